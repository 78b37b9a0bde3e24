package contest

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/bench/workload"
)

// Burst is many equal requests at the same moment, over and over, at four
// dispatchers whose views lag: the herd that runs to the engine that was idle a
// moment ago.
func Burst(ctx context.Context, cfg Config) (*Report, error) {
	const engines, dispatchers, each = 8, 4, 64
	const lan, far = 5 * time.Millisecond, 50 * time.Millisecond // the most that a view lags
	bursts := 40
	if cfg.Quick {
		bursts = 5
	}
	fleet := slices.Repeat([]model.Config{{MaxRunning: 16}}, engines)
	lagging := func(seed uint64, lag time.Duration) (*Case, error) {
		w, err := workload.Reasoning{Seed: seed, Steps: bursts, Groups: each, NMin: 1, NMax: 1, System: -1,
			Prompt: workload.Fixed(512), Output: workload.Fixed(200)}.Workload()
		for i := range w.Rollouts {
			w.Rollouts[i].Group, w.Rollouts[i].Size = "", 0 // nothing that would make them meet
			w.Rollouts[i].At = time.Second                  // after the burst before: its releases have been seen
		}
		return &Case{Engines: fleet, Work: w, Seed: seed, Dispatchers: dispatchers, Options: sim.Options{WatchDelay: lag}}, err
	}
	build := func(seed uint64) (*Case, error) { return lagging(seed, lan) }
	p := newPool(ctx, cfg)
	cs, err := p.tuned("over_fair_max", cfg.seeds(), build)
	if err != nil {
		return nil, err
	}
	rows, err := p.measure(append(ours(), cs...), cfg.seeds(), build)
	if err != nil {
		return nil, err
	}
	late, err := p.measure(ours(), cfg.seeds(), func(seed uint64) (*Case, error) { return lagging(seed, far) })
	if err != nil {
		return nil, err
	}
	for _, row := range late {
		row.Name, row.Kind, row.Setting = row.Name+", far", KindFar, "views lag by up to "+far.String()
	}
	rows = append(rows, late...)
	r := newReport("burst", cfg, rows, "over_fair_max", "latency_p50_s", "latency_p99_s", "makespan_s", "waiting_max")
	r.Workload = fmt.Sprintf("%d bursts of %d equal requests, 512 tokens in and 200 out, at %d dispatchers (or routers) over %d idle engines of 16 slots; views lag by up to %v, far: %v", bursts, each, dispatchers, engines, lan, far)
	worst, who := 0.0, ""
	perPolicy := map[string]float64{}
	for _, row := range rows {
		if row.Kind != KindOurs {
			continue
		}
		m := slices.Max(row.values["over_fair_max"])
		perPolicy[row.Name] = m
		if who == "" || m > worst {
			worst, who = m, row.Name
		}
		r.atMost("most over the fair share of "+strconv.Itoa(each/engines)+", any burst and seed: "+row.Name, Stat{Mean: m, N: cfg.seeds()}, 1,
			"what it knows of the engines is apart by more than one request: reports and answers to binds come at different times")
	}
	base := r.best(KindBaseline, "over_fair_max", 1)
	r.extra(map[string]any{"bursts": bursts, "requests": each, "engines": engines, "dispatchers": dispatchers, "fair_share": each / engines,
		"over_fair_share_max": worst, "over_fair_share_by_policy": perPolicy})
	r.Conclusion = fmt.Sprintf("Over %d bursts a seed no engine got more than %.0f above its fair share of %d from our policies (the most: %s); from four routers that do not know each other the best was %s with up to %.0f. %s",
		bursts, worst, each/engines, who, base.Name, slices.Max(base.values["over_fair_max"]), r.verdict())
	r.barPicture("over_fair_max")
	r.barPicture("latency_p99_s")
	r.fleetPictures(r.row("projected_time"), r.row("load_only"))
	r.sharePicture(r.row("projected_time"), r.row("load_only"), r.row("consistent_hash"))
	r.latencyPicture("requests", r.row("projected_time"), r.row("load_only"), r.row("consistent_hash"))
	return r, nil
}
