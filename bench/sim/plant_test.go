package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/subjects"
)

// troubled is a run with everything in it: four dispatchers, engines that die,
// come back and are cut off, and attempts that come back to the same engine.
func troubled(seed uint64, plant sim.Plant) []string {
	w := sim.New(sim.Options{Seed: seed, Plant: plant, WatchDelay: 5 * time.Millisecond, SlowWrites: 0.02})
	for i := range 4 {
		w.AddDispatcher(fmt.Sprintf("d%d", i))
	}
	var engines []*sim.Node
	for i := range 1 + seed%2 {
		engines = append(engines, w.AddNode(fmt.Sprintf("e%d", i), 4, 0))
	}
	w.Run(50*time.Millisecond, nil)
	for i := range 40 {
		w.Bus.Submit(subjects.Facts{Job: "j", ID: fmt.Sprintf("%04d", i), Reader: "main", Lane: subjects.LaneNormal,
			Model: "m", PromptTokens: 100, MaxTokens: 20 + i*5, MaxAttempts: 50})
	}
	for k, n := range engines {
		at := time.Duration(100+(seed*37+uint64(k)*211)%900) * time.Millisecond
		if (seed+uint64(k))%2 == 0 {
			w.After(at, n.Kill)
			w.After(at+5*time.Second, n.Start)
		} else {
			w.After(at, n.Cut)
			w.After(at+time.Duration(35+seed%5)*time.Second, n.Heal)
		}
	}
	for i := range 20 {
		w.After(time.Duration(i)*300*time.Millisecond, func() {
			for _, n := range engines {
				if r := n.Running(); len(r) > 0 {
					n.Return(r[i%len(r)], "failed", 1)
				}
			}
		})
	}
	w.Run(10*time.Minute, w.AllAnswered)
	w.Run(time.Minute, nil) // what comes late comes now
	return w.Problems()
}

func TestTroubleBreaksNoInvariant(t *testing.T) {
	for seed := range uint64(100) {
		for _, p := range troubled(seed, "") {
			t.Fatalf("seed %d: %s", seed, p)
		}
	}
}

// A check that finds nothing must be known to bite: each planted bug is found.
func TestEveryPlantedBugIsFoundWithin200Seeds(t *testing.T) {
	for _, plant := range []sim.Plant{sim.PlantNoGuard, sim.PlantLateRelease, sim.PlantNoRegister} {
		found := false
		for seed := range uint64(200) {
			if p := troubled(seed, plant); len(p) > 0 {
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

func TestOneSeedGivesOneRun(t *testing.T) {
	run := func() string {
		w := sim.New(sim.Options{Seed: 5})
		w.AddDispatcher("d0")
		w.AddDispatcher("d1")
		for i := range 3 {
			w.AddNode(fmt.Sprintf("e%d", i), 2, 0)
		}
		for i := range 30 {
			w.Bus.Submit(subjects.Facts{Job: "j", ID: fmt.Sprint(i), Lane: subjects.LaneNormal, PromptTokens: 10, MaxTokens: 30})
		}
		w.Run(time.Minute, w.AllAnswered)
		return fmt.Sprint(w.Decisions, w.Now, w.RanOn)
	}
	if a, b := run(), run(); a != b {
		t.Errorf("two runs of one seed differ:\n%s\n%s", a, b)
	}
}
