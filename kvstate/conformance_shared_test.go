package kvstate

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/kvstate/conform"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// sharedStories are those that the simulator's model of NATS passes too.
func sharedStories(t *testing.T, e *env) { conform.Run(t, &realLedger{t: t, e: e}) }

// realLedger is a store on real servers.
type realLedger struct {
	t *testing.T
	e *env
}

// write repeats what asks for it and tells the rest in the suite's words.
func (l *realLedger) write(do func(ctx context.Context) (uint64, error)) conform.Verdict {
	l.t.Helper()
	var v conform.Verdict
	natstest.Eventually(l.t, within, "a write that is answered", func() bool {
		seq, err := do(l.t.Context())
		v = conform.Verdict{Answer: conform.OK, Seq: seq}
		if err == nil {
			return true
		}
		for want, answer := range map[error]conform.Answer{
			ErrConflict: conform.Conflict, ErrDuplicate: conform.Duplicate, ErrSuperseded: conform.Superseded, ErrGone: conform.Gone,
		} {
			if errors.Is(err, want) {
				v = conform.Verdict{Answer: answer}
			}
		}
		if c, ok := errors.AsType[*ConflictError](err); ok {
			v.Actual = c.Actual
		}
		if d, ok := errors.AsType[*DuplicateError](err); ok {
			v.Seq = d.Seq
		}
		return v.Answer != conform.OK
	})
	return v
}

func (l *realLedger) Bind(h subjects.Held, expected uint64, ttl time.Duration) conform.Verdict {
	return l.write(func(ctx context.Context) (uint64, error) {
		return l.e.store.Bind(ctx, Bind{Held: h, Expected: expected, TTL: ttl, Body: []byte("x")})
	})
}

func (l *realLedger) Release(r subjects.Released, revision uint64) conform.Verdict {
	return l.write(func(ctx context.Context) (uint64, error) { return l.e.store.Release(ctx, r, revision) })
}

func (l *realLedger) Return(x conform.Entry, reason string, burnt int) conform.Verdict {
	return l.write(func(ctx context.Context) (uint64, error) {
		return l.e.store.Return(ctx, Reservation{Held: x.Held, Revision: x.Revision, Body: []byte("x")}, reason, burnt)
	})
}

func (l *realLedger) Reservation(engine, job, id string) (conform.Entry, bool) {
	r, err := l.e.store.Reservation(l.t.Context(), engine, job, id)
	if err != nil && !errors.Is(err, ErrGone) {
		l.t.Fatal(err)
	}
	return conform.Entry{Held: r.Held, Revision: r.Revision}, err == nil
}

func (l *realLedger) Commit(job, id string, a subjects.Answer) conform.Verdict {
	res := &subjects.Result{SchemaVersion: subjects.SchemaVersion, Job: job, ID: id, Attempt: a.Bind, Status: a.Status}
	return l.write(func(ctx context.Context) (uint64, error) { return l.e.store.Commit(ctx, res, a) })
}

func (l *realLedger) Answer(job, id string) (subjects.Answer, uint64, bool) {
	r, err := l.e.store.Result(l.t.Context(), job, "main", id)
	if err != nil && !errors.Is(err, ErrGone) {
		l.t.Fatal(err)
	}
	return r.Answer, r.Revision, err == nil
}

func (l *realLedger) Requeue(r conform.Requeue) conform.Verdict {
	return l.write(func(ctx context.Context) (uint64, error) {
		return l.e.store.Requeue(ctx, Requeue{Job: r.Job, ID: r.ID, Lane: subjects.LaneNormal, Bind: r.Bind, LeftMS: 5_000, Body: []byte("x")})
	})
}

func (l *realLedger) Until(what string, so func() bool) { natstest.Eventually(l.t, within, what, so) }

func (l *realLedger) Follow(engine string) conform.View {
	return realView{l.e.watch(l.t, l.e.store, engine, engine+".>").wait(l.t), engine}
}

type realView struct {
	*following
	engine string
}

func (v realView) Keys() []conform.Entry {
	var out []conform.Entry
	for _, r := range v.Snapshot() {
		out = append(out, conform.Entry{Held: r.Held, Revision: r.Revision})
	}
	slices.SortFunc(out, func(a, b conform.Entry) int { return strings.Compare(a.ID, b.ID) })
	return out
}

func (v realView) Last() uint64 { return v.Engine(v.engine).Last }
