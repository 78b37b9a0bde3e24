package dispatcher

import (
	"context"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// begin starts an effect. It is called by the owner of the core and never
// waits: what talks to NATS runs elsewhere.
//
//   - Ack and NakDelay leave in order on one goroutine.
//   - Bind and Fetch get a goroutine each: the core has at most one bind in
//     flight an engine and one pull a queue.
//   - The other writes wait for one of Limits.Writers. Their queue is bounded by
//     the core: one write for each reservation and each message in hand.
func (d *Dispatcher) begin(e core.Effect) {
	switch e := e.(type) {
	case core.EnsureConsumer:
		d.spawn(func() { d.ensureConsumer(d.intakeCtx, e.Queue) })
	case core.Fetch:
		d.spawn(func() { d.fetch(d.intakeCtx, e) })
	case core.Bind:
		m := d.hand.get(e.Handle) // now: it may leave the hand before the goroutine runs
		d.spawn(func() { d.send(d.workCtx, d.bind(d.workCtx, e, m)) })
	case core.SeedBind:
		m, chosen := d.hand.get(e.Handle), time.Now()
		d.spawn(func() { d.send(d.workCtx, d.seed(d.workCtx, e, m, chosen)) })
	case core.WriteSeed:
		d.write(func(ctx context.Context) core.Event { return d.writeSeed(ctx, e) })
	case core.WriteOwners:
		d.write(func(ctx context.Context) core.Event { return d.writeOwners(ctx, e) })
	case core.Transition:
		d.moved(e)
	case core.GetFromLeader:
		d.write(func(ctx context.Context) core.Event { return d.askLeader(ctx, e) })
	case core.Retry:
		d.write(func(ctx context.Context) core.Event { return d.requeue(ctx, e) })
	case core.DeleteKey:
		d.write(func(ctx context.Context) core.Event { return d.deleteKey(ctx, e) })
	case core.PublishResult:
		m := d.hand.get(e.Handle)
		d.write(func(ctx context.Context) core.Event { return d.publishResult(ctx, e, m) })
	case core.PublishDead:
		m := d.hand.get(e.Handle)
		d.write(func(ctx context.Context) core.Event { return d.bury(ctx, e, m) })
	case core.Ack:
		d.hand.ack(e.Handle)
	case core.NakDelay:
		d.hand.giveBack(e.Handle, e.Delay)
	case core.Granted:
		d.granted(e)
	case core.Refused:
		d.refused(e)
	case core.AskSnapshot:
		d.spawn(func() { d.snapshot(d.intakeCtx, e) })
	case core.Rebuild:
		d.log.Info("views are built anew", "why", e.Why)
		d.rebuilds.all()
	case core.Decision:
		d.decided(e)
	case core.Count:
		if e.Name == "settings_refused" {
			d.log.Warn("the pool's settings are refused whole; those before stay in force", "why", e.Label)
		}
		d.metrics.count(e)
	}
}

// spawn runs f on a goroutine that Run waits for.
func (d *Dispatcher) spawn(f func()) {
	d.inflight.add()
	d.effects.Go(func() {
		defer d.inflight.done()
		f()
	})
}

// write queues a write whose answer is an event.
func (d *Dispatcher) write(f func(context.Context) core.Event) {
	d.inflight.add()
	d.work.put(func(ctx context.Context) {
		defer d.inflight.done()
		d.send(d.workCtx, f(ctx))
	})
}

// writer carries out queued writes, one at a time.
func (d *Dispatcher) writer(ctx context.Context) error {
	for {
		f, ok := d.work.take(ctx)
		if !ok {
			return nil
		}
		f(ctx)
	}
}

func (d *Dispatcher) ensureConsumer(ctx context.Context, q core.Queue) {
	if err := d.queues.get(q).ensure(ctx); err != nil && ctx.Err() == nil {
		// The next pull tries again, and its FetchDone says what is wrong.
		d.log.Warn("a consumer cannot be created", "job", q.Job, "lane", q.Lane, "retry", q.Retry, "err", err)
	}
}

// decided passes a decision record on. It is valid only now: what is kept is copied.
func (d *Dispatcher) decided(e core.Decision) {
	d.metrics.decided(e)
	if hook := d.cfg.Decisions; hook != nil {
		hook(e)
	}
	if !d.cfg.QuietDecisions {
		d.decisions.put(line{Decision: copyDecision(e), Dispatcher: d.cfg.Name, AtNS: d.clock.now()})
	}
}

// dispatched notes how long a rollout waited from its acceptance to its bind,
// both on the server's clock.
func (d *Dispatcher) dispatched(m *held, at int64) {
	if at > 0 && !m.queue.Retry {
		d.metrics.dispatch.Observe(max(0, time.Duration(at-m.stored).Seconds()))
	}
}
