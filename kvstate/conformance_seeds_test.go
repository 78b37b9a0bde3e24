package kvstate

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func seeding(engine, id, key string) Seeding {
	version := int64(3)
	return Seeding{
		Bind: Bind{Held: held(engine, id, 1), Body: []byte("body of " + id)},
		Seed: subjects.Seed{Key: key, WeightVersion: &version, Anchor: 77, Dispatcher: "d1"},
	}
}

// seed seeds on whatever the two sequences are, as a retrying dispatcher does.
func (e *env) seed(t *testing.T, b Seeding) uint64 {
	t.Helper()
	return eventually(t, "seeded "+b.Held.ID, func() (uint64, error) {
		seq, err := e.store.Seed(t.Context(), b)
		if c, ok := errors.AsType[*ConflictError](err); ok && c.Seed {
			b.At = c.Actual
		} else if ok {
			b.Expected = c.Actual
		}
		return seq, err
	})
}

func (e *env) noSeed(t *testing.T, key string) {
	t.Helper()
	if sd, at, err := e.store.SeedOf(t.Context(), key); !errors.Is(err, ErrGone) {
		t.Fatalf("at the key's seed stands %+v at %d (%v), want nothing", sd, at, err)
	}
}

func seedBothOrNone(t *testing.T, e *env) {
	const key = "00000000000000a1"
	there := e.bind(t, "sd", "there", 1)
	wantConflict := func(b Seeding, actual uint64, seed bool) {
		t.Helper()
		err := settled(t, func() error { _, err := e.store.Seed(t.Context(), b); return err })
		wantErr(t, err, ErrConflict)
		if c, _ := errors.AsType[*ConflictError](err); c.Actual != actual || c.Seed != seed {
			t.Fatalf("conflict at %d, of the seed %v; want %d, %v", c.Actual, c.Seed, actual, seed)
		}
	}
	// The engine's guard is stale: no seed stands either.
	b := seeding("sd", "a", key)
	wantConflict(b, there, false)
	e.noSeed(t, key)
	// The seed's guard is stale: no reservation stands either.
	b.Expected, b.At = there, there
	wantConflict(b, 0, true)
	_, err := e.store.Reservation(t.Context(), "sd", "sd", "a")
	wantErr(t, err, ErrGone)

	b.At = 0
	seq := e.seed(t, b)
	got, at, err := e.store.SeedOf(t.Context(), key)
	must(t, err)
	want := b.Seed
	want.State, want.Engine, want.Job, want.ID, want.Bind, want.Epoch = subjects.SeedLive, "sd", "sd", "a", 1, "e"
	if d := cmp.Diff(want, got); d != "" || at != seq-1 {
		t.Fatalf("the seed stands at %d, want %d; differs:\n%s", at, seq-1, d)
	}
	r, err := e.store.Reservation(t.Context(), "sd", "sd", "a")
	must(t, err)
	if r.Revision != seq || string(r.Body) != "body of a" {
		t.Fatalf("the reservation stands at %d with body %q, want %d", r.Revision, r.Body, seq)
	}
	// A live seed of the key lets no other through, on whatever engine.
	other := seeding("sd2", "b", key)
	wantConflict(other, at, true)
	_, err = e.store.Reservation(t.Context(), "sd2", "sd2", "b")
	wantErr(t, err, ErrGone)
	// Nor does a bind number work twice.
	again := b
	again.At, again.Expected = at, seq
	err = settled(t, func() error { _, err := e.store.Seed(t.Context(), again); return err })
	wantErr(t, err, ErrDuplicate)
	// Its own engine guard knows of it: an ordinary bind has to have seen it.
	_, err = e.store.Bind(t.Context(), Bind{Held: held("sd", "c", 1), Expected: there})
	wantErr(t, err, ErrConflict)
}

func unknownSeed(t *testing.T, e *env) {
	const key = "00000000000000a2"
	s, line := e.remote(t, Timeout(300*time.Millisecond))
	b := seeding("usd", "a", key)
	line.LoseReplies()
	_, err := s.Seed(t.Context(), b)
	wantErr(t, err, ErrUnknown)
	line.Heal()
	natstest.Eventually(t, within, "an answer to the repetition", func() bool {
		_, err = s.Seed(t.Context(), b)
		return errors.Is(err, ErrDuplicate) || errors.Is(err, ErrConflict)
	})
	r, err := e.store.Reservation(t.Context(), "usd", "usd", "a")
	must(t, err)
	if _, at, err := e.store.SeedOf(t.Context(), key); err != nil || at != r.Revision-1 {
		t.Fatalf("the seed stands at %d (%v), the reservation at %d", at, err, r.Revision)
	}
	// Never arrived: the repetition writes both.
	lost := seeding("usd2", "b", "00000000000000a3")
	line.LoseRequests()
	_, err = s.Seed(t.Context(), lost)
	wantErr(t, err, ErrUnknown)
	line.Heal()
	seq := eventually(t, "the repetition", func() (uint64, error) { return s.Seed(t.Context(), lost) })
	if _, at, err := e.store.SeedOf(t.Context(), lost.Seed.Key); err != nil || at != seq-1 {
		t.Fatalf("the seed stands at %d (%v), want %d", at, err, seq-1)
	}
}

func seedEndsOnce(t *testing.T, e *env) {
	const key = "00000000000000a4"
	seq := e.seed(t, seeding("end", "a", key))
	sd, at, err := e.store.SeedOf(t.Context(), key)
	must(t, err)
	_, err = e.store.GiveBack(t.Context(), key, at+5)
	wantErr(t, err, ErrSuperseded)
	cooling, err := e.store.Cooldown(t.Context(), sd, at, time.Second)
	must(t, err)
	_, err = e.store.GiveBack(t.Context(), key, at) // a paused holder, late
	wantErr(t, err, ErrSuperseded)
	got, _, err := e.store.SeedOf(t.Context(), key)
	must(t, err)
	if got.State != subjects.SeedCooldown || got.Rollout() != "end.a" {
		t.Fatalf("got %+v, want the cooldown of end.a", got)
	}
	natstest.Eventually(t, within, "the end of the cooldown at the server", func() bool {
		_, _, err := e.store.SeedOf(t.Context(), key)
		return errors.Is(err, ErrGone)
	})
	_, err = e.store.Cooldown(t.Context(), sd, cooling, time.Second)
	wantErr(t, err, ErrGone)
	// What is over can be seeded again, and given back.
	b := seeding("end", "b", key)
	b.Expected = seq
	second := e.seed(t, b)
	must(t, onlyErr(e.store.GiveBack(t.Context(), key, second-1)))
	e.noSeed(t, key)
}

func onlyErr(_ uint64, err error) error { return err }

// seedRace: several dispatchers want one key on three engines. Whoever got it
// ends it before another may have it.
func seedRace(t *testing.T, e *env) {
	const key, workers, rounds = "00000000000000a5", 4, 30
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	var live, won atomic.Int64
	f := newSeedView(t, e)
	var wg sync.WaitGroup
	for w := range workers {
		s := e.storeOn(t, e.nc)
		wg.Go(func() {
			for i := 0; won.Load() < rounds && ctx.Err() == nil; i++ {
				engine := fmt.Sprintf("rc%d", (w+i)%3)
				b := seeding(engine, fmt.Sprintf("w%d-%d", w, i), key)
				at := f.seed.Load()
				if at.live {
					runtime.Gosched()
					continue
				}
				b.At, b.Expected = at.rev, f.engines[(w+i)%3].Load()
				seq, err := s.Seed(ctx, b)
				if err != nil {
					if errors.Is(err, ErrUnknown) {
						t.Errorf("no answer: %v", err)
						return
					}
					continue
				}
				if n := live.Add(1); n != 1 {
					t.Errorf("%d live seeds of one key", n)
				}
				won.Add(1)
				_ = settled(t, func() error {
					_, err := s.Release(ctx, released(engine, b.Held.ID, 1), seq)
					return err
				})
				live.Add(-1)
				_ = settled(t, func() error { _, err := s.GiveBack(ctx, key, seq-1); return err })
			}
		})
	}
	wg.Wait()
	if won.Load() < rounds {
		t.Fatalf("%d seeds were won, want %d: they kept each other away", won.Load(), rounds)
	}
}

// seedView is what the racers know: the last sequence of the key's seed and of
// each engine, as a follower of all tells it.
type seedView struct {
	seed    atomic.Pointer[seedAt]
	engines [3]atomic.Uint64
}

type seedAt struct {
	rev  uint64
	live bool // nobody may write over it but to end it
}

func newSeedView(t *testing.T, e *env) *seedView {
	v := &seedView{}
	v.seed.Store(&seedAt{})
	note := func(engine string, seed, live bool, rev uint64) {
		switch {
		case seed:
			v.seed.Store(&seedAt{rev, live})
		case len(engine) == 3 && engine[:2] == "rc":
			v.engines[engine[2]-'0'].Store(rev)
		}
	}
	const key = "00000000000000a5"
	put := func(x Entry) { note(x.Engine, x.Seed != nil && x.Seed.Key == key, true, x.Revision) }
	gone := func(x Ended) { note(x.Engine, x.SeedKey == key, false, x.Revision) }
	ready := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- e.store.FollowAll(ctx, FollowConfig{Name: "race"}, Handler[Entry, Ended]{
			Swap: func(es []Entry, xs []Ended) {
				for _, x := range es {
					put(x)
				}
				for _, x := range xs {
					gone(x)
				}
				select {
				case ready <- struct{}{}:
				default:
				}
			}, Put: put, Gone: gone,
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	select {
	case <-ready:
	case <-time.After(within):
		t.Fatal("no view")
	}
	return v
}

func ownersGuarded(t *testing.T, e *env) {
	const key = "00000000000000b1"
	cached := 512
	o := subjects.Ownership{Key: key, Owners: []subjects.Owner{{Engine: "e1", Epoch: "x", Anchor: 1 << 63, Proof: subjects.Proof{Rollout: "j.1", Bind: 1, CachedTokens: &cached, At: 5}}}}
	rev, err := e.store.PutOwners(t.Context(), o, 0, time.Minute)
	must(t, err)
	_, err = e.store.PutOwners(t.Context(), o, 0, time.Minute)
	wantErr(t, err, ErrConflict)
	if c, _ := errors.AsType[*ConflictError](err); c.Actual != rev {
		t.Fatalf("conflict at %d, want %d", c.Actual, rev)
	}
	type change struct {
		v    Value[subjects.Ownership]
		gone bool
	}
	seen := make(chan change, 64)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- e.store.FollowOwners(ctx, FollowConfig{Name: "own"}, Handler[Value[subjects.Ownership], Value[struct{}]]{
			Swap: func(vs []Value[subjects.Ownership], _ []Value[struct{}]) {
				for _, v := range vs {
					seen <- change{v: v}
				}
			},
			Put: func(v Value[subjects.Ownership]) { seen <- change{v: v} },
			Gone: func(g Value[struct{}]) {
				seen <- change{v: Value[subjects.Ownership]{Key: g.Key, Revision: g.Revision}, gone: true}
			},
		})
	}()
	defer func() { cancel(); <-done }()
	next := func(revision uint64) change {
		t.Helper()
		for {
			select {
			case c := <-seen:
				if c.v.Revision == revision {
					return c
				}
			case <-time.After(within):
				t.Fatalf("nothing is seen at %d", revision)
			}
		}
	}
	o.SchemaVersion = subjects.SchemaVersion
	if c := next(rev); c.gone || c.v.TTL != time.Minute || cmp.Diff(o, c.v.V) != "" {
		t.Fatalf("followed %+v", c)
	}
	o.Owners = append(o.Owners, subjects.Owner{Engine: "e2", Epoch: "y"})
	rev2, err := e.store.PutOwners(t.Context(), o, rev, time.Second)
	must(t, err)
	if c := next(rev2); len(c.v.V.Owners) != 2 || c.v.TTL != time.Second {
		t.Fatalf("followed %+v", c)
	}
	natstest.Eventually(t, within, "an expired entry that is none", func() bool {
		rev, err = e.store.PutOwners(t.Context(), o, 0, time.Minute)
		return err == nil
	})
	rev, err = e.store.DeleteOwners(t.Context(), key, rev)
	must(t, err)
	if c := next(rev); !c.gone {
		t.Fatalf("followed %+v, want it deleted", c)
	}
	_, err = e.store.PutOwners(t.Context(), subjects.Ownership{Key: "nonsense"}, 0, time.Minute)
	wantErr(t, err, ErrRefused)
}
