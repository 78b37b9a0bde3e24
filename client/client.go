package client

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Client is one reader of one job in one pool. Its methods may be called from
// any goroutine. Close it; it does not own the connection.
type Client struct {
	nc       *nats.Conn
	js       jetstream.JetStream // with room for MaxInFlight asynchronous publishes
	store    *kvstate.Store
	pool     subjects.Pool
	job      string
	opt      options
	settings subjects.Settings
	secret   []byte

	line   line
	ledger *ledger
	inbox  *inbox
	full   backoff
	pings  pings

	ctx  context.Context // ends with Close
	stop context.CancelCauseFunc
	wg   sync.WaitGroup // watch, pump, keep, sweep
}

// Open makes a client of a job. It reads the pool's settings and creates
// nothing: streams are made by dispatchers or `rollbus pool init`.
func Open(ctx context.Context, nc *nats.Conn, pool, job string, opts ...Option) (*Client, error) {
	p, err := subjects.NewPool(pool)
	errs := []error{err, subjects.CheckToken("job", job)}
	o := defaults()
	for _, f := range opts {
		errs = append(errs, f(&o))
	}
	if nc == nil {
		errs = append(errs, fmt.Errorf("%w: the connection is nil: connect to NATS first", ErrBadOption))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(o.maxInFlight+1), jetstream.WithPublishAsyncTimeout(publishTimeout))
	if err != nil {
		return nil, fmt.Errorf("open pool %s: %w", pool, err)
	}
	store, err := kvstate.Open(nc, p)
	if err != nil {
		return nil, fmt.Errorf("open pool %s: %w", pool, err)
	}
	c := &Client{nc: nc, js: js, store: store, pool: p, job: job, opt: o, secret: o.secret}
	if c.secret == nil {
		c.secret = make([]byte, 32)
		_, _ = rand.Read(c.secret) // never fails
	}
	c.line.renew()
	if err := c.readSettings(ctx); err != nil {
		return nil, err
	}
	c.ctx, c.stop = context.WithCancelCause(context.Background())
	c.inbox = newInbox(c)
	c.ledger = newLedger(c)
	changed := nc.StatusChanged(nats.RECONNECTING, nats.CLOSED)
	c.wg.Go(func() { c.watch(changed) })
	return c, nil
}

func (c *Client) readSettings(ctx context.Context) error {
	if c.opt.settings != nil {
		c.settings = c.opt.settings.WithDefaults()
		return nil
	}
	s, err := c.poolSettings(ctx)
	switch {
	case err == nil, errors.Is(err, kvstate.ErrGone):
	case ctx.Err() != nil:
		return fmt.Errorf("open pool %s: %w", c.pool, context.Cause(ctx))
	default:
		// A credential may not read them: the defaults cost at worst some decoding.
		c.opt.log.Info("settings of the pool were not read, defaults are used", "pool", c.pool.String(), "err", err)
	}
	if s.Validate() != nil { // those of a later version
		s = subjects.Settings{}
	}
	c.settings = s.WithDefaults()
	return nil
}

// Pool is the pool's names.
func (c *Client) Pool() subjects.Pool { return c.pool }

// Job is the job's name.
func (c *Client) Job() string { return c.job }

// Reader is the name under which this client reads.
func (c *Client) Reader() string { return c.opt.reader }

// Close stops the client and waits for it. Answers that were fetched and not
// handed out are given back for the next reader; what was handed out and not
// received comes again. It may be called twice.
func (c *Client) Close() {
	c.stop(ErrClosed)
	c.wg.Wait()
	c.line.lose(ErrClosed)
	if c.inbox.giveBack() && c.nc.IsConnected() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.nc.FlushWithContext(ctx) // what is lost comes again by itself, later
	}
}

// closed is ErrClosed once Close was called.
func (c *Client) closed() error {
	if c.ctx.Err() != nil {
		return ErrClosed
	}
	return nil
}

// replyKey is the same for each submit of an id by a client of one secret.
func (c *Client) replyKey(id string) string {
	m := hmac.New(sha256.New, c.secret)
	_, _ = m.Write([]byte(subjects.RolloutKey(c.job, id)))
	return hex.EncodeToString(m.Sum(nil)[:16])
}

// sleep waits, or ends with the cause of whichever context ended.
func (c *Client) sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.ctx.Done():
		return ErrClosed
	}
}
