package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/subjects"
)

func BenchmarkFleetOf1000(b *testing.B) {
	for b.Loop() {
		w := sim.New(sim.Options{Seed: 1})
		w.AddDispatcher("d0")
		for i := range 1000 {
			w.AddNode(fmt.Sprintf("e%03d", i), 16, 0)
		}
		w.Run(50*time.Millisecond, nil)
		for i := range 20000 {
			w.Bus.Submit(subjects.Facts{Job: "j", ID: fmt.Sprint(i), Lane: subjects.LaneNormal, PromptTokens: 100, MaxTokens: 500 + i%1000})
		}
		if !w.Run(10*time.Minute, w.AllAnswered) {
			b.Fatalf("%d of %d answered", len(w.Answers), len(w.Accepted))
		}
	}
}
