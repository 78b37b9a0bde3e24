package dispatcher

import (
	"context"
	"errors"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// seedAge is how old the choice of a seed may be when it leaves. The guards
// refuse it when anything at its engine or its key has moved; this is for what
// they do not guard, such as telemetry, after a pause of this process.
const seedAge = time.Second

// seedWriter writes owners and seeds.
type seedWriter interface {
	Seed(ctx context.Context, b kvstate.Seeding) (uint64, error)
	Cooldown(ctx context.Context, sd subjects.Seed, revision uint64, ttl time.Duration) (uint64, error)
	GiveBack(ctx context.Context, key string, revision uint64) (uint64, error)
	PutOwners(ctx context.Context, o subjects.Ownership, expected uint64, ttl time.Duration) (uint64, error)
	DeleteOwners(ctx context.Context, key string, revision uint64) (uint64, error)
}

// seed writes a seed and its reservation in one batch.
func (d *Dispatcher) seed(ctx context.Context, b core.SeedBind, m *held, chosen time.Time) core.BindAnswer {
	out := core.BindAnswer{
		Handle: b.Handle, Engine: b.Held.Engine, Job: b.Held.Job, ID: b.Held.ID, Bind: b.Held.Bind, Answer: core.Unavailable,
	}
	if m == nil || time.Since(chosen) > seedAge {
		return out // it has left the hand, or is too old: decide again
	}
	write := kvstate.Seeding{
		Bind: kvstate.Bind{Held: b.Held, Expected: b.Expected, TTL: b.TTL, Body: m.msg.Data}, Seed: b.Seed, At: b.SeedAt,
	}
	w := d.untilAnswered(ctx, "seed", func(ctx context.Context) (uint64, error) { return d.seeds.Seed(ctx, write) })
	if c, ok := errors.AsType[*kvstate.ConflictError](w.err); ok {
		out.Seed = c.Seed
	}
	// A repetition of a batch that did happen meets its own guards, or its own
	// message id without a sequence: the leader knows.
	if w.doubt && w.answer == core.Conflict || w.answer == core.Duplicate {
		out.Seed = !d.whose(ctx, b.Held, &w) && out.Seed
	}
	if errors.Is(w.err, kvstate.ErrRefused) {
		d.log.Warn("a seed is refused for what it is", "rollout", b.Held.Key(), "engine", b.Held.Engine, "key", b.Seed.Key, "err", w.err)
	}
	d.bound(&out, w, m)
	return out
}

// writeSeed ends a seed. After a doubt a refusal may be that of our own first
// attempt: the view says which.
func (d *Dispatcher) writeSeed(ctx context.Context, e core.WriteSeed) core.SeedAnswer {
	w := d.untilAnswered(ctx, "end_seed", func(ctx context.Context) (uint64, error) {
		if e.GiveBack {
			return d.seeds.GiveBack(ctx, e.Seed.Key, e.Revision)
		}
		return d.seeds.Cooldown(ctx, e.Seed, e.Revision, e.TTL)
	})
	return core.SeedAnswer{Key: e.Seed.Key, Revision: e.Revision, Answer: w.answer, Seq: w.seq}
}

// writeOwners compares and sets an entry of the owner map.
func (d *Dispatcher) writeOwners(ctx context.Context, e core.WriteOwners) core.OwnersAnswer {
	w := d.untilAnswered(ctx, "owners", func(ctx context.Context) (uint64, error) {
		if len(e.Owners) == 0 {
			return d.seeds.DeleteOwners(ctx, e.Key, e.Revision)
		}
		return d.seeds.PutOwners(ctx, e.Ownership, e.Revision, e.TTL)
	})
	return core.OwnersAnswer{Key: e.Key, Revision: e.Revision, Answer: w.answer, Seq: w.seq, Actual: w.actual}
}

// moved tells consoles of a change of owners or seeds.
func (d *Dispatcher) moved(e core.Transition) {
	d.log.Debug("owners or seeds have changed", "key", e.Key, "what", e.What, "engine", e.Engine, "rollout", e.Rollout, "why", e.Why, "owners", e.Owners)
	if !d.cfg.QuietDecisions {
		d.decisions.put(line{transition: &e, Dispatcher: d.cfg.Name, AtNS: d.clock.now()})
	}
}

// transitionLine is what is published of a transition, on the subject of
// decisions, where one without "transition" is a decision.
type transitionLine struct {
	Transition core.Transition `json:"transition"`
	Dispatcher string          `json:"dispatcher"`
	AtNS       int64           `json:"at_ns,omitempty"`
}

// entries splits what is followed of the reservations bucket into the core's events.
func entries(es []kvstate.Entry, xs []kvstate.Ended) core.ViewSwap {
	v := core.ViewSwap{Kind: core.ViewReservations}
	for _, e := range es {
		switch p := entryPut(e).(type) {
		case core.ReservationPut:
			v.Reservations = append(v.Reservations, p)
		case core.SeedPut:
			v.Seeds = append(v.Seeds, p)
		}
	}
	for _, x := range xs {
		switch g := entryGone(x).(type) {
		case core.ReservationGone:
			v.Gone = append(v.Gone, g)
		case core.SeedGone:
			v.SeedsGone = append(v.SeedsGone, g)
		}
	}
	return v
}

func entryPut(e kvstate.Entry) core.Event {
	if e.Seed == nil {
		return reservationPut(e.Reservation)
	}
	return core.SeedPut{Seed: *e.Seed, Revision: e.Revision, Stored: nanos(e.Stored), TTLMS: e.TTL.Milliseconds()}
}

func entryGone(x kvstate.Ended) core.Event {
	if x.SeedKey == "" {
		return reservationGone(x.Marker)
	}
	return core.SeedGone{Key: x.SeedKey, Revision: x.Revision, Stored: nanos(x.Stored), TTLMS: x.TTL.Milliseconds()}
}
