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

func request(job string, n int) subjects.Facts {
	return subjects.Facts{Job: job, ID: fmt.Sprintf("%04d", n), Reader: "main", Lane: subjects.LaneNormal,
		Model: "m", PromptTokens: 100, MaxTokens: 50}
}

func fleet(w *sim.World, engines, slots int) {
	for i := range engines {
		w.AddNode(fmt.Sprintf("e%02d", i), slots, 0)
	}
}

// settle lets every dispatcher see every engine.
func settle(w *sim.World) { w.Run(50*time.Millisecond, nil) }

func finish(t *testing.T, w *sim.World, within time.Duration) {
	t.Helper()
	w.Run(within, w.AllAnswered)
	for _, p := range w.Problems() {
		t.Error(p)
	}
}

func perEngine(w *sim.World) map[string]int {
	n := map[string]int{}
	for _, on := range w.RanOn {
		for _, e := range on {
			n[e]++
		}
	}
	return n
}

func TestEveryRolloutIsAnsweredOnceAndNothingStaysReserved(t *testing.T) {
	for _, dispatchers := range []int{1, 4} {
		w := sim.New(sim.Options{Seed: 1})
		for i := range dispatchers {
			w.AddDispatcher(fmt.Sprintf("d%d", i))
		}
		fleet(w, 4, 4)
		settle(w)
		for i := range 200 {
			w.Bus.Submit(request("j", i))
		}
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

// scenario P2
func TestArrivalsOneByOneGoRoundEqualEngines(t *testing.T) {
	w := sim.New(sim.Options{Seed: 2})
	w.AddDispatcher("d0")
	fleet(w, 8, 4)
	settle(w)
	for i := range 80 {
		w.Bus.Submit(request("j", i))
		w.Run(10*time.Second, w.AllAnswered)
	}
	finish(t, w, time.Second)
	n := perEngine(w)
	for e := range w.Nodes {
		if n[e] < 9 || n[e] > 11 {
			t.Errorf("engine %s got %d of 80 requests that came one by one: want 10 +- 1", e, n[e])
		}
	}
}

// scenario P5
func TestABurstOfEqualRequestsSpreadsEvenly(t *testing.T) {
	for _, dispatchers := range []int{1, 4} {
		w := sim.New(sim.Options{Seed: 3})
		for i := range dispatchers {
			w.AddDispatcher(fmt.Sprintf("d%d", i))
		}
		fleet(w, 8, 16)
		settle(w)
		for i := range 64 {
			w.Bus.Submit(request("j", i))
		}
		w.Run(300*time.Millisecond, nil)
		n := perEngine(w)
		for e := range w.Nodes {
			if n[e] < 7 || n[e] > 9 {
				t.Errorf("%d dispatchers: engine %s got %d of 64 simultaneous requests over 8 engines: want 8 +- 1", dispatchers, e, n[e])
			}
		}
		finish(t, w, time.Minute)
	}
}

// scenario R1
func TestWorkOfADeadEngineIsRequeuedOnceAndAnsweredOnce(t *testing.T) {
	w := sim.New(sim.Options{Seed: 4})
	w.AddDispatcher("d0")
	w.AddDispatcher("d1")
	fleet(w, 3, 8)
	settle(w)
	for i := range 12 {
		w.Bus.Submit(request("j", i))
	}
	w.Run(100*time.Millisecond, nil)
	victim := w.Nodes["e01"]
	lost := len(victim.Running())
	if lost == 0 {
		t.Fatal("nothing ran on the engine that dies: the test tests nothing")
	}
	victim.Kill()
	finish(t, w, 2*time.Minute)
	if w.Requeues != lost {
		t.Errorf("%d rollouts were lost with their engine and %d requeues were written", lost, w.Requeues)
	}
}

// scenario R5
func TestARetryAvoidsTheEnginesThatWereTried(t *testing.T) {
	w := sim.New(sim.Options{Seed: 5})
	w.AddDispatcher("d0")
	fleet(w, 3, 2)
	settle(w)
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

func nodes(w *sim.World) []*sim.Node {
	var out []*sim.Node
	for _, n := range w.Nodes {
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b *sim.Node) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return out
}

// scenario R7
func TestAfterMaxAttemptsItIsDeadAndFailed(t *testing.T) {
	w := sim.New(sim.Options{Seed: 6})
	w.AddDispatcher("d0")
	fleet(w, 4, 2)
	settle(w)
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
	w := sim.New(sim.Options{Seed: 7})
	w.AddDispatcher("d0")
	fleet(w, 1, 1)
	settle(w)
	for i := range 20 {
		w.Bus.Submit(request("j", i))
	}
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

// scenario R17
func TestAFleetThatIsAwayForTwoMinutesFailsNobody(t *testing.T) {
	w := sim.New(sim.Options{Seed: 10})
	w.AddDispatcher("d0")
	fleet(w, 2, 4)
	settle(w)
	for _, n := range w.Nodes {
		n.Kill()
	}
	for i := range 20 {
		w.Bus.Submit(request("j", i))
	}
	w.Run(2*time.Minute, nil)
	if len(w.Answers) != 0 {
		t.Errorf("%d rollouts were answered while no engine lived", len(w.Answers))
	}
	for _, n := range nodes(w) {
		n.Start()
	}
	finish(t, w, time.Minute)
	for k, a := range w.Answers {
		if a[0].Status != subjects.Completed {
			t.Errorf("rollout %s ended %s", k, a[0].Status)
		}
	}
}

func TestTwoJobsWithTheSameIdsDoNotTouchEachOther(t *testing.T) {
	w := sim.New(sim.Options{Seed: 11})
	w.AddDispatcher("d0")
	fleet(w, 2, 4)
	settle(w)
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
	w := sim.New(sim.Options{Seed: 12})
	w.AddDispatcher("d0")
	fleet(w, 1, 2)
	settle(w)
	w.Bus.Submit(request("j", 1))
	finish(t, w, time.Minute)
	w.Run(10*time.Minute, nil) // the dedup window is over
	w.Bus.Submit(request("j", 1))
	finish(t, w, time.Minute)
	if w.Ran["j.0001"] != 1 {
		t.Errorf("it ran %d times", w.Ran["j.0001"])
	}
}

// scenarios F1, B11: killed before every kind of effect, at every step.
func TestADispatcherKilledAtAnyStepLosesNothing(t *testing.T) {
	for step := range 120 {
		w := sim.New(sim.Options{Seed: uint64(step)})
		d := w.AddDispatcher("d0")
		w.AddDispatcher("d1")
		fleet(w, 2, 2)
		n := 0
		d.Die = func(e core.Effect) bool {
			switch e.(type) {
			case core.Count, core.Decision:
				return false
			}
			n++
			return n == step
		}
		for i := range 8 {
			w.Bus.Submit(request("j", i))
		}
		w.Run(200*time.Millisecond, nil)
		w.Nodes["e00"].Kill()
		w.Run(time.Second, nil)
		w.Nodes["e00"].Start()
		w.Run(3*time.Minute, w.AllAnswered)
		for _, p := range w.Problems() {
			t.Errorf("killed at effect %d: %s", step, p)
		}
		if t.Failed() {
			return
		}
	}
}

// scenario F2
func TestADispatcherPausedForAMinuteDoesNoHarm(t *testing.T) {
	for seed := range uint64(100) {
		w := sim.New(sim.Options{Seed: seed})
		d := w.AddDispatcher("d0")
		w.AddDispatcher("d1")
		fleet(w, 3, 4)
		settle(w)
		for i := range 40 {
			w.Bus.Submit(request("j", i))
		}
		w.Run(time.Duration(seed)*400*time.Microsecond, nil)
		d.Pause()
		w.Run(time.Minute, nil)
		d.Resume()
		w.Run(time.Minute, w.AllAnswered)
		for _, p := range w.Problems() {
			t.Fatalf("seed %d: %s", seed, p)
		}
	}
}

// scenarios F3, F4, F6: engines die, come back, are cut off and answer late.
func TestEnginesThatComeAndGoLoseNothingAndDoubleNothing(t *testing.T) {
	for seed := range uint64(100) {
		w := sim.New(sim.Options{Seed: seed})
		for i := range 3 {
			w.AddDispatcher(fmt.Sprintf("d%d", i))
		}
		fleet(w, 4, 3)
		settle(w)
		for i := range 60 {
			f := request("j", i)
			f.MaxAttempts = 20
			w.Bus.Submit(f)
		}
		for k, n := range nodes(w) {
			at := time.Duration(seed%17+uint64(k)*23) * 37 * time.Millisecond
			switch (int(seed) + k) % 3 {
			case 0:
				w.After(at, n.Kill)
				w.After(at+time.Duration(seed%5)*9*time.Second, n.Start)
			case 1:
				w.After(at, n.Cut)
				w.After(at+time.Duration(seed%7)*9*time.Second, n.Heal)
			}
		}
		w.Run(5*time.Minute, w.AllAnswered)
		for _, p := range w.Problems() {
			t.Fatalf("seed %d: %s", seed, p)
		}
	}
}

// scenario F16: NATS forgets who is there; the engines are not to blame.
func TestAMassLossOfRegistrationsFreezesRequeueing(t *testing.T) {
	w := sim.New(sim.Options{Seed: 13})
	w.AddDispatcher("d0")
	fleet(w, 6, 2)
	for _, n := range w.Nodes {
		n.Takes = func(subjects.Held) time.Duration { return 100 * time.Second }
	}
	settle(w)
	for i := range 6 {
		w.Bus.Submit(request("j", i))
	}
	w.Run(time.Second, nil)
	for _, n := range w.Nodes {
		n.Cut()
	}
	w.Run(80*time.Second, nil)
	if w.Requeues != 0 {
		t.Errorf("%d rollouts were requeued although every engine fell silent at once", w.Requeues)
	}
	for _, n := range nodes(w) {
		n.Heal()
	}
	finish(t, w, 2*time.Minute)
	for k, n := range w.Ran {
		if n != 1 {
			t.Errorf("rollout %s ran %d times", k, n)
		}
	}
}

// scenario P21: late binding keeps every engine busy while work waits.
func TestWhileWorkWaitsNoEngineIsIdle(t *testing.T) {
	w := sim.New(sim.Options{Seed: 14})
	w.AddDispatcher("d0")
	w.AddDispatcher("d1")
	fleet(w, 4, 2)
	for i, n := range nodes(w) {
		n.Takes = func(h subjects.Held) time.Duration {
			return time.Duration(1+i) * time.Duration(1+len(h.ID)*int(h.ID[3]-'0')) * 20 * time.Millisecond
		}
	}
	settle(w)
	for i := range 200 {
		w.Bus.Submit(request("j", i))
	}
	w.Run(500*time.Millisecond, nil)
	idle := 0
	for len(w.Bus.Queued()) > 10 {
		w.Run(50*time.Millisecond, nil)
		for _, n := range w.Nodes {
			if len(n.Running()) < 2 {
				idle++
			}
		}
	}
	if idle > 0 {
		t.Errorf("engines had a free slot at %d samples while more than 10 rollouts waited", idle)
	}
	finish(t, w, time.Minute)
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

// A bind that was stored while its answer was lost is one bind.
func TestALostAnswerOfABindIsNotASecondBind(t *testing.T) {
	w := sim.New(sim.Options{Seed: 17})
	w.AddDispatcher("d0")
	fleet(w, 2, 4)
	settle(w)
	w.Bus.Lost = 3
	for i := range 6 {
		w.Bus.Submit(request("j", i))
	}
	finish(t, w, time.Minute)
	for k, n := range w.Ran {
		if n != 1 {
			t.Errorf("rollout %s ran %d times", k, n)
		}
	}
}

// Engines that register in the same instant are all counted, by every dispatcher.
func TestEnginesThatRegisterTogetherAreAllCountedWithinASecond(t *testing.T) {
	w := sim.New(sim.Options{Seed: 18})
	for i := range 4 {
		w.AddDispatcher(fmt.Sprintf("d%d", i))
	}
	w.Run(time.Second, nil)
	want := 0
	for i := range 60 {
		w.AddNode(fmt.Sprintf("e%02d", i), 1+i%7, 0)
		want += 1 + i%7
	}
	w.Run(time.Second, nil)
	for name, d := range w.Cores {
		if got := d.Core.Slots(); got != want {
			t.Errorf("dispatcher %s counts %d slots a second after they registered: want %d", name, got, want)
		}
	}
}

// scenario R2: cancelled at any instant, every reservation comes back to zero.
func TestACancelAtAnyInstantLeavesNothingReserved(t *testing.T) {
	for at := range 60 {
		w := sim.New(sim.Options{Seed: uint64(at)})
		w.AddDispatcher("d0")
		w.AddDispatcher("d1")
		fleet(w, 2, 2)
		settle(w)
		for i := range 12 {
			w.Bus.Submit(request("j", i))
		}
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

// Markers live a minute. When the last one under an engine has expired, the
// server's sequence there falls back, to zero if nothing stands: what was seen
// is then no guard any more, and the answer says what is.
func TestAFleetThatWasIdleForMinutesBindsAtOnce(t *testing.T) {
	for _, idle := range []time.Duration{30 * time.Second, 61 * time.Second, 10 * time.Minute} {
		w := sim.New(sim.Options{Seed: 20})
		w.AddDispatcher("d0")
		w.AddDispatcher("d1")
		fleet(w, 2, 4)
		settle(w)
		for i := range 8 {
			w.Bus.Submit(request("j", i))
		}
		finish(t, w, time.Minute)
		w.Run(idle, nil)
		w.Bus.Submit(request("j", 100))
		before := w.Now
		w.Run(time.Minute, w.AllAnswered)
		if took := w.Now - before; took > 3*time.Second {
			t.Errorf("after %s of idleness one rollout took %s", idle, took)
		}
	}
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

// scenario F12: the server's clock steps by ten minutes, both ways, in the middle
// of everything; the processes' own clocks began at different times anyway.
func TestAServerClockThatStepsLosesAndDoublesNothing(t *testing.T) {
	for seed := range uint64(40) {
		w := sim.New(sim.Options{Seed: seed})
		w.AddDispatcher("d0")
		w.Run(17*time.Minute, nil)
		w.AddDispatcher("d1") // its clock is 17 minutes behind
		fleet(w, 3, 3)
		settle(w)
		for i := range 60 {
			w.Bus.Submit(request("j", i))
		}
		at := time.Duration(seed) * 100 * time.Millisecond
		w.After(at, func() { w.StepClock(-10 * time.Minute) })
		w.After(at+700*time.Millisecond, func() { w.StepClock(20 * time.Minute) })
		w.After(at+900*time.Millisecond, w.Nodes["e01"].Kill)
		w.After(at+8*time.Second, w.Nodes["e01"].Start)
		w.Run(5*time.Minute, w.AllAnswered)
		for _, p := range w.Problems() {
			t.Fatalf("seed %d: %s", seed, p)
		}
		for k, a := range w.Answers {
			if a[0].Status != subjects.Completed {
				t.Fatalf("seed %d: rollout %s ended %s: a step of ten minutes is no deadline of six hours", seed, k, a[0].Status)
			}
		}
	}
}
