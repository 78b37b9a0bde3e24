package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// deltasHeld bounds the deltas that wait for a slow loop; beyond it the newest
// are lost, which Seq shows.
const deltasHeld = 1024

// Tokens streams the output of one rollout while it is made, if the request
// asked for it (stream). Subscribe before Submit, so that nothing is missed:
// deltas are not kept, and what counts is the result. A higher Bind starts the
// output anew (another attempt); a gap in Seq means that deltas were lost.
//
// The loop ends when the rollout is answered or the context ends; it may be run
// once.
func (c *Client) Tokens(ctx context.Context, id string) (iter.Seq2[subjects.Delta, error], error) {
	if err := c.closed(); err != nil {
		return nil, err
	}
	if err := subjects.CheckToken("id", id); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	ch := make(chan *nats.Msg, deltasHeld)
	sub, err := c.nc.ChanSubscribe(c.pool.Tokens(c.job, id), ch)
	if err != nil {
		return nil, fmt.Errorf("tokens of %s: %w", subjects.RolloutKey(c.job, id), err)
	}
	// The subscription must stand at the server before the request does.
	flush, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if err := c.nc.FlushWithContext(flush); err != nil {
		_ = sub.Unsubscribe()
		return nil, fmt.Errorf("tokens of %s: %w: %w", subjects.RolloutKey(c.job, id), ErrUnavailable, err)
	}
	release := context.AfterFunc(ctx, func() { _ = sub.Unsubscribe() })
	return func(yield func(subjects.Delta, error) bool) {
		defer func() {
			release()
			_ = sub.Unsubscribe()
		}()
		c.deltas(ctx, id, ch, yield)
	}, nil
}

func (c *Client) deltas(ctx context.Context, id string, ch <-chan *nats.Msg, yield func(subjects.Delta, error) bool) {
	give := func(m *nats.Msg) (last, more bool) {
		var d subjects.Delta
		if err := json.Unmarshal(m.Data, &d); err != nil {
			return false, yield(d, fmt.Errorf("%w: a delta of %s: %w", ErrBadAnswer, subjects.RolloutKey(c.job, id), err))
		}
		return d.Last, yield(d, nil)
	}
	look := time.NewTicker(c.opt.poll)
	defer look.Stop()
	check := func() bool {
		_, err := c.register(ctx, id)
		return err == nil
	}
	for {
		select {
		case m := <-ch:
			last, more := give(m)
			if !more {
				return
			}
			if last {
				// The answer follows at once, unless there is another attempt.
				look.Reset(c.opt.poll / 10)
			}
		case <-look.C:
			look.Reset(c.opt.poll)
			if !check() {
				continue
			}
			for { // what came before the answer
				select {
				case m := <-ch:
					if _, more := give(m); !more {
						return
					}
				default:
					return
				}
			}
		case <-ctx.Done():
			return
		case <-c.ctx.Done():
			yield(subjects.Delta{}, ErrClosed)
			return
		}
	}
}
