package sim

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/conform"
	"github.com/rollbus/rollbus/subjects"
)

// The same suite runs on real NATS servers, in package kvstate.
func TestTheModelOfNATSConforms(t *testing.T) {
	for seed := range uint64(5) {
		w := New(Options{Seed: seed, WatchDelay: 20 * time.Millisecond})
		conform.Run(t, &ledger{t: t, w: w})
	}
}

// A model that breaks a promise is found out.
func TestAModelWithABugDoesNotConform(t *testing.T) {
	w := New(Options{Plant: PlantLateRelease})
	l := &ledger{t: t, w: w}
	h := subjects.Held{Engine: "e", Job: "j", ID: "a", State: subjects.StateBound, Bind: 1}
	first := l.Bind(h, 0, 0).Seq
	h.Bind = 2
	l.Bind(h, first, 0)
	if v := l.Release(subjects.Released{Engine: "e", Job: "j", ID: "a"}, first); v.Answer != conform.OK {
		t.Errorf("the planted bug shows nothing: %+v", v)
	}
}

// ledger is the model of NATS, in virtual time.
type ledger struct {
	t *testing.T
	w *World
}

func verdict(a core.Answer, seq uint64) conform.Verdict {
	return conform.Verdict{Answer: conform.Answer(a), Seq: seq}
}

func (l *ledger) Bind(h subjects.Held, expected uint64, ttl time.Duration) conform.Verdict {
	if ttl == 0 {
		ttl = 24 * time.Hour
	}
	a := l.w.Bus.bind(core.Bind{Held: h, Expected: expected, TTL: ttl})
	return conform.Verdict{Answer: conform.Answer(a.Answer), Seq: a.Seq, Actual: a.Actual}
}

func (l *ledger) Release(r subjects.Released, revision uint64) conform.Verdict {
	return verdict(l.w.Bus.remove(r, revision))
}

func (l *ledger) Return(x conform.Entry, reason string, burnt int) conform.Verdict {
	return verdict(l.w.Bus.giveBack(x.Held, x.Revision, reason, burnt, time.Hour))
}

func (l *ledger) Reservation(engine, job, id string) (conform.Entry, bool) {
	p := l.w.Bus.keys[keyOf(engine, job, id)]
	if p == nil {
		return conform.Entry{}, false
	}
	return conform.Entry{Held: p.Held, Revision: p.Revision}, true
}

func (l *ledger) Commit(job, id string, a subjects.Answer) conform.Verdict {
	a.Job, a.ID = job, id
	return verdict(l.w.Bus.commit(a))
}

func (l *ledger) Answer(job, id string) (subjects.Answer, uint64, bool) {
	r := l.w.Bus.register[subjects.RolloutKey(job, id)]
	if r == nil {
		return subjects.Answer{}, 0, false
	}
	return r.Answer, r.Revision, true
}

func (l *ledger) Requeue(r conform.Requeue) conform.Verdict {
	return verdict(l.w.Bus.retry(core.Retry{Engine: r.Engine, Job: r.Job, ID: r.ID, Revision: r.Revision, Bind: r.Bind}), 0)
}

func (l *ledger) Until(what string, so func() bool) {
	l.t.Helper()
	if !l.w.Run(2*time.Minute, so) {
		l.t.Fatalf("never: %s", what)
	}
}

// Follow hears what a dispatcher's follower hears.
func (l *ledger) Follow(engine string) conform.View {
	v := &heard{engine: engine, keys: map[string]conform.Entry{}}
	d := l.w.AddDispatcher("follower-" + engine)
	d.Log = func(ev core.Event, _ time.Duration, _ []core.Effect) { v.hear(ev) }
	return v
}

type heard struct {
	engine string
	keys   map[string]conform.Entry
	last   uint64
}

func (v *heard) hear(ev core.Event) {
	switch ev := ev.(type) {
	case core.ViewSwap:
		if ev.Kind != core.ViewReservations {
			return
		}
		clear(v.keys)
		for _, p := range ev.Reservations {
			v.hear(p)
		}
		for _, g := range ev.Gone {
			v.hear(g)
		}
	case core.ReservationPut:
		if ev.Engine == v.engine {
			v.keys[ev.ID], v.last = conform.Entry{Held: ev.Held, Revision: ev.Revision}, max(v.last, ev.Revision)
		}
	case core.ReservationGone:
		if ev.Engine == v.engine {
			v.last = max(v.last, ev.Revision)
			if v.keys[ev.ID].Revision < ev.Revision {
				delete(v.keys, ev.ID)
			}
		}
	}
}

func (v *heard) Keys() []conform.Entry {
	var out []conform.Entry
	for _, e := range v.keys {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b conform.Entry) int { return strings.Compare(a.ID, b.ID) })
	return out
}

func (v *heard) Last() uint64 { return v.last }
