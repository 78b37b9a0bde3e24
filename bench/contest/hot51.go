package contest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// Hot51 is the regression of 51 engines: one of them holds a long prefix, and
// 4,000 requests of that prefix come at once.
func Hot51(ctx context.Context, cfg Config) (*Report, error) {
	const slots, ready = 38, 5 * time.Second
	engines, requests := 51, 4000
	if cfg.Quick {
		engines, requests = 11, 860
	}
	fleet := slices.Repeat([]model.Config{{MaxRunning: slots}}, engines)
	build := func(seed uint64) (*Case, error) {
		w, err := workload.HotPrefix{Seed: seed, Requests: requests + 1}.Workload()
		if err != nil {
			return nil, err
		}
		for i := range w.Rollouts[1:] {
			w.Rollouts[i+1].At = ready // the first one makes an engine the owner
		}
		return &Case{Engines: fleet, Work: w, Seed: seed, From: ready}, nil
	}
	p := newPool(ctx, cfg)
	cs, err := p.tuned("makespan_s", cfg.seeds(), build)
	if err != nil {
		return nil, err
	}
	cs = append(ours(), cs...)
	for i := range cs {
		if cs[i].Name == policy.OwnerPressure {
			cs[i].Seeds = 2 // its burst takes ten times as long, and so does the simulation
		}
	}
	rows, err := p.measure(cs, cfg.seeds(), build)
	if err != nil {
		return nil, err
	}
	r := newReport("hot51", cfg, rows, "makespan_s", "hit_rate", "latency_p90_s", "engines_used", "share_max", "waiting_max", "idle_share")
	r.Workload = fmt.Sprintf("%d requests at once of one 16,384-token prefix that one of %d engines holds; suffixes p50 128, outputs p50 256 tokens; %d slots an engine", requests, engines, slots)

	us, load := r.row(policy.ProjectedTime), r.row("load_only")
	span := r.paired(us, load, "makespan_s")
	window := slots + subjects.DefaultPrefetch
	bound := 1 - us.Figures["engines_used"].Mean/float64(requests)
	owner := stat(us.values["owner_waiting_max"])
	most := slices.Max(us.values["owner_waiting_max"])
	r.extra(map[string]any{
		"policy": us.Name, "requests": requests, "engines": engines, "makespan_ratio": round(span.Mean), "makespan_ratio_ci95": round(span.CI95),
		"hit_rate": round(us.Figures["hit_rate"].Mean), "hit_bound": round(bound), "owner_waiting_max": most, "owner_window": window,
		"owner_requests_max": slices.Max(us.values["owner_requests_max"]),
	})
	r.atMost("makespan / load-only", span, 1.05, "affinity keeps work on engines that are slower to free than the least loaded")
	r.atLeast("hit rate - (1 - engines used / requests)", Stat{Mean: us.Figures["hit_rate"].Mean - bound, CI95: us.Figures["hit_rate"].CI95, N: cfg.seeds()}, -0.03,
		"a prompt's own suffix is never cached, and an engine that computes the prefix cannot share it before its blocks are whole")
	r.atMost("most waiting in the owner, of a window of slots + prefetch", Stat{Mean: most, CI95: owner.CI95, N: cfg.seeds()}, float64(window), "more was bound to the owner than its window")
	r.Conclusion = fmt.Sprintf("%s served the burst in %.3f times load-only's makespan, found %s of prompt tokens cached (bound %s), and its owner never had more than %.0f requests, of a window of %d. %s",
		us.Name, span.Mean, percent(us.Figures["hit_rate"].Mean), percent(bound), slices.Max(us.values["owner_requests_max"]), window, r.verdict())
	r.Notes = append(r.Notes, "owner_pressure adds owners of a key one proof after another, up to four: a burst on one prefix cannot reach the rest of the fleet. It is run on 2 seeds.")
	r.barPicture("makespan_s")
	r.barPicture("waiting_max")
	r.fleetPictures(us, r.row("consistent_hash"))
	r.sharePicture(us, load, r.row("consistent_hash"))
	r.hitPicture(us, load, r.row("cache_aware"))
	r.latencyPicture("requests", us, load, r.row("consistent_hash"), r.row("cache_aware"))
	return r, nil
}
