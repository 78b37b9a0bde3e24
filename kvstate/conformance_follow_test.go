package kvstate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// watch follows the reservations under a key filter.
func (e *env) watch(t *testing.T, s *Store, name, filter string) *following {
	t.Helper()
	return follows(t, s, func(ctx context.Context, h Handler[Reservation, Marker]) error {
		return s.FollowReservations(ctx, FollowConfig{Name: name, Filter: filter}, h)
	})
}

// shows waits until the view is exactly that.
func (f *following) shows(t *testing.T, want ...string) {
	t.Helper()
	slices.Sort(want)
	var got []string
	natstest.EventuallyOr(t, within, func() bool {
		got = f.keys()
		slices.Sort(got)
		return slices.Equal(got, want)
	}, func() string { return "the view differs (-want +got):\n" + cmp.Diff(want, got) })
}

func followEmpty(t *testing.T, e *env) {
	f := e.watch(t, e.storeOn(t, e.nc, Heartbeat(DefaultHeartbeat)), "empty", "nothing.>").wait(t)
	f.shows(t)
	swaps, _ := f.counts()
	natstest.Eventually(t, within, "heartbeats of an idle consumer", func() bool { _, alive := f.counts(); return alive > 5 })
	if again, _ := f.counts(); again != swaps {
		t.Fatalf("%d swaps of a quiet follower, want %d", again, swaps)
	}
	_, err := e.store.ServerTime(t.Context())
	must(t, err)
}

func followChanges(t *testing.T, e *env) {
	a := e.bind(t, "chg", "a", 1)
	b := e.bind(t, "chg", "b", 1)
	gone := e.bind(t, "chg", "gone", 1)
	mark, err := e.store.Release(t.Context(), released("chg", "gone", 1), gone)
	must(t, err)

	var first []Marker
	s := e.storeOn(t, e.nc, Heartbeat(DefaultHeartbeat)) // one that does not start over on a loaded machine
	f := follows(t, s, func(ctx context.Context, h Handler[Reservation, Marker]) error {
		swap := h.Swap
		h.Swap = func(rs []Reservation, ms []Marker) {
			first = ms
			swap(rs, ms)
		}
		return s.FollowReservations(ctx, FollowConfig{Name: "chg", Filter: "chg.>"}, h)
	}).wait(t)
	f.shows(t, keyOf("chg", "a", 1, a), keyOf("chg", "b", 1, b))
	r, ok := f.Get("chg", "chg", "a")
	if !ok || len(r.Body) != 0 || r.Tokens != 100 || r.TTL != 24*time.Hour+time.Minute {
		t.Fatalf("got %+v, want headers only", r)
	}
	if l := f.Engine("chg"); l != (EngineLoad{Bound: 2, Tokens: 200, Last: mark}) {
		t.Fatalf("load %+v", l)
	}
	c := e.bind(t, "chg", "c", 1)
	whole, err := e.store.Reservation(t.Context(), "chg", "chg", "a")
	must(t, err)
	back, err := e.store.Return(t.Context(), whole, "no slot", 0)
	must(t, err)
	end, err := e.store.Release(t.Context(), released("chg", "b", 1), b)
	must(t, err)
	must(t, f.WaitFor(t.Context(), "chg", end))
	f.shows(t, keyOf("chg", "a", 1, back), keyOf("chg", "c", 1, c))
	if l := f.Engine("chg"); l != (EngineLoad{Bound: 1, Returned: 1, Tokens: 100, Last: end}) {
		t.Fatalf("load %+v", l)
	}
	f.stop()
	must(t, f.err)
	if f.swaps != 1 || len(first) != 1 || first[0].Revision != mark || first[0].Released.Outcome != subjects.OutcomeAnswered {
		t.Fatalf("%d swaps, first with markers %+v", f.swaps, first)
	}
	if len(f.puts) != 2 || f.puts[0].Revision != c || f.puts[1].State != subjects.StateReturned {
		t.Fatalf("puts %+v, want the bind of c, then the return of a", f.puts)
	}
	want := Marker{Released: released("chg", "b", 1), Revision: end, TTL: MarkerTTL}
	if len(f.markers) != 1 {
		t.Fatalf("markers %+v, want one", f.markers)
	}
	want.Stored = f.markers[0].Stored
	if d := cmp.Diff(want, f.markers[0]); d != "" || want.Stored.IsZero() {
		t.Fatalf("marker differs (-want +got):\n%s", d)
	}
}

func followFilter(t *testing.T, e *env) {
	a := e.bind(t, "fil1", "x", 1)
	e.bind(t, "fil2", "y", 1)
	f := e.watch(t, e.store, "fil", "fil1.fil1.*").wait(t)
	f.shows(t, keyOf("fil1", "x", 1, a))
	b := e.bind(t, "fil1", "z", 1)
	e.bind(t, "fil2", "w", 1)
	f.shows(t, keyOf("fil1", "x", 1, a), keyOf("fil1", "z", 1, b))
	for _, bad := range []string{"a..b", ".a", "a.", ">.a", "a*", "a b"} {
		err := e.store.FollowReservations(t.Context(), FollowConfig{Name: "fil", Filter: bad}, Handler[Reservation, Marker]{})
		wantErrIs(t, err, ErrBadOption)
	}
	wantErrIs(t, e.store.FollowReservations(t.Context(), FollowConfig{Name: "a.b"}, Handler[Reservation, Marker]{}), ErrBadOption)
	wantErrIs(t, e.store.FollowOwn(t.Context(), "*", Handler[Reservation, Marker]{}), ErrBadOption)
}

// seen is a small bucket as its follower tells it. On a loaded machine a follower
// may start over at any time: what is checked is what stands.
type seen struct {
	mu    sync.Mutex
	swaps int
	text  map[string]string
	bad   map[string]bool
}

// wait waits until a key says text, "" = it is not there.
func (s *seen) wait(t *testing.T, key, text string) {
	t.Helper()
	natstest.EventuallyOr(t, within, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.swaps > 0 && s.text[key] == text
	}, func() string { return fmt.Sprintf("%s=%q in %v", key, text, s.text) })
}

// refused waits until a subject was reported as undecodable.
func (s *seen) refused(t *testing.T, subject string) {
	t.Helper()
	natstest.Eventually(t, within, subject+" reported", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.bad[subject]
	})
}

// values follows a small bucket until the test ends.
func values[T any](t *testing.T, run func(context.Context, FollowConfig, Handler[Value[T], Value[struct{}]]) error, f FollowConfig, show func(T) string) *seen {
	s := &seen{text: map[string]string{}, bad: map[string]bool{}}
	locked := func(do func()) {
		s.mu.Lock()
		defer s.mu.Unlock()
		do()
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, f, Handler[Value[T], Value[struct{}]]{
			Swap: func(vs []Value[T], _ []Value[struct{}]) {
				locked(func() {
					s.swaps++
					clear(s.text)
					for _, v := range vs {
						s.text[v.Key] = show(v.V)
					}
				})
			},
			Put:  func(v Value[T]) { locked(func() { s.text[v.Key] = show(v.V) }) },
			Gone: func(g Value[struct{}]) { locked(func() { delete(s.text, g.Key) }) },
			Bad:  func(u Undecodable) { locked(func() { s.bad[u.Subject] = true }) },
		})
	}()
	t.Cleanup(func() {
		cancel()
		must(t, <-done)
	})
	return s
}

func followValuesDecode(t *testing.T, e *env) {
	f := FollowConfig{Name: "val"}
	engines := values(t, e.store.FollowEngines, f, func(v subjects.Engine) string { return v.Epoch })
	dispatchers := values(t, e.store.FollowDispatchers, f, func(v subjects.Dispatcher) string { return v.Version })
	f.Filter = "*.val.>"
	cancels := values(t, e.store.FollowCancels, f, func(v subjects.Cancel) string { return v.Reason })
	f.Filter = e.pool.String()
	pools := values(t, e.store.FollowPools, f, func(v subjects.Settings) string { return fmt.Sprint(v.MaxAttempts) })
	for _, first := range []*seen{engines, dispatchers, cancels, pools} {
		first.wait(t, "val", "")
	}
	var rev uint64
	natstest.Eventually(t, within, "the registration seen", func() bool {
		var err error
		rev, err = e.store.PutEngine(t.Context(), subjects.Engine{Engine: "val", Epoch: "7"}) // it lives a second
		must(t, err)
		engines.mu.Lock()
		defer engines.mu.Unlock()
		return engines.text["val"] == "7"
	})
	// On a slow machine it may have ended by age meanwhile.
	err := settled(t, func() error { return e.store.DeleteEngine(t.Context(), "val", rev) })
	if err != nil {
		wantErr(t, err, ErrGone)
	}
	natstest.Eventually(t, within, "the registration gone", func() bool {
		if err != nil {
			return true // nothing tells of the end by age
		}
		engines.mu.Lock()
		defer engines.mu.Unlock()
		return engines.text["val"] == ""
	})
	natstest.Eventually(t, within, "the dispatcher seen", func() bool {
		_, err := e.store.PutDispatcher(t.Context(), subjects.Dispatcher{Dispatcher: "val", Version: "v1"})
		must(t, err)
		dispatchers.mu.Lock()
		defer dispatchers.mu.Unlock()
		return dispatchers.text["val"] == "v1"
	})
	cancel := subjects.Cancel{Kind: subjects.CancelGroup, Job: "val", Value: "g.1", Reason: "why"}
	must(t, e.store.PutCancel(t.Context(), cancel))
	cancels.wait(t, cancel.Key(), "why")
	set, err := e.store.PutSettings(t.Context(), subjects.Settings{MaxAttempts: 2}, 0)
	must(t, err)
	pools.wait(t, "p", "2")
	_, err = e.store.PutSettings(t.Context(), subjects.Settings{MaxAttempts: 5}, set)
	must(t, err)
	pools.wait(t, "p", "5")

	// What names another key than its own is not believed, and takes away what stood there.
	raw := func(bucket, key, body string) {
		_, err := e.store.publish(t.Context(), subjects.BucketSubject(bucket, key), nats.Header{}, []byte(body))
		must(t, err)
	}
	raw(e.pool.Bucket(subjects.Cancels), cancel.Key(), `{"kind":"job","job":"other","reason":"lie"}`)
	cancels.refused(t, subjects.BucketSubject(e.pool.Bucket(subjects.Cancels), cancel.Key()))
	cancels.wait(t, cancel.Key(), "")
	// Bad settings are refused whole.
	pools.mu.Lock()
	before := pools.swaps
	pools.mu.Unlock()
	raw(subjects.BucketPools, "p", `{"max_attempts":"many"}`)
	pools.refused(t, subjects.BucketSubject(subjects.BucketPools, "p"))
	pools.mu.Lock()
	defer pools.mu.Unlock()
	if pools.swaps == before && pools.text["p"] != "5" {
		t.Fatalf("bad settings left %v", pools.text)
	}
}

func followBad(t *testing.T, e *env) {
	good := e.bind(t, "bad", "good", 1)
	e.bind(t, "bad", "over", 1)
	f := e.watch(t, e.store, "bad", "bad.>").wait(t)
	subject := e.pool.ReservationSubject("bad", "bad", "over")
	seq, err := e.store.publish(t.Context(), subject, nats.Header{subjects.HdrState: {"bound"}, subjects.HdrBind: {"x"}}, []byte("?"))
	must(t, err)
	f.shows(t, keyOf("bad", "good", 1, good))
	// It holds the engine's sequence all the same.
	must(t, f.WaitFor(t.Context(), "bad", seq))
	f.mu.Lock()
	bad := slices.Clone(f.bad)
	f.mu.Unlock()
	if len(bad) == 0 || bad[0].Subject != subject || bad[0].Revision != seq || bad[0].Err == nil {
		t.Fatalf("reported %+v, want %s at %d", bad, subject, seq)
	}
	// Also in the first view.
	e.watch(t, e.store, "bad2", "bad.>").wait(t).shows(t, keyOf("bad", "good", 1, good))
}

func followRegister(t *testing.T, e *env) {
	type entry struct {
		id     string
		status subjects.Status
		body   int
	}
	got := make(chan entry, 16)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	_, err := e.store.Commit(t.Context(), result("reg1"), subjects.Answer{})
	must(t, err)
	say := func(r Registered) {
		if strings.HasPrefix(r.ID, "reg") {
			got <- entry{r.ID, r.Status, len(r.Body)}
		}
	}
	go func() {
		done <- e.store.FollowResults(ctx, FollowConfig{Name: "reg", Filter: "j.main.*"}, Handler[Registered, struct{}]{
			Swap: func(rs []Registered, _ []struct{}) {
				for _, r := range rs {
					say(r)
				}
			},
			Put: say,
		})
	}()
	want := func(w entry) {
		t.Helper()
		select {
		case g := <-got:
			if g != w {
				t.Fatalf("got %+v, want %+v", g, w)
			}
		case <-time.After(within):
			t.Fatalf("no %+v", w)
		}
	}
	want(entry{"reg1", subjects.Completed, 0})
	_, err = e.store.Commit(t.Context(), result("reg2"), subjects.Answer{})
	must(t, err)
	want(entry{"reg2", subjects.Completed, 0})
	r, err := e.store.Result(t.Context(), "j", "main", "reg1")
	must(t, err)
	must(t, settled(t, func() error { return e.store.Received(t.Context(), r) }))
	want(entry{"reg1", "", 0})
	cancel()
	must(t, <-done)
}

// consumersOf lists the consumers of the reservations with that prefix.
func (e *env) consumersOf(t *testing.T, prefix string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	s, err := e.store.JS().Stream(ctx, e.store.reservationsStream())
	must(t, err)
	var out []string
	names := s.ConsumerNames(ctx)
	for n := range names.Name() {
		if strings.HasPrefix(n, prefix) {
			out = append(out, n)
		}
	}
	must(t, names.Err())
	return out
}

// scenario B4
func consumerDeleted(t *testing.T, e *env) {
	a := e.bind(t, "del", "a", 1)
	f := e.watch(t, e.store, "del", "del.>").wait(t)
	f.shows(t, keyOf("del", "a", 1, a))
	var names []string
	natstest.Eventually(t, within, "the follower's consumer listed", func() bool {
		names = e.consumersOf(t, "f-del-reservations-")
		return len(names) == 1
	})
	must(t, e.store.JS().DeleteConsumer(t.Context(), e.store.reservationsStream(), names[0]))
	b := e.bind(t, "del", "b", 1)
	f.shows(t, keyOf("del", "a", 1, a), keyOf("del", "b", 1, b))
	natstest.Eventually(t, within, "a new view", func() bool { swaps, _ := f.counts(); return swaps >= 2 })
	f.stop()
	natstest.Eventually(t, within, "no consumer left", func() bool { return len(e.consumersOf(t, "f-del-")) == 0 })
}

// scenario B5
func followerStopped(t *testing.T, e *env) {
	keep := e.bind(t, "stop", "keep", 1)
	var revs []uint64
	for i := range 5 {
		revs = append(revs, e.bind(t, "stop", fmt.Sprintf("r%d", i), 1))
	}
	s, line := e.remote(t)
	f := e.watch(t, s, "stop", "stop.>").wait(t)
	natstest.Eventually(t, within, "six keys", func() bool { return len(f.keys()) == 6 })
	line.Hold()
	// They retire, and their markers go, while nothing reaches the follower.
	for i, rev := range revs {
		r := released("stop", fmt.Sprintf("r%d", i), 1)
		h := r.Header()
		guard(h, rev)
		setTTL(h, time.Second)
		must(t, settled(t, func() error {
			_, err := e.store.publish(t.Context(), e.pool.ReservationSubject("stop", "stop", r.ID), h, nil)
			return err
		}))
	}
	natstest.Eventually(t, within, "the markers gone", func() bool {
		m, err := e.store.last(t.Context(), e.store.reservationsStream(), e.pool.EngineGuard("stop"))
		return err == nil && m.seq == keep
	})
	_, after := f.counts()
	if len(f.keys()) != 6 {
		t.Fatalf("the view moved to %v while nothing came through", f.keys())
	}
	line.Heal()
	f.shows(t, keyOf("stop", "keep", 1, keep))
	natstest.Eventually(t, within, "proof of contact again", func() bool { _, alive := f.counts(); return alive > after })
}

// scenario B8
func noOrphans(t *testing.T, e *env) {
	s, line := e.remote(t)
	f := e.watch(t, s, "orph", "orph.>").wait(t)
	for range 4 {
		swaps, _ := f.counts()
		line.Cut()
		natstest.Eventually(t, within, "the connection lost", func() bool { return !s.nc.IsConnected() })
		line.Heal()
		natstest.Eventually(t, within, "a new view", func() bool { n, _ := f.counts(); return n > swaps })
	}
	natstest.Eventually(t, within, "one consumer for one follower", func() bool { return len(e.consumersOf(t, "f-orph-")) == 1 })
	f.stop()
	natstest.Eventually(t, within, "no consumer for none", func() bool { return len(e.consumersOf(t, "f-orph-")) == 0 })
}

func ownFollower(t *testing.T, e *env) {
	a := e.bind(t, "own", "a", 1)
	e.bind(t, "other", "b", 1)
	own := func(s *Store) *following {
		return follows(t, s, func(ctx context.Context, h Handler[Reservation, Marker]) error { return s.FollowOwn(ctx, "own", h) })
	}
	old := own(e.store).wait(t)
	old.shows(t, keyOf("own", "a", 1, a))
	if r, _ := old.Get("own", "own", "a"); string(r.Body) != "body of a" {
		t.Fatalf("body %q, want all of it", r.Body)
	}
	natstest.Eventually(t, within, "a-own listed", func() bool { return slices.Contains(e.consumersOf(t, "a-"), "a-own") })
	// A new process of the agent gets everything from the start.
	next := own(e.storeOn(t, e.nc)).wait(t)
	next.shows(t, keyOf("own", "a", 1, a))
	old.stop()
	b := e.bind(t, "own", "b", 1)
	next.shows(t, keyOf("own", "a", 1, a), keyOf("own", "b", 1, b))
	_, alive := next.counts()
	natstest.Eventually(t, within, "heartbeats of an idle consumer", func() bool { _, n := next.counts(); return n > alive+3 })
}

// scenario B5
func restartMidFollow(t *testing.T, e *env) {
	a := e.bind(t, "re", "a", 1)
	b := e.bind(t, "re", "b", 1)
	c := e.bind(t, "re", "c", 1)
	s, line := e.remote(t)
	f := e.watch(t, s, "re", "re.>").wait(t)
	g := follows(t, s, func(ctx context.Context, h Handler[Reservation, Marker]) error { return s.FollowOwn(ctx, "re", h) }).wait(t)
	all := []string{keyOf("re", "a", 1, a), keyOf("re", "b", 1, b), keyOf("re", "c", 1, c)}
	f.shows(t, all...)
	g.shows(t, all...)
	line.Cut()
	eventually(t, "b released", func() (uint64, error) { return e.store.Release(t.Context(), released("re", "b", 1), b) })
	e.restart(t)
	d := e.bind(t, "re", "d", 1)
	line.Heal()
	now := []string{keyOf("re", "a", 1, a), keyOf("re", "c", 1, c), keyOf("re", "d", 1, d)}
	if e.lossy {
		now = now[2:]
	}
	f.shows(t, now...)
	g.shows(t, now...)
}

func wantErrIs(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}
