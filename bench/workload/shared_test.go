//go:build shared

package workload

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/rollbus/rollbus/bench/shared"
)

func TestThePublicTracesReadWholeWithTheirPublishedHits(t *testing.T) {
	for name, want := range map[string]struct {
		rows, blocks, distinct int
		hits                   float64
	}{
		"mooncake_synthetic_trace.jsonl":       {3993, 121_877, 43_924, 0.640},
		"mooncake_conversation_head2000.jsonl": {2000, 54_559, 38_788, 0.289},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Open(shared.Path(t, "traces", name))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			w, err := ReadTrace(f, TraceOptions{Name: name})
			if err != nil {
				t.Fatal(err)
			}
			blocks, seen := 0, map[uint64]bool{}
			for i := range w.Rollouts {
				for _, n := range Names(nil, 0, padded(w.Rollouts[i].Prompt, w.Rollouts[i].PromptTokens()), BlockTokens) {
					blocks++
					seen[n] = true
				}
			}
			if len(w.Rollouts) != want.rows || blocks != want.blocks || len(seen) != want.distinct {
				t.Errorf("%d rows, %d blocks, %d distinct; published %+v", len(w.Rollouts), blocks, len(seen), want)
			}
			near(t, "hits of an infinite cache", 1-float64(len(seen))/float64(blocks), want.hits, 0.002)
		})
	}
}

func TestReasoningLengthsFollowTheRecordedHistogram(t *testing.T) {
	b, err := os.ReadFile(shared.Path(t, "traces", "servegen_deepseek_r1_length_hist.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Fields map[string]struct {
			Bin  int
			Hist map[string]float64
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	hist := file.Fields["output_tokens"]
	var edges []int
	for e := range hist.Hist {
		n, err := strconv.Atoi(e)
		if err != nil {
			t.Fatal(err)
		}
		edges = append(edges, n)
	}
	slices.Sort(edges)
	rng := rand.New(rand.NewPCG(3, 3))
	drawn := make([]int, 200_000)
	for i := range drawn {
		drawn[i] = ReasoningOutput.Draw(rng)
	}
	slices.Sort(drawn)
	sum, worst := 0.0, 0.0
	for _, e := range edges {
		sum += hist.Hist[strconv.Itoa(e)]
		below, _ := slices.BinarySearch(drawn, e+hist.Bin)
		worst = max(worst, sum-float64(below)/float64(len(drawn)), float64(below)/float64(len(drawn))-sum)
	}
	if worst > 0.035 {
		t.Errorf("the distribution is off by %.3f at its worst", worst)
	}
}
