// Package conform is what the bus promises to those who write reservations,
// answers and requeued requests: one suite for kvstate on real NATS servers and
// for the simulator's model of them, so that there is one fake and it is true.
//
// A Ledger adapts either. Its writes report what came of them as a Verdict and
// retry what asks for a retry (another guarded write in flight). Stories use
// engines, jobs and ids of their own, so that they may share a pool.
package conform

import (
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Answer of a write: what a caller can do differently.
type Answer string

// Answers. They are the words of the decision core.
const (
	OK         Answer = "ok"
	Conflict   Answer = "conflict"
	Duplicate  Answer = "duplicate"
	Superseded Answer = "superseded"
	Gone       Answer = "gone"
)

// Verdict of a write.
type Verdict struct {
	Answer Answer
	Seq    uint64 // of OK and Duplicate
	Actual uint64 // of Conflict: where the guarded sequence stands
}

// Entry is a reservation as it stands.
type Entry struct {
	subjects.Held
	Revision uint64
}

// Requeue is what the next place of a request is told.
type Requeue struct {
	Engine, Job, ID string
	Revision        uint64 // of its key
	Bind            int    // the next
}

// Ledger is a bus under test.
type Ledger interface {
	Bind(h subjects.Held, expected uint64, ttl time.Duration) Verdict
	Release(r subjects.Released, revision uint64) Verdict
	Return(e Entry, reason string, burnt int) Verdict
	Reservation(engine, job, id string) (Entry, bool)
	Commit(job, id string, a subjects.Answer) Verdict
	Answer(job, id string) (a subjects.Answer, revision uint64, ok bool)
	Requeue(r Requeue) Verdict
	// Follow shows what a follower of one engine's keys knows from now on.
	Follow(engine string) View
	// Until lets time pass until it is so.
	Until(what string, so func() bool)
}

// View is what a follower has heard.
type View interface {
	Keys() []Entry // by id
	Last() uint64  // last sequence seen under the engine
}

// Run tells every story.
func Run(t *testing.T, l Ledger) {
	for _, s := range []struct {
		name string
		tell func(*testing.T, Ledger)
	}{
		{"a bind needs the engine's last sequence", lastSequence},
		{"a bind number is used once", numberOnce},
		{"a bind overwrites a returned key", overwritesReturned},
		{"the late delete of an old attempt leaves the new one", lateDelete},
		{"a release that was done before changes nothing", releaseTwice},
		{"a return needs the revision held", returnAtRevision},
		{"an identical bind that was stored writes nothing again", identicalBind},
		{"a reservation expires and its sequence falls back", expires},
		{"the first answer wins", firstAnswer},
		{"a requeue stands once", requeueOnce},
		{"a follower gets the view, then the changes, in order", follows},
	} {
		t.Run(s.name, func(t *testing.T) { s.tell(t, l) })
	}
}

func held(engine, id string, bind int) subjects.Held {
	return subjects.Held{Engine: engine, Job: engine, ID: id, State: subjects.StateBound, Bind: bind, Epoch: "e", LeftMS: 60_000,
		Tokens: 100, PromptTokens: 60, Lane: subjects.LaneNormal, Reader: "main", Dispatcher: "d1"}
}

func released(engine, id string, bind int) subjects.Released {
	return subjects.Released{Engine: engine, Job: engine, ID: id, Outcome: subjects.OutcomeAnswered, Bind: bind, Epoch: "e", Tokens: 100, PromptTokens: 60}
}

func want(t *testing.T, got Verdict, answer Answer) Verdict {
	t.Helper()
	if got.Answer != answer {
		t.Fatalf("answer %+v, want %s", got, answer)
	}
	return got
}

// bind binds on whatever the engine's sequence is, as a dispatcher does that
// decides again.
func bind(t *testing.T, l Ledger, engine, id string, n int) uint64 {
	t.Helper()
	v := l.Bind(held(engine, id, n), 0, 0)
	if v.Answer == Conflict {
		v = l.Bind(held(engine, id, n), v.Actual, 0)
	}
	return want(t, v, OK).Seq
}

func stands(t *testing.T, l Ledger, engine, id string, bind int, revision uint64, state subjects.State) Entry {
	t.Helper()
	e, ok := l.Reservation(engine, engine, id)
	if !ok || e.Bind != bind || e.Revision != revision || e.State != state {
		t.Fatalf("%s of %s: bind %d at %d, %s (there: %v), want bind %d at %d, %s", id, engine, e.Bind, e.Revision, e.State, ok, bind, revision, state)
	}
	return e
}

func lastSequence(t *testing.T, l Ledger) {
	first := bind(t, l, "c-guard", "a", 1)
	for _, stale := range []uint64{0, first + 1_000_000} {
		if v := want(t, l.Bind(held("c-guard", "b", 1), stale, 0), Conflict); v.Actual != first {
			t.Fatalf("conflict at %d, want %d", v.Actual, first)
		}
	}
	bind(t, l, "c-guard2", "a", 1) // another engine's write does not move it
	second := want(t, l.Bind(held("c-guard", "b", 1), first, 0), OK).Seq
	release := want(t, l.Release(released("c-guard", "a", 1), first), OK).Seq
	if v := want(t, l.Bind(held("c-guard", "c", 1), second, 0), Conflict); v.Actual != release {
		t.Fatalf("conflict at %d, want the release at %d", v.Actual, release)
	}
}

func numberOnce(t *testing.T, l Ledger) {
	first := bind(t, l, "c-dup", "a", 1)
	want(t, l.Release(released("c-dup", "a", 1), first), OK)
	h := held("c-dup", "a", 1)
	h.Engine = "c-dup2" // elsewhere, and after its release: the same number writes nothing
	if v := want(t, l.Bind(h, 0, 0), Duplicate); v.Seq != first {
		t.Fatalf("duplicate of %d, want %d", v.Seq, first)
	}
	if _, ok := l.Reservation("c-dup2", "c-dup", "a"); ok {
		t.Fatal("a duplicate bind stands")
	}
	h.Bind = 2
	want(t, l.Bind(h, 0, 0), OK)
}

func overwritesReturned(t *testing.T, l Ledger) {
	first := bind(t, l, "c-ret", "a", 1)
	back := want(t, l.Return(stands(t, l, "c-ret", "a", 1, first, subjects.StateBound), "no slot", 1), OK).Seq
	if e := stands(t, l, "c-ret", "a", 1, back, subjects.StateReturned); e.Burnt != 1 || e.ReturnReason != "no slot" {
		t.Fatalf("returned %+v", e.Held)
	}
	again := want(t, l.Bind(held("c-ret", "a", 2), back, 0), OK).Seq
	if e := stands(t, l, "c-ret", "a", 2, again, subjects.StateBound); e.ReturnReason != "" {
		t.Fatalf("bound again with the reason of a return: %+v", e.Held)
	}
}

// scenario P9
func lateDelete(t *testing.T, l Ledger) {
	first := bind(t, l, "c-late", "a", 1)
	want(t, l.Release(released("c-late", "a", 1), first), OK)
	second := bind(t, l, "c-late", "a", 2)
	want(t, l.Release(released("c-late", "a", 1), first), Superseded)
	old := stands(t, l, "c-late", "a", 2, second, subjects.StateBound)
	third := bind(t, l, "c-late", "a", 3) // over the key itself
	want(t, l.Release(released("c-late", "a", 2), second), Superseded)
	want(t, l.Return(old, "late", 0), Superseded)
	stands(t, l, "c-late", "a", 3, third, subjects.StateBound)
}

func releaseTwice(t *testing.T, l Ledger) {
	rev := bind(t, l, "c-twice", "a", 1)
	want(t, l.Release(released("c-twice", "a", 1), rev), OK)
	want(t, l.Release(released("c-twice", "a", 1), rev), Superseded)
	want(t, l.Release(released("c-twice", "never", 1), rev), Gone)
	if _, ok := l.Reservation("c-twice", "c-twice", "a"); ok {
		t.Fatal("a released reservation stands")
	}
}

func returnAtRevision(t *testing.T, l Ledger) {
	rev := bind(t, l, "c-rr", "a", 1)
	e := stands(t, l, "c-rr", "a", 1, rev, subjects.StateBound)
	e.Revision = rev + 1
	want(t, l.Return(e, "x", 0), Superseded)
	e.ID, e.Revision = "never", rev
	want(t, l.Return(e, "x", 0), Gone)
}

func identicalBind(t *testing.T, l Ledger) {
	h := held("c-same", "a", 1)
	first := want(t, l.Bind(h, 0, 0), OK).Seq
	// Its answer was lost; a server checks the guard or the id first.
	if v := l.Bind(h, 0, 0); v.Answer != Conflict && v.Answer != Duplicate || v.Answer == Conflict && v.Actual != first || v.Answer == Duplicate && v.Seq != first {
		t.Fatalf("answer %+v, want a conflict or a duplicate at %d", v, first)
	}
	stands(t, l, "c-same", "a", 1, first, subjects.StateBound)
	want(t, l.Bind(held("c-same", "b", 1), first, 0), OK) // nothing moved
}

func expires(t *testing.T, l Ledger) {
	rev := want(t, l.Bind(held("c-ttl", "a", 1), 0, time.Second), OK).Seq
	l.Until("the reservation is gone", func() bool { _, ok := l.Reservation("c-ttl", "c-ttl", "a"); return !ok })
	if v := want(t, l.Bind(held("c-ttl", "b", 1), rev, 0), Conflict); v.Actual != 0 {
		t.Fatalf("conflict at %d, want 0: nothing stands under the engine", v.Actual)
	}
}

func firstAnswer(t *testing.T, l Ledger) {
	seq := want(t, l.Commit("c-win", "a", subjects.Answer{Bind: 1, Status: subjects.Completed}), OK).Seq
	want(t, l.Commit("c-win", "a", subjects.Answer{Bind: 2, Status: subjects.Failed}), Superseded)
	a, rev, ok := l.Answer("c-win", "a")
	if !ok || rev != seq || a.Status != subjects.Completed || a.Bind != 1 {
		t.Fatalf("answer %+v at %d (there: %v), want the first, at %d", a, rev, ok, seq)
	}
	if _, _, ok := l.Answer("c-win", "nobody"); ok {
		t.Fatal("an answer that nobody gave")
	}
}

func requeueOnce(t *testing.T, l Ledger) {
	rev := bind(t, l, "c-back", "a", 1)
	r := Requeue{Engine: "c-back", Job: "c-back", ID: "a", Revision: rev, Bind: 2}
	want(t, l.Requeue(r), OK)
	want(t, l.Requeue(r), Duplicate)
	r.Bind = 3
	want(t, l.Requeue(r), OK)
}

func follows(t *testing.T, l Ledger) {
	a, b := bind(t, l, "c-fol", "a", 1), bind(t, l, "c-fol", "b", 1)
	v := l.Follow("c-fol")
	shows := func(last uint64, revisions ...uint64) {
		t.Helper()
		l.Until("the follower has it", func() bool {
			var got []uint64
			for _, e := range v.Keys() {
				got = append(got, e.Revision)
			}
			return slices.Equal(got, revisions) && v.Last() == last
		})
	}
	shows(b, a, b)
	c := bind(t, l, "c-fol", "c", 1)
	shows(c, a, b, c)
	back := want(t, l.Return(stands(t, l, "c-fol", "a", 1, a, subjects.StateBound), "no slot", 0), OK).Seq
	shows(back, back, b, c)
	gone := want(t, l.Release(released("c-fol", "b", 1), b), OK).Seq
	shows(gone, back, c)
}
