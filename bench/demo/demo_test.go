package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/demo/local"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// work of two jobs with the same ids: groups of four samples of one prompt,
// and a chain of turns in each.
func work(n int) workload.Workload {
	w := workload.Workload{Name: "generated"}
	for i := range n {
		job, group := []string{"math", "code"}[i%2], i/8
		r := workload.Rollout{
			Job: job, ID: fmt.Sprintf("%04d", i/2), At: time.Duration(i) * 20 * time.Millisecond, Output: 16 + i%5,
			Prompt: []workload.Segment{{ID: uint64(2*group + i%2), Tokens: 256}},
			Group:  fmt.Sprintf("g%d", group), Index: i / 2 % 4, Size: 4,
		}
		if i >= 8 && r.Index == 0 { // a later turn: the group's prompt, then what the turn before said
			before := &w.Rollouts[i-8]
			r.Group, r.Size = "", 0
			r.Trajectory, r.Turn, r.After = "t"+job, group+1, before.ID
			r.Prompt = append(r.Prompt, before.OutputSegment())
		}
		w.Rollouts = append(w.Rollouts, r)
	}
	return w
}

func config(n, engines, dispatchers int) Config {
	cfg := Config{
		Workload: work(n), Speed: 4,
		Local: local.Config{
			Pool: "demo", Dispatchers: dispatchers, Layout: subjects.Layout{Budget: 256 << 20},
			Settings: subjects.Settings{SchemaVersion: subjects.SchemaVersion, Policy: "kv_tokens", Mode: subjects.ModeEnforce},
		},
	}
	for i := range engines {
		cfg.Local.Engines = append(cfg.Local.Engines, local.Engine{Name: fmt.Sprintf("e%d", i+1), Sim: &simengine.Config{TimeScale: 4}})
	}
	return cfg
}

// scenario P6
func TestADemoAnswersEverythingOnceAndItsCountsAgree(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	cfg := config(160, 3, 2)
	var last Progress
	cfg.Progress = func(p Progress) { last = p }
	r, err := Run(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !r.OK() || r.Submitted != 160 || r.Completed != 160 {
		t.Errorf("report: %+v", r)
	}
	rollouts, output := 0, int64(0)
	for _, e := range r.Engines {
		rollouts += e.Rollouts
		output += e.CompletionTokens
	}
	wantIn, wantOut := int64(0), int64(0)
	for i := range cfg.Workload.Rollouts {
		wantIn += int64(cfg.Workload.Rollouts[i].PromptTokens())
		wantOut += int64(cfg.Workload.Rollouts[i].Output)
	}
	if rollouts != r.Completed || output != wantOut || r.CompletionTokens != wantOut || r.PromptTokens != wantIn {
		t.Errorf("engines ran %d rollouts with %d output tokens, the report says %d and %d; asked for %d output and %d prompt tokens, got %d",
			rollouts, output, r.Completed, r.CompletionTokens, wantOut, wantIn, r.PromptTokens)
	}
	if len(r.Engines) != 3 {
		t.Errorf("only %d of 3 engines ran anything: %+v", len(r.Engines), r.Engines)
	}
	if r.CachedPromptFraction <= 0 || r.CachedPromptFraction >= 1 {
		t.Errorf("cached fraction %v: groups share their prompt, and each prompt is new once", r.CachedPromptFraction)
	}
	if r.DispatchP50MS <= 0 || r.DispatchP99MS < r.DispatchP50MS {
		t.Errorf("dispatch p50 %v ms, p99 %v ms", r.DispatchP50MS, r.DispatchP99MS)
	}
	if last.Total != 160 || last.Submitted == 0 {
		t.Errorf("progress ended at %+v", last)
	}
}

func TestAnInterruptedDemoStopsEverythingAndLeavesNothing(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	stop := errors.New("told to stop")
	cfg := config(400, 2, 1)
	cfg.Progress = func(p Progress) {
		if p.Answered > 20 {
			cancel(stop)
		}
	}
	begin := time.Now()
	r, err := Run(ctx, cfg)
	if !errors.Is(err, stop) {
		t.Errorf("want the cause of the stop, got %v", err)
	}
	if r.Submitted == 0 || len(r.Violations) != 0 || r.Lost != 0 || !r.Interrupted || r.Completed >= 400 {
		t.Errorf("what happened before the stop must be reported and is no violation: %+v", r)
	}
	if d := time.Since(begin); d > 20*time.Second {
		t.Errorf("the stop took %v", d)
	}
	if left, _ := filepath.Glob(filepath.Join(tmp, "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := os.Stat(tmp); err != nil {
		t.Error(err)
	}
}

// scenario R1
func TestADemoSurvivesAnEngineThatDies(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	cfg := config(200, 3, 1)
	var pool *local.Pool
	cfg.Started = func(p *local.Pool) { pool = p }
	died := false
	cfg.Progress = func(p Progress) {
		if !died && p.Answered > 20 {
			died = true
			pool.Sims[0].Die()
		}
	}
	r, err := Run(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.Lost != 0 || r.Duplicated != 0 || len(r.Violations) != 0 || r.Completed+r.Failed != 200 {
		t.Errorf("report: %+v", r)
	}
	if !died {
		t.Error("the engine did not die: the test shows nothing")
	}
}

func TestAnOverloadedPoolBindsNoEngineBeyondItsWindow(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	const slots = 4
	cfg := config(240, 3, 3)
	cfg.Speed = 1000 // all at once
	for i := range cfg.Local.Engines {
		cfg.Local.Engines[i].Sim = &simengine.Config{TimeScale: 20, Engine: model.Config{MaxRunning: slots}}
	}
	r, err := Run(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !r.OK() || r.Completed != 240 {
		t.Errorf("report: %+v", r)
	}
	for _, e := range r.Engines {
		if e.PeakRequests > slots+subjects.DefaultPrefetch || e.PeakRequests < slots {
			t.Errorf("%s held %d requests at once: its window is %d slots and %d more, and there was always work", e.Name, e.PeakRequests, slots, subjects.DefaultPrefetch)
		}
	}
}

func TestADemoWithoutArrivalsIsRefused(t *testing.T) {
	if _, err := Run(t.Context(), Config{}); err == nil {
		t.Error("accepted")
	}
}
