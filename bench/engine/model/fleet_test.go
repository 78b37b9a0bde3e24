package model_test

import (
	"container/heap"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
)

// BenchmarkFleet is the engines' share of the largest simulation: one op is
// 100,000 rollouts of about 1,000 output tokens, in groups of 8 to 16, over
// 1,000 engines, placed round robin by group, with cache events.
func BenchmarkFleet(b *testing.B) {
	w, err := workload.Reasoning{Seed: 1, Groups: 8400}.Workload()
	if err != nil {
		b.Fatal(err)
	}
	rollouts := w.Rollouts[:100_000]
	b.ReportAllocs()
	for b.Loop() {
		fleet(b, rollouts, 1000)
	}
	b.ReportMetric(float64(len(rollouts))*float64(b.N)/b.Elapsed().Seconds(), "rollouts/s")
}

type due struct {
	at time.Duration
	i  int
}

type dues []due

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].at < d[j].at || d[i].at == d[j].at && d[i].i < d[j].i }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dues) Push(x any) {
	if v, ok := x.(due); ok {
		*d = append(*d, v)
	}
}

func (d *dues) Pop() any {
	old := *d
	last := old[len(old)-1]
	*d = old[:len(old)-1]
	return last
}

func fleet(tb testing.TB, rollouts []workload.Rollout, engines int) (finished int, events int) {
	const block = 64
	ms := make([]*model.Model, engines)
	for i := range ms {
		m, err := model.New(model.Config{BlockTokens: block, MaxRunning: 64, CacheEvents: true})
		if err != nil {
			tb.Fatal(err)
		}
		ms[i] = m
	}
	group, last := -1, ""
	for i := range rollouts {
		r := &rollouts[i]
		if r.Group != last {
			group, last = group+1, r.Group
		}
		q := model.Request{ID: r.ID, PromptTokens: r.PromptTokens(), OutputTokens: r.Output,
			Blocks: workload.Names(nil, 0, r.Prompt, block), Output: r.OutputNames(0, block)}
		if err := ms[group%engines].Add(0, q); err != nil {
			tb.Fatal(err)
		}
	}
	var h dues
	for i, m := range ms {
		if at, ok := m.Next(); ok {
			heap.Push(&h, due{at, i})
		}
	}
	for len(h) > 0 {
		d := h[0]
		heap.Pop(&h)
		for _, e := range ms[d.i].Advance(d.at) {
			events++
			if e.Kind == model.Finished {
				finished++
			}
		}
		if at, ok := ms[d.i].Next(); ok {
			heap.Push(&h, due{at, d.i})
		}
	}
	return finished, events
}

func TestAFleetFinishesWhatItWasGiven(t *testing.T) {
	w, err := workload.Reasoning{Seed: 1, Groups: 40}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	n, events := fleet(t, w.Rollouts, 10)
	again, same := fleet(t, w.Rollouts, 10)
	if n != len(w.Rollouts) || again != n || same != events {
		t.Errorf("%d and %d of %d finished, %d and %d events", n, again, len(w.Rollouts), events, same)
	}
}
