package core_test

import (
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// projected_time counts with what an engine shows when it is busy; with what it
// showed before, in another life or to its agent, while it shows nothing; and
// with the pool's defaults for an engine that was never seen busy. No source is
// believed beyond rate_bound.
func TestRatesComeFromTheEngineElseItsProfileElseThePool(t *testing.T) {
	c := core.New(core.Config{Dispatcher: "d", Explain: true})
	begin(t, c, 1)
	c.Step(core.PoolPut{Revision: 1, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce,
		Knobs: map[string]float64{"decode_tok_s": 2000, "prefill_tok_s": 8000, "rate_bound": 10}}}, 0)
	seq, life, revision := uint64(0), "x", uint64(10)
	now := time.Second
	load := func(running int, decode, prefill float64) {
		seq++
		r := rank(0, running, 0, 0)
		if decode > 0 {
			r.DecodeTokS, r.PrefillTokS = &decode, &prefill
		}
		c.Step(loadOf("a", life, seq, r), now)
	}
	register := func(epoch string, decode, prefill *float64) {
		life = epoch
		revision++
		p := engineAt("a", epoch, revision, subjects.EngineReady)
		p.DecodeTokS, p.PrefillTokS, p.Stored = decode, prefill, stamp+int64(now)
		c.Step(p, now)
	}
	handle := core.Handle(0)
	want := func(when string, decode, prefill float64, from string) {
		t.Helper()
		handle++
		f := arrival(handle)
		f.Stored = stamp + int64(now)
		out := c.Step(f, now)
		d, b := decisionIn(out), bindIn(out)
		if d == nil || b == nil || len(d.Candidates) != 1 {
			t.Fatalf("%s: no decision with its candidate: %+v", when, d)
		}
		if got := d.Candidates[0]; got.DecodeTokS != decode || got.PrefillTokS != prefill || got.DecodeFrom != from || got.PrefillFrom != from {
			t.Errorf("%s: counted with %v and %v tokens/s from %s and %s, want %v and %v from %s",
				when, got.DecodeTokS, got.PrefillTokS, got.DecodeFrom, got.PrefillFrom, decode, prefill, from)
		}
		revision++
		c.Step(core.BindAnswer{Handle: handle, Engine: "a", Job: "j", ID: b.Held.ID, Bind: b.Held.Bind, Answer: core.OK, Seq: 1000 + revision, Stored: stamp}, now)
		c.Step(goneAt("a", b.Held.ID, 1, 1001+revision), now)
		revision++
	}
	want("nothing is known", 2000, 8000, "default")
	load(0, 50, 60)
	want("it was idle", 2000, 8000, "default")
	fast, absurd, negative := 6000.0, 1e15, -1.0
	register("x", &fast, &absurd)
	load(0, 0, 0)
	want("its agent saw it busy", 6000, 80_000, "profile")
	register("x", &negative, &negative)
	load(0, 0, 0)
	want("its agent tells nonsense", 2000, 8000, "default")
	load(4, 3000, 9000)
	want("it is busy", 3000, 9000, "engine")
	load(0, 10, 10)
	want("it is idle again", 3000, 9000, "engine")
	register("y", &fast, &fast)
	load(0, 0, 0)
	want("a new life", 3000, 9000, "profile")
	now += 5 * time.Second // its reports stop
	c.Step(core.Contact{Proven: true}, now)
	c.Step(core.Tick{}, now)
	want("without reports", 3000, 9000, "profile")
}
