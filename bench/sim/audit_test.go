package sim_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/subjects"
)

// conversing is a run of engines with small caches, whose reports are late,
// lost and kept back for a while, under a policy that counts on them.
func conversing(t testing.TB, seed uint64, plant sim.Plant) []string {
	t.Helper()
	const block = subjects.DefaultBlockTokens
	w := sim.New(sim.Options{Seed: seed, Plant: plant, Audit: true, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce},
		Telemetry: sim.Telemetry{CacheLoss: 0.1, CacheDelay: 50 * time.Millisecond, LoadLoss: 0.05}})
	rng := rand.New(rand.NewPCG(seed, 1))
	work := map[string]sim.Work{}
	w.Work = func(key string) sim.Work { return work[key] }
	for i := range 2 {
		w.AddDispatcher(fmt.Sprintf("d%d", i))
	}
	var nodes []*sim.Node
	for i := range 3 {
		n := w.AddNode(fmt.Sprintf("e%d", i), 1, 0)
		if err := n.SetModel(model.Config{MaxRunning: 8, KVTokens: 14_000, BlockTokens: block}); err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	w.Run(time.Second, nil)
	for i := range 150 {
		id := fmt.Sprintf("%04d", i)
		prompt := []workload.Segment{{ID: uint64(rng.IntN(8)), Tokens: block * (4 + rng.IntN(40))}, {ID: uint64(1000 + i), Tokens: 100}}
		x := sim.Work{OutputTokens: 20 + rng.IntN(200), Blocks: workload.Names(nil, 1, prompt, block)}
		x.PromptTokens = prompt[0].Tokens + prompt[1].Tokens
		work["j."+id] = x
		w.After(time.Duration(rng.IntN(20_000))*time.Millisecond, func() {
			w.Bus.Submit(subjects.Facts{Job: "j", ID: id, Reader: "main", Lane: subjects.LaneNormal, Model: "m", Namespace: 1, BlockTokens: block,
				PromptTokens: x.PromptTokens, MaxTokens: x.OutputTokens, Blocks: x.Blocks, MaxAttempts: 20})
		})
	}
	for k := range 4 {
		n := nodes[rng.IntN(len(nodes))]
		w.After(time.Duration(2+4*k)*time.Second, func() { n.Mute = true })
		w.After(time.Duration(5+4*k)*time.Second, func() { n.Mute = false })
	}
	w.After(9*time.Second, nodes[0].Kill)
	w.After(12*time.Second, nodes[0].Start)
	w.Run(22*time.Second, nil)
	w.Run(10*time.Minute, w.AllAnswered)
	w.Run(time.Minute, nil) // what comes late comes now
	return w.Problems()
}

func TestDecisionsAreTrueToWhatEnginesTold(t *testing.T) {
	for seed := range uint64(25) {
		for _, p := range conversing(t, seed, "") {
			t.Fatalf("seed %d: %s", seed, p)
		}
	}
}

// Also these checks must be known to bite.
func TestEveryBugPlantedInWhatTheCoreIsToldIsFoundWithin200Seeds(t *testing.T) {
	for _, plant := range []sim.Plant{sim.PlantCounted, sim.PlantNoBarrier, sim.PlantMixedBasis} {
		found := false
		for seed := range uint64(200) {
			if p := conversing(t, seed, plant); len(p) > 0 {
				t.Logf("%s: seed %d: %s", plant, seed, p[0])
				found = true
				break
			}
		}
		if !found {
			t.Errorf("planted bug %q was not found in 200 seeds", plant)
		}
	}
}
