package core_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// a has one large reservation and b two small ones: requests say a, tokens say b.
func TestModesAndPoliciesSwitchWhileTheCoreRuns(t *testing.T) {
	c := ready(t, 2)
	now := time.Second
	capacity := int64(1_000_000)
	for i, e := range []string{"a", "b"} {
		p := engineAt(e, "x", uint64(10+i), subjects.EngineReady)
		p.CapacityTokens, p.Stored = &capacity, stamp
		c.Step(p, now)
	}
	c.Step(reserved("a", "r1", "x", 1, 100_000, 20), now)
	c.Step(reserved("b", "r2", "x", 1, 10, 21), now)
	c.Step(reserved("b", "r3", "x", 1, 10, 22), now)
	for i, s := range []struct {
		settings     subjects.Settings
		engine       string
		mode, reason string
		shadow       string
	}{
		{subjects.Settings{}, "a", "off", "least_requests", ""},
		{subjects.Settings{Policy: policy.KVTokens, Mode: subjects.ModeShadow}, "a", "shadow", "least_requests", "b"},
		{subjects.Settings{Policy: policy.KVTokens, Mode: subjects.ModeEnforce}, "b", "enforce", "least_tokens", ""},
		{subjects.Settings{Policy: policy.KVTokens, Mode: subjects.ModeEnforce, Knobs: map[string]float64{"alpha": 7}}, "b", "enforce", "least_tokens", ""}, // refused: what was stays
		{subjects.Settings{Policy: policy.LeastRequests, Mode: subjects.ModeEnforce}, "a", "enforce", "least_requests", ""},
		{subjects.Settings{Policy: policy.KVTokens, Mode: subjects.ModeOff}, "a", "off", "least_requests", ""},
	} {
		refused := countsInAll(c.Step(core.PoolPut{Settings: s.settings, Revision: uint64(i + 1)}, now), "settings_refused")
		if want := len(s.settings.Knobs); refused != want {
			t.Errorf("step %d: %d changes refused, want %d", i, refused, want)
		}
		h := core.Handle(i + 1)
		out := c.Step(arrival(h), now)
		d, b := decisionIn(out), bindIn(out)
		if d == nil || b == nil {
			t.Fatalf("step %d: nothing was decided", i)
		}
		if d.Engine != s.engine || d.Mode != s.mode || d.Reason != s.reason || d.Shadow != s.shadow || b.Held.Engine != s.engine {
			t.Errorf("step %d: %+v, bound to %s; want %s by %s in mode %s, shadow %q", i, d, b.Held.Engine, s.engine, s.reason, s.mode, s.shadow)
		}
		if differs := countsIn(out, "shadow", "differs"); (differs == 1) != (s.shadow != "") {
			t.Errorf("step %d: %d disagreements counted", i, differs)
		}
		seq := uint64(100 * (i + 1))
		c.Step(core.BindAnswer{Handle: h, Engine: b.Held.Engine, Job: "j", ID: b.Held.ID, Bind: 1, Answer: core.OK, Seq: seq, Stored: stamp}, now)
		c.Step(goneAt(b.Held.Engine, b.Held.ID, 1, seq+1), now)
	}
}

func countsInAll(out []core.Effect, name string) (n int) {
	for _, e := range out {
		if c, ok := e.(core.Count); ok && c.Name == name {
			n += c.N
		}
	}
	return n
}

// What a dispatcher lived through in mode off, another core lives through with a
// policy configured and off, and in shadow: it writes the same, decision for
// decision; shadow only adds what it records.
func TestOffAndShadowWriteWhatTheBaselineWrites(t *testing.T) {
	type line struct {
		ev  core.Event
		now time.Duration
		out []string
	}
	var log []line
	writes := func(out []core.Effect) (lines []string) {
		for _, e := range out {
			switch e.(type) {
			case core.Decision, core.Count: // records
				continue
			}
			lines = append(lines, written(t, []core.Effect{e})...)
		}
		return lines
	}
	first := lived(31, func(ev core.Event, now time.Duration, out []core.Effect) {
		b, err := core.EncodeEvent(ev, now)
		if err != nil {
			t.Fatal(err)
		}
		kept, now, err := core.DecodeEvent(b) // events share memory with the world
		if err != nil {
			t.Fatal(err)
		}
		log = append(log, line{kept, now, writes(out)})
	})
	for _, name := range policy.Policies() {
		for _, mode := range []string{subjects.ModeOff, subjects.ModeShadow} {
			c := core.New(core.Config{Dispatcher: "d1", Timings: core.DefaultTimings()})
			c.Step(first, 0)
			set := false
			for i, l := range log {
				if v, ok := l.ev.(core.ViewSwap); ok && v.Kind == core.ViewPools {
					v.Pool = &core.PoolPut{Revision: 1, Settings: subjects.Settings{Policy: name, Mode: mode, Knobs: map[string]float64{"sticky_group": 1, "wait_max": 5}}}
					l.ev, set = v, true
				}
				if diff := cmp.Diff(l.out, writes(c.Step(l.ev, l.now))); diff != "" {
					t.Fatalf("%s in mode %s: event %d (%T) led to other writes than the baseline's (-baseline +%s):\n%s", name, mode, i, l.ev, mode, diff)
				}
			}
			if !set {
				t.Fatal("the run has no settings to change: the test tests nothing")
			}
		}
	}
}
