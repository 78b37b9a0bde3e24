package contest

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
)

// Agentic is conversations with tools in an open loop: tasks arrive, each as a
// group of trajectories whose prompts grow turn by turn.
func Agentic(ctx context.Context, cfg Config) (*Report, error) {
	engines, tasks := 8, 24
	if cfg.Quick {
		engines, tasks = 2, 5
	}
	fleet := slices.Repeat([]model.Config{{MaxRunning: 64}}, engines)
	const each = 8
	r, err := sweep(ctx, cfg, served{name: "agentic", units: "trajectories", build: func(seed uint64, rate float64) (*Case, error) {
		w, err := workload.Agentic{Seed: seed, Tasks: tasks, N: each, Arrivals: workload.Arrivals{Rate: rate / each}}.Workload()
		return &Case{Engines: fleet, Work: w, Seed: seed}, err
	}})
	if err == nil {
		r.Workload = fmt.Sprintf("%d tasks of %d trajectories, turns p50 29, p90 56, tools' gaps 86 %% under 1 s and 95 %% under 10 s, a shared system prompt of 2,048 tokens; %d engines of 64 slots", tasks, each, engines)
	}
	return r, err
}

// Trace is a recorded trace in an open loop. Each seed takes another stretch of
// it; arrivals keep their bursts, their speed is scaled to the load.
type Trace struct {
	Name string
	Open func() (io.ReadCloser, error)
	// Episodes says that it is of {group, stream, prompt_len, out_lens, obs_lens}
	// instead of Mooncake's format.
	Episodes bool
	Engines  int // 8
	Rows     int // of a seed; 2,000
	KVTokens int // cache of an engine, tokens; the engine model's
}

// Bench runs it.
func (t Trace) Bench(ctx context.Context, cfg Config) (*Report, error) {
	all, err := t.read()
	if err != nil {
		return nil, err
	}
	if t.Engines == 0 {
		t.Engines = 8
	}
	if t.Rows == 0 {
		t.Rows = 2000
	}
	if t.KVTokens == 0 {
		t.KVTokens = model.Config{}.WithDefaults().KVTokens
	}
	if cfg.Quick {
		t.Engines, t.Rows = 2, 100
	}
	fleet := slices.Repeat([]model.Config{{MaxRunning: 64, KVTokens: t.KVTokens}}, t.Engines)
	units := "requests"
	if slices.ContainsFunc(all.Rollouts, func(r workload.Rollout) bool { return r.Trajectory != "" }) {
		units = "trajectories"
	}
	r, err := sweep(ctx, cfg, served{name: "trace", units: units, build: func(seed uint64, rate float64) (*Case, error) {
		return &Case{Engines: fleet, Work: stretch(all, t.Rows, seed, rate), Seed: seed}, nil
	}})
	if err == nil {
		r.Workload = fmt.Sprintf("%s: %d rollouts, each seed a stretch of %d; %d engines of 64 slots and a cache of %d tokens", t.Name, len(all.Rollouts), min(t.Rows, len(all.Rollouts)), t.Engines, t.KVTokens)
	}
	return r, err
}

func (t Trace) read() (workload.Workload, error) {
	f, err := t.Open()
	if err != nil {
		return workload.Workload{}, err
	}
	defer f.Close()
	var w workload.Workload
	if t.Episodes {
		w, err = workload.ReadEpisodes(f, t.Name, "")
	} else {
		w, err = workload.ReadTrace(f, workload.TraceOptions{Name: t.Name, Chained: true})
	}
	if err == nil && len(w.Rollouts) == 0 {
		err = fmt.Errorf("trace %s: no row in it", t.Name)
	}
	return w, err
}

// stretch takes whole conversations from a place in the trace that the seed
// says, about n rollouts, arriving at so many units a second on average.
func stretch(all workload.Workload, n int, seed uint64, rate float64) workload.Workload {
	chains := conversations(all)
	from := 0
	if len(all.Rollouts) > n {
		from = int(seed * 0x9e3779b97f4a7c15 >> 33 % uint64(len(chains)))
	}
	out := workload.Workload{Name: all.Name}
	units, span, last := 0, time.Duration(0), time.Duration(-1)
	for k := 0; k < len(chains) && len(out.Rollouts) < n; k++ {
		i := (from + k) % len(chains)
		at := all.Rollouts[chains[i][0]].At
		if last >= 0 && at > last {
			span += at - last // going round, it goes on where it began
		}
		last = at
		for _, x := range chains[i] {
			r := all.Rollouts[x]
			r.At, r.Step = span, 0
			out.Rollouts = append(out.Rollouts, r)
		}
		units++
	}
	if span == 0 && rate > 0 { // a trace without arrival times: evenly
		nth := -1
		for i := range out.Rollouts {
			if out.Rollouts[i].After == "" {
				nth++
			}
			out.Rollouts[i].At = time.Duration(float64(nth) / rate * float64(time.Second))
		}
		return out
	}
	for i := range out.Rollouts {
		f := 0.0
		if rate > 0 {
			f = float64(units) / rate / span.Seconds()
		}
		out.Rollouts[i].At = time.Duration(float64(out.Rollouts[i].At) * f)
	}
	return out
}

// conversations are the rollouts' numbers by trajectory, in order of their first turn.
func conversations(w workload.Workload) [][]int {
	var out [][]int
	at := map[string]int{}
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		k := r.Job + "." + r.Trajectory
		if c, ok := at[k]; ok && r.Trajectory != "" && r.Turn > 1 {
			out[c] = append(out[c], i)
			continue
		}
		at[k] = len(out)
		out = append(out, []int{i})
	}
	return out
}
