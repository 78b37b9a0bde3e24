package core_test

import (
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

func TestAnAcquiredReservationIsPlacedLikeAnyOtherAndCountsAsLoad(t *testing.T) {
	c := ready(t, 2)
	f := subjects.Facts{Job: "j", ID: "1", Lane: subjects.LaneNormal, PromptTokens: 100, MaxTokens: 10}
	b := bindIn(c.Step(core.Acquire{Handle: 9, Facts: f}, time.Second))
	if b == nil {
		t.Fatal("no bind")
	}
	if b.Held.State != subjects.StateExternal || b.TTL != time.Minute {
		t.Errorf("the key is %s with TTL %s: want external, 1m0s", b.Held.State, b.TTL)
	}
	out := c.Step(core.BindAnswer{Handle: 9, Engine: b.Held.Engine, Job: "j", ID: "1", Bind: 1, Answer: core.OK, Seq: 3, Stored: stamp}, time.Second)
	granted := false
	for _, e := range out {
		if g, ok := e.(core.Granted); ok && g.Handle == 9 && g.Revision == 3 {
			granted = true
		}
		if _, ok := e.(core.Ack); ok {
			t.Error("there is no message to acknowledge")
		}
	}
	if !granted {
		t.Errorf("not granted: %v", out)
	}
	if n, _ := c.Reserved(b.Held.Engine); n != 1 {
		t.Errorf("%d requests are reserved on %s", n, b.Held.Engine)
	}
	// Its caller vanished: the TTL ends it, and nothing else does.
	now := 2 * time.Second
	for now < 70*time.Second {
		now += 250 * time.Millisecond
		c.Step(core.Contact{Proven: true}, now)
		for _, e := range c.Step(core.Tick{}, now) {
			switch e.(type) {
			case core.Retry, core.PublishResult, core.DeleteKey:
				t.Fatalf("at %s an acquired reservation led to %T", now, e)
			}
		}
	}
	if n, _ := c.Reserved(b.Held.Engine); n != 0 {
		t.Errorf("%d requests are still reserved after the TTL", n)
	}
}

func TestAcquiringTwiceOrWithoutEnginesIsRefusedWithAReason(t *testing.T) {
	refusal := func(out []core.Effect) string {
		for _, e := range out {
			if r, ok := e.(core.Refused); ok {
				return r.Code
			}
		}
		return ""
	}
	f := subjects.Facts{Job: "j", ID: "1", Lane: subjects.LaneNormal, PromptTokens: 100, MaxTokens: 10}
	if got := refusal(ready(t, 0).Step(core.Acquire{Handle: 1, Facts: f}, time.Second)); got != "unavailable" {
		t.Errorf("without engines: refused with %q, want unavailable", got)
	}
	c := ready(t, 1)
	c.Step(core.Acquire{Handle: 1, Facts: f}, time.Second)
	if got := refusal(c.Step(core.Acquire{Handle: 2, Facts: f}, time.Second)); got != "reserved" {
		t.Errorf("the second time: refused with %q, want reserved", got)
	}
}

// Servers of the settings take acquired requests, and nothing from the queue.
func TestServersWithoutAnAgentAreOnlyAcquired(t *testing.T) {
	c := ready(t, 0)
	c.Step(core.PoolPut{Revision: 2, Settings: subjects.Settings{Servers: []subjects.Server{{Name: "s1", Slots: 2}, {Name: "s2", Slots: 2}}}}, time.Second)
	if n := c.Headroom(); n != 0 {
		t.Errorf("there is room for %d requests of the queue on servers that no agent serves", n)
	}
	at := map[string]int{}
	seq := uint64(0)
	for i := range 4 {
		f := subjects.Facts{Job: "j", ID: string(rune('1' + i)), Lane: subjects.LaneNormal, PromptTokens: 100, MaxTokens: 10}
		b := bindIn(c.Step(core.Acquire{Handle: core.Handle(i + 1), Facts: f}, time.Second))
		if b == nil {
			t.Fatalf("request %d is not bound", i)
		}
		at[b.Held.Engine]++
		seq++
		c.Step(core.BindAnswer{Handle: core.Handle(i + 1), Engine: b.Held.Engine, Job: "j", ID: f.ID, Bind: 1, Answer: core.OK, Seq: seq, Stored: stamp}, time.Second)
	}
	if at["s1"] != 2 || at["s2"] != 2 {
		t.Errorf("four requests went to %v: want two to each", at)
	}
	c.Step(core.PoolPut{Revision: 3, Settings: subjects.Settings{}}, time.Second)
	f := subjects.Facts{Job: "j", ID: "9", Lane: subjects.LaneNormal, PromptTokens: 100, MaxTokens: 10}
	if b := bindIn(c.Step(core.Acquire{Handle: 9, Facts: f}, time.Second)); b != nil {
		t.Errorf("bound to %s, which was taken out", b.Held.Engine)
	}
}

// A caller's prompt is placed by what engines have cached, as any other.
func TestAnAcquiredPromptGoesWhereItIsCached(t *testing.T) {
	w, _ := newWarm(t)
	w.snapshot("a", 5, chain)
	w.snapshot("b", 0, nil)
	for i := range 4 {
		w.report()
		f := subjects.Facts{Job: "j", ID: string(rune('1' + i)), Lane: subjects.LaneNormal, PromptTokens: 64 * len(chain), MaxTokens: 10, Blocks: chain}
		h := core.Handle(i + 1)
		b := bindIn(w.step(core.Acquire{Handle: h, Facts: f}))
		if b == nil || b.Held.Engine != "a" || b.Held.PredictedCached == nil || *b.Held.PredictedCached != 64*len(chain) {
			t.Fatalf("request %d: %+v, want it on a, with all of it cached", i, b)
		}
		seq := uint64(100 * (i + 1))
		w.step(core.BindAnswer{Handle: h, Engine: "a", Job: "j", ID: f.ID, Bind: 1, Answer: core.OK, Seq: seq, Stored: stamp})
		w.step(goneAt("a", f.ID, 1, seq+1))
	}
}
