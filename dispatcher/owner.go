package dispatcher

import (
	"context"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// arrival is an event on its way to the core, or a question to its owner.
type arrival struct {
	ev  core.Event
	at  time.Time
	ask func()
}

// owner is the goroutine that owns the core. It waits for nothing but arrivals:
// effects are started, not carried out, here.
type owner struct {
	d       *Dispatcher
	step    Stepper
	start   time.Time
	in      chan arrival
	stopped bool // Stop was stepped: messages that still come are given back unseen
	seen    map[core.ViewKind]bool
}

// run ends with ctx.
func (o *owner) run(ctx context.Context) error {
	tick := time.NewTicker(o.d.cfg.Timings.Core.Tick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case a := <-o.in:
			if a.ask != nil {
				a.ask()
				continue
			}
			o.d.metrics.eventWait.Observe(time.Since(a.at).Seconds())
			o.take(a.ev)
		case <-tick.C:
			o.take(core.Tick{})
			o.d.metrics.queued.Set(float64(len(o.in)))
		}
	}
}

// take steps the core once and starts what it asks for.
func (o *owner) take(ev core.Event) {
	switch e := ev.(type) {
	case core.Fetched:
		if o.stopped {
			o.d.hand.giveBack(e.Handle, 0)
			return
		}
	case core.ViewSwap:
		if !o.seen[e.Kind] {
			o.seen[e.Kind] = true
			o.d.ready.views(o.seen)
		}
	case core.Stop:
		o.stopped = true
	}
	now := time.Since(o.start)
	effects := o.step.Step(ev, now)
	o.d.metrics.step.Observe((time.Since(o.start) - now).Seconds())
	if r := o.d.cfg.Recorder; r != nil {
		r.Record(now, ev, effects)
	}
	for _, e := range effects {
		if _, ok := e.(core.Rebuild); ok {
			clear(o.seen)
			o.d.ready.views(o.seen)
		}
		o.d.begin(e)
	}
	if k, ok := o.d.cfg.Recorder.(Checkpointer); ok && k.Due(now) {
		if s, ok := o.step.(core.Source); ok {
			k.Checkpoint(now, s)
		}
	}
}

// send hands an event to the core; it waits for room and gives up with ctx.
func (d *Dispatcher) send(ctx context.Context, ev core.Event) bool {
	select {
	case d.owner.in <- arrival{ev: ev, at: time.Now()}:
		return true
	case <-ctx.Done():
		return false
	}
}

// ask runs f on the goroutine that owns the core and waits until it returned.
func (d *Dispatcher) ask(ctx context.Context, f func()) error {
	ran := make(chan struct{})
	select {
	case d.owner.in <- arrival{ask: func() { defer close(ran); f() }}:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-d.done:
		return ErrStopped
	}
	select {
	case <-ran:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-d.done:
		return ErrStopped
	}
}

// Inspect runs f on the goroutine that owns the core, between two steps: f may
// read the core and must be quick. It waits until f has returned or ctx ends
// (then f may still run). Before Run it waits for Run.
func (d *Dispatcher) Inspect(ctx context.Context, f func(*core.Core)) error {
	c, ok := d.owner.step.(*core.Core)
	if !ok {
		return ErrNoCore
	}
	return d.ask(ctx, func() { f(c) })
}
