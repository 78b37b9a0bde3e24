package dispatcher

import (
	"context"
	"sync"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Grant is a reservation whose request its caller moves itself. The caller
// renews it or releases it at its revision; else the server reclaims it by its
// TTL. It is never requeued and has no result.
type Grant struct {
	Held     subjects.Held
	Revision uint64
}

// RefusedError says that nothing is reserved. Codes: "unavailable" (try again),
// "reserved" and "answered" (acquire each request once), or those of a request
// that can never run.
type RefusedError struct{ Code, Message string }

func (e *RefusedError) Error() string { return e.Message }

// acquires are the callers that wait, by handle: one for each Acquire under way.
type acquires struct {
	mu sync.Mutex
	by map[core.Handle]chan acquired
}

type acquired struct {
	grant Grant
	err   error
}

func newAcquires() *acquires { return &acquires{by: map[core.Handle]chan acquired{}} }

func (a *acquires) add(h core.Handle) <-chan acquired {
	ch := make(chan acquired, 1)
	a.mu.Lock()
	a.by[h] = ch
	a.mu.Unlock()
	return ch
}

// take is nil when the caller has gone.
func (a *acquires) take(h core.Handle) chan<- acquired {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch := a.by[h]
	delete(a.by, h)
	return ch
}

// Acquire reserves room for a request that is not in the queue (the balancer
// interface), by the same decision and guard as every other. f needs job, id and
// what placement asks of a request; ttl 0 = 1 min. When ctx ends first and the
// reservation is granted all the same, it is given back.
func (d *Dispatcher) Acquire(ctx context.Context, f subjects.Facts, ttl time.Duration) (Grant, error) {
	h := d.hand.name()
	answer := d.acquires.add(h)
	defer d.acquires.take(h)
	select {
	case d.owner.in <- arrival{ev: core.Acquire{Handle: h, Facts: f, TTLMS: ttl.Milliseconds()}, at: time.Now()}:
	case <-ctx.Done():
		return Grant{}, context.Cause(ctx)
	case <-d.done:
		return Grant{}, ErrStopped
	}
	select {
	case a := <-answer:
		return a.grant, a.err
	case <-ctx.Done():
		if d.acquires.take(h) == nil {
			// It was answered in this instant, and nobody else will give it back.
			a := <-answer
			return a.grant, a.err
		}
		return Grant{}, context.Cause(ctx)
	case <-d.done:
		return Grant{}, ErrStopped
	}
}

// granted hands a reservation to its caller, or gives it back when there is none
// any more.
func (d *Dispatcher) granted(e core.Granted) {
	if ch := d.acquires.take(e.Handle); ch != nil {
		ch <- acquired{grant: Grant{Held: e.Held, Revision: e.Revision}}
		return
	}
	h := e.Held
	d.spawn(func() {
		d.untilAnswered(d.workCtx, "release_grant", func(ctx context.Context) (uint64, error) {
			return d.store.Release(ctx, subjects.Released{
				Engine: h.Engine, Job: h.Job, ID: h.ID, Outcome: subjects.OutcomeCancelled,
				Bind: h.Bind, Epoch: h.Epoch, Tokens: h.Tokens, PromptTokens: h.PromptTokens, Group: h.Group,
			}, e.Revision)
		})
	})
}

func (d *Dispatcher) refused(e core.Refused) {
	if ch := d.acquires.take(e.Handle); ch != nil {
		ch <- acquired{err: &RefusedError{Code: e.Code, Message: e.Message}}
	}
}
