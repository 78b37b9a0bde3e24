package core_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

func TestEveryRolloutIsAnsweredOnceAndNothingStaysReserved(t *testing.T) {
	for _, dispatchers := range []int{1, 4} {
		w := pool(1, dispatchers, 4, 4)
		submit(w, 200)
		finish(t, w, time.Minute)
		if w.Binds != 200 {
			t.Errorf("%d dispatchers wrote %d binds for 200 rollouts", dispatchers, w.Binds)
		}
		for n, node := range w.Nodes {
			if node.Most > 4+subjects.DefaultPrefetch {
				t.Errorf("engine %s held %d requests, more than its window", n, node.Most)
			}
		}
	}
}

// scenario R5
func TestARetryAvoidsTheEnginesThatWereTried(t *testing.T) {
	w := pool(5, 1, 3, 2)
	w.Bus.Submit(request("j", 1))
	for range 2 {
		w.Run(10*time.Second, func() bool {
			return slices.ContainsFunc(nodes(w), func(n *sim.Node) bool { return len(n.Running()) > 0 })
		})
		for _, n := range nodes(w) {
			n.Return("j.0001", "failed", 1)
		}
	}
	finish(t, w, time.Minute)
	on := w.RanOn["j.0001"]
	slices.Sort(on)
	if len(slices.Compact(on)) != 3 {
		t.Errorf("three attempts ran on %v: want three different engines", w.RanOn["j.0001"])
	}
}

// scenario R7
func TestAfterMaxAttemptsItIsDeadAndFailed(t *testing.T) {
	w := pool(6, 1, 4, 2)
	f := request("j", 1)
	f.MaxAttempts = 2
	w.Bus.Submit(f)
	for range 4 {
		w.Run(5*time.Second, func() bool {
			return w.AllAnswered() || slices.ContainsFunc(nodes(w), func(n *sim.Node) bool { return len(n.Running()) > 0 })
		})
		for _, n := range nodes(w) {
			n.Return("j.0001", "failed", 1)
		}
	}
	finish(t, w, time.Minute)
	if got := w.Answers["j.0001"]; len(got) != 1 || got[0].Status != subjects.Failed {
		t.Errorf("answers are %v: want one, failed", got)
	}
	if len(w.Bus.Dead) != 1 {
		t.Errorf("DEAD holds %d entries: want the one that was given up", len(w.Bus.Dead))
	}
	if w.Ran["j.0001"] != 2 {
		t.Errorf("it ran %d times with max_attempts 2", w.Ran["j.0001"])
	}
}

// scenario R3
func TestWhatIsCancelledWhileQueuedIsNeverBound(t *testing.T) {
	w := pool(7, 1, 1, 1)
	submit(w, 20)
	w.Run(20*time.Millisecond, nil)
	w.Bus.Cancel(subjects.Cancel{Kind: subjects.CancelID, Job: "j", Value: "0015"})
	finish(t, w, time.Minute)
	if w.Ran["j.0015"] != 0 {
		t.Errorf("the cancelled rollout ran %d times", w.Ran["j.0015"])
	}
	if got := w.Answers["j.0015"]; len(got) != 1 || got[0].Status != subjects.Cancelled {
		t.Errorf("answers are %v: want one, cancelled", got)
	}
}

// A name may be used again: a cancel reaches only what was accepted before it.
func TestACancelDoesNotReachWhatIsSubmittedAfterIt(t *testing.T) {
	w := sim.New(sim.Options{Seed: 8})
	w.AddDispatcher("d0")
	fleet(w, 1, 4)
	w.Bus.Cancel(subjects.Cancel{Kind: subjects.CancelJob, Job: "j"})
	settle(w)
	w.Bus.Submit(request("j", 1))
	finish(t, w, time.Minute)
	if got := w.Answers["j.0001"]; len(got) != 1 || got[0].Status != subjects.Completed {
		t.Errorf("answers are %v: want one, completed", got)
	}
}

// scenario P22
func TestARequestLargerThanEveryEngineIsRefusedAtOnce(t *testing.T) {
	w := sim.New(sim.Options{Seed: 9})
	w.AddDispatcher("d0")
	w.AddNode("e0", 4, 1000)
	w.AddNode("e1", 4, 2000)
	settle(w)
	f := request("j", 1)
	f.PromptTokens, f.MaxTokens = 1900, 200
	w.Bus.Submit(f)
	finish(t, w, time.Second)
	if got := w.Answers["j.0001"]; len(got) != 1 || got[0].Status != subjects.Rejected {
		t.Errorf("answers are %v: want one, rejected", got)
	}
	if len(w.Bus.Dead) != 1 || w.Bus.Dead[0].Code != "too_large" {
		t.Errorf("DEAD holds %v: want the refused request", w.Bus.Dead)
	}
}

func TestTwoJobsWithTheSameIdsDoNotTouchEachOther(t *testing.T) {
	w := pool(11, 1, 2, 4)
	for i := range 10 {
		w.Bus.Submit(request("a", i))
		w.Bus.Submit(request("b", i))
	}
	w.Bus.Cancel(subjects.Cancel{Kind: subjects.CancelID, Job: "a", Value: "0003"})
	finish(t, w, time.Minute)
	if len(w.Answers) != 20 {
		t.Errorf("%d answers for 20 rollouts of two jobs", len(w.Answers))
	}
	if w.Answers["b.0003"][0].Status != subjects.Completed {
		t.Errorf("cancelling a.0003 ended b.0003 as %s", w.Answers["b.0003"][0].Status)
	}
}

// scenario F13
func TestASubmitRepeatedLongAfterIsDropped(t *testing.T) {
	w := pool(12, 1, 1, 2)
	w.Bus.Submit(request("j", 1))
	finish(t, w, time.Minute)
	w.Run(10*time.Minute, nil) // the dedup window is over
	w.Bus.Submit(request("j", 1))
	finish(t, w, time.Minute)
	if w.Ran["j.0001"] != 1 {
		t.Errorf("it ran %d times", w.Ran["j.0001"])
	}
}

func TestADeadlineThatPassesInTheQueueEndsAsExpired(t *testing.T) {
	w := sim.New(sim.Options{Seed: 15})
	w.AddDispatcher("d0")
	w.AddNode("e0", 1, 0).Takes = func(subjects.Held) time.Duration { return 6 * time.Second }
	settle(w)
	for i := range 6 {
		f := request("j", i)
		f.DeadlineMS = 10_000
		w.Bus.Submit(f)
	}
	finish(t, w, time.Minute)
	n := map[subjects.Status]int{}
	for _, a := range w.Answers {
		n[a[0].Status]++
	}
	if n[subjects.Expired] == 0 || n[subjects.Completed] == 0 {
		t.Errorf("statuses are %v: want some completed, the rest expired", n)
	}
}

func TestARunOnAHungEngineEndsAtItsDeadline(t *testing.T) {
	w := sim.New(sim.Options{Seed: 16})
	w.AddDispatcher("d0")
	w.AddNode("e0", 1, 0).Hang = true
	settle(w)
	f := request("j", 1)
	f.DeadlineMS = 10_000
	w.Bus.Submit(f)
	finish(t, w, time.Minute)
	if a := w.Answers["j.0001"]; len(a) != 1 || a[0].Status != subjects.Expired {
		t.Errorf("answers are %v: want one, expired", a)
	}
}

// scenario R2: cancelled at any instant, every reservation comes back to zero.
func TestACancelAtAnyInstantLeavesNothingReserved(t *testing.T) {
	for at := range 60 {
		w := pool(uint64(at), 2, 2, 2)
		submit(w, 12)
		w.Run(time.Duration(at)*20*time.Millisecond, nil)
		w.Bus.Cancel(subjects.Cancel{Kind: subjects.CancelJob, Job: "j"})
		w.Run(time.Minute, w.AllAnswered)
		w.Run(5*time.Second, nil)
		for _, p := range w.Problems() {
			t.Fatalf("cancelled after %d ms: %s", at*20, p)
		}
		for name, d := range w.Cores {
			for e := range w.Nodes {
				if n, tokens := d.Core.Reserved(e); n != 0 || tokens != 0 {
					t.Fatalf("cancelled after %d ms: dispatcher %s still counts %d requests and %d tokens on %s", at*20, name, n, tokens, e)
				}
			}
		}
	}
}

// scenario B2: nothing limits deliveries but our own count of attempts: what is
// given back more often than any MaxDeliver is still placed.
func TestAMessageGivenBackAHundredTimesIsStillPlaced(t *testing.T) {
	w := sim.New(sim.Options{Seed: 19})
	w.AddDispatcher("d0")
	n := w.AddNode("e0", 1, 0)
	n.Reg.Model = "another"
	n.Start()
	lora := request("j", 1)
	lora.Model, lora.LoRA = "", "adapter"
	settle(w)
	w.Bus.Submit(lora)
	w.Run(4*time.Minute, nil)
	if got := w.Bus.Deliveries("j.0001"); got < 50 {
		t.Fatalf("it was delivered %d times in 4 minutes without an engine that has its adapter: the test tests nothing", got)
	}
	n.Reg.LoRAs = []string{"adapter"}
	n.Start()
	finish(t, w, time.Minute)
}

// scenario P19: waiting outweighs urgency, one lane for each aging step, so that
// nothing is starved by what keeps arriving before it.
func TestALongWaitOutweighsUrgency(t *testing.T) {
	step := core.DefaultTimings().AgingStep
	for _, c := range []struct {
		waited time.Duration
		first  string
	}{{step, "urgent"}, {4*step - time.Second, "urgent"}, {4*step + time.Second, "batch"}} {
		w := ready(t, 1)
		now := time.Second
		var held []core.ReservationPut
		for i := range 6 { // the engine's window is full
			held = append(held, reserved("a", fmt.Sprint("old", i), "x", 1, 10, uint64(10+i)))
			w.Step(held[i], now)
		}
		for i, lane := range []subjects.Lane{subjects.LaneBatch, subjects.LaneUrgent} {
			stored := stamp + int64(now)
			if lane == subjects.LaneBatch {
				stored -= int64(c.waited)
			}
			w.Step(core.Fetched{Handle: core.Handle(i + 1), Queue: core.Queue{Job: "j", Lane: lane}, Seq: uint64(i + 1), Stored: stored,
				Facts: subjects.Facts{Job: "j", ID: string(lane), Lane: lane, PromptTokens: 10, MaxTokens: 10}}, now)
		}
		b := bindIn(w.Step(goneAt("a", "old0", 1, 30), now))
		if b == nil || b.Held.ID != c.first {
			t.Errorf("after %s of waiting beside a fresh urgent request %+v is bound first: want %s", c.waited, b, c.first)
		}
	}
}
