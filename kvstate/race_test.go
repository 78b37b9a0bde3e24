package kvstate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// The guard race of design.md 4: binders and releasers on one engine. What is
// checked comes from the stream: the header of a stored bind says what its
// binder knew, and whatever bind stands before it must be within that.

// stands is one bind as the stream has it.
type stands struct{ seq, expected uint64 }

// unaware counts binds that did not know of the bind before them.
func unaware(binds []stands) (n int, first string) {
	slices.SortFunc(binds, func(a, b stands) int { return int(int64(a.seq) - int64(b.seq)) })
	for i, b := range binds[1:] {
		if before := binds[i]; before.seq > b.expected {
			if n++; first == "" {
				first = fmt.Sprintf("the bind at %d expected %d and did not know of the one at %d", b.seq, b.expected, before.seq)
			}
		}
	}
	return n, first
}

// race is one run of it.
type race struct {
	e      *env
	engine string
	guards []string // of the binders, in turn
	binds  int      // binds to reach
	until  func(*race) bool

	last   atomic.Uint64 // newest sequence under the engine's keys that the recorder has seen
	bound  atomic.Int64  // binds acknowledged
	bids   atomic.Int64  // binds tried
	frees  atomic.Int64  // releases
	mu     sync.Mutex
	record map[uint64]stands
	acked  map[uint64]bool
	toFree chan Reservation
}

func newRace(e *env, engine string, binds int, guards ...string) *race {
	return &race{
		e: e, engine: engine, guards: guards, binds: binds,
		record: map[uint64]stands{}, acked: map[uint64]bool{}, toFree: make(chan Reservation, 1<<16),
	}
}

func (r *race) done() bool {
	return int(r.bound.Load()) >= r.binds || r.until != nil && r.until(r)
}

// recorder reads every write of the engine's keys in stream order; releases are
// made from what it read, so that no bind is overwritten before it is recorded.
func (r *race) recorder(ctx context.Context, t *testing.T) <-chan error {
	s := r.e.storeOn(t, r.e.nc)
	ready := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		sp, err := s.spec(FollowConfig{Name: "race", Filter: r.engine + ".>"}, subjects.Reservations, s.reservationsStream(), subjects.BucketSubject(s.pool.Bucket(subjects.Reservations), ""))
		if err != nil {
			done <- err
			return
		}
		sp.headersOnly = true
		put := func(d delivery) {
			r.last.Store(max(r.last.Load(), d.seq))
			if d.deleted() {
				return
			}
			exp, _ := strconv.ParseUint(d.header.Get(subjects.HdrExpectLastSeq), 10, 64)
			r.mu.Lock()
			r.record[d.seq] = stands{seq: d.seq, expected: exp}
			r.mu.Unlock()
			_, job, id, _ := s.pool.ParseReservationSubject(d.subject)
			r.toFree <- Reservation{Held: subjects.Held{Engine: r.engine, Job: job, ID: id, Bind: 1}, Revision: d.seq}
		}
		h := Handler[delivery, struct{}]{
			Swap: func(ds []delivery, _ []struct{}) {
				for _, d := range ds {
					put(d)
				}
				select {
				case <-ready:
				default:
					close(ready)
				}
			},
			Put: put,
		}
		done <- follow(ctx, s, sp, h, func(d delivery) (delivery, struct{}, kind, error) { return d, struct{}{}, kindPut, nil })
	}()
	select {
	case <-ready:
	case <-time.After(within):
		t.Error("the recorder has no view")
	}
	return done
}

// binder binds new rollouts until the race is done.
func (r *race) binder(ctx context.Context, t *testing.T, s *Store, n int) {
	guard := r.guards[n%len(r.guards)]
	for i := 0; !r.done() && ctx.Err() == nil; i++ {
		h := held(r.engine, fmt.Sprintf("b%d-%d", n, i), 1)
		seq, err := r.place(ctx, s, h, guard)
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("binder %d: %v", n, err)
			}
			return
		}
		r.mu.Lock()
		r.acked[seq] = true
		r.mu.Unlock()
		r.bound.Add(1)
	}
}

// place binds one rollout: it decides again after each conflict, once more while
// busy, and repeats the identical write while the outcome is unknown.
func (r *race) place(ctx context.Context, s *Store, h subjects.Held, guard string) (uint64, error) {
	expected := r.last.Load()
	unknown := false
	for {
		r.bids.Add(1)
		seq, err := r.publish(ctx, s, h, expected, guard)
		switch {
		case err == nil:
			return seq, nil
		case errors.Is(err, ErrUnknown), errors.Is(err, ErrUnavailable):
			unknown = unknown || errors.Is(err, ErrUnknown)
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
		case errors.Is(err, ErrBusy):
		case errors.Is(err, ErrDuplicate):
			d, _ := errors.AsType[*DuplicateError](err)
			if !unknown {
				return 0, fmt.Errorf("a duplicate without a first attempt: %w", err)
			}
			return d.Seq, nil
		case errors.Is(err, ErrConflict):
			if unknown {
				own, err := s.Reservation(ctx, h.Engine, h.Job, h.ID)
				switch {
				case err == nil:
					return own.Revision, nil
				case errors.Is(err, ErrGone):
				case errors.Is(err, ErrUnavailable):
					continue
				default:
					return 0, err
				}
				unknown = false
			}
			c, _ := errors.AsType[*ConflictError](err)
			expected = c.Actual
		default:
			return 0, err
		}
	}
}

// publish is Bind, but for the string of the guard when that is another one.
func (r *race) publish(ctx context.Context, s *Store, h subjects.Held, expected uint64, other string) (uint64, error) {
	if other == "" {
		return s.Bind(ctx, Bind{Held: h, Expected: expected, Body: []byte("x")})
	}
	h.State = subjects.StateBound
	header := h.Header()
	header.Set(subjects.HdrMsgID, msgID(h.Job, h.ID, h.Bind))
	guard(header, expected)
	header.Set(subjects.HdrExpectLastSubj, other)
	setTTL(header, time.Hour)
	return s.publish(ctx, s.pool.ReservationSubject(h.Engine, h.Job, h.ID), header, []byte("x"))
}

// releaser releases what the recorder has read.
func (r *race) releaser(ctx context.Context, t *testing.T, s *Store) {
	for {
		select {
		case <-ctx.Done():
			return
		case x := <-r.toFree:
			rel := subjects.Released{Engine: x.Engine, Job: x.Job, ID: x.ID, Bind: 1, Outcome: subjects.OutcomeAnswered}
			for {
				_, err := s.Release(ctx, rel, x.Revision)
				if err == nil || errors.Is(err, ErrSuperseded) || ctx.Err() != nil {
					r.frees.Add(1)
					break
				}
				if !errors.Is(err, ErrBusy) && !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrUnavailable) {
					t.Errorf("release: %v", err)
					return
				}
			}
		}
	}
}

// run races and returns all binds that the stream had.
func (r *race) run(t *testing.T, during func()) []stands {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	stop, end := context.WithCancel(ctx)
	recorded := r.recorder(stop, t)
	began := time.Now()
	var binders, releasers sync.WaitGroup
	for n := range 4 {
		s := r.e.storeOn(t, r.connect(t, n), Timeout(2*time.Second))
		binders.Go(func() { r.binder(ctx, t, s, n) })
	}
	for n := range 2 {
		s := r.e.storeOn(t, r.connect(t, n), Timeout(2*time.Second))
		releasers.Go(func() { r.releaser(stop, t, s) })
	}
	if during != nil {
		during()
	}
	binders.Wait()
	took := time.Since(began)
	natstest.Eventually(t, within, "every acknowledged bind recorded", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for seq := range r.acked {
			if _, ok := r.record[seq]; !ok {
				return false
			}
		}
		return true
	})
	end()
	must(t, <-recorded)
	releasers.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]stands, 0, len(r.record))
	for _, b := range r.record {
		out = append(out, b)
	}
	t.Logf("%d binds acknowledged, %d recorded, of %d tried, %d releases, %v (%.0f binds/s)",
		len(r.acked), len(out), r.bids.Load(), r.frees.Load(), took.Round(time.Millisecond), float64(len(r.acked))/took.Seconds())
	return out
}

// connect spreads the contestants over the servers.
func (r *race) connect(t *testing.T, n int) *nats.Conn {
	opts := []nats.Option{nats.ReconnectBufSize(-1)}
	if r.e.cluster != nil {
		return r.e.cluster.List[n%len(r.e.cluster.List)].Conn(t, opts...)
	}
	return r.e.node.Conn(t, opts...)
}

// long is how much more the long tests do.
func long(short, much int) int {
	if os.Getenv("ROLLBUS_LONG") == "1" {
		return much
	}
	return short
}

// scenario F8
func TestNoBindIsUnawareOfAnotherOnR3(t *testing.T) {
	t.Parallel()
	e := clustered(t)
	r := newRace(e, "race", long(3_000, 20_000), "")
	binds := r.run(t, func() {
		for part := 1; part <= long(2, 8); part++ {
			at := int64(r.binds * part / long(3, 9))
			natstest.Eventually(t, 5*time.Minute, "the race under way", func() bool { return r.bound.Load() >= at || t.Failed() })
			e.cluster.StepDown(e.store.reservationsStream())
		}
	})
	if len(binds) < r.binds {
		t.Fatalf("%d binds recorded, want %d", len(binds), r.binds)
	}
	if n, first := unaware(binds); n > 0 {
		t.Fatalf("%d of %d binds were unaware of the one before: %s", n, len(binds), first)
	}
}

// The same race with guards that mean the same and are spelled differently: on R3
// the server keeps apart what it compares by their strings. If this test fails,
// the race above has lost its bite, or the server guards by subjects now.
func TestMixedGuardStringsLetBindsPassUnseenOnR3(t *testing.T) {
	t.Parallel()
	e := clustered(t)
	other := subjects.BucketSubject(e.pool.Bucket(subjects.Reservations), "mixed.*.*")
	r := newRace(e, "mixed", long(20_000, 100_000), "", other)
	r.until = func(r *race) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.record) < 200 {
			return false
		}
		all := make([]stands, 0, len(r.record))
		for _, b := range r.record {
			all = append(all, b)
		}
		n, _ := unaware(all)
		return n > 0
	}
	binds := r.run(t, nil)
	n, first := unaware(binds)
	if n == 0 {
		t.Fatalf("%d binds with mixed guards and none unaware of another: the race has no bite", len(binds))
	}
	t.Logf("%d of %d unaware: %s", n, len(binds), first)
}
