package core_test

import (
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// scenario R1
func TestWorkOfADeadEngineIsRequeuedOnceAndAnsweredOnce(t *testing.T) {
	w := pool(4, 2, 3, 8)
	submit(w, 12)
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

// scenario R17
func TestAFleetThatIsAwayForTwoMinutesFailsNobody(t *testing.T) {
	w := pool(10, 1, 2, 4)
	for _, n := range w.Nodes {
		n.Kill()
	}
	submit(w, 20)
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
		submit(w, 8)
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
		submit(w, 40)
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
		w := pool(seed, 3, 4, 3)
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

// silenced is a world of six engines with a long run each that all fell silent at once.
func silenced() *sim.World {
	w := sim.New(sim.Options{Seed: 13})
	w.AddDispatcher("d0")
	fleet(w, 6, 2)
	for _, n := range w.Nodes {
		n.Takes = func(subjects.Held) time.Duration { return 100 * time.Second }
	}
	settle(w)
	submit(w, 6)
	w.Run(time.Second, nil)
	for _, n := range w.Nodes {
		n.Cut()
	}
	return w
}

// scenario F16: NATS forgets who is there; the engines are not to blame.
func TestAMassLossOfRegistrationsFreezesRequeueing(t *testing.T) {
	w := silenced()
	w.Run(80*time.Second, nil)
	if w.Requeues != 0 {
		t.Errorf("%d rollouts were requeued although every engine fell silent at once", w.Requeues)
	}
	for i, n := range nodes(w) { // they do not come back in one instant
		w.After(time.Duration(i)*2*time.Second, n.Heal)
	}
	finish(t, w, 2*time.Minute)
	for k, n := range w.Ran {
		if n != 1 {
			t.Errorf("rollout %s ran %d times", k, n)
		}
	}
}

// An engine that does not come back with the others is lost after all.
func TestAfterAMassLossWhoStaysAwayIsLost(t *testing.T) {
	w := silenced()
	w.Run(40*time.Second, nil)
	for i, n := range nodes(w) {
		if i > 0 {
			n.Heal()
		}
	}
	w.Run(25*time.Second, nil)
	if w.Requeues != 1 {
		t.Errorf("%d rollouts were requeued, want that of the engine that stays away", w.Requeues)
	}
	finish(t, w, 3*time.Minute)
}

// A bind that was stored while its answer was lost is one bind.
func TestALostAnswerOfABindIsNotASecondBind(t *testing.T) {
	w := pool(17, 1, 2, 4)
	w.Bus.Lost = 3
	submit(w, 6)
	finish(t, w, time.Minute)
	for k, n := range w.Ran {
		if n != 1 {
			t.Errorf("rollout %s ran %d times", k, n)
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
		submit(w, 60)
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
