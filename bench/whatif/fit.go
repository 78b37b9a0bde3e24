package whatif

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/subjects"
)

const (
	fitRuns = 18   // of the model, at most
	fitMost = 4000 // rollouts of one
	// fitWide is how far the first steps go, as a logarithm: half and double.
	fitWide  = 0.69
	fitClose = 0.02 // a distance at which the search ends: 2 % a measure
)

// fit finds the engine's speed: how many times as slow as the model's default
// decoding and prefilling are, so that attempts under the recorded settings take
// as long as they were recorded to. A pattern search over the two; each step
// runs the model.
func (r *runner) fit(ctx context.Context, s subjects.Settings) (model.Profile, error) {
	f := &fitter{r: &runner{t: r.t, q: r.q, closed: r.closed, total: r.total, limit: fitMost}, s: s, tried: map[[2]float64]float64{}}
	recorded := r.t.recorded()
	if len(recorded) > fitMost {
		recorded = recorded[:fitMost]
	}
	f.halves = halves(recorded)
	f.want = f.measure(recorded)
	best := [2]float64{0, 0}
	// The whole first: a speed that is far off queues where nothing queued.
	for range 3 {
		if _, err := f.distance(ctx, best); err != nil {
			return model.Profile{}, err
		}
		by := clampLog(math.Log(over(f.want[0], f.last[0])))
		if math.Abs(by) < 0.1 {
			break
		}
		best[0], best[1] = best[0]+by, best[1]+by
	}
	least, err := f.distance(ctx, best)
	if err != nil {
		return model.Profile{}, err
	}
	for step := fitWide; f.runs < fitRuns-4 && step > 0.04 && least > fitClose; {
		better := false
		for _, d := range [][2]float64{{step, 0}, {-step, 0}, {0, step}, {0, -step}} {
			at := [2]float64{best[0] + d[0], best[1] + d[1]}
			got, err := f.distance(ctx, at)
			if err != nil {
				return model.Profile{}, err
			}
			if got < least {
				least, best, better = got, at, true
				break
			}
		}
		if !better {
			step /= 2
		}
	}
	r.done = f.r.done
	return scale(model.H100x8B(), math.Exp(best[0]), math.Exp(best[1])), nil
}

func clampLog(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return min(3, max(-3, v))
}

// fitter runs the model and tells how far from the recorded run it is.
type fitter struct {
	r      *runner
	s      subjects.Settings
	want   []float64
	last   []float64
	halves [2]map[string]bool // rollouts with more prompt to compute, with more output, than the median
	tried  map[[2]float64]float64
	runs   int
}

// halves are told apart by what was recorded, in every run alike.
func halves(all []served) (out [2]map[string]bool) {
	value := [2]func(*served) int{
		func(s *served) int { return s.prompt - max(0, s.cached) },
		func(s *served) int { return s.tokens },
	}
	for k := range out {
		out[k] = map[string]bool{}
		v := make([]int, 0, len(all))
		for i := range all {
			v = append(v, value[k](&all[i]))
		}
		slices.Sort(v)
		mid := v[len(v)/2]
		for i := range all {
			if value[k](&all[i]) > mid {
				out[k][all[i].key] = true
			}
		}
	}
	return out
}

// measure is what should be alike: service times as a whole, their quantiles,
// those of the halves, latencies, and the time of the whole run.
func (f *fitter) measure(all []served) []float64 {
	var service, latency []float64
	var sums, counts [4]float64
	end := 0.0
	for i := range all {
		s := &all[i]
		if !s.completed {
			continue
		}
		t := s.ended - s.bound
		service, latency = append(service, t), append(latency, s.ended-s.at)
		end = max(end, s.ended)
		for k := range 2 {
			h := 2 * k
			if f.halves[k][s.key] {
				h++
			}
			sums[h] += t
			counts[h]++
		}
	}
	slices.Sort(service)
	slices.Sort(latency)
	out := []float64{mean(service), end, at(latency, 0.5), at(latency, 0.9)}
	for _, q := range []float64{0.1, 0.25, 0.5, 0.75, 0.9} {
		out = append(out, at(service, q))
	}
	for h := range sums {
		out = append(out, over(sums[h], counts[h]))
	}
	return out
}

// distance is the mean of the measures' relative distances, as logarithms.
func (f *fitter) distance(ctx context.Context, x [2]float64) (float64, error) {
	if d, ok := f.tried[x]; ok {
		return d, nil
	}
	f.runs++
	m, err := f.r.run(ctx, f.s, len(f.r.t.Engines), scale(model.H100x8B(), math.Exp(x[0]), math.Exp(x[1])), 99, "fitting the engine model")
	if err != nil {
		return 0, err
	}
	f.last = f.measure(m.served)
	sum, n := 0.0, 0.0
	for i, want := range f.want {
		if want > 0 && f.last[i] > 0 {
			sum += min(3, math.Abs(math.Log(f.last[i]/want)))
			n++
		}
	}
	d := over(sum, n)
	f.tried[x] = d
	return d, nil
}

// scale makes a profile that many times as slow, within what a model takes.
func scale(p model.Profile, decode, prefill float64) model.Profile {
	times := func(v, f, most float64) float64 { return min(most, max(1, v*f)) }
	p.Name = "fitted"
	p.Step = time.Duration(times(float64(p.Step), decode, 10e9))
	p.Sequence = time.Duration(times(float64(p.Sequence), decode, 1e6))
	p.KVReadPS = int64(times(float64(p.KVReadPS), decode, 1e6))
	p.PromptToken = time.Duration(times(float64(p.PromptToken), prefill, 1e9))
	p.PairPS = int64(times(float64(p.PairPS), prefill, 1e5))
	return p
}
