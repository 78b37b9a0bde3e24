package sim_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/subjects"
)

// BenchmarkAThousandEngines is 100,000 rollouts of 1,000 output tokens on
// average, given at once to one core and 1,000 engine models that tell their
// load on every change. It should take less than 60 CPU seconds.
func BenchmarkAThousandEngines(b *testing.B) {
	const engines, rollouts = 1_000, 100_000
	for b.Loop() {
		begun := cpu(b)
		w := sim.New(sim.Options{Seed: 1, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce}})
		rng := rand.New(rand.NewPCG(1, 1))
		out := map[string]int{}
		w.Work = func(key string) sim.Work { return sim.Work{PromptTokens: 300, OutputTokens: out[key]} }
		w.AddDispatcher("d0")
		for i := range engines {
			n := w.AddNode(fmt.Sprintf("e%03d", i), 1, 0)
			if err := n.SetModel(model.Config{MaxRunning: 32}); err != nil {
				b.Fatal(err)
			}
		}
		w.Run(time.Second, nil)
		for i := range rollouts {
			f := subjects.Facts{Job: "j", ID: fmt.Sprint(i), Lane: subjects.LaneNormal, PromptTokens: 300, MaxTokens: 4000}
			out[f.Key()] = 1 + int(rng.ExpFloat64()*1000)
			w.Bus.Submit(f)
		}
		if !w.Run(time.Hour, w.AllAnswered) {
			b.Fatalf("%d of %d answered", len(w.Answers), len(w.Accepted))
		}
		took := cpu(b) - begun
		b.ReportMetric(took.Seconds(), "CPU-s")
		b.ReportMetric(w.Now.Seconds()/took.Seconds(), "virtual-s/CPU-s")
		b.Logf("%d engines, %d rollouts, %v of virtual time: %.1f CPU seconds", engines, rollouts, w.Now.Round(time.Second), took.Seconds())
	}
}

// cpu is what the process has used.
func cpu(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
