package contest

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/workload"
)

// Done is an answered rollout. Times count from the first release.
type Done struct {
	Rollout   *workload.Rollout
	Engine    int
	At        time.Duration // released
	First     time.Duration // first token; before At when it is not known
	Ended     time.Duration
	Prompt    int // tokens
	Cached    int // of them
	Tokens    int // of the output
	Completed bool
}

// Outcome of a run.
type Outcome struct {
	Done     []Done // in order of their end
	Makespan time.Duration
	Reasons  map[string]int // decisions, of a run over the bus
	Problems []string       // broken invariants
	Fleet    *Series
	Predict  Prediction

	canary    *CanaryArm // of a canary
	start     time.Duration
	owner     int // the engine that answered what came before Case.From
	open      int
	predicted map[string]int
	again     int     // runs beyond the first, of all rollouts
	idle      float64 // engines x ticks without a running request while one waits somewhere
	slotIdle  float64 // slots x ticks free while a request waits that could have had them
	engineAll float64
	slotAll   float64
	backlog   float64 // engines x ticks while a request waits
	most      []int   // requests waiting in each engine, at most
	held      []int   // requests on each engine, at most
	preempted int64
	busy      []time.Duration
	outTokens int64
}

// Prediction is how well the dispatcher knew the caches, tokens.
type Prediction struct{ Claimed, Missed int }

// Series is what each engine ran and queued over time.
type Series struct {
	Every   time.Duration
	Running [][]int // by sample, by engine
	Waiting [][]int
	ticks   int
}

func newOutcome(c *Case) *Outcome {
	n := len(c.Engines)
	return &Outcome{Reasons: map[string]int{}, predicted: map[string]int{}, Fleet: &Series{Every: tick},
		most: make([]int, n), held: make([]int, n), busy: make([]time.Duration, n)}
}

func (o *Outcome) add(d Done, key string) {
	o.Done = append(o.Done, d)
	o.outTokens += int64(d.Tokens)
	if p, ok := o.predicted[key]; ok {
		o.Predict.Claimed += p
		o.Predict.Missed += max(0, p-d.Cached-blockTokens) // a hit never covers a prompt's last token
		delete(o.predicted, key)
	}
}

// sample adds one tick of the fleet.
func (o *Outcome) sample(r *Run) {
	n := len(r.Case.Engines)
	running, waiting := make([]int, n), make([]int, n)
	runs, free, slots, idle := 0, 0, 0, 0
	for i := range n {
		running[i], waiting[i] = r.engine(i).Model.Counts()
		most := r.Case.Engines[i].WithDefaults().MaxRunning
		runs, slots, free = runs+running[i], slots+most, free+max(0, most-running[i])
		if running[i] == 0 {
			idle++
		}
		r.peak(i)
	}
	if wait := o.open - runs; wait > 0 {
		o.idle += float64(idle)
		o.backlog += float64(n)
		o.slotIdle += float64(min(free, wait))
	}
	o.engineAll += float64(n)
	o.slotAll += float64(slots)
	o.Fleet.add(running, waiting)
}

// peak notes what an engine holds when something was sent to it.
func (r *Run) peak(i int) {
	running, waiting := r.engine(i).Model.Counts()
	r.out.most[i] = max(r.out.most[i], waiting)
	r.out.held[i] = max(r.out.held[i], running+waiting)
}

const maxSamples = 1200 // kept; beyond that every other goes

func (s *Series) add(running, waiting []int) {
	if s.ticks%int(s.Every/tick) == 0 {
		s.Running, s.Waiting = append(s.Running, running), append(s.Waiting, waiting)
	}
	s.ticks++
	if len(s.Running) <= maxSamples {
		return
	}
	s.Every *= 2
	half := func(x [][]int) [][]int {
		out := x[:0]
		for i := 0; i < len(x); i += 2 {
			out = append(out, x[i])
		}
		return out
	}
	s.Running, s.Waiting = half(s.Running), half(s.Waiting)
}

func (o *Outcome) close(r *Run) {
	o.Makespan = o.Done[len(o.Done)-1].Ended
	for i := range r.Case.Engines {
		s := r.engine(i).Model.Stats()
		o.busy[i] = s.Busy
		o.preempted += s.Preemptions
	}
}

// figures of one run, by name; FigureName says what they are.
func (o *Outcome) figures() map[string]float64 {
	prompt, cached, completed := 0, 0, 0
	var whole, first, trip []float64
	begun := map[string]time.Duration{}
	share := make([]float64, len(o.busy))
	used, over := 0, 0.0
	steps := map[int64][]float64{}
	served := map[string]float64{}
	var tripServed []float64
	for i := range o.Done {
		d := &o.Done[i]
		prompt, cached = prompt+d.Prompt, cached+d.Cached
		whole = append(whole, (d.Ended - d.At).Seconds())
		if d.Completed {
			completed++
		}
		if d.First >= d.At {
			first = append(first, (d.First - d.At).Seconds())
		}
		if share[d.Engine] == 0 {
			used++
		}
		share[d.Engine]++
		k := d.Rollout.Job + "." + d.Rollout.Trajectory
		if d.Rollout.Turn <= 1 {
			begun[k] = d.At
		}
		if steps[d.Rollout.Step] == nil {
			steps[d.Rollout.Step] = make([]float64, len(o.busy))
		}
		steps[d.Rollout.Step][d.Engine]++
		if d.Rollout.Trajectory != "" {
			served[k] += (d.Ended - d.At).Seconds()
			if d.Rollout.Last {
				tripServed = append(tripServed, served[k])
			}
		}
		if d.Rollout.Trajectory == "" || d.Rollout.Last {
			at := d.At
			if d.Rollout.Trajectory != "" {
				at = begun[k]
			}
			trip = append(trip, (d.Ended - at).Seconds())
		}
	}
	for _, s := range steps {
		sum := 0.0
		for _, v := range s {
			sum += v
		}
		over = max(over, slices.Max(s)-sum/float64(len(s)))
	}
	slices.Sort(tripServed)
	slices.Sort(whole)
	slices.Sort(first)
	slices.Sort(trip)
	n := float64(len(o.Done))
	f := map[string]float64{
		"makespan_s": o.Makespan.Seconds(), "hit_rate": ratio(float64(cached), float64(prompt)),
		"latency_p50_s": at(whole, 0.5), "latency_p90_s": at(whole, 0.9), "latency_p99_s": at(whole, 0.99),
		"first_token_p50_s": at(first, 0.5), "first_token_p90_s": at(first, 0.9),
		"trajectory_p50_s": at(trip, 0.5), "trajectory_p90_s": at(trip, 0.9), "trajectory_mean_s": mean(trip),
		"served_p90_s": at(tripServed, 0.9), "over_fair_max": over,
		"output_tok_s": ratio(float64(o.outTokens), o.Makespan.Seconds()), "engines_used": float64(used),
		"share_max":           ratio(slices.Max(share)*float64(len(share)), n),
		"idle_share":          ratio(o.idle, o.engineAll),
		"idle_while_backlog":  ratio(o.idle, o.backlog),
		"slots_idle":          ratio(o.slotIdle, o.slotAll),
		"waiting_max":         float64(slices.Max(o.most)),
		"preemptions":         float64(o.preempted),
		"unanswered":          n - float64(completed),
		"cache_overclaimed":   ratio(float64(o.Predict.Missed), float64(o.Predict.Claimed)),
		"ran_again":           float64(o.again),
		"problems":            float64(len(o.Problems)),
		"requests_on_one_max": float64(slices.Max(o.held)),
		"owner_waiting_max":   float64(o.most[o.owner]),
		"owner_requests_max":  float64(o.held[o.owner]),
	}
	return f
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// at is the nearest-rank percentile of sorted values.
func at(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	return v[min(len(v)-1, int(q*float64(len(v))))]
}

func mean(v []float64) float64 {
	s := 0.0
	for _, x := range v {
		s += x
	}
	return ratio(s, float64(len(v)))
}

// shares of the requests that each engine answered.
func (o *Outcome) shares() []float64 {
	out := make([]float64, len(o.busy))
	for i := range o.Done {
		out[o.Done[i].Engine] += 1 / float64(len(o.Done))
	}
	return out
}

// released puts the answered rollouts in order of their release.
func (o *Outcome) released() []Done {
	out := slices.Clone(o.Done)
	slices.SortStableFunc(out, func(a, b Done) int { return cmp.Compare(a.At, b.At) })
	return out
}
