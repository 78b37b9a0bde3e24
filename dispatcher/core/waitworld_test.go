package core_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Long prompts that few engines hold, more requests than slots, engines that die,
// reports and cache events that are lost: some wait for their holder, nobody longer
// than wait_max after its acceptance, and everything is answered once.
func TestWaitingForPrefixesInAWholePoolLosesNothingAndEnds(t *testing.T) {
	const most, block, rollouts = 3, 64, 120
	waits := 0
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 7))
		w := sim.New(sim.Options{Seed: seed, Telemetry: sim.Telemetry{LoadLoss: 0.05, CacheLoss: 0.02, CacheDelay: 50 * time.Millisecond},
			Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce, Prefetch: -1,
				Knobs: map[string]float64{"wait_max": most, "escape_floor": 60}}})
		work, accepted := map[string]sim.Work{}, map[string]time.Duration{}
		w.Work = func(key string) sim.Work { return work[key] }
		for d := range 2 {
			w.AddDispatcher(fmt.Sprint("d", d)).Log = func(_ core.Event, _ time.Duration, out []core.Effect) {
				for _, e := range out {
					d, ok := e.(core.Decision)
					if !ok || d.WaitFor == "" {
						continue
					}
					waits++
					if until := w.Now - accepted[d.Rollout] + time.Duration(d.WaitMS)*time.Millisecond; until > most*time.Second+50*time.Millisecond {
						t.Errorf("seed %d: rollout %s is to wait until %v after its acceptance, wait_max is %d s", seed, d.Rollout, until, most)
					}
				}
			}
		}
		for i := range 3 {
			if err := w.AddNode(fmt.Sprint("e", i), 1, 0).SetModel(model.Config{MaxRunning: 2, KVTokens: 1 << 18, BlockTokens: block}); err != nil {
				t.Fatal(err)
			}
		}
		w.Run(time.Second, nil)
		for i := range rollouts {
			// Six at a time of one prefix: its holder is full, and soon free again.
			hot := uint64(i/6%4 + 1)
			x := sim.Work{PromptTokens: 400 * block, OutputTokens: 10 + rng.IntN(30)}
			for b := range uint64(399) {
				x.Blocks = append(x.Blocks, hot<<32+b)
			}
			x.Blocks = append(x.Blocks, uint64(i)<<40)
			f := subjects.Facts{Job: "j", ID: fmt.Sprintf("%04d", i), Reader: "main", Lane: subjects.LaneNormal, Model: "m", BlockTokens: block,
				PromptTokens: x.PromptTokens, MaxTokens: x.OutputTokens, Blocks: x.Blocks, MaxAttempts: 20}
			work[f.Key()] = x
			w.After(time.Duration(i/6)*time.Second+time.Duration(rng.IntN(50))*time.Millisecond, func() {
				accepted[f.Key()] = w.Now
				w.Bus.Submit(f)
			})
		}
		w.After(6*time.Second, w.Nodes["e1"].Kill)
		w.After(50*time.Second, w.Nodes["e1"].Start)
		w.Run(21*time.Second, nil)
		w.Run(10*time.Minute, w.AllAnswered)
		for _, p := range w.Problems() {
			t.Errorf("seed %d: %s", seed, p)
		}
	}
	if waits < 10 {
		t.Errorf("only %d requests waited for a prefix: the test tests nothing", waits)
	}
}
