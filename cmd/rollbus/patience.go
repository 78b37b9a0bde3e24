package main

import (
	"context"
	"sync/atomic"
	"time"
)

// patience is a context that ends when NATS was silent for a while, however
// long everything together takes: what reads ten thousand messages calls heard
// with each of them.
type patience struct {
	context.Context // ended by the timer; its cause is the error to print
	done            chan struct{}
	wait            time.Duration
	timer           *time.Timer
	due             atomic.Int64 // Unix, ns: what Deadline tells
	late            atomic.Bool
}

// patient makes one; silence is the error after wait without an answer.
func patient(parent context.Context, wait time.Duration, silence error) (*patience, context.CancelFunc) {
	inner, end := context.WithCancelCause(parent)
	p := &patience{Context: inner, done: make(chan struct{}), wait: wait}
	p.due.Store(time.Now().Add(wait).UnixNano())
	context.AfterFunc(inner, func() { close(p.done) })
	p.timer = time.AfterFunc(wait, func() {
		p.late.Store(inner.Err() == nil)
		end(silence)
	})
	return p, func() {
		p.timer.Stop()
		end(context.Canceled)
	}
}

// Deadline moves with every answer: the library bounds a request by it.
func (p *patience) Deadline() (time.Time, bool) {
	due := time.Unix(0, p.due.Load())
	if outer, ok := p.Context.Deadline(); ok && outer.Before(due) {
		return outer, true
	}
	return due, true
}

// Done is a channel of its own, so that children ask Err below.
func (p *patience) Done() <-chan struct{} { return p.done }

// Err tells silence as what it is, a deadline that passed.
func (p *patience) Err() error {
	err := p.Context.Err()
	if err != nil && p.late.Load() {
		return context.DeadlineExceeded
	}
	return err
}

type patienceKey struct{}

// Value finds the patience from a child of it.
func (p *patience) Value(key any) any {
	if key == (patienceKey{}) {
		return p
	}
	return p.Context.Value(key)
}

// heard starts the wait anew, where ctx is patient.
func heard(ctx context.Context) {
	if p, ok := ctx.Value(patienceKey{}).(*patience); ok && p.Context.Err() == nil {
		p.due.Store(time.Now().Add(p.wait).UnixNano())
		p.timer.Reset(p.wait)
	}
}
