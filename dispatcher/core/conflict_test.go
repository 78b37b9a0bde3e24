package core_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

func TestAfterARefusalNothingIsBoundThereUntilTheViewFollows(t *testing.T) {
	c := ready(t, 1)
	now := time.Second
	if bindIn(c.Step(arrival(1), now)) == nil {
		t.Fatal("no bind")
	}
	c.Step(arrival(2), now)
	if b := bindIn(c.Step(core.BindAnswer{Handle: 1, Engine: "a", Job: "j", ID: "1", Bind: 1, Answer: core.Conflict, Actual: 7}, now)); b != nil {
		t.Fatalf("bound behind sequence %d, which is known to have moved to 7", b.Expected)
	}
	if b := bindIn(c.Step(arrival(3), now)); b != nil {
		t.Fatalf("a later message is bound behind sequence %d, which is known to have moved to 7", b.Expected)
	}
	for _, seq := range []uint64{6, 7} {
		other := core.ReservationPut{
			Held:     subjects.Held{Engine: "a", Job: "j", ID: "other" + strconv.Itoa(int(seq)), State: subjects.StateBound, Bind: 1, Epoch: "x", LeftMS: 60_000},
			Revision: seq, Stored: stamp, TTLMS: 60_000,
		}
		b := bindIn(c.Step(other, now))
		switch {
		case seq < 7 && b != nil:
			t.Fatalf("bound at sequence %d of the view", seq)
		case seq == 7 && (b == nil || b.Expected != 7 || b.Held.ID != "1" || b.Held.Bind != 2):
			t.Fatalf("with the view at 7: %+v, want rollout 1 bound as number 2 behind 7", b)
		}
	}
}

func TestAStopDoesNotWaitForTheView(t *testing.T) {
	c := ready(t, 1)
	now := time.Second
	c.Step(arrival(1), now)
	c.Step(core.BindAnswer{Handle: 1, Engine: "a", Job: "j", ID: "1", Bind: 1, Answer: core.Conflict, Actual: 7}, now)
	if !given(c.Step(core.Stop{}, now)) {
		t.Fatal("what waits for the view is not given back at a stop")
	}
}

// What was decided behind a bind is bound when its answer comes, first come first.
func TestWhatWaitsBehindABindFollowsIt(t *testing.T) {
	c := ready(t, 1)
	now := time.Second
	for h := range core.Handle(4) {
		if b := bindIn(c.Step(arrival(h+1), now)); (b != nil) != (h == 0) {
			t.Fatalf("message %d: bind %v while another is in flight", h+1, b)
		}
	}
	for n := uint64(1); n < 4; n++ {
		id := strconv.FormatUint(n, 10)
		b := bindIn(c.Step(core.BindAnswer{Handle: core.Handle(n), Engine: "a", Job: "j", ID: id, Bind: 1, Answer: core.OK, Seq: n, Stored: stamp}, now))
		if want := strconv.FormatUint(n+1, 10); b == nil || b.Held.ID != want || b.Expected != n {
			t.Fatalf("after the answer to rollout %s: %+v, want rollout %s bound behind %d", id, b, want, n)
		}
	}
}

// A view may be quicker than the answer to a bind: its request counts once all the same.
func TestABindThatTheViewHasAlreadyCountsOnce(t *testing.T) {
	c := ready(t, 1)
	now := time.Second
	b := bindIn(c.Step(arrival(1), now))
	if b == nil {
		t.Fatal("no bind")
	}
	want := func(when string) {
		t.Helper()
		if got := c.Candidates()[0].ReservedRequests; got != 1 {
			t.Errorf("%s: the engine counts with %d requests, want 1", when, got)
		}
	}
	want("in flight")
	c.Step(core.ReservationPut{Held: b.Held, Revision: 7, Stored: stamp, TTLMS: 60_000}, now)
	want("in the view, unanswered")
	c.Step(core.BindAnswer{Handle: 1, Engine: "a", Job: "j", ID: "1", Bind: 1, Answer: core.OK, Seq: 7, Stored: stamp}, now)
	want("answered")
}
