package workeragent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/bench/engine/fakes/faketest"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// scenario P7: gauges that freeze with work in them, as after a mass abort.
func TestFrozenGaugesDoNotCountAndTheLoadSaysWhy(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	shows := func(running, generated int) {
		p.setMetrics(fmt.Sprintf("vllm:num_requests_running{engine=\"0\"} %d\nvllm:num_requests_waiting{engine=\"0\"} 0\n"+
			"vllm:kv_cache_usage_perc{engine=\"0\"} 0.99\nvllm:generation_tokens_total{engine=\"0\"} %d\n", running, generated))
	}
	shows(8, 100)
	loads := r.loads()
	a := r.agent(p.url, vllm(t, p.url, func(c *engine.VLLMConfig) { c.Tracker = telemetry.TrackerConfig{FrozenAfter: 100 * time.Millisecond} }))
	l := r.load(loads, "a problem", func(l subjects.Load) bool { return l.Problem != "" })
	if !strings.HasPrefix(l.Problem, "frozen: ") || l.Ranks[0].Running != nil || l.Ranks[0].KVUsage != nil {
		t.Errorf("the picture counts: %+v of %+v", l.Ranks[0], l)
	}
	if a.Ready() != nil {
		t.Error("stale is read as saturated: nobody would ever ask this engine again")
	}
	shows(0, 101)
	l = r.load(loads, "no problem", func(l subjects.Load) bool { return l.Problem == "" })
	if l.Ranks[0].Running == nil || *l.Ranks[0].Running != 0 {
		t.Errorf("after a step: %+v", l.Ranks[0])
	}
}

// refuses binds what must come back at once, at no cost.
func (r *rig) refuses(id, reason string) {
	r.t.Helper()
	r.bind(request(id, 5))
	if got := r.returned(id); got.ReturnReason != reason || got.Burnt != 0 {
		r.t.Errorf("returned %q with %d burnt, want %q for free", got.ReturnReason, got.Burnt, reason)
	}
}

// An engine whose scheduler hangs is healthy by its own word: what tells is that
// there is work and nothing moves.
func TestAWedgedEngineIsNotReadyAndItsRunsAreTakenFromIt(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Engine.TimeScale = 1 })
	quickly := telemetry.TrackerConfig{WedgedAfter: 200 * time.Millisecond, StalledAfter: 200 * time.Millisecond}
	r.agent(f.URL(), vllm(t, f.URL(), func(c *engine.VLLMConfig) { c.Tracker = quickly }), func(c *Config) {
		c.Timings.ProgressTimeout, c.Timings.WedgeHold, c.Timings.AbortTimeout = 2*time.Second, 200*time.Millisecond, 100*time.Millisecond
	})
	r.bind(request("0001", 4000))
	r.eventually("it runs", func() bool {
		stats, err := f.Stats()
		return err == nil && stats[0].Running == 1 && stats[0].GenerationTokens > 0
	})
	if err := f.Arm(simengine.Fault{Kind: simengine.FaultWedge}); err != nil {
		t.Fatal(err)
	}
	e := r.registered("it is down", inState(subjects.EngineDown))
	if !strings.HasPrefix(e.Cause, "wedged") {
		t.Errorf("its cause is %q", e.Cause)
	}
	r.refuses("0002", returnWedged)
	if got := r.returned("0001"); got.ReturnReason != returnNoProgress || got.Burnt != 1 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	if err := f.Arm(simengine.Fault{Kind: simengine.FaultClear}); err != nil {
		t.Fatal(err)
	}
	r.registered("it is ready again", inState(subjects.EngineReady))
	r.bind(request("0003", 5))
	if got := r.result("0003"); got.Status != subjects.Truncated {
		t.Errorf("got %+v", got)
	}
}

// What hangs with an engine that is paused waits for its resumption: that is no
// want of progress.
func TestAnEnginePausedBehindTheAgentsBackTakesNothingNewAndGoesOnWhenResumed(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Engine.TimeScale = 5 })
	r.agent(f.URL(), vllm(t, f.URL()), func(c *Config) { c.Timings.ProgressTimeout = 400 * time.Millisecond })
	behind := controlled(t, f.URL())
	r.bind(request("0001", 400))
	r.eventually("it runs", func() bool {
		stats, err := f.Stats()
		return err == nil && stats[0].GenerationTokens > 0
	})
	if err := behind.Pause(r.ctx(), engine.PauseKeep); err != nil {
		t.Fatal(err)
	}
	e := r.registered("it is paused", inState(subjects.EnginePaused))
	if !strings.Contains(e.Cause, "paused") {
		t.Errorf("its cause is %q", e.Cause)
	}
	r.refuses("0002", returnPaused)
	pass(t, time.Second) // more than a run may be silent
	if err := behind.Resume(r.ctx()); err != nil {
		t.Fatal(err)
	}
	if got := r.result("0001"); got.Status != subjects.Truncated || len(got.TokenIDs) != 400 || got.Attempt != 1 {
		t.Errorf("the run that was frozen ended as %+v", got)
	}
	r.registered("it is ready again", inState(subjects.EngineReady))
	r.bind(request("0003", 5))
	r.result("0003")
}

// scenario C5: whoever sleeps has no cache, whenever its events say so.
func TestAnEnginePutToSleepIsPausedAndItsCacheIsGone(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t)
	behind := controlled(t, f.URL())
	r.agent(f.URL(), vllm(t, f.URL()))
	before := r.registered("its events are followed", withEvents(eventsExact))
	p := prompt(1, 256)
	r.bind(requestOf("0001", p, 8))
	r.result("0001")
	r.holds("its prompt is in the view", p, 4)
	if err := behind.Sleep(r.ctx(), 1); err != nil {
		t.Fatal(err)
	}
	e := r.registered("it is paused", inState(subjects.EnginePaused))
	if !strings.Contains(e.Cause, "sleep") || e.Epoch != before.Epoch {
		t.Errorf("its cause is %q, its epoch %s after %s", e.Cause, e.Epoch, before.Epoch)
	}
	r.holds("nothing of it is left", p, 0)
	if err := behind.Wake(r.ctx()); err != nil {
		t.Fatal(err)
	}
	r.registered("it is ready again", inState(subjects.EngineReady))
	r.bind(requestOf("0002", p, 8))
	r.result("0002")
	r.holds("its prompt is in the view again", p, 4)
}

// scenario R9: nothing is aborted, and the answer says which tokens are of which
// weights.
func TestARunThatSeesNewWeightsShowsBothVersions(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Engine.WeightVersion, c.Engine.TimeScale = 7, 5 })
	behind := controlled(t, f.URL())
	r.agent(f.URL(), vllm(t, f.URL()))
	r.registered("version 7 is registered", func(e subjects.Engine) bool { return e.WeightVersion != nil && *e.WeightVersion == 7 })
	r.bind(request("0001", 400))
	r.eventually("it runs", func() bool {
		stats, err := f.Stats()
		return err == nil && stats[0].GenerationTokens > 20
	})
	if err := behind.SetWeightVersion(r.ctx(), "8"); err != nil {
		t.Fatal(err)
	}
	got := r.result("0001")
	s := got.Segments
	if got.Status != subjects.Truncated || got.Attempt != 1 || len(s) != 2 || s[0].WeightVersion != "7" || s[1].WeightVersion != "8" ||
		s[0].Start != 0 || s[0].End == 0 || s[0].End != s[1].Start || s[1].End != 400 {
		t.Errorf("%s, segments %+v", got.Status, s)
	}
}

// scenario C5: what other weights have computed is no prefix.
func TestNewWeightsBehindTheAgentsBackArePublishedAndEmptyTheView(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Engine.WeightVersion = 7 })
	behind := controlled(t, f.URL())
	h := r.listen()
	r.agent(f.URL(), vllm(t, f.URL()))
	version := func(n int64) func(subjects.Engine) bool {
		return func(e subjects.Engine) bool {
			return e.WeightVersion != nil && *e.WeightVersion == n && e.Events == eventsExact
		}
	}
	before := r.registered("version 7 is registered", version(7))
	p := prompt(1, 256)
	r.bind(requestOf("0001", p, 8))
	r.result("0001")
	r.holds("its prompt is in the view", p, 4)
	n := h.count(cleared)
	if err := behind.SetWeightVersion(r.ctx(), "8"); err != nil {
		t.Fatal(err)
	}
	after := r.registered("version 8 is registered", version(8))
	r.holds("nothing of it is left", p, 0)
	r.eventually("that is published", func() bool { return h.count(cleared) > n })
	if after.Epoch != before.Epoch {
		t.Errorf("epoch %s after %s", after.Epoch, before.Epoch)
	}
	// The engine has kept its cache, and says nothing of it again: a new prompt's
	// blocks are credited, the old one's are not.
	q := prompt(2, 256)
	r.bind(requestOf("0002", q, 8))
	r.result("0002")
	r.holds("a new prompt is in the view", q, 4)
	if h.has(func(c kvevents.Change) bool { return c.Epoch != before.Epoch }) {
		t.Error("a change of another epoch was published")
	}
}
