package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

var (
	// errNotSent: there was no connection all the time.
	errNotSent = errors.New("not connected to NATS")
	// errDisconnected: the connection went while an answer was waited for.
	errDisconnected = errors.New("the connection went away")
)

// line is one life of the connection after the other: what was asked in one is
// not answered in the next.
type line struct {
	mu   sync.Mutex
	ctx  context.Context
	lose context.CancelCauseFunc
}

func (l *line) renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lose != nil {
		l.lose(errDisconnected)
	}
	l.ctx, l.lose = context.WithCancelCause(context.Background())
}

// life ends with the connection as it is now.
func (l *line) life() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ctx
}

// watch notes that the connection went, until Close.
func (c *Client) watch(changed chan nats.Status) {
	defer c.nc.RemoveStatusListener(changed)
	for {
		select {
		case _, open := <-changed:
			if !open { // the library closes it with the connection
				changed = nil
			}
			c.line.renew()
		case <-c.ctx.Done():
			return
		}
	}
}

// attempt bounds one exchange with NATS by time and by the connection's life.
func (c *Client) attempt(ctx context.Context, d time.Duration) (context.Context, func()) {
	ctx, lose := context.WithCancelCause(ctx)
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(c.line.life(), func() { lose(errDisconnected) })
	return ctx, func() {
		stop()
		cancel()
		lose(nil)
	}
}

// connected waits for the connection: what waits in the library's buffer over
// an outage is sent when nobody expects it any more.
func (c *Client) connected(ctx context.Context) error {
	if c.nc.IsConnected() {
		return nil
	}
	changed := c.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer c.nc.RemoveStatusListener(changed)
	for !c.nc.IsConnected() {
		if c.nc.IsClosed() {
			return nats.ErrConnectionClosed
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", errNotSent, context.Cause(ctx))
		case <-c.ctx.Done():
			return ErrClosed
		}
	}
	return nil
}
