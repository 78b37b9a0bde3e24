package contest

import (
	"context"
	"fmt"
	"slices"

	"github.com/rollbus/rollbus/bench/baseline"
	"github.com/rollbus/rollbus/bench/picture"
	"github.com/rollbus/rollbus/dispatcher/policy"
)

// served is a workload that can be offered at any rate.
type served struct {
	name  string
	units string // of what: "trajectories"
	// build makes the case of a seed at so many units a second; 0 = all at once.
	build func(seed uint64, rate float64) (*Case, error)
}

// loads are what is offered, as a share of what load-only can serve at most.
var loads = []float64{0.2, 0.4, 0.7, 1, 1.2}

const compared = 0.7 // the load at which everybody is compared

// saturation is how many units a second load-only ends while everything waits:
// between the first tenth and the eighth tenth of all, on the tuning seeds.
func (p *pool) saturation(s served, seeds int) (float64, error) {
	cases, err := casesOf(min(tuningSeeds, seeds), tuningSeed, func(seed uint64) (*Case, error) { return s.build(seed, 0) })
	if err != nil {
		return 0, err
	}
	set := baseline.Families()[slices.IndexFunc(baseline.Families(), func(f baseline.Family) bool { return f.Name == "load_only" })].Settings[0]
	var rates []float64
	var tasks []task
	for _, k := range cases {
		tasks = append(tasks, task{"saturation of load_only", func() (*Outcome, error) { return k.Route(set.Make) }, func(o *Outcome) {
			var ends []float64
			for _, d := range o.Done {
				if d.Rollout.Trajectory == "" || d.Rollout.Last {
					ends = append(ends, d.Ended.Seconds())
				}
			}
			slices.Sort(ends)
			from, to := at(ends, 0.1), at(ends, 0.8)
			rates = append(rates, ratio(0.7*float64(len(ends)), to-from))
		}})
	}
	if err := p.do(tasks); err != nil {
		return 0, err
	}
	return mean(rates), nil
}

// sweep compares everybody at one load, and the recommended policy with
// load-only at every load.
func sweep(ctx context.Context, cfg Config, s served) (*Report, error) {
	p := newPool(ctx, cfg)
	n := cfg.seeds()
	p.expect(min(tuningSeeds, n)*(1+3*len(baseline.Families())) + n*(len(policy.Policies())+len(baseline.Families())+2*(len(loads)-1)))
	most, err := p.saturation(s, n)
	if err != nil {
		return nil, err
	}
	at := func(load float64) func(uint64) (*Case, error) {
		return func(seed uint64) (*Case, error) { return s.build(seed, load*most) }
	}
	cs, err := p.tuned("trajectory_p90_s", n, at(compared))
	if err != nil {
		return nil, err
	}
	rows, err := p.measure(append(ours(), cs...), n, at(compared))
	if err != nil {
		return nil, err
	}
	columns := []string{"trajectory_p50_s", "trajectory_p90_s", "served_p90_s", "latency_p50_s", "latency_p90_s", "first_token_p90_s", "hit_rate", "share_max", "waiting_max", "preemptions", "cache_overclaimed"}
	if rows[0].Figures["served_p90_s"].Mean == 0 { // nobody used a tool
		columns = slices.DeleteFunc(columns, func(c string) bool { return c == "served_p90_s" })
	}
	r := newReport(s.name, cfg, rows, columns...)
	us, load := r.row(policy.ProjectedTime), r.row("load_only")

	quick, steady := r.best(KindBaseline, "trajectory_p90_s", 1), r.best(KindBaseline, "hit_rate", -1)
	hits := stat(differences(us.values["hit_rate"], steady.values["hit_rate"]))
	toQuick := r.paired(us, quick, "trajectory_p90_s")
	toHash := r.paired(us, r.row("consistent_hash"), "trajectory_p90_s")
	toLoad := r.paired(us, load, "trajectory_p90_s")
	r.atLeast(fmt.Sprintf("hit rate - that of the best baseline (%s)", steady.Name), hits, -0.03, "work left the engines that hold its prefix, for those that would end sooner")
	r.beyond(fmt.Sprintf("p90 / that of the best baseline (%s)", quick.Name), toQuick, 1, "that baseline keeps sessions together and pays less for it than the projection expects")
	r.atMost("p90 / that of consistent hash", toHash, 0.85, "at this load engines are far from full once prefixes are found, which consistent hash does too: there is less than 15 % left to win")
	r.atMost("p90 / that of least requests", toLoad, 0.85, "recomputed prefixes are too small a part of the time: most of it is tools and decoding")
	if us.Figures["served_p90_s"].Mean > 0 {
		served := r.paired(us, load, "served_p90_s")
		r.extra(map[string]any{"served_p90_to_least_requests": round(served.Mean), "served_p90_to_consistent_hash": round(r.paired(us, r.row("consistent_hash"), "served_p90_s").Mean)})
		r.atMost("p90 without the time of the tools / that of least requests", served, 0.85, "recomputed prefixes are too small a part of the time")
	}

	byLoad, us2, load2, err := p.byLoad(r, cs, us, load, n, at)
	if err != nil {
		return nil, err
	}
	worst := slices.MaxFunc(byLoad, func(a, b loadPoint) int { return sign(a.Ratio.Mean - b.Ratio.Mean) })
	r.atMost(fmt.Sprintf("p90 / load-only's, worst load (%.0f %%)", 100*worst.Load), worst.Ratio, 1.03, worseBecause(worst.Load))
	r.extra(map[string]any{
		"policy": us.Name, "saturation_per_s": round(most), "unit": s.units, "load": compared, "p90_to_best_baseline": round(toQuick.Mean), "p90_to_consistent_hash": round(toHash.Mean),
		"p90_to_least_requests": round(toLoad.Mean), "hit_rate": round(us.Figures["hit_rate"].Mean), "hit_rate_best_baseline": round(steady.Figures["hit_rate"].Mean),
		"best_baseline": quick.Name, "by_load": byLoad,
	})
	r.Conclusion = fmt.Sprintf("At %.0f %% of load-only's saturation (%.3g %s a second) %s's p90 is %.2f of the best baseline's (%s), %.2f of consistent hash's and %.2f of load-only's; it found %s of prompt tokens cached, the best baseline %s. %s",
		100*compared, most, s.units, us.Name, toQuick.Mean, quick.Name, toHash.Mean, toLoad.Mean, percent(us.Figures["hit_rate"].Mean), percent(steady.Figures["hit_rate"].Mean), r.verdict())
	r.Notes = append(r.Notes, "Saturation is what load_only ends a second while everything waits, first to eighth tenth, in its first setting.")
	var x []float64
	for _, b := range byLoad {
		x = append(x, 100*b.Load)
	}
	r.Pictures = append(r.Pictures, Picture{picture.Lines("p90 by load", picture.Axis{Title: "offered load (% of load-only's saturation)"}, picture.Axis{Title: "p90 of " + s.units + " (s)"},
		[]picture.Line{{Name: us.Name, X: x, Y: us2}, {Name: load.Name, X: x, Y: load2}}),
		fmt.Sprintf("At the worst load for it, %.0f %%, %s's p90 is %.2f of load-only's.", 100*worst.Load, us.Name, worst.Ratio.Mean)})
	r.barPicture("trajectory_p90_s")
	r.barPicture("hit_rate")
	r.fleetPictures(us, load)
	r.sharePicture(us, load, r.row("consistent_hash"))
	r.hitPicture(us, load, r.row("consistent_hash"), quick)
	r.latencyPicture(s.units, us, load, r.row("consistent_hash"), quick)
	return r, nil
}

// worseBecause says what makes load-only quicker at a load.
func worseBecause(load float64) string {
	if load > 1 {
		return "beyond saturation work waits in the queue until an engine's KV use has come down from kv_block to kv_unblock; load_only fills every engine to its last block"
	}
	return "affinity cost more than it saved at this load"
}

// loadPoint is one load of a sweep.
type loadPoint struct {
	Load  float64 `json:"load"`
	Ratio Stat    `json:"p90_ratio_to_load_only"`
	Ours  Stat    `json:"p90_s"`
	Base  Stat    `json:"load_only_p90_s"`
}

func (p *pool) byLoad(r *Report, cs []Contender, us, load *Row, n int, at func(float64) func(uint64) (*Case, error)) (points []loadPoint, ourP90, loadP90 []float64, err error) {
	both := append(ours(us.Name), cs[slices.IndexFunc(cs, func(c Contender) bool { return c.Name == "load_only" })])
	for _, l := range loads {
		a, b := us, load
		if l != compared {
			rows, err := p.measure(both, n, at(l))
			if err != nil {
				return nil, nil, nil, err
			}
			a, b = rows[0], rows[1]
		}
		points = append(points, loadPoint{l, r.paired(a, b, "trajectory_p90_s"), a.Figures["trajectory_p90_s"], b.Figures["trajectory_p90_s"]})
		ourP90, loadP90 = append(ourP90, a.Figures["trajectory_p90_s"].Mean), append(loadP90, b.Figures["trajectory_p90_s"].Mean)
	}
	return points, ourP90, loadP90, nil
}

func sign(v float64) int {
	switch {
	case v < 0:
		return -1
	case v > 0:
		return 1
	}
	return 0
}

func differences(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] - b[i]
	}
	return out
}
