package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Bounds of receiving.
const (
	receipts   = 32               // receipts of one Results loop on their way
	receiptFor = 10 * time.Second // to write the last of them when the loop has ended
	pollMost   = time.Minute      // between two looks of a Wait
)

// Results hands out the answers of this job and reader as they come, those of
// earlier processes included, until the context ends or the loop is left. Asking
// for the next one receives the last: nobody is handed it again. Leaving the
// loop does not, nor does anything under ManualDone: then Done does.
//
// An error that comes with a result is about that rollout (ErrForged,
// ErrBadAnswer, ErrLost; its id and job are set, and it is received like
// others); one that comes alone ends the loop. The end of the context ends the
// loop without one. Several loops share the answers among them.
func (c *Client) Results(ctx context.Context) iter.Seq2[*subjects.Result, error] {
	return func(yield func(*subjects.Result, error) bool) {
		if err := c.closed(); err != nil {
			yield(nil, err)
			return
		}
		c.start()
		rc := newReceiver(c)
		defer rc.wait()
		for {
			it, wake, err := c.inbox.next()
			switch {
			case it != nil:
			case err != nil:
				yield(nil, err)
				return
			default:
				select {
				case <-wake:
				case <-ctx.Done():
					return
				case <-c.ctx.Done():
					yield(nil, ErrClosed)
					return
				}
				continue
			}
			if c.received(ctx, it) {
				continue
			}
			res, err := c.open(it)
			if !yield(res, err) {
				return
			}
			if !c.opt.manual && it.lost == nil {
				rc.receive(it.reg.ID)
			}
		}
	}
}

// receiver writes the receipts of one loop beside it.
type receiver struct {
	c    *Client
	sem  chan struct{}
	wg   sync.WaitGroup
	ctx  context.Context // not the loop's: that may end while the last answer is dealt with
	stop context.CancelFunc
}

func newReceiver(c *Client) *receiver {
	r := &receiver{c: c, sem: make(chan struct{}, receipts)}
	r.ctx, r.stop = context.WithCancel(c.ctx)
	return r
}

// receive starts one receipt. While NATS does not answer, the loop waits here.
func (r *receiver) receive(id string) {
	r.sem <- struct{}{}
	r.wg.Go(func() {
		defer func() { <-r.sem }()
		if err := r.c.done(r.ctx, id); err != nil {
			r.c.opt.log.Warn("an answer was not received and will come again", "rollout", subjects.RolloutKey(r.c.job, id), "err", err)
		}
	})
}

// wait ends when all receipts are written, or given up.
func (r *receiver) wait() {
	t := time.AfterFunc(receiptFor, r.stop)
	defer t.Stop()
	r.wg.Wait()
	r.stop()
}

// received tells whether an item that was held for a while was received
// elsewhere meanwhile.
func (c *Client) received(ctx context.Context, it *item) bool {
	if it.lost != nil || time.Since(it.at) < recheckAfter {
		return false
	}
	now, err := c.register(ctx, it.reg.ID)
	if err != nil || now.Revision <= it.reg.Revision || now.Status != "" {
		return false
	}
	c.inbox.received(it.reg.ID)
	c.ledger.answered(it.reg.ID)
	c.tell(it.ack, ackWord)
	return true
}

// open decodes and checks an item that is handed out.
func (c *Client) open(it *item) (*subjects.Result, error) {
	id := it.reg.ID
	if it.lost != nil {
		return &subjects.Result{Job: c.job, ID: id}, it.lost
	}
	key, known := c.ledger.answered(id)
	if !known && c.opt.secret != nil {
		key, known = c.replyKey(id), true
	}
	res, err := subjects.DecodeResult(it.reg.Body)
	if err == nil && (res.Job != c.job || res.ID != id) {
		err = fmt.Errorf("its body says %q", subjects.RolloutKey(res.Job, res.ID))
	}
	if err == nil && it.reg.Status != "" && res.Status != it.reg.Status {
		err = fmt.Errorf("its body says %q and its header %q", res.Status, it.reg.Status)
	}
	if err != nil {
		return &subjects.Result{Job: c.job, ID: id}, fmt.Errorf("%w: %s: %w", ErrBadAnswer, it.reg.Key(), err)
	}
	// What never ran is answered by a dispatcher, which need not have read the
	// body: such an answer may lack the key. It teaches nobody anything.
	ran := res.Status.Sample() || len(res.TokenIDs) > 0 || res.Text != ""
	if known && res.ReplyKey != key && (ran || res.ReplyKey != "") {
		return res, &ReplyKeyError{Job: c.job, ID: id}
	}
	return res, nil
}

// Wait returns the answer of one rollout when there is one: any answer, failed
// and expired ones too (its Status). It does not receive it: call Done once it
// is kept, else it comes again after a restart. ErrReceived: it was received
// before. *LostError: see the package's last ledger.
func (c *Client) Wait(ctx context.Context, h Handle) (*subjects.Result, error) {
	if err := c.closed(); err != nil {
		return nil, err
	}
	if h.Job != c.job || h.Reader != c.opt.reader && h.Reader != "" {
		return nil, fmt.Errorf("%w: wait for %s of reader %q: this client reads job %s as %q", ErrBadOption, h.Key(), h.Reader, c.job, c.opt.reader)
	}
	if err := subjects.CheckToken("id", h.ID); err != nil {
		return nil, fmt.Errorf("wait: %w", err)
	}
	c.start()
	it, ch := c.inbox.claim(h.ID)
	if ch != nil {
		defer func() { c.inbox.leave(h.ID, ch, it != nil) }()
	}
	// The register is asked at once for what this client did not submit itself,
	// and now and then for all: another process of this name may have taken the
	// delivery.
	poll := c.opt.poll
	if !c.ledger.has(h.ID) || h.Duplicate {
		poll = 0
	}
	for {
		if it != nil {
			if c.received(ctx, it) {
				return nil, fmt.Errorf("wait for %s: %w", h.Key(), ErrReceived)
			}
			return c.open(it)
		}
		t := time.NewTimer(poll)
		select {
		case got, open := <-ch:
			t.Stop()
			switch {
			case got != nil:
				it = got
			case open:
				return nil, fmt.Errorf("wait for %s: %w", h.Key(), ErrReceived)
			default:
				return nil, fmt.Errorf("wait for %s: %w", h.Key(), c.inbox.ended())
			}
		case <-t.C:
			found, err := c.lookup(ctx, h.ID)
			if err != nil {
				return nil, fmt.Errorf("wait for %s: %w", h.Key(), err)
			}
			it = found
			poll = min(max(2*poll, c.opt.poll), pollMost)
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("wait for %s: %w", h.Key(), context.Cause(ctx))
		case <-c.ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("wait for %s: %w", h.Key(), ErrClosed)
		}
	}
}

// lookup reads the register; nil when there is nothing yet.
func (c *Client) lookup(ctx context.Context, id string) (*item, error) {
	if err := c.inbox.ended(); err != nil {
		return nil, err
	}
	reg, err := c.register(ctx, id)
	switch {
	case err != nil:
		return nil, nil // not there, or NATS does not answer now: it is asked again
	case reg.Status == "" && len(reg.Body) == 0:
		c.ledger.answered(id)
		return nil, ErrReceived
	}
	it := &item{reg: reg, at: time.Now()}
	c.inbox.mu.Lock()
	defer c.inbox.mu.Unlock()
	if old := c.inbox.handed[id]; old != nil {
		it.ack = old.ack
	}
	c.inbox.hand(it)
	return it, nil
}

// Do submits, waits, and receives the answer: for callers that keep nothing. A
// crash between the answer and its return loses this copy of it.
func (c *Client) Do(ctx context.Context, r *subjects.Request) (*subjects.Result, error) {
	h, err := c.Submit(ctx, r)
	if err != nil {
		return nil, err
	}
	res, err := c.Wait(ctx, h)
	if res == nil || errors.Is(err, ErrLost) {
		return res, err
	}
	return res, errors.Join(err, c.Done(ctx, res))
}

// Done receives an answer: from now on nobody is handed it, neither in this
// process nor after a restart. Calling it twice is harmless. It repeats what
// NATS does not answer until the context ends.
func (c *Client) Done(ctx context.Context, res *subjects.Result) error {
	if res == nil {
		return nil
	}
	if res.Job != c.job {
		return fmt.Errorf("%w: done with %s: this client is of job %s", ErrBadOption, res.Key(), c.job)
	}
	return c.done(ctx, res.ID)
}

func (c *Client) done(ctx context.Context, id string) error {
	it := c.inbox.find(id)
	if it == nil {
		reg, err := c.store.Result(ctx, c.job, c.opt.reader, id)
		switch {
		case errors.Is(err, kvstate.ErrGone), err == nil && reg.Status == "" && len(reg.Body) == 0:
			return nil
		case err != nil:
			return fmt.Errorf("done with %s: %w", subjects.RolloutKey(c.job, id), err)
		}
		it = &item{reg: reg}
	}
	pause := 50 * time.Millisecond
	for {
		err := c.store.Received(ctx, it.reg)
		switch {
		case err == nil, errors.Is(err, kvstate.ErrSuperseded), errors.Is(err, kvstate.ErrGone):
			c.tell(it.ack, ackWord)
			c.inbox.received(id)
			c.ledger.answered(id)
			return nil
		case !errors.Is(err, kvstate.ErrUnknown) && !errors.Is(err, kvstate.ErrUnavailable) && !errors.Is(err, kvstate.ErrBusy) && !errors.Is(err, kvstate.ErrFull):
			return fmt.Errorf("done with %s: %w", it.reg.Key(), err)
		}
		if wait := c.sleep(ctx, jitter(pause)); wait != nil {
			return fmt.Errorf("done with %s: %w", it.reg.Key(), errors.Join(wait, err))
		}
		pause = min(2*pause, time.Second)
	}
}
