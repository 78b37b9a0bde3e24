package workeragent

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// slowAbort is an adapter whose engine takes its time to let go of a run.
type slowAbort struct {
	engine.Adapter
	asked chan string
	let   chan struct{}
}

func (s *slowAbort) Abort(ctx context.Context, run engine.Run) error {
	s.asked <- run.ID
	select {
	case <-s.let:
	case <-ctx.Done():
	}
	return nil
}

func TestStopFinishesWhatRunsAndTakesNothingNew(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	r.bind(request("0001", 50))
	c := p.next()
	stopped := make(chan error, 1)
	go func() { stopped <- a.Stop(r.ctx()) }()
	r.eventually("it is registered as draining", func() bool {
		e, _ := r.engine("e1")
		return e.State == subjects.EngineDraining
	})
	r.bind(request("0002", 50))
	if got := r.returned("0002"); got.ReturnReason != returnDraining || got.Burnt != 0 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	if a.Ready() == nil {
		t.Error("an agent that stops says that it is ready")
	}
	c.tokens(1)
	c.finish("stop")
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if err := a.end(t); err != nil {
		t.Errorf("Run ended with %v", err)
	}
	if got := r.result("0001"); got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
	r.released("0001")
	if _, ok := r.engine("e1"); ok {
		t.Error("the registration is still there")
	}
	if err := a.Stop(r.ctx()); err != nil {
		t.Errorf("stopped again: %v", err)
	}
}

func TestASecondStopGivesTheRestBackWithItsOutput(t *testing.T) {
	for name, hurry := range map[string]func(*agentRun, context.CancelFunc){
		"a second Stop":             func(a *agentRun, _ context.CancelFunc) { go func() { _ = a.Stop(context.Background()) }() },
		"the end of Stop's context": func(_ *agentRun, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			p := newPuppet(t)
			a := r.agent(p.url)
			r.bind(request("0001", 50), func(h *subjects.Held) { h.Burnt = 1 })
			c := p.next()
			c.tokens(1, 2)
			a.moved(r, "0001")
			ctx, cancel := context.WithCancel(r.ctx())
			defer cancel()
			stopped := make(chan error, 1)
			go func() { stopped <- a.Stop(ctx) }()
			<-a.stopping
			hurry(a, cancel)
			if err := <-stopped; err != nil {
				t.Error(err)
			}
			c.left()
			got := r.returned("0001")
			back, err := subjects.DecodeRequest(got.Body)
			if err != nil {
				t.Fatal(err)
			}
			if got.ReturnReason != returnDraining || got.Burnt != 1 || back.Resume == nil || !slices.Equal(back.Resume.TokenIDs, []uint32{1, 2}) {
				t.Errorf("returned %q with %d burnt, resumes from %+v", got.ReturnReason, got.Burnt, back.Resume)
			}
		})
	}
}

func TestStopGivesUpWaitingAfterItsTime(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url, func(c *Config) { c.Timings.DrainTimeout = 50 * time.Millisecond })
	r.bind(request("0001", 50))
	p.next()
	if err := a.Stop(r.ctx()); err != nil {
		t.Error(err)
	}
	if got := r.returned("0001"); got.ReturnReason != returnDraining {
		t.Errorf("returned %q", got.ReturnReason)
	}
}

func TestStopSaysWhatItLeavesBehindWhenNATSIsAway(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url, func(c *Config) {
		c.Timings.DrainTimeout, c.Timings.HandBack = 50*time.Millisecond, 300*time.Millisecond
	})
	r.bind(request("0001", 50))
	p.next()
	r.node.Stop()
	err := a.Stop(r.ctx())
	if err == nil {
		t.Error("it says that nothing is left")
	}
	if err := a.end(t); err != nil {
		t.Errorf("Run ended with %v", err)
	}
}

func TestAnAgentThatNeverRanStopsAtOnce(t *testing.T) {
	r := newRig(t)
	ad, err := engine.NewOpenAI(engine.OpenAIConfig{URL: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(Config{Pool: "p", Engines: []EngineConfig{{Name: "e1", Adapter: ad}}}, r.nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Stop(r.ctx()); err != nil {
		t.Error(err)
	}
	if a.Ready() == nil {
		t.Error("it says that it is ready")
	}
}
