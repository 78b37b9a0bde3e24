package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// scenario F10: dispatchers and agents are cut off, singly and together, for a
// moment and for longer than a lease.
func TestPartitionsLoseNothingAndDoubleNothing(t *testing.T) {
	for seed := range uint64(100) {
		w := sim.New(sim.Options{Seed: seed})
		var ds []*sim.Dispatcher
		for i := range 3 {
			ds = append(ds, w.AddDispatcher(fmt.Sprintf("d%d", i)))
		}
		fleet(w, 3, 3)
		settle(w)
		for i := range 60 {
			f := request("j", i)
			f.MaxAttempts = 20
			w.Bus.Submit(f)
		}
		at := time.Duration(seed%23) * 31 * time.Millisecond
		long := time.Duration(1+seed%5) * 12 * time.Second
		w.After(at, ds[seed%3].Pause)
		w.After(at+long, ds[seed%3].Resume)
		for k, n := range nodes(w) {
			if (seed>>k)&1 == 1 {
				w.After(at+time.Duration(k)*50*time.Millisecond, n.Cut)
				w.After(at+long+time.Duration(k)*3*time.Second, n.Heal)
			}
		}
		w.Run(10*time.Minute, w.AllAnswered)
		for _, p := range w.Problems() {
			t.Fatalf("seed %d: %s", seed, p)
		}
	}
}

// scenario F10: without contact a dispatcher decides nothing, and gives back what it holds.
func TestWithoutContactNothingIsDecided(t *testing.T) {
	c := ready(t, 0)
	c.Step(core.Fetched{Handle: 1, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: 1, Stored: stamp,
		Facts: subjects.Facts{Job: "j", ID: "1", Lane: subjects.LaneNormal, PromptTokens: 10, MaxTokens: 10}}, time.Second)
	c.Step(core.Contact{Proven: false}, time.Second)
	p := engineAt("a", "x", 9, subjects.EngineReady)
	p.Stored = stamp
	if b := bindIn(c.Step(p, 1100*time.Millisecond)); b != nil {
		t.Errorf("bound to %s while NATS is away", b.Held.Engine)
	}
	c.Step(core.Tick{}, 1200*time.Millisecond)
	if n := c.InHand(); n != 0 {
		t.Errorf("%d messages are still in hand without contact", n)
	}
}
