package workeragent

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// scenario F7: 500, truncation, disconnects. scenario R16: an error inside a 200.
// scenario R17: 503 and 429 cost no attempt. scenario R14: abort is no answer.
// scenario R18: one cause, one outcome, whenever it strikes.
func TestEachFaultOfAnEngineGivesTheRolloutBackAsItDeserves(t *testing.T) {
	r := newRig(t)
	s := simulated(t)
	a := r.agent(s.URL())
	// The same output wherever it is made: what a resumed run must come to.
	whole := request("whole", 40)
	r.bind(whole)
	want := r.result("whole").TokenIDs
	for i, c := range []struct {
		fault  simengine.Fault
		reason string
		burnt  int
		resume bool
	}{
		{simengine.Fault{Kind: simengine.Fault500}, "failed:InternalServerError", 2, false},
		{simengine.Fault{Kind: simengine.FaultHTML}, "failed:not_an_engine", 2, false},
		{simengine.Fault{Kind: simengine.FaultTruncate}, "failed:truncated_stream", 2, false},
		{simengine.Fault{Kind: simengine.FaultTruncate, AfterTokens: 5}, "failed:truncated_stream", 2, false},
		{simengine.Fault{Kind: simengine.FaultDisconnectAt, AfterTokens: 5}, "failed:truncated_stream", 2, false},
		{simengine.Fault{Kind: simengine.FaultErrorAfter, AfterTokens: 5}, "failed:InternalServerError", 2, false},
		{simengine.Fault{Kind: simengine.Fault503}, "not_accepted:", 1, false},
		{simengine.Fault{Kind: simengine.Fault429}, "not_accepted:", 1, false},
		{simengine.Fault{Kind: simengine.FaultAbort, AfterTokens: 5}, "aborted:", 1, true},
		{simengine.Fault{Kind: simengine.FaultAbortSilent}, "aborted:", 2, false},
	} {
		id := fmt.Sprintf("%04d", i)
		t.Run(fmt.Sprintf("%s after %d", c.fault.Kind, c.fault.AfterTokens), func(t *testing.T) {
			r := r.with(t)
			r.eventually("the engine takes work again", func() bool { return a.Ready() == nil })
			c.fault.Count = 1
			if err := s.Arm(c.fault); err != nil {
				t.Fatal(err)
			}
			req := request(id, 40)
			r.bind(req, func(h *subjects.Held) { h.Burnt = 1 })
			got := r.returned(id)
			if !strings.HasPrefix(got.ReturnReason, c.reason) || got.Burnt != c.burnt {
				t.Errorf("returned %q with %d burnt, want %q with %d", got.ReturnReason, got.Burnt, c.reason, c.burnt)
			}
			back, err := subjects.DecodeRequest(got.Body)
			if err != nil {
				t.Fatal(err)
			}
			if (back.Resume != nil) != c.resume {
				t.Fatalf("resume is %+v", back.Resume)
			}
			if _, err := r.store.Result(r.ctx(), "j", "main", id); !errors.Is(err, kvstate.ErrGone) {
				t.Errorf("it was answered: %v", err)
			}
			// It is placed again and comes to the very same tokens.
			n := 0
			if back.Resume != nil {
				n = len(back.Resume.TokenIDs)
				if n < 5 || got.PromptTokens != 4+n || got.MaxTokens != 40-n || !slices.Equal(back.Resume.TokenIDs, want[:n]) {
					t.Errorf("resumes from %v, header says prompt %d and output %d", back.Resume.TokenIDs, got.PromptTokens, got.MaxTokens)
				}
			}
			r.eventually("the engine takes work again", func() bool { return a.Ready() == nil })
			r.bindBody("j", id, got.Body, func(h *subjects.Held) { h.Bind = 2 })
			done := r.result(id)
			if !slices.Equal(done.TokenIDs, want) || done.Status != subjects.Truncated || done.Usage.PromptTokens != 4 || done.Usage.CompletionTokens != 40 {
				t.Errorf("%s with %d tokens, usage %+v, want the 40 of an undisturbed run", done.Status, len(done.TokenIDs), done.Usage)
			}
			if n > 0 && (len(done.Segments) != 2 || done.Segments[0].End != n || done.Segments[1].Start != n || done.Segments[1].End != 40) {
				t.Errorf("segments %+v", done.Segments)
			}
			r.released(id)
		})
	}
}

// scenario R7: a data error is tried once more elsewhere, then it fails.
func TestADataErrorIsTriedOnceElsewhereAndThenFails(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	const bad = `{"error":{"message":"min_p must not be that","type":"BadRequestError","code":400}}`
	say := func() {
		c := p.next()
		c.say(bad)
		c.end()
	}
	r.bind(request("0001", 5))
	say()
	if got := r.returned("0001"); got.ReturnReason != "data_error:BadRequestError" || got.Burnt != 1 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	r.bind(request("0001", 5), func(h *subjects.Held) { h.Bind, h.Burnt, h.Tried = 2, 1, []string{"e0"} })
	say()
	got := r.result("0001")
	if got.Status != subjects.Failed || got.Error.Class != subjects.ClassData || got.Error.Code != "BadRequestError" || got.Error.Message == "" {
		t.Errorf("got %+v %+v", got.Status, got.Error)
	}
	r.released("0001")
	// With one attempt allowed there is no other engine to ask.
	r.bind(request("0002", 5), func(h *subjects.Held) { h.MaxAttempts = 1 })
	say()
	if got := r.result("0002"); got.Status != subjects.Failed || got.Error.Class != subjects.ClassData {
		t.Errorf("got %+v", got)
	}
}

// scenario R6, scenario F5: an engine takes a request and never answers.
func TestARunWithoutProgressIsTakenFromItsEngine(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url, func(c *Config) { c.Timings.ProgressTimeout = 150 * time.Millisecond })
	r.bind(request("0001", 50))
	silent := p.next()
	r.bind(request("0002", 50))
	stuck := p.next()
	stuck.tokens(1)
	stuck.tokens(2)
	for _, id := range []string{"0001", "0002"} {
		if got := r.returned(id); got.ReturnReason != returnNoProgress || got.Burnt != 1 {
			t.Errorf("%s: returned %q with %d burnt", id, got.ReturnReason, got.Burnt)
		}
	}
	silent.left()
	stuck.left()
}

func TestTheTimeInTheEnginesQueueIsNoSilence(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url, func(c *Config) {
		c.Engines[0].Slots = 1
		c.Timings.ProgressTimeout = 500 * time.Millisecond
	})
	r.bind(request("0001", 500))
	first := p.next()
	r.bind(request("0002", 500))
	second := p.next()
	// The first one moves for three times the limit; the second one waits behind it.
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for begun := time.Now(); time.Since(begun) < 1500*time.Millisecond; <-tick.C {
		first.tokens(1)
	}
	first.finish("stop")
	second.tokens(7)
	second.finish("stop")
	for _, id := range []string{"0001", "0002"} {
		if got := r.result(id); got.Status != subjects.Completed {
			t.Errorf("%s: got %+v", id, got.Status)
		}
	}
}

func TestADeadlineEndsARunWithWhatCame(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	r.bind(request("0001", 50), func(h *subjects.Held) { h.LeftMS = 300 })
	c := p.next()
	c.tokens(1, 2)
	got := r.result("0001")
	c.left()
	if got.Status != subjects.Expired || !slices.Equal(got.TokenIDs, []uint32{1, 2}) || got.Error.Code != "deadline" {
		t.Errorf("got %+v", got)
	}
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeExpired {
		t.Errorf("marker %+v", m)
	}
	r.bind(request("0002", 50), func(h *subjects.Held) { h.LeftMS = 0 })
	if got := r.result("0002"); got.Status != subjects.Expired {
		t.Errorf("nothing was left: got %+v", got)
	}
	if p.arrivals() != 1 {
		t.Error("what had no time left reached the engine")
	}
}

func TestAnAttemptThatTakesTooLongIsReturned(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	r.bind(request("0001", 50), func(h *subjects.Held) { h.AttemptTimeoutMS = 100 })
	c := p.next()
	c.tokens(1, 2)
	if got := r.returned("0001"); got.ReturnReason != returnTimeout || got.Burnt != 1 || got.LeftMS >= 600_000 {
		t.Errorf("returned %q with %d burnt, %d ms left", got.ReturnReason, got.Burnt, got.LeftMS)
	}
	c.left()
}

// scenario R17: an engine that refuses is left alone, and comes back by itself.
func TestAnEngineThatRefusesIsLeftAloneForAWhile(t *testing.T) {
	r := newRig(t)
	s := simulated(t)
	a := r.agent(s.URL(), func(c *Config) {
		c.Timings.BackoffMin, c.Timings.BackoffMax = time.Hour, time.Hour
	})
	if err := s.Arm(simengine.Fault{Kind: simengine.Fault503, Count: 1}); err != nil {
		t.Fatal(err)
	}
	r.bind(request("0001", 5))
	r.returned("0001")
	r.eventually("it is registered as paused", func() bool {
		e, _ := r.engine("e1")
		return e.State == subjects.EnginePaused
	})
	r.refuses("0002", returnEngineBusy)
	u := a.units[0]
	u.mu.Lock()
	u.resting = time.Now()
	u.mu.Unlock()
	kick(u.kickReg)
	r.eventually("it is ready again", func() bool {
		e, _ := r.engine("e1")
		return e.State == subjects.EngineReady
	})
	r.bind(request("0002", 5), func(h *subjects.Held) { h.Bind = 2 })
	if got := r.result("0002"); got.Status != subjects.Truncated {
		t.Errorf("got %+v", got)
	}
}

// scenario F6: the engine restarts and its cache is gone.
func TestARestartOfTheEngineBeginsANewEpoch(t *testing.T) {
	r := newRig(t)
	s := simulated(t, func(c *simengine.Config) { c.TimeScale = 1 })
	r.agent(s.URL())
	before, _ := r.engine("e1")
	r.bind(request("0001", 2000))
	r.eventually("it runs", func() bool {
		stats, err := s.Stats()
		return err == nil && stats[0].Running == 1
	})
	if err := s.Arm(simengine.Fault{Kind: simengine.FaultRestart}); err != nil {
		t.Fatal(err)
	}
	if got := r.returned("0001"); got.Burnt != 1 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	r.eventually("a new epoch is registered", func() bool {
		e, ok := r.engine("e1")
		return ok && e.Epoch != before.Epoch && e.State == subjects.EngineReady
	})
	// What was bound to the old life goes back; it never ran.
	r.bind(request("0002", 5), func(h *subjects.Held) { h.Epoch = before.Epoch })
	if got := r.returned("0002"); got.ReturnReason != returnEpoch || got.Burnt != 0 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	r.bind(request("0003", 5))
	if got := r.result("0003"); got.Status != subjects.Truncated {
		t.Errorf("got %+v", got)
	}
}

func TestAnEngineThatIsAwayIsRegisteredAsDownAndComesBack(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	state := func(want subjects.EngineState) {
		t.Helper()
		r.eventually("it is "+string(want), func() bool {
			e, ok := r.engine("e1")
			return ok && e.State == want
		})
	}
	p.setDown(503)
	state(subjects.EngineDown)
	r.refuses("0001", returnEngineDown)
	p.setDown(0)
	state(subjects.EngineReady)
}

func TestAnEngineThatStartsLaterIsServedFromThenOn(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	p.setDown(503)
	r.launch(r.node.Conn(t), p.url)
	r.eventually("it is registered as down", func() bool {
		e, ok := r.engine("e1")
		return ok && e.State == subjects.EngineDown
	})
	p.setDown(0)
	r.eventually("it is registered as ready", func() bool {
		e, ok := r.engine("e1")
		return ok && e.State == subjects.EngineReady
	})
	r.bind(request("0001", 5))
	c := p.next()
	c.tokens(1)
	c.finish("stop")
	r.result("0001")
}

// scenario R15: an agent dies; what its checkpoint kept is not made again.
func TestACheckpointOutlivesTheAgent(t *testing.T) {
	r := newRig(t)
	if _, err := r.store.PutSettings(r.ctx(), subjects.Settings{PartialsEvery: 2}, 0); err != nil {
		t.Fatal(err)
	}
	p := newPuppet(t)
	a := r.agent(p.url)
	r.eventually("the settings are known", func() bool { return a.settings.Load().PartialsEvery == 2 })
	r.bind(request("0001", 50))
	c := p.next()
	c.tokens(1, 2)
	c.tokens(3)
	kv, err := r.store.JS().KeyValue(r.ctx(), r.pool.Bucket(subjects.Partials))
	if err != nil {
		t.Fatal(err)
	}
	checkpoint := func(id string) (p subjects.Partial) {
		if v, err := kv.Get(r.ctx(), "e1.j."+id); err == nil {
			_ = json.Unmarshal(v.Value(), &p)
		}
		return p
	}
	r.eventually("a checkpoint is written", func() bool { return len(checkpoint("0001").TokenIDs) == 2 })
	a.kill()
	if err := a.end(t); err == nil {
		t.Error("a killed agent ended well")
	}
	b := r.agent(p.url)
	r.eventually("the settings are known", func() bool { return b.settings.Load().PartialsEvery == 2 })
	got := r.returned("0001")
	back, err := subjects.DecodeRequest(got.Body)
	if err != nil {
		t.Fatal(err)
	}
	if back.Resume == nil || !slices.Equal(back.Resume.TokenIDs, []uint32{1, 2}) || len(back.Resume.Segments) != 1 {
		t.Fatalf("resumes from %+v", back.Resume)
	}
	r.bindBody("j", "0001", got.Body, func(h *subjects.Held) { h.Bind = 2 })
	c = p.next()
	c.tokens(5, 6)
	r.eventually("the next checkpoint has both", func() bool { return slices.Equal(checkpoint("0001").TokenIDs, []uint32{1, 2, 5, 6}) })
	c.finish("stop")
	if got := r.result("0001"); !slices.Equal(got.TokenIDs, []uint32{1, 2, 5, 6}) || len(got.Segments) != 2 {
		t.Errorf("got %v %+v", got.TokenIDs, got.Segments)
	}
	r.eventually("the checkpoint is cleared", func() bool { return checkpoint("0001").Bind == 0 })
}
