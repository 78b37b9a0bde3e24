package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// SubmitMany stores requests, at most MaxInFlight of them unacknowledged at a
// time, and yields what came of each in the order given: a handle, or an error
// as of Submit with the handle's id set where there was one. One that is
// refused does not stop the others; ending the loop does. When the context
// ends, what was not sent yet is not asked for.
func (c *Client) SubmitMany(ctx context.Context, requests iter.Seq[*subjects.Request]) iter.Seq2[Handle, error] {
	return func(yield func(Handle, error) bool) {
		var window []sending
		// What was sent and is not waited for any more is settled here, so that
		// the ledger knows the outcome.
		defer func() {
			for _, s := range window {
				_, _ = c.settle(ctx, s)
			}
		}()
		oldest := func() bool {
			s := window[0]
			window = window[1:]
			return yield(c.settle(ctx, s))
		}
		for r := range requests {
			if ctx.Err() != nil {
				break
			}
			window = append(window, c.send(r))
			if len(window) >= c.opt.maxInFlight && !oldest() {
				return
			}
		}
		for len(window) > 0 {
			if !oldest() {
				return
			}
		}
		if err := ctx.Err(); err != nil {
			yield(Handle{Job: c.job, Reader: c.opt.reader}, context.Cause(ctx))
		}
	}
}

// sending is a request on its way.
type sending struct {
	e      *entry
	future jetstream.PubAckFuture // nil: not sent, err says why
	err    error
}

func (c *Client) send(r *subjects.Request) sending {
	e, err := c.prepare(r)
	if err != nil {
		return sending{err: err, e: c.nameless(r)}
	}
	if err := c.ledger.add(e); err != nil {
		return sending{err: err, e: e}
	}
	f, err := c.js.PublishMsgAsync(c.message(e), jetstream.WithRetryAttempts(0))
	return sending{e: e, future: f, err: err}
}

func (c *Client) nameless(r *subjects.Request) *entry {
	h := Handle{Job: c.job, Reader: c.opt.reader}
	if r != nil {
		h.ID = r.ID
	}
	return &entry{handle: h}
}

// settle waits for what came of one request; what NATS did not answer is sent
// again, one at a time.
func (c *Client) settle(ctx context.Context, s sending) (Handle, error) {
	if s.future == nil {
		if s.e.body == nil || errors.Is(s.err, ErrBackpressure) {
			return s.e.handle, s.err
		}
		ack, err := c.publish(ctx, s.e)
		return c.acked(s.e, ack, err)
	}
	select {
	case ack := <-s.future.Ok():
		return c.acked(s.e, ack, nil)
	case err := <-s.future.Err():
		if !unanswered(err) {
			return c.acked(s.e, nil, err)
		}
	case <-c.ctx.Done():
		return c.acked(s.e, nil, ErrClosed)
	}
	ack, err := c.publish(ctx, s.e)
	return c.acked(s.e, ack, err)
}

// maxExpand bounds the samples of one prompt.
const maxExpand = 4096

// Expand makes the n samples of one prompt: requests <id>-0 to <id>-<n-1> of
// one group. The group's other fields are kept; a group without an id takes the
// request's. A seed is raised by the index: equal seeds give equal samples.
func Expand(r *subjects.Request, n int) ([]*subjects.Request, error) {
	switch {
	case r == nil || r.ID == "":
		return nil, &subjects.FieldError{Field: "id", Problem: "is empty: the samples are named after it"}
	case n < 1 || n > maxExpand:
		return nil, &subjects.FieldError{Field: "n", Problem: fmt.Sprintf("is %d: give 1 to %d samples", n, maxExpand)}
	}
	out := make([]*subjects.Request, n)
	for i := range out {
		s := *r
		s.ID = r.ID + "-" + strconv.Itoa(i)
		g := subjects.Group{ID: r.ID}
		if r.Group != nil {
			g = *r.Group
			if g.ID == "" {
				g.ID = r.ID
			}
		}
		g.Index, g.Size = i, n
		s.Group = &g
		if r.Sampling.Seed != nil {
			seed := *r.Sampling.Seed + int64(i)
			s.Sampling.Seed = &seed
		}
		out[i] = &s
	}
	return out, nil
}
