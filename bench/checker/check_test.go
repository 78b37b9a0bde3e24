package checker

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/subjects"
)

// script builds histories: each call appends the next revision of its stream.
type script struct {
	h            History
	rev, resRev  uint64
	submitted    uint64
	reservations map[string]Reservation
}

const ms = int64(time.Millisecond)

func newScript() *script {
	return &script{h: History{Pool: "p", Ended: true, Windows: map[string]int{"e1": 4}}, reservations: map[string]Reservation{}}
}

func (s *script) now() int64 { return int64(s.rev+s.resRev+s.submitted) * 10 * ms }

func (s *script) submit(id string) *script {
	s.submitted++
	s.h.Submits = append(s.h.Submits, Submit{Job: "j", ID: id, Outcome: Accepted, Seq: s.submitted, Stored: s.now()})
	return s
}

func (s *script) bind(engine, id string, n int, change ...func(*Reservation)) *script {
	s.rev++
	r := Reservation{Revision: s.rev, Stored: s.now(), Held: &subjects.Held{
		Engine: engine, Job: "j", ID: id, State: subjects.StateBound, Bind: n, Burnt: n - 1, Epoch: "x", Tokens: 100,
	}}
	return s.put(r, change)
}

func (s *script) put(r Reservation, change []func(*Reservation)) *script {
	for _, c := range change {
		c(&r)
	}
	if r.Held != nil {
		s.reservations[r.Held.Engine+"."+r.Held.ID] = r
	}
	s.h.Reservations = append(s.h.Reservations, r)
	return s
}

func (s *script) giveBack(engine, id string, change ...func(*Reservation)) *script {
	was := s.reservations[engine+"."+id]
	s.rev++
	held := *was.Held
	held.State = subjects.StateReturned
	return s.put(Reservation{Revision: s.rev, Stored: s.now(), Guard: was.Revision, Held: &held}, change)
}

func (s *script) release(engine, id string, n int, change ...func(*Reservation)) *script {
	s.rev++
	return s.put(Reservation{Revision: s.rev, Stored: s.now(), Guard: s.reservations[engine+"."+id].Revision, Released: &subjects.Released{
		Engine: engine, Job: "j", ID: id, Outcome: subjects.OutcomeAnswered, Bind: n, Epoch: "x", Tokens: 100,
	}}, change)
}

func (s *script) answer(engine, id string, n int, change ...func(*Result)) *script {
	s.resRev++
	out := 7
	r := Result{Revision: s.resRev, Stored: s.now(), Answer: subjects.Answer{
		Job: "j", ID: id, Reader: "main", Status: subjects.Completed, Engine: engine, Bind: n, Epoch: "x", CompletionTokens: &out,
	}}
	for _, c := range change {
		c(&r)
	}
	s.h.Results = append(s.h.Results, r)
	if r.Status != "" {
		s.h.Attempts = append(s.h.Attempts, Attempt{r.Answer})
	}
	return s
}

func (s *script) mark(id string, replaces uint64) *script {
	return s.answer("", id, 0, func(r *Result) {
		r.Status, r.Replaces, r.CompletionTokens = "", replaces, nil
	})
}

func (s *script) hand(id string) *script {
	s.h.Seen = append(s.h.Seen, Seen{Job: "j", ID: id})
	return s
}

func (s *script) received(id string) *script {
	s.h.Seen = append(s.h.Seen, Seen{Job: "j", ID: id, Received: true})
	return s
}

// whole is one rollout from submit to received.
func (s *script) whole(id string) *script {
	s.submit(id).bind("e1", id, 1).answer("e1", id, 1).release("e1", id, 1)
	at := s.resRev
	return s.hand(id).mark(id, at).received(id)
}

func TestAWholeHistoryHasNoViolation(t *testing.T) {
	s := newScript().whole("a").whole("b")
	// Requeued from a lost engine: the second attempt answers.
	s.submit("c").bind("e2", "c", 1).giveBack("e2", "c").release("e2", "c", 1).bind("e1", "c", 2).answer("e1", "c", 2).release("e1", "c", 2)
	s.hand("c").hand("c").mark("c", s.resRev).received("c") // handed twice before received: allowed
	// Bound twice after a partition, one answer: wasted, no violation.
	s.submit("d").bind("e2", "d", 1).bind("e1", "d", 2).answer("e2", "d", 1).release("e2", "d", 1).release("e1", "d", 2).hand("d")
	// Refused, never answered; duplicate acks of one submit.
	s.h.Submits = append(s.h.Submits, Submit{Job: "j", ID: "full", Outcome: Refused, Err: "stream full"}, s.h.Submits[0])
	if v := Check(s.h); len(v) != 0 {
		t.Fatalf("a clean history has violations: %v", v)
	}
}

func TestEachPlantedViolationIsFound(t *testing.T) {
	tests := []struct {
		name      string
		invariant string
		sentence  string // part of it
		plant     func(*script)
	}{
		{"an accepted rollout without an answer", "I1", "j.x was accepted at sequence 2 of ROLLOUTS_p and never answered; it was last bound to e1 at revision 3, bind 1",
			func(s *script) { s.submit("x").bind("e1", "x", 1).release("e1", "x", 1).hand("whole") }},
		{"a rollout that ended in DEAD without an answer", "I1", "it stands in DEAD: too big",
			func(s *script) {
				s.submit("x")
				s.h.Dead = append(s.h.Dead, Dead{Job: "j", ID: "x", Reason: "too big"})
			}},
		{"answers for two readers", "I1", "answered twice: for reader main at revision 3 (completed) and for reader other at revision 4",
			func(s *script) {
				s.submit("x").answer("e1", "x", 1).answer("e1", "x", 2, func(r *Result) { r.Reader = "other" }).hand("x")
			}},
		{"an answer of what nobody submitted", "I1", "although no submitter had it accepted",
			func(s *script) { s.answer("e1", "ghost", 1) }},
		{"an answer of what was refused", "I1", "its submit was refused with stream full",
			func(s *script) {
				s.h.Submits = append(s.h.Submits, Submit{Job: "j", ID: "x", Outcome: Refused, Err: "stream full"})
				s.answer("e1", "x", 1)
			}},
		{"an answer with an unknown status", "I1", `unknown status "fine"`,
			func(s *script) { s.submit("x").answer("e1", "x", 1, func(r *Result) { r.Status = "fine" }).hand("x") }},
		{"an answer handed out after it was received", "I2", "j.whole was handed to user code again after it was received at revision 2",
			func(s *script) { s.hand("whole") }},
		{"an answer received before anybody saw it", "I2", "marked received before user code had seen its answer",
			func(s *script) { s.submit("x").answer("e1", "x", 1).received("x") }},
		{"an answer that no reader was handed", "I2", "no reader was ever handed it",
			func(s *script) { s.submit("x").answer("e1", "x", 1) }},
		{"a reservation released twice", "I3", "j.x was released from e1 twice: at revisions 4 and 5",
			func(s *script) { s.done("x").release("e1", "x", 1) }},
		{"a release of what was never bound", "I3", "released from e1 at revision 3 without having been bound there",
			func(s *script) {
				s.put(Reservation{Revision: 3, Released: &subjects.Released{Engine: "e1", Job: "j", ID: "x"}}, nil)
			}},
		{"an old release that lands on a new bind", "I3", "names bind 1, but bind 2 at revision 3 was held",
			func(s *script) { s.submit("x").bind("e1", "x", 2).answer("e1", "x", 2).hand("x").release("e1", "x", 1) }},
		{"a release of another epoch", "I3", "names epoch y, but it was held under epoch x",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x").release("e1", "x", 1, func(r *Reservation) { r.Released.Epoch = "y" })
			}},
		{"a release that gives back more than it held", "I3", "the reserved tokens of e1 fell to -50",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x").release("e1", "x", 1, func(r *Reservation) { r.Released.Tokens = 150 })
			}},
		{"a release that gives back less", "I3", "the reserved tokens of e1 sum to 40 after everything was retired",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x").release("e1", "x", 1, func(r *Reservation) { r.Released.Tokens = 60 })
			}},
		{"a bind over a live bind", "I3", "bound again to e1 at revision 4 (bind 2) while bind 1 at revision 3 was still held",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).bind("e1", "x", 2).answer("e1", "x", 2).hand("x").release("e1", "x", 2)
			}},
		{"a returned key bound again in place", "I3", "went from returned at revision 4 back to bound at revision 5",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).giveBack("e1", "x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x").release("e1", "x", 1)
			}},
		{"a return after the release", "I3", "returned by e1 at revision 5 although it had been released",
			func(s *script) { s.done("x").giveBack("e1", "x").release("e1", "x", 1) }},
		{"a reservation that is never retired", "I3", "still holds 100 tokens on e1 at the end: bind 1 at revision 3",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x")
				s.h.Left = append(s.h.Left, "e1.j.x")
			}},
		{"a reservation that vanishes", "I3", "vanished without a release",
			func(s *script) { s.submit("x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x") }},
		{"a key in the bucket that the history retired", "I3", "holds a reservation on e1 at the end that the history retired",
			func(s *script) { s.h.Left = append(s.h.Left, "e1.j.whole") }},
		{"an unguarded bind", "I3", "was written on e1 at revision 3 without its guard",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1, func(r *Reservation) { r.Unguarded = true }).answer("e1", "x", 1).hand("x").release("e1", "x", 1)
			}},
		{"an unguarded release", "I3", "was released from e1 at revision 4 without its guard",
			func(s *script) {
				s.submit("x").bind("e1", "x", 1).answer("e1", "x", 1).hand("x").release("e1", "x", 1, func(r *Reservation) { r.Unguarded = true })
			}},
		{"unreadable accounting", "I3", "cannot be read",
			func(s *script) { s.h.Unreadable = []string{"reservation $KV.b.e1.j.x at revision 9: no bind"} }},
		{"an answer that replaces another", "I5", "the answer of rollout j.x at revision 3 (completed, bind 1) was replaced at revision 4 (failed, bind 2)",
			func(s *script) {
				s.submit("x").answer("e1", "x", 1).answer("e2", "x", 2, func(r *Result) { r.Status = subjects.Failed }).hand("x")
			}},
		{"an answer after the received mark", "I5", "answered again at revision 3 (completed, bind 2) after it was received at revision 2",
			func(s *script) { s.answer("e1", "whole", 2) }},
		{"a received mark for another answer", "I5", "marked received at revision 4 for the answer at 1, but the answer stood at 3",
			func(s *script) { s.submit("x").answer("e1", "x", 1).hand("x").mark("x", 1) }},
		{"two received marks", "I5", "marked received twice: at revisions 2 and 3", func(s *script) { s.mark("whole", 1) }},
		{"a received mark without an answer", "I5", "without an answer before it", func(s *script) { s.submit("x").mark("x", 9).hand("x") }},
		{"an unguarded answer", "I5", "written in the register at revision 3 without a guard",
			func(s *script) { s.submit("x").answer("e1", "x", 1, func(r *Result) { r.Unguarded = true }).hand("x") }},
		{"a bind number used twice", "I6", "bound with number 1 to e2 at revision 5 after number 1 to e1 at revision 3",
			func(s *script) { s.done("x").bind("e2", "x", 1).release("e2", "x", 1) }},
		{"more attempts than allowed", "I6", "with 3 attempts burnt of 3 allowed",
			func(s *script) {
				s.submit("x")
				for n := 1; n <= 4; n++ {
					s.bind("e1", "x", n).release("e1", "x", n)
				}
				s.answer("e1", "x", 4).hand("x")
			}},
		{"more attempts than the rollout allows", "I6", "with 1 attempts burnt of 1 allowed",
			func(s *script) {
				once := func(r *Reservation) { r.Held.MaxAttempts = 1 }
				s.submit("x").bind("e1", "x", 1, once).release("e1", "x", 1).bind("e2", "x", 2, once).release("e2", "x", 2).answer("e2", "x", 2).hand("x")
			}},
		{"binds without end", "I6", "was bound 51 times, at most 50 are allowed",
			func(s *script) {
				s.submit("x")
				for n := 1; n <= 51; n++ {
					s.bind("e1", "x", n, func(r *Reservation) { r.Held.Burnt = 0 }).release("e1", "x", n)
				}
				s.answer("e1", "x", 51).hand("x")
			}},
		{"a bind long after the answer", "I6", "6s after its answer at revision 3",
			func(s *script) {
				s.done("x").bind("e2", "x", 2, func(r *Reservation) { r.Stored = s.h.Results[len(s.h.Results)-1].Stored + 6000*ms }).release("e2", "x", 2)
			}},
		{"more requests on an engine than its window", "I11", "j.o5 is the 5. request bound to e1 at once at revision 7: its window is 4",
			func(s *script) {
				ids := []string{"o1", "o2", "o3", "o4", "o5", "o6"}
				for _, id := range ids {
					s.submit(id).bind("e1", id, 1)
				}
				for _, id := range ids {
					s.answer("e1", id, 1).release("e1", id, 1).hand(id)
				}
			}},
		{"a bound that did not hold", "I11", "a-e1 spool, bytes was 2000, at most 1000 is allowed",
			func(s *script) { s.h.Bounds = []Bound{{Name: "a-e1 spool, bytes", Value: 2000, Most: 1000}} }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript().whole("whole")
			tt.plant(s)
			for _, v := range Check(s.h) {
				if v.Invariant == tt.invariant && strings.Contains(v.Text, tt.sentence) {
					return
				}
			}
			t.Errorf("no %s violation says %q; found %v", tt.invariant, tt.sentence, Check(s.h))
		})
	}
}

// done is a rollout answered and handed out, not received.
func (s *script) done(id string) *script {
	return s.submit(id).bind("e1", id, 1).answer("e1", id, 1).hand(id).release("e1", id, 1)
}

func TestAHistoryThatHasNotEndedIsNotBlamedForWhatIsMissing(t *testing.T) {
	s := newScript().whole("a").submit("b").bind("e1", "b", 1)
	s.h.Ended = false
	if v := Check(s.h); len(v) != 0 {
		t.Errorf("an unfinished history has violations: %v", v)
	}
}

func TestMessagesNobodySawSilenceTheChecksThatNeedThem(t *testing.T) {
	s := newScript().whole("a")
	s.rev++ // a bind that was overwritten before it was seen
	s.submit("b").answer("e1", "b", 1).hand("b")
	s.put(Reservation{Revision: s.rev + 1, Released: &subjects.Released{Engine: "e1", Job: "j", ID: "b", Bind: 1, Tokens: 100}}, nil)
	s.h.UnseenReservations = 1
	if v := Check(s.h); len(v) != 0 {
		t.Errorf("violations although the bind may have been overwritten unseen: %v", v)
	}
}

func TestFiguresAddUpWhatWasObserved(t *testing.T) {
	s := newScript().whole("a").whole("b")
	s.submit("c").bind("e2", "c", 1).bind("e1", "c", 2).answer("e1", "c", 2).release("e1", "c", 2).release("e2", "c", 1)
	s.h.Attempts = append(s.h.Attempts, Attempt{subjects.Answer{
		Job: "j", ID: "c", Reader: "main", Status: subjects.Completed, Engine: "e2", Bind: 1, Epoch: "x", CompletionTokens: new(30),
	}}, s.h.Attempts[0]) // a late answer that was refused; a repetition of one that stands
	s.submit("d").answer("", "d", 0, func(r *Result) { r.Status, r.Engine = subjects.Expired, "" })
	s.submit("e")
	s.h.Submits = append(s.h.Submits, Submit{Job: "j", ID: "f", Outcome: Refused, Err: "full"})

	got := Figure(s.h)
	got.DispatchP50, got.DispatchP99, got.Span = 0, 0, 0
	for i := range got.Engines {
		got.Engines[i].HeldP50, got.Engines[i].HeldP99 = 0, 0
	}
	want := Figures{
		Submitted: 5, Refused: 1, Completed: 3, Failed: 1, Lost: 1,
		Binds: 4, Requeued: 1, DoubleRuns: 1, Superseded: 1, WastedTokens: 30, CompletionTokens: 21,
		Statuses: map[subjects.Status]int{subjects.Completed: 3, subjects.Expired: 1},
		Engines: []EngineFigures{
			{Engine: "e1", Rollouts: 3, Binds: 3, CompletionTokens: 21, PeakRequests: 1},
			{Engine: "e2", Binds: 1, PeakRequests: 1},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A crashed server shows a key again when the marker over it has expired, and not before.
//
// scenario B11
func TestAKeyThatNATSBroughtBackMayBeRetiredAgain(t *testing.T) {
	for after, broken := range map[time.Duration]bool{59 * time.Second: true, 61 * time.Second: false} {
		s := newScript().whole("a")
		first := s.h.Reservations[len(s.h.Reservations)-1]
		s.release("e1", "a", 1, func(r *Reservation) {
			r.Guard, r.Stored = first.Guard, first.Stored+after.Nanoseconds()
			r.Released.Outcome = subjects.OutcomeSuperseded
		})
		if v := Check(s.h); len(v) > 0 != broken {
			t.Errorf("released again %v later: %v", after, v)
		}
		if f := Figure(s.h); f.BroughtBack > 0 == broken {
			t.Errorf("released again %v later: %d were brought back", after, f.BroughtBack)
		}
	}
}

func TestAnAnswerReadBeforeItWasSeenCountsAsItsReleaseTells(t *testing.T) {
	s := newScript().submit("a").bind("e1", "a", 1).release("e1", "a", 1, func(r *Reservation) {
		r.Released.Outcome, r.Released.Status = subjects.OutcomeAnswered, subjects.Truncated
	})
	s.mark("a", 1)
	if f := Figure(s.h); f.Completed != 1 || f.Lost != 0 || f.Statuses[subjects.Truncated] != 1 {
		t.Errorf("figures: %+v", f)
	}
}

func TestQuantilesAreNearestRank(t *testing.T) {
	var v []time.Duration
	for n := range 200 {
		v = append(v, time.Duration(200-n))
	}
	if p50, p99 := quantiles(v); p50 != 100 || p99 != 198 {
		t.Errorf("of 1..200: p50 %d, p99 %d; want 100 and 198", p50, p99)
	}
	if p50, p99 := quantiles(nil); p50 != 0 || p99 != 0 {
		t.Errorf("of nothing: p50 %d, p99 %d; want 0", p50, p99)
	}
}

func TestAWriteOverwrittenUnseenIsInferredFromTheGuardThatNamesIt(t *testing.T) {
	pool, err := subjects.NewPool("p")
	if err != nil {
		t.Fatal(err)
	}
	gone := &subjects.Released{Engine: "e1", Job: "j", ID: "a", Bind: 1, Epoch: "x", Tokens: 100}
	r := &Recorder{pool: pool, reservations: map[uint64]Reservation{2: {Revision: 2, Guard: 1, Released: gone}}}
	h := r.History()
	if len(h.Reservations) != 2 || !h.Reservations[0].Inferred || h.Reservations[0].Held.Key() != "j.a" || h.UnseenReservations != 0 {
		t.Errorf("want the bind at revision 1 inferred and nothing unseen, got %+v with %d unseen", h.Reservations, h.UnseenReservations)
	}
	r.reservations = map[uint64]Reservation{3: {Revision: 3, Guard: 2, Released: gone}}
	if h := r.History(); h.UnseenReservations != 1 {
		t.Errorf("revision 1 is named by nothing: want 1 unseen, got %d", h.UnseenReservations)
	}
}

func TestReturnsThatWereNotSeenDoNotCountAgainstTheWindow(t *testing.T) {
	pool, err := subjects.NewPool("p")
	if err != nil {
		t.Fatal(err)
	}
	// An engine dies and its agent returns three requests, unseen. What
	// overwrites them tells that they were written, not that they were bound.
	r := &Recorder{pool: pool, slots: map[string]int{"e1": 1}, prefetch: 1, reservations: map[uint64]Reservation{}}
	for i, id := range []string{"a", "b", "c"} {
		gone := &subjects.Released{Engine: "e1", Job: "j", ID: id, Bind: 1, Epoch: "x", Tokens: 100, Outcome: subjects.OutcomeRequeued}
		r.reservations[uint64(4+i)] = Reservation{Revision: uint64(4 + i), Guard: uint64(1 + i), Released: gone}
	}
	h := r.History()
	if len(h.Reservations) != 6 {
		t.Fatalf("want three writes inferred, got %+v", h.Reservations)
	}
	for _, v := range Check(h) {
		if v.Invariant == "I11" {
			t.Error(v)
		}
	}
}
