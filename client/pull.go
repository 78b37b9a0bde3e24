package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Bounds of pulling.
const (
	fetchMost = 64               // answers a request
	fetchFor  = 30 * time.Second // a request
	fetchBeat = 2 * time.Second  // an idle consumer speaks this often; twice that without a word is silence
	ackPrefix = "$JS.ACK."       // of the reply subject of every delivery, and of nothing else
)

var errSilent = errors.New("the consumer fell silent")

// read pulls answers until something is wrong with the consumer.
//
// It does by itself what jetstream.Consumer.Fetch does, for one reason: to leave
// cleanly. Fetch drops what the server sends while it ends, and that is lost to
// the next reader until its AckWait, a minute, has passed. Here the subscription
// is drained, and what came of it given back.
func (b *inbox) read(consumer string) error {
	c := b.c
	ch := make(chan *nats.Msg, 4*fetchMost)
	sub, err := c.nc.ChanSubscribe(c.nc.NewInbox(), ch)
	if err != nil {
		return err
	}
	defer b.leaveQuietly(sub, ch)
	// The server forgets a request when the connection goes.
	gone := c.line.life().Done()
	for {
		n, err := b.wait()
		if err != nil {
			return err
		}
		n = min(n, fetchMost)
		if err := c.request(consumer, sub.Subject, n); err != nil {
			return err
		}
		if err := b.serve(ch, gone, n); err != nil {
			return err
		}
	}
}

func (c *Client) request(consumer, inbox string, n int) error {
	body, err := json.Marshal(map[string]any{"batch": n, "expires": fetchFor, "idle_heartbeat": fetchBeat})
	if err != nil {
		return err
	}
	return c.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+c.pool.Results()+"."+consumer, inbox, body)
}

// serve takes what comes of one request: n answers, or its end.
func (b *inbox) serve(ch <-chan *nats.Msg, gone <-chan struct{}, n int) error {
	silence := time.NewTimer(2 * fetchBeat)
	defer silence.Stop()
	for n > 0 {
		select {
		case m := <-ch:
			silence.Reset(2 * fetchBeat)
			if strings.HasPrefix(m.Reply, ackPrefix) {
				b.take(m)
				n--
				continue
			}
			if over, err := status(m); over || err != nil {
				return err
			}
		case <-silence.C:
			return errSilent
		case <-gone:
			return errDisconnected
		case <-b.c.ctx.Done():
			return ErrClosed
		}
	}
	return nil
}

// status reads what the server says of a request instead of an answer.
func status(m *nats.Msg) (over bool, err error) {
	code, text := m.Header.Get("Status"), m.Header.Get("Description")
	switch code {
	case "100":
		return false, nil
	case "404", "408": // nothing there, or its time is up
		return true, nil
	}
	return true, fmt.Errorf("%s %s", code, text)
}

// leaveQuietly ends the subscription and gives back what came meanwhile. It
// drains: unsubscribing would drop what the server had already sent.
func (b *inbox) leaveQuietly(sub *nats.Subscription, ch <-chan *nats.Msg) {
	c := b.c
	if !c.nc.IsConnected() || sub.Drain() != nil {
		_ = sub.Unsubscribe()
		return
	}
	// After the flush the server delivers nothing here any more.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.nc.FlushWithContext(ctx)
	for {
		select {
		case m, open := <-ch:
			if !open {
				return
			}
			if strings.HasPrefix(m.Reply, ackPrefix) {
				c.tell(m.Reply, nakWord)
			}
		default:
			return
		}
	}
}
