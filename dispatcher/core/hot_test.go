package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// S3's case through the whole core: of 51 engines one holds the hot prefix with
// 38 running and 109 waiting, one is half loaded, 49 are idle. New work of that
// prefix goes to the idle ones, each gets one; and where one of them has it
// cached, by its own events, that one is preferred from then on.
func TestAHotPrefixMovesToIdlePeersWhichThenHoldIt(t *testing.T) {
	const engines, hot, half, slots = 51, 17, 30, 38
	name := func(i int) string { return fmt.Sprintf("e%02d", i) }
	c := ready(t, 0)
	now := time.Second
	c.Step(core.PoolPut{Revision: 1, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce}}, now)
	for i := range engines {
		p := engineAt(name(i), "x", uint64(10+i), subjects.EngineReady)
		capacity := int64(1_000_000)
		p.Slots, p.CapacityTokens, p.Events, p.Stored = slots, &capacity, "exact", stamp+int64(now)
		c.Step(p, now)
		for _, phase := range []string{"begin", "part", "end"} {
			s := core.Snapshot{Engine: name(i), Epoch: "x", AsOf: 1, Phase: phase}
			if phase == "part" && i == hot {
				s.Tier, s.Blocks = "gpu", chain
			}
			c.Step(s, now)
		}
	}
	seq := uint64(0)
	report := func() {
		seq++
		for i := range engines {
			running, waiting := 0, 0
			switch i {
			case hot:
				running, waiting = slots, 109
			case half:
				running = slots / 2
			}
			r, most := rank(0, running, waiting, float64(running+waiting)*2560e-6), slots
			r.MaxRunning = &most
			c.Step(loadOf(name(i), "x", seq, r), now)
		}
	}
	report()
	ask := func(h core.Handle) *core.Bind {
		f := arrival(h)
		f.Facts.PromptTokens, f.Facts.MaxTokens, f.Facts.Blocks = 64*len(chain), 512, chain
		return bindIn(c.Step(f, now))
	}
	var first *core.Bind
	seen := map[string]bool{}
	for h := range core.Handle(engines - 2) {
		b := ask(h + 1)
		if b == nil || b.Held.Engine == name(hot) || b.Held.Engine == name(half) || seen[b.Held.Engine] {
			t.Fatalf("request %d of the hot prefix: %+v, want an idle engine that has none yet", h+1, b)
		}
		seen[b.Held.Engine] = true
		if first == nil {
			first = b
		}
	}
	// All end; the first engine's events say that it has the prefix now.
	for h := range core.Handle(engines - 2) {
		id := fmt.Sprint(h + 1)
		for e := range seen {
			c.Step(core.BindAnswer{Handle: h + 1, Engine: e, Job: "j", ID: id, Bind: 1, Answer: core.OK, Seq: 100 + uint64(h), Stored: stamp}, now)
			c.Step(goneAt(e, id, 1, 1000+uint64(h)), now)
		}
	}
	c.Step(core.Cache{Engine: first.Held.Engine, Epoch: "x", Seq: 2, Op: "stored", Tier: "gpu", Namespace: 5, Parent: 5, HasParent: true, Blocks: chain}, now)
	report()
	for h := range core.Handle(3) {
		b := ask(1000 + h)
		if h == 0 && (b == nil || b.Held.Engine != first.Held.Engine || b.Held.PredictedCached == nil || *b.Held.PredictedCached != 64*len(chain)) {
			t.Fatalf("a request of the prefix that %s holds now: %+v, want it there", first.Held.Engine, b)
		}
		if b == nil || b.Held.Engine == name(hot) {
			t.Errorf("request %d: %+v, want it anywhere but at the engine that is far behind", h, b)
		}
	}
}
