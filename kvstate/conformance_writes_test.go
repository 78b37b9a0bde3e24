package kvstate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func bindRoundTrip(t *testing.T, e *env) {
	rank, cached := 3, 17
	want := subjects.Held{
		Engine: "trip", Job: "trip", ID: "a", State: subjects.StateBound, Bind: 4, Burnt: 1, Epoch: "ep 1", LeftMS: 12_345,
		Tokens: 900, PromptTokens: 500, MaxTokens: 400, Lane: subjects.LaneUrgent, Reader: "r2",
		Group: "g, 1", Trajectory: "t", Turn: 2, Affinity: "a b", Tried: []string{"x", "y"}, Dispatcher: "d1",
		Policy: "kv_tokens", Reason: "least", Accepted: 1_700_000_000_000_000_000, MaxAttempts: 5,
		AttemptTimeoutMS: 9, Weights: "min=3", Rank: &rank, PredictedCached: &cached,
	}
	seq, err := e.store.Bind(t.Context(), Bind{Held: want, TTL: 90*time.Second + time.Millisecond, Body: []byte("request")})
	must(t, err)
	got, err := e.store.Reservation(t.Context(), "trip", "trip", "a")
	must(t, err)
	if d := cmp.Diff(want, got.Held); d != "" {
		t.Fatalf("facts differ (-want +got):\n%s", d)
	}
	if got.Revision != seq || string(got.Body) != "request" || got.TTL != 91*time.Second || got.Stored.IsZero() {
		t.Fatalf("got revision %d, body %q, ttl %v, stored %v", got.Revision, got.Body, got.TTL, got.Stored)
	}
	// Without a TTL it is what is left and a day.
	want.ID, want.Bind = "b", 1
	_, err = e.store.Bind(t.Context(), Bind{Held: want, Expected: seq, Body: []byte("x")})
	must(t, err)
	got, err = e.store.Reservation(t.Context(), "trip", "trip", "b")
	must(t, err)
	if got.TTL != 24*time.Hour+13*time.Second {
		t.Fatalf("ttl %v, want a day and what is left", got.TTL)
	}
}

func bindOverwritesReturned(t *testing.T, e *env) {
	e.bind(t, "ret", "a", 1)
	r, err := e.store.Reservation(t.Context(), "ret", "ret", "a")
	must(t, err)
	r.LeftMS = 5_000
	rev, err := e.store.Return(t.Context(), r, "refused: no slot", 1)
	must(t, err)
	got, err := e.store.Reservation(t.Context(), "ret", "ret", "a")
	must(t, err)
	want := r
	want.State, want.ReturnReason, want.Burnt, want.Revision, want.TTL = subjects.StateReturned, "refused: no slot", 1, rev, 24*time.Hour+5*time.Second
	want.Stored = got.Stored
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("returned key differs (-want +got):\n%s", d)
	}
	again, err := e.store.Bind(t.Context(), Bind{Held: held("ret", "a", 2), Expected: rev, Body: r.Body})
	must(t, err)
	got, err = e.store.Reservation(t.Context(), "ret", "ret", "a")
	must(t, err)
	if got.State != subjects.StateBound || got.Bind != 2 || got.Revision != again || got.ReturnReason != "" {
		t.Fatalf("got %+v, want bind 2 bound at %d", got.Held, again)
	}
}

func releaseTwice(t *testing.T, e *env) {
	rev := e.bind(t, "twice", "a", 1)
	marker, err := e.store.Release(t.Context(), released("twice", "a", 1), rev)
	must(t, err)
	_, err = e.store.Release(t.Context(), released("twice", "a", 1), rev)
	wantErr(t, err, ErrSuperseded)
	_, err = e.store.Reservation(t.Context(), "twice", "twice", "a")
	wantErr(t, err, ErrGone)
	_, err = e.store.Release(t.Context(), released("twice", "never", 1), rev)
	wantErr(t, err, ErrGone)
	d, err := e.store.last(t.Context(), e.store.reservationsStream(), e.pool.ReservationSubject("twice", "twice", "a"))
	must(t, err)
	got, err := subjects.ReleasedFromHeader("twice", "twice", "a", d.header)
	must(t, err)
	if diff := cmp.Diff(released("twice", "a", 1), got); diff != "" || d.seq != marker || len(d.data) != 0 || ttlOf(d.header) != MarkerTTL {
		t.Fatalf("marker at %d (want %d), %d bytes, ttl %v, differs:\n%s", d.seq, marker, len(d.data), ttlOf(d.header), diff)
	}
}

func returnNeedsRevision(t *testing.T, e *env) {
	rev := e.bind(t, "rr", "a", 1)
	r, err := e.store.Reservation(t.Context(), "rr", "rr", "a")
	must(t, err)
	r.Revision = rev + 1
	_, err = e.store.Return(t.Context(), r, "x", 0)
	wantErr(t, err, ErrSuperseded)
	r.Revision, r.Body = rev, nil
	_, err = e.store.Return(t.Context(), r, "x", 0)
	wantErr(t, err, ErrRefused)
	r.ID, r.Body = "never", []byte("x")
	_, err = e.store.Return(t.Context(), r, "x", 0)
	wantErr(t, err, ErrGone)
}

func reservationExpires(t *testing.T, e *env) {
	f := follows(t, e.store, func(ctx context.Context, h Handler[Reservation, Marker]) error {
		return e.store.FollowReservations(ctx, FollowConfig{Name: "ttl", Filter: "ttl.>"}, h)
	}).wait(t)
	rev, err := e.store.Bind(t.Context(), Bind{Held: held("ttl", "a", 1), TTL: time.Millisecond, Body: []byte("x")})
	must(t, err)
	natstest.Eventually(t, within, "the key in the view", func() bool { _, ok := f.Get("ttl", "ttl", "a"); return ok })
	natstest.Eventually(t, within, "the key gone at the server", func() bool {
		_, err := e.store.Reservation(t.Context(), "ttl", "ttl", "a")
		return errors.Is(err, ErrGone)
	})
	natstest.Eventually(t, within, "the key gone from the view, and the sequence with it", func() bool {
		_, ok := f.Get("ttl", "ttl", "a")
		return !ok && f.Engine("ttl") == EngineLoad{}
	})
	// The sequence falls back: the conflict says to what.
	_, err = e.store.Bind(t.Context(), Bind{Held: held("ttl", "b", 1), Expected: rev})
	wantErr(t, err, ErrConflict)
	if c, _ := errors.AsType[*ConflictError](err); c.Actual != 0 {
		t.Fatalf("conflict at %d, want 0", c.Actual)
	}
}

// An external reservation is held by its caller, who renews it.
func externalRenewed(t *testing.T, e *env) {
	h := held("ext", "a", 1)
	h.State = subjects.StateExternal
	rev, err := e.store.Bind(t.Context(), Bind{Held: h, TTL: time.Minute})
	must(t, err)
	next, err := e.store.Renew(t.Context(), h, rev, 2*time.Minute)
	must(t, err)
	got, err := e.store.Reservation(t.Context(), "ext", "ext", "a")
	must(t, err)
	if got.Revision != next || got.TTL != 2*time.Minute || got.State != subjects.StateExternal {
		t.Fatalf("got %+v, want external at %d for 2 minutes", got, next)
	}
	_, err = e.store.Renew(t.Context(), h, rev, time.Minute)
	wantErr(t, err, ErrSuperseded)
	_, err = e.store.Renew(t.Context(), held("ext", "a", 1), next, time.Minute)
	wantErr(t, err, ErrRefused)
	h.ID = "never"
	_, err = e.store.Renew(t.Context(), h, rev, time.Minute)
	wantErr(t, err, ErrGone)
}

func badNames(t *testing.T, e *env) {
	ctx := t.Context()
	b := Bind{Held: held("e.x", "a", 1)}
	for name, write := range map[string]func() error{
		"bind":    func() error { _, err := e.store.Bind(ctx, b); return err },
		"bind 0":  func() error { _, err := e.store.Bind(ctx, Bind{Held: held("e", "a", 0)}); return err },
		"release": func() error { _, err := e.store.Release(ctx, released("e", "*", 1), 1); return err },
		"commit": func() error {
			_, err := e.store.Commit(ctx, &subjects.Result{Job: "j", ID: "a b", Status: subjects.Failed}, subjects.Answer{})
			return err
		},
		"commit of another": func() error {
			_, err := e.store.Commit(ctx, &subjects.Result{Job: "j", ID: "a", Status: subjects.Failed}, subjects.Answer{Job: "other"})
			return err
		},
		"requeue": func() error {
			_, err := e.store.Requeue(ctx, Requeue{Job: "j", ID: ">", Lane: subjects.LaneNormal, Bind: 2, Body: []byte("x")})
			return err
		},
		"engine": func() error { _, err := e.store.PutEngine(ctx, subjects.Engine{Engine: "_e"}); return err },
		"too large": func() error {
			_, err := e.store.Bind(ctx, Bind{Held: held("e", "a", 1), Body: make([]byte, subjects.MaxPayload)})
			return err
		},
	} {
		if err := write(); !errors.Is(err, ErrRefused) {
			t.Errorf("%s: error %v, want %v", name, err, ErrRefused)
		}
	}
}

func result(id string) *subjects.Result {
	return &subjects.Result{SchemaVersion: 1, Job: "j", ID: id, Attempt: 1, Status: subjects.Completed, Text: "hello"}
}

// scenario R19
func firstAnswerWins(t *testing.T, e *env) {
	n := 7
	a := subjects.Answer{Bind: 1, Epoch: "e", Engine: "e1", PromptTokens: &n, CompletionTokens: &n, Group: "g", LeftMS: 1_000}
	seq, err := e.store.Commit(t.Context(), result("win"), a)
	must(t, err)
	late := result("win")
	late.Text = "late"
	_, err = e.store.Commit(t.Context(), late, a)
	wantErr(t, err, ErrSuperseded)
	got, err := e.store.Result(t.Context(), "j", "", "win")
	must(t, err)
	a.Job, a.ID, a.Reader, a.Status = "j", "win", "main", subjects.Completed
	if d := cmp.Diff(a, got.Answer); d != "" || got.Revision != seq || !strings.Contains(string(got.Body), "hello") {
		t.Fatalf("at %d (want %d), body %s, differs:\n%s", got.Revision, seq, got.Body, d)
	}
	_, err = e.store.Result(t.Context(), "j", "", "nobody")
	wantErr(t, err, ErrGone)
}

func receivedStays(t *testing.T, e *env) {
	seq, err := e.store.Commit(t.Context(), result("rec"), subjects.Answer{LeftMS: 30_000})
	must(t, err)
	r, err := e.store.Result(t.Context(), "j", "main", "rec")
	must(t, err)
	old := r
	must(t, settled(t, func() error { return e.store.Received(t.Context(), r) }))
	got, err := e.store.Result(t.Context(), "j", "main", "rec")
	must(t, err)
	if got.Status != "" || len(got.Body) != 0 || got.Revision <= seq {
		t.Fatalf("got status %q, %d bytes at %d, want none, empty, after %d", got.Status, len(got.Body), got.Revision, seq)
	}
	d, err := e.store.last(t.Context(), e.pool.Results(), e.pool.Result("j", "main", "rec"))
	must(t, err)
	if ttl := ttlOf(d.header); ttl != 25*time.Hour+30*time.Second {
		t.Fatalf("ttl %v, want 25 hours and 30 s", ttl)
	}
	wantErr(t, settled(t, func() error { return e.store.Received(t.Context(), old) }), ErrSuperseded)
	_, err = e.store.Commit(t.Context(), result("rec"), subjects.Answer{})
	wantErr(t, err, ErrSuperseded)
	never := subjects.Answer{Job: "j", ID: "never", Reader: "main"}
	wantErr(t, e.store.Received(t.Context(), Registered{Answer: never, Revision: seq}), ErrGone)
}

func requeueOnce(t *testing.T, e *env) {
	r := Requeue{
		Job: "back", ID: "a", Lane: subjects.LaneBatch, Bind: 2, Burnt: 1, Tried: []string{"e1"},
		LeftMS: 5_000, Accepted: 42, Body: []byte("request"),
	}
	seq, err := e.store.Requeue(t.Context(), r)
	must(t, err)
	_, err = e.store.Requeue(t.Context(), r)
	wantErr(t, err, ErrDuplicate)
	if d, _ := errors.AsType[*DuplicateError](err); d.Seq != seq {
		t.Fatalf("duplicate of %d, want %d", d.Seq, seq)
	}
	got, err := e.store.last(t.Context(), e.pool.Retry(), e.pool.RetrySubject("back"))
	must(t, err)
	facts, complete, err := subjects.FactsFromHeader("back", "a", "", got.header)
	must(t, err)
	want := subjects.Facts{
		Job: "back", ID: "a", Reader: "main", Lane: subjects.LaneBatch, Bind: 2, Burnt: 1, Tried: []string{"e1"},
		LeftMS: 5_000, Accepted: 42,
	}
	if d := cmp.Diff(want, facts); d != "" || complete || string(got.data) != "request" || got.header.Get(subjects.HdrMsgID) != "back.a#2" {
		t.Fatalf("complete %v, body %q, id %q, differs:\n%s", complete, got.data, got.header.Get(subjects.HdrMsgID), d)
	}
}

func deadWhole(t *testing.T, e *env) {
	h := held("e1", "a", 3)
	d := Dead{Job: "dead", ID: "a", Code: "max_attempts", Reason: "3 of 3\nburnt", Body: []byte("request"), Header: h.Header()}
	d.Header.Set(subjects.HdrExpectLastSeq, "17") // would be obeyed
	d.Header.Set(subjects.HdrTTL, "1")
	must(t, e.store.Bury(t.Context(), d))
	must(t, e.store.Bury(t.Context(), d))
	must(t, e.store.Bury(t.Context(), Dead{Job: "dead", ID: "no id.", Code: "invalid", Body: []byte("{")}))
	s, err := e.store.JS().Stream(t.Context(), e.pool.Dead())
	must(t, err)
	if n := s.CachedInfo().State.Msgs; n != 2 {
		t.Fatalf("%d messages in DEAD, want 2", n)
	}
	got, err := s.GetMsg(t.Context(), s.CachedInfo().State.FirstSeq)
	must(t, err)
	if text := got.Header.Get(subjects.HdrError); text != "max_attempts: 3 of 3 burnt" || string(got.Data) != "request" || got.Header.Get(subjects.HdrBind) != "3" {
		t.Fatalf("got %q %v", got.Data, got.Header)
	}
}

func registrations(t *testing.T, e *env) {
	old, err := e.store.PutEngine(t.Context(), subjects.Engine{Engine: "reg", Epoch: "1"})
	must(t, err)
	now, err := e.store.PutEngine(t.Context(), subjects.Engine{Engine: "reg", Epoch: "2"})
	must(t, err)
	// An old agent that shuts down after a new one registered.
	wantErr(t, e.store.DeleteEngine(t.Context(), "reg", old), ErrSuperseded)
	must(t, settled(t, func() error { return e.store.DeleteEngine(t.Context(), "reg", now) }))
	wantErr(t, e.store.DeleteEngine(t.Context(), "never", now), ErrGone)

	rev, err := e.store.PutDispatcher(t.Context(), subjects.Dispatcher{Dispatcher: "reg"})
	must(t, err)
	stream, subject := e.store.bucketStream(subjects.Dispatchers), subjects.BucketSubject(e.pool.Bucket(subjects.Dispatchers), "reg")
	natstest.Eventually(t, within, "the registration gone by age", func() bool {
		_, err := e.store.last(t.Context(), stream, subject)
		return errors.Is(err, ErrGone)
	})
	wantErr(t, e.store.DeleteDispatcher(t.Context(), "reg", rev), ErrGone)
}

func settingsGuarded(t *testing.T, e *env) {
	s := e.storeOn(t, e.nc)
	pool, err := subjects.NewPool("other")
	must(t, err)
	s.pool = pool
	_, _, err = s.Settings(t.Context())
	wantErr(t, err, ErrGone)
	rev, err := s.PutSettings(t.Context(), subjects.Settings{MaxAttempts: 2}, 0)
	must(t, err)
	_, err = s.PutSettings(t.Context(), subjects.Settings{MaxAttempts: 4}, 0)
	wantErr(t, err, ErrConflict)
	_, err = s.PutSettings(t.Context(), subjects.Settings{MaxAttempts: -4}, rev)
	wantErr(t, err, ErrRefused)
	got, at, err := s.Settings(t.Context())
	must(t, err)
	if at != rev || got.MaxAttempts != 2 {
		t.Fatalf("got %+v at %d, want 2 attempts at %d", got, at, rev)
	}
}

func cancels(t *testing.T, e *env) {
	must(t, e.store.PutCancel(t.Context(), subjects.Cancel{Kind: subjects.CancelJob, Job: "c"}))
	must(t, e.store.PutCancel(t.Context(), subjects.Cancel{Kind: subjects.CancelGroup, Job: "c", Value: "prompt.12 of > all"}))
	for _, c := range []subjects.Cancel{
		{Kind: "all", Job: "c"}, {Kind: subjects.CancelID, Job: "c"}, {Kind: subjects.CancelJob, Job: "*"},
		{Kind: subjects.CancelGroup, Job: "c", Value: strings.Repeat("g", 513)}, {Kind: subjects.CancelVersion, Job: "c", Value: "v1"},
	} {
		wantErr(t, e.store.PutCancel(t.Context(), c), ErrRefused)
	}
}

// answered repeats an identical bind until it is answered, as its contract says,
// and tells where it was bound.
func answered(ctx context.Context, t testing.TB, s *Store, b Bind) (seq uint64, bound bool) {
	t.Helper()
	natstest.Eventually(t, within, "an answer to a bind", func() bool {
		var err error
		seq, err = s.Bind(ctx, b)
		if d, ok := errors.AsType[*DuplicateError](err); ok {
			seq, err = d.Seq, nil
		}
		if err == nil {
			bound = true
			return true
		}
		if !errors.Is(err, ErrConflict) {
			return false // unknown, busy, unavailable: once more
		}
		r, err := s.Reservation(ctx, b.Held.Engine, b.Held.Job, b.Held.ID)
		if errors.Is(err, ErrGone) {
			return true
		}
		seq, bound = r.Revision, r.Bind == b.Held.Bind
		return err == nil
	})
	return seq, bound
}

// scenario F8
func unknownBind(t *testing.T, e *env) {
	s, line := e.remote(t, Timeout(300*time.Millisecond))
	// Stored, but nobody hears of it; the server restarts in between.
	done := Bind{Held: held("unk", "a", 1), Body: []byte("x")}
	line.LoseReplies()
	_, err := s.Bind(t.Context(), done)
	wantErr(t, err, ErrUnknown)
	before, err := e.store.Reservation(t.Context(), "unk", "unk", "a")
	must(t, err)
	if !e.lossy {
		e.restartLeader(t)
	}
	line.Heal()
	seq, bound := answered(t.Context(), t, s, done)
	if !bound || seq != before.Revision {
		t.Fatalf("bound %v at %d, want true at %d", bound, seq, before.Revision)
	}
	// Never stored.
	lost := Bind{Held: held("unk", "b", 1), Expected: seq, Body: []byte("x")}
	line.LoseRequests()
	_, err = s.Bind(t.Context(), lost)
	wantErr(t, err, ErrUnknown)
	line.Heal()
	at, bound := answered(t.Context(), t, s, lost)
	if got, err := e.store.Reservation(t.Context(), "unk", "unk", "b"); err != nil || !bound || got.Revision != at {
		t.Fatalf("bound %v at %d, read %d, %v", bound, at, got.Revision, err)
	}
	// Stored by neither: somebody else was faster meanwhile.
	late := Bind{Held: held("unk", "c", 1), Expected: at, Body: []byte("x")}
	line.LoseRequests()
	_, err = s.Bind(t.Context(), late)
	wantErr(t, err, ErrUnknown)
	e.bind(t, "unk", "other", 1)
	line.Heal()
	if _, bound := answered(t.Context(), t, s, late); bound {
		t.Fatal("bound on an expectation that had passed")
	}
}

// scenario B9
func unknownCommit(t *testing.T, e *env) {
	s, line := e.remote(t, Timeout(300*time.Millisecond))
	line.LoseReplies()
	_, err := s.Commit(t.Context(), result("unk"), subjects.Answer{Bind: 1, Epoch: "e"})
	wantErr(t, err, ErrUnknown)
	line.Heal()
	natstest.Eventually(t, within, "an answer to the repeated commit", func() bool {
		_, err = s.Commit(t.Context(), result("unk"), subjects.Answer{Bind: 1, Epoch: "e"})
		return !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrBusy)
	})
	wantErr(t, err, ErrSuperseded)
	got, err := s.Result(t.Context(), "j", "main", "unk")
	must(t, err)
	if got.Bind != 1 || got.Epoch != "e" {
		t.Fatalf("the register has %+v, want one's own answer", got.Answer)
	}
}

func notSent(t *testing.T, e *env) {
	s, line := e.remote(t, Timeout(100*time.Millisecond))
	line.Cut()
	natstest.Eventually(t, within, "the connection lost", func() bool { return !s.nc.IsConnected() })
	_, err := s.Bind(t.Context(), Bind{Held: held("cut", "a", 1)})
	wantErr(t, err, ErrUnavailable)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = e.store.Bind(ctx, Bind{Held: held("cut", "a", 1)})
	wantErr(t, err, ErrUnavailable)
	line.Heal()
	// Nothing waits in a buffer to be sent later.
	natstest.Eventually(t, within, "the connection back", s.nc.IsConnected)
	must(t, s.nc.FlushTimeout(within))
	_, err = e.store.Reservation(t.Context(), "cut", "cut", "a")
	wantErr(t, err, ErrGone)
}

// fullBucket fills a small pool's reservations.
func fullBucket(t *testing.T, e *env) {
	pool, err := subjects.NewPool("small")
	must(t, err)
	s := e.storeOn(t, e.nc)
	s.pool = pool
	l := e.layout
	l.ReservationsBytes = 1 << 20
	var cfg jetstream.StreamConfig
	for _, c := range pool.Streams(l) {
		if c.Name == s.reservationsStream() {
			cfg = c
		}
	}
	_, err = s.JS().CreateStream(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { must(t, s.JS().DeleteStream(context.Background(), cfg.Name)) })

	var revs []uint64
	var last uint64
	body := make([]byte, 32<<10)
	natstest.Eventually(t, within, "a bind refused for want of room", func() bool {
		id := fmt.Sprintf("r%d", len(revs))
		seq, err := s.Bind(t.Context(), Bind{Held: held("e", id, 1), Expected: last, Body: body})
		if errors.Is(err, ErrBusy) {
			return false
		}
		if err == nil {
			revs, last = append(revs, seq), seq
			return false
		}
		wantErr(t, err, ErrFull)
		return true
	})
	if n := len(revs); n < 20 || n > 29 {
		t.Fatalf("%d binds of 32 KiB in 1 MiB, want about 28", n)
	}
	r, err := s.Reservation(t.Context(), "e", "e", "r0")
	must(t, err)
	_, err = s.Return(t.Context(), r, "no slot", 0)
	must(t, err)
	for i, rev := range revs[1:] {
		_, err = s.Release(t.Context(), released("e", fmt.Sprintf("r%d", i+1), 1), rev)
		must(t, err)
	}
	natstest.Eventually(t, within, "a bind after the releases", func() bool {
		b := Bind{Held: held("e", "again", 1), Expected: last, Body: body}
		_, err = s.Bind(t.Context(), b)
		if c, ok := errors.AsType[*ConflictError](err); ok {
			last = c.Actual
		}
		return err == nil
	})
	// What NATS itself refuses is full too.
	subject := func(i int) string { return pool.ReservationSubject("raw", "raw", fmt.Sprintf("r%d", i)) }
	for i := range 64 {
		if _, err = s.publish(t.Context(), subject(i), nats.Header{}, body); err != nil {
			break
		}
	}
	wantErr(t, err, ErrFull)
}
