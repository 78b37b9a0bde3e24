package whatif

import (
	"slices"

	"github.com/rollbus/rollbus/subjects"
)

// served is a rollout that was answered, recorded or modelled. Times are seconds
// since the first submission.
type served struct {
	key                    string
	at, bound, ended       float64
	prompt, cached, tokens int // cached < 0 = unknown
	engine                 string
	trajectory             string // with its job; "" = a single turn
	completed              bool
}

// Name of a figure, with its unit and which way is better.
type Name struct {
	Key    string
	What   string
	Unit   string
	Better int // +1 more, -1 less
}

// Names are the figures in the order in which they are told.
func Names() []Name {
	return []Name{
		{"hit_rate", "prompt tokens found in a cache", "share", 1},
		{"queue_mean_s", "submitted to bound, mean", "s", -1},
		{"queue_p90_s", "submitted to bound, 90th percentile", "s", -1},
		{"latency_p50_s", "submitted to answered, median", "s", -1},
		{"latency_p90_s", "submitted to answered, 90th percentile", "s", -1},
		{"trajectory_mean_s", "first turn submitted to last one answered, mean", "s", -1},
		{"trajectory_p90_s", "first turn submitted to last one answered, 90th percentile", "s", -1},
		{"output_tok_s", "output tokens a second, first submission to last answer", "tokens/s", 1},
		{"makespan_s", "first submission to last answer", "s", -1},
		{"imbalance", "tokens of the engine that had most over those of the average engine", "ratio", -1},
	}
}

// Figures by key.
type Figures map[string]float64

// figures of what a fleet of that many engines served.
func figures(all []served, engines int) Figures {
	var prompt, cached, tokens int
	var queue, latency, trips []float64
	load := map[string]float64{}
	type trip struct{ from, to float64 }
	begun := map[string]*trip{}
	end, total := 0.0, 0.0
	for i := range all {
		s := &all[i]
		if s.cached >= 0 {
			prompt, cached = prompt+s.prompt, cached+s.cached
		}
		tokens += s.tokens
		queue = append(queue, s.bound-s.at)
		latency = append(latency, s.ended-s.at)
		load[s.engine] += float64(s.prompt + s.tokens)
		total += float64(s.prompt + s.tokens)
		end = max(end, s.ended)
		if s.trajectory == "" {
			trips = append(trips, s.ended-s.at)
			continue
		}
		if t := begun[s.trajectory]; t != nil {
			t.from, t.to = min(t.from, s.at), max(t.to, s.ended)
		} else {
			begun[s.trajectory] = &trip{s.at, s.ended}
		}
	}
	for _, t := range begun {
		trips = append(trips, t.to-t.from)
	}
	most := 0.0
	for _, v := range load {
		most = max(most, v)
	}
	for _, v := range [][]float64{queue, latency, trips} {
		slices.Sort(v)
	}
	return Figures{
		"hit_rate": over(float64(cached), float64(prompt)), "queue_mean_s": mean(queue), "queue_p90_s": at(queue, 0.9),
		"latency_p50_s": at(latency, 0.5), "latency_p90_s": at(latency, 0.9),
		"trajectory_mean_s": mean(trips), "trajectory_p90_s": at(trips, 0.9),
		"output_tok_s": over(float64(tokens), end), "makespan_s": end, "imbalance": over(most*float64(engines), total),
	}
}

func over(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func mean(v []float64) float64 {
	s := 0.0
	for _, x := range v {
		s += x
	}
	return over(s, float64(len(v)))
}

// at is the nearest rank of sorted values.
func at(sorted []float64, q float64) (v float64) {
	if n := len(sorted); n > 0 {
		v = sorted[min(n-1, int(q*float64(n)))]
	}
	return v
}

// recorded is what the journals say of each rollout.
func (t *Traffic) recorded() []served {
	first := t.Rollouts[0].Submitted
	s := func(ns int64) float64 { return float64(ns-first) / 1e9 }
	out := make([]served, 0, len(t.Rollouts))
	for i := range t.Rollouts {
		x := &t.Rollouts[i]
		v := served{key: x.Facts.Key(), at: 0, bound: s(x.Bound), ended: s(x.Answered), prompt: x.Facts.PromptTokens, cached: x.Cached,
			tokens: x.Tokens, engine: x.Engine, completed: x.Status == subjects.Completed}
		v.at = s(x.Submitted)
		if x.Facts.Trajectory != "" {
			v.trajectory = x.Facts.Job + "." + x.Facts.Trajectory
		}
		out = append(out, v)
	}
	return out
}

func abs(v float64) float64 { return max(v, -v) }
