package contest

import (
	"context"
	"fmt"
	"time"

	"github.com/rollbus/rollbus/bench/baseline"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/policy"
)

// Tail is a training step of reasoning rollouts with a long tail, all given at
// once to engines of which half are three times as fast. The step ends with its
// last rollout.
func Tail(ctx context.Context, cfg Config) (*Report, error) {
	const slots = 32
	pairs, groups := 2, 240
	if cfg.Quick {
		pairs, groups = 1, 24
	}
	var fleet []model.Config
	for range pairs {
		fleet = append(fleet, model.Config{MaxRunning: slots}, model.Config{MaxRunning: slots, Profile: model.H100x8B().Times(300)})
	}
	build := func(told bool) func(uint64) (*Case, error) {
		return func(seed uint64) (*Case, error) {
			w, err := workload.Reasoning{Seed: seed, Groups: groups}.Workload()
			return &Case{Engines: fleet, Work: w, Seed: seed, Told: told}, err
		}
	}
	p := newPool(ctx, cfg)
	cs, err := p.tuned("makespan_s", cfg.seeds(), build(false))
	if err != nil {
		return nil, err
	}
	cs = append(append(ours(), cs...), split(), longestFirst())
	rows, err := p.measure(cs, cfg.seeds(), build(false))
	if err != nil {
		return nil, err
	}
	told := Contender{Name: policy.ProjectedTime + " told", Kind: KindBound, Setting: "lengths told", Run: ours(policy.ProjectedTime)[0].Run}
	more, err := p.measure([]Contender{told}, cfg.seeds(), build(true))
	if err != nil {
		return nil, err
	}
	r := newReport("tail", cfg, append(rows, more...), "makespan_s", "idle_while_backlog", "slots_idle", "latency_p90_s", "hit_rate", "preemptions")
	r.Workload = fmt.Sprintf("one step of %d groups of 8 to 16 samples, outputs p50 620, p99 15,700 tokens, all at once; %d engines of %d slots, every other one three times as fast", groups, 2*pairs, slots)

	us, static := r.row(policy.ProjectedTime), r.row("static_split")
	var lower, alone []float64
	for seed := range uint64(cfg.seeds()) {
		k, err := build(false)(seed + 1)
		if err != nil {
			return nil, err
		}
		l, a := bounds(k)
		lower, alone = append(lower, l), append(alone, a)
	}
	var both []float64
	for i := range lower {
		both = append(both, lower[i]+alone[i])
	}
	toBound := paired(us.values["makespan_s"], both)
	toTold := r.paired(us, more[0], "makespan_s")
	toStatic := r.paired(us, static, "makespan_s")
	idle := us.Figures["idle_while_backlog"]
	r.extra(map[string]any{
		"policy": us.Name, "makespan_s": round(us.Figures["makespan_s"].Mean), "lower_bound_s": round(mean(lower)), "longest_alone_s": round(mean(alone)),
		"makespan_to_bound": round(toBound.Mean), "makespan_to_told": round(toTold.Mean), "idle_share": round(idle.Mean), "makespan_to_static_split": round(toStatic.Mean),
	})
	r.atMost("makespan / (lower bound + the longest rollout alone)", toBound, 1, "the longest rollout began late, or ran in a full batch, where a token takes longer than alone")
	r.atMost("makespan / the same policy told all lengths", toTold, 1.1, "without their lengths the longest rollouts cannot be begun first")
	r.atMost("engines idle, of the time when work waits", idle, 0.03, "work stood in the queue or behind other work while an engine had none")
	r.Conclusion = fmt.Sprintf("%s ended the step in %.0f s, %.2f of the lower bound and the longest rollout alone (%.0f + %.0f s), %.2f of itself told all lengths and %.2f of a static split. %s",
		us.Name, us.Figures["makespan_s"].Mean, toBound.Mean, mean(lower), mean(alone), toTold.Mean, toStatic.Mean, r.verdict())
	r.Notes = append(r.Notes, "The lower bound divides the engine time that the step takes at full batches, prompts computed once a group, by the speed of all engines; the longest rollout alone is that on the slower kind of engine.",
		"static_split gives every engine the same number of samples before the step begins; longest_first is told all lengths and fills the engine that ends soonest, a bound from above.")
	r.barPicture("makespan_s")
	r.fleetPictures(us, static)
	r.sharePicture(us, static)
	r.latencyPicture("rollouts", us, static, r.row("load_only"), r.row("longest_first"))
	return r, nil
}

// split is what a trainer does without a dispatcher: equal counts, in order.
func split() Contender {
	return Contender{Name: "static_split", Kind: KindBaseline, Setting: "equal counts", Run: func(c *Case) (*Outcome, error) {
		each := (len(c.Work.Rollouts) + len(c.Engines) - 1) / len(c.Engines)
		return c.Route(func(baseline.Fleet) baseline.Router { return &staticSplit{each: each} })
	}}
}

type staticSplit struct{ each, n int }

func (s *staticSplit) Route(*baseline.Request) int {
	s.n++
	return (s.n - 1) / s.each
}

func (s *staticSplit) Done(*baseline.Request, int) {}

// longestFirst is told all lengths: the longest rollouts go first, each to the
// engine whose work would end soonest.
func longestFirst() Contender {
	return Contender{Name: "longest_first", Kind: KindBound, Setting: "lengths told", Run: func(c *Case) (*Outcome, error) {
		k := *c
		k.Work = longestOrder(c.Work)
		work := make([]float64, len(c.Engines))
		next := 0
		return k.Route(func(baseline.Fleet) baseline.Router {
			return routeFunc(func(*baseline.Request) int {
				x := &k.Work.Rollouts[next]
				next++
				best, least := 0, 0.0
				for i, e := range c.Engines {
					if end := work[i] + demand(e, x, true).Seconds(); i == 0 || end < least {
						best, least = i, end
					}
				}
				work[best] = least
				return best
			})
		})
	}}
}

type routeFunc func(*baseline.Request) int

func (f routeFunc) Route(q *baseline.Request) int { return f(q) }
func (routeFunc) Done(*baseline.Request, int)     {}

func longestOrder(w workload.Workload) workload.Workload {
	out := w
	out.Rollouts = append([]workload.Rollout(nil), w.Rollouts...)
	sortBy(out.Rollouts, func(x *workload.Rollout) float64 { return -float64(x.Output) })
	return out
}

// demand is the engine time that a rollout takes of a full batch: its share of
// each step, its reads of KV, and its prompt when nobody has computed it.
func demand(c model.Config, x *workload.Rollout, prompt bool) time.Duration {
	c = c.WithDefaults()
	p := c.Profile
	n, in := float64(x.Output), float64(x.PromptTokens())
	ns := n*(float64(p.Step)/float64(c.MaxRunning)+float64(p.Sequence)) + float64(p.KVReadPS)/1000*(n*in+n*(n-1)/2)
	if prompt {
		ns += in*float64(p.PromptToken) + float64(p.PairPS)/1000*in*in/2
	}
	return time.Duration(ns)
}

// bounds of the makespan in seconds: no schedule is shorter than lower, and
// alone is the longest rollout by itself on the slowest kind of engine.
func bounds(c *Case) (lower, alone float64) {
	base := c.Engines[0]
	speed := 0.0
	slow := 0
	for i, e := range c.Engines {
		speed += float64(base.WithDefaults().Profile.Step) / float64(e.WithDefaults().Profile.Step)
		if e.WithDefaults().Profile.Step > c.Engines[slow].WithDefaults().Profile.Step {
			slow = i
		}
	}
	seen := map[string]bool{}
	single := c.Engines[slow]
	single.MaxRunning = 1
	for i := range c.Work.Rollouts {
		x := &c.Work.Rollouts[i]
		lower += demand(base, x, !seen[x.Group]).Seconds() / speed
		seen[x.Group] = true
		alone = max(alone, demand(single, x, true).Seconds())
	}
	return lower, alone
}
