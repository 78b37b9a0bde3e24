package contest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/policy"
)

// sync is a weight update: every engine stops for a while, goes on with what
// runs, and has nothing cached.
const (
	syncEvery = 40 * time.Second
	syncStop  = 2 * time.Second
)

// syncing makes all engines sync every syncEvery: at once, or one after another.
func syncing(rolling bool) func(r *Run) {
	return func(r *Run) {
		for v := range int64(60) {
			for i := range r.Case.Engines {
				at := time.Duration(v+1) * syncEvery
				if rolling {
					at += time.Duration(i) * syncStop
				}
				r.World.After(at, func() { r.pauseEngine(i) })
				r.World.After(at+syncStop, func() { r.resumeEngine(i, v+1) })
			}
		}
	}
}

func (r *Run) pauseEngine(i int) {
	if r.engines != nil {
		r.engines[i].Freeze(true)
		return
	}
	r.Nodes[i].Pause()
}

func (r *Run) resumeEngine(i int, version int64) {
	if r.engines != nil {
		r.engines[i].Flush()
		r.engines[i].Freeze(false)
		return
	}
	r.Nodes[i].Resume(version)
}

// Weights is conversations while the weights are updated every 40 s. Caches are
// empty after an update: who believes otherwise sends work to engines for
// prefixes that are gone.
func Weights(ctx context.Context, cfg Config) (*Report, error) {
	engines, tasks := 8, 16
	if cfg.Quick {
		engines, tasks = 3, 3
	}
	fleet := slices.Repeat([]model.Config{{MaxRunning: 32}}, engines)
	build := func(script func(r *Run)) func(seed uint64) (*Case, error) {
		return func(seed uint64) (*Case, error) {
			w, err := workload.Agentic{Seed: seed, Tasks: tasks, Turns: workload.Dist{Median: 20, Sigma: 0.5, Min: 2, Max: 60}, NoGaps: true, Arrivals: workload.Arrivals{Rate: 0.1}}.Workload()
			return &Case{Engines: fleet, Work: w, Seed: seed, Script: script}, err
		}
	}
	p := newPool(ctx, cfg)
	n := cfg.seeds()
	cs, err := p.tuned("trajectory_p90_s", n, build(syncing(false)))
	if err != nil {
		return nil, err
	}
	rows, err := p.measure(append(ours(), cs...), n, build(syncing(false)))
	if err != nil {
		return nil, err
	}
	us := ours(policy.ProjectedTime)[0]
	variants := []struct {
		name   string
		script func(r *Run)
	}{{"rolling", syncing(true)}, {"no update", nil}}
	for _, v := range variants {
		c := us
		c.Name, c.Setting = us.Name+", "+v.name, v.name
		more, err := p.measure([]Contender{c}, n, build(v.script))
		if err != nil {
			return nil, err
		}
		more[0].Kind = KindBound
		rows = append(rows, more...)
	}
	r := newReport("weights", cfg, rows, "trajectory_p50_s", "trajectory_p90_s", "hit_rate", "cache_overclaimed", "share_max", "waiting_max", "output_tok_s", "problems")
	r.Workload = fmt.Sprintf("%d tasks of 8 trajectories without tool gaps on %d engines of 32 slots; every %v all engines stop for %v and come back with new weights and an empty cache, what runs goes on",
		tasks, engines, syncEvery, syncStop)
	mine, rolling, none := r.row(us.Name), r.row(us.Name+", rolling"), r.row(us.Name+", no update")
	best := r.best(KindBaseline, "trajectory_p90_s", 1)
	toBest := r.paired(mine, best, "trajectory_p90_s")
	cost := r.paired(mine, none, "trajectory_p90_s")
	over := mine.Figures["cache_overclaimed"]
	r.extra(map[string]any{"policy": us.Name, "cache_overclaimed": round(over.Mean), "p90_to_best_baseline": round(toBest.Mean), "best_baseline": best.Name,
		"p90_to_no_update": round(cost.Mean), "p90_rolling_to_at_once": round(r.paired(rolling, mine, "trajectory_p90_s").Mean), "hit_rate": round(mine.Figures["hit_rate"].Mean)})
	r.atMost("cache claimed and not found, all updates", over, 0.01, "decisions between the update and its event count on what is gone")
	r.beyond("p90 / that of the best baseline ("+best.Name+")", toBest, 1, "it keeps conversations on their engines at less cost than the projection expects")
	r.atMost("broken invariants", Stat{Mean: sum(mine.values["problems"]) + sum(rolling.values["problems"]), N: n}, 0, "a seed reproduces it")
	r.Conclusion = fmt.Sprintf("With an update every %v %s claimed %s of cached tokens that were gone; the p90 of trajectories is %.2f of that without updates and %.2f of the best baseline's (%s). Rolling updates change it to %.2f. %s",
		syncEvery, us.Name, percent(over.Mean), cost.Mean, toBest.Mean, best.Name, r.paired(rolling, mine, "trajectory_p90_s").Mean, r.verdict())
	r.barPicture("trajectory_p90_s")
	r.barPicture("hit_rate")
	r.fleetPictures(mine, rolling)
	r.sharePicture(mine, rolling, r.row("cache_aware"))
	r.hitPicture(mine, rolling, none, r.row("cache_aware"))
	r.latencyPicture("trajectories", mine, rolling, none, best)
	return r, nil
}
