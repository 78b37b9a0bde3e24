package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// fill takes every place of engine a: 4 slots and 2 behind them.
func fill(c *core.Core, now time.Duration) {
	for i := range 6 {
		c.Step(reserved("a", fmt.Sprint("r", i), "x", 1, 5, uint64(100+i)), now)
	}
}

// An adapter that nobody has loaded is none_eligible, whether engines are full or
// not: the message goes back, with the reason. A full engine that has it is
// none_admissible: the message is kept.
func TestAnAdapterThatNobodyHasIsToldFromOneWhoseEngineIsFull(t *testing.T) {
	now := time.Second
	for _, full := range []bool{false, true} {
		c := ready(t, 1)
		p := engineAt("a", "x", 2, subjects.EngineReady)
		p.LoRAs, p.Stored = []string{"known"}, stamp
		c.Step(p, now)
		if full {
			fill(c, now)
		}
		ask := func(h core.Handle, lora string) []core.Effect {
			f := arrival(h)
			f.Facts.LoRA = lora
			return c.Step(f, now)
		}
		out := ask(1, "unknown")
		d := decisionIn(out)
		if d == nil || d.Reason != "none_eligible" || d.Filtered["lora"] != 1 || nakIn(out) == nil {
			t.Errorf("full %v: an adapter that nobody has: %+v, given back %v, want none_eligible with one engine left out for its adapters", full, d, nakIn(out) != nil)
		}
		out = ask(2, "known")
		b := bindIn(out)
		if full && (b != nil || nakIn(out) != nil || c.InHand() != 1) {
			t.Errorf("an adapter whose engine is full: bound %v, given back %v, want it kept until there is room", b != nil, nakIn(out) != nil)
		}
		if !full && (b == nil || b.Held.ID != "2") {
			t.Errorf("an adapter that a free engine has is not bound: %+v", b)
		}
		if full {
			if b := bindIn(c.Step(goneAt("a", "r0", 1, 200), now)); b == nil || b.Held.ID != "2" {
				t.Errorf("with room again: %+v, want the request whose adapter is there", b)
			}
		}
	}
}

// A message that nobody may serve does not keep those behind it in their queue,
// and a queue of nothing else is not fetched over and over.
func TestAMisfitHoldsUpNobodyAndManyRestTheirQueue(t *testing.T) {
	c := ready(t, 1)
	now := time.Second
	q := core.Queue{Job: "j", Lane: subjects.LaneNormal}
	c.Step(core.Jobs{Queues: []core.QueueDepth{{Queue: q, Messages: 1000}}}, now)
	fetched := func(out []core.Effect) int {
		n := 0
		for _, e := range out {
			if f, ok := e.(core.Fetch); ok && f.Queue == q {
				n += f.N
			}
		}
		return n
	}
	misfit := func(h core.Handle) {
		f := arrival(h)
		f.Pending, f.Facts.LoRA = 1000, "unknown"
		c.Step(f, now)
	}
	misfit(1)
	if fetched(c.Step(core.FetchDone{Queue: q, Asked: 16, Delivered: 16}, now)) == 0 {
		t.Error("one message that nobody may serve stops its whole queue")
	}
	for h := range core.Handle(16) {
		misfit(2 + h)
	}
	if n := fetched(c.Step(core.FetchDone{Queue: q, Asked: 16, Delivered: 16}, now)); n > 0 {
		t.Errorf("after 17 messages in a row that nobody may serve %d more are fetched at once: want a rest", n)
	}
	for range 50 {
		now += 50 * time.Millisecond
		c.Step(core.Contact{Proven: true}, now)
		if fetched(c.Step(core.Tick{}, now)) > 0 {
			return
		}
	}
	t.Error("the queue still rests after 2.5 s")
}

func TestMaxStalenessCountsFromTheNewestWeightsThatAnEngineServes(t *testing.T) {
	n := func(v int64) *int64 { return &v }
	for name, s := range map[string]struct {
		a, b       *int64
		bState     subjects.EngineState
		min, stale *int64
		bound      bool
		onlyOnB    bool
	}{
		"both new enough":                {a: n(4), b: n(5), stale: n(1), bound: true},
		"only the newest":                {a: n(4), b: n(5), stale: n(0), bound: true, onlyOnB: true},
		"min counts too":                 {a: n(4), b: n(5), min: n(6), stale: n(3)},
		"none tells its version":         {stale: n(1)},
		"one tells it":                   {b: n(0), stale: n(0), bound: true, onlyOnB: true},
		"the newest is paused":           {a: n(4), b: n(5), bState: subjects.EnginePaused, stale: n(0)},
		"weights that are not accepted":  {a: n(4), b: n(5), bState: subjects.EngineStale, stale: n(0), bound: true},
		"without it any version will do": {a: n(1), b: n(9), bound: true},
	} {
		c := ready(t, 2)
		now := time.Second
		for i, v := range []*int64{s.a, s.b} {
			state := subjects.EngineReady
			if i == 1 && s.bState != "" {
				state = s.bState
			}
			p := engineAt(string(rune('a'+i)), "x", uint64(10+i), state)
			p.WeightVersion, p.Stored = v, stamp
			c.Step(p, now)
		}
		f := arrival(1)
		f.Facts.WeightMin, f.Facts.WeightStaleness = s.min, s.stale
		out := c.Step(f, now)
		b, d := bindIn(out), decisionIn(out)
		switch {
		case (b != nil) != s.bound:
			t.Errorf("%s: bound %v, want %v (%+v)", name, b != nil, s.bound, d)
		case b != nil && s.stale != nil && b.Held.Weights != fmt.Sprint("max_staleness=", *s.stale):
			t.Errorf("%s: the reservation asks for weights %q", name, b.Held.Weights)
		case s.onlyOnB && b.Held.Engine != "b":
			t.Errorf("%s: bound to %s, whose weights are too old", name, b.Held.Engine)
		case !s.bound && (d == nil || d.Reason != "none_eligible" || d.Filtered["weights"] == 0):
			t.Errorf("%s: %+v, want none_eligible for the weights", name, d)
		}
	}
}
