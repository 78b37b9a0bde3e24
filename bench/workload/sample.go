package workload

import (
	"bytes"
	_ "embed"
	"io"
	"slices"
	"time"
)

// sample is written by TestTheSampleIsWhatItsGeneratorMakes with -update.
//
//go:embed sample.jsonl
var sample []byte

// Sample is the trace that the demo runs: 240 rollouts of two jobs in Mooncake's
// format with our keys, over about a minute. Job math has 10 groups of 8
// samples, job agent 20 trajectories of 8 turns in groups of 4. It is made by
// generateSample and copied from nowhere.
func Sample() io.Reader { return bytes.NewReader(sample) }

// generateSample makes the sample's rows.
func generateSample() ([]Row, error) {
	reason, err := Reasoning{Seed: 1, Job: "math", Groups: 10, NMin: 8, NMax: 8, System: 512,
		Prompt:   Dist{Median: 500, Sigma: 0.4, Min: 128, Max: 1_200},
		Output:   Dist{Median: 160, Sigma: 0.7, TailShare: 0.04, TailMed: 900, TailSigma: 0.3, Min: 16, Max: 1_500},
		Arrivals: Arrivals{Rate: 0.2}}.Workload()
	if err != nil {
		return nil, err
	}
	agent, err := Agentic{Seed: 1, Job: "agent", Tasks: 5, N: 4, System: 1_024, Turns: Fixed(8),
		Task:        Dist{Median: 500, Sigma: 0.3, Min: 128, Max: 1_024},
		Output:      Dist{Median: 90, Sigma: 0.5, Min: 8, Max: 400},
		Observation: Dist{Median: 180, Sigma: 0.8, Min: 8, Max: 900},
		Arrivals:    Arrivals{Rate: 0.25}}.Workload()
	if err != nil {
		return nil, err
	}
	w := Workload{Rollouts: slices.Concat(reason.Rollouts, agent.Rollouts)}
	for i := range w.Rollouts {
		w.Rollouts[i].Step = 0
		w.Rollouts[i].Gap = min(w.Rollouts[i].Gap, 2*time.Second)
	}
	const perToken = 10 * time.Millisecond
	rows := w.ToRows(perToken)
	for i := range slices.Backward(rows) {
		rows[i].Timestamp -= rows[0].Timestamp
	}
	return rows, nil
}
