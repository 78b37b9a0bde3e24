package contest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/policy"
)

// fault is something that goes wrong while a pool works.
type fault struct {
	name  string
	text  string
	apply func(c *Case)
}

// faults of the bench. Times are those of the workload: about two minutes.
var faults = []fault{
	{"none", "nothing goes wrong", func(*Case) {}},
	{"cache events late", "cache events lag by up to 2 s", func(c *Case) { c.Options.Telemetry.CacheDelay = 2 * time.Second }},
	{"cache events lost", "2 % of cache events never come, and a snapshot is asked for at each gap", func(c *Case) { c.Options.Telemetry.CacheLoss = 0.02 }},
	{"load reports lost", "half of the load reports never come", func(c *Case) { c.Options.Telemetry.LoadLoss = 0.5 }},
	{"no load reports", "no load report comes at all", func(c *Case) { c.Options.Telemetry.LoadLoss = 1 }},
	{"agents cut off", "each agent in turn is cut off from NATS for 10 s", func(c *Case) {
		c.Script = func(r *Run) {
			r.inTurn(15*time.Second, func(n *sim.Node) { n.Cut(); r.World.After(10*time.Second, n.Heal) })
		}
	}},
	{"engines restarted", "each engine in turn dies and is back after 5 s, its cache gone", func(c *Case) {
		c.Script = func(r *Run) {
			r.inTurn(15*time.Second, func(n *sim.Node) { n.Kill(); r.World.After(5*time.Second, n.Start) })
		}
	}},
	{"dispatchers killed", "one of two dispatchers dies every 20 s and another starts", func(c *Case) {
		c.Script = func(r *Run) {
			for i := range 5 {
				r.World.After(time.Duration(20*(i+1))*time.Second, func() {
					r.World.Cores[fmt.Sprintf("d%d", i)].Kill()
					r.World.AddDispatcher(fmt.Sprintf("d%d", i+2))
				})
			}
		}
	}},
}

// inTurn does something to each node, one every so often, once.
func (r *Run) inTurn(every time.Duration, do func(n *sim.Node)) {
	for i, n := range r.Nodes {
		r.World.After(time.Duration(i+1)*every, func() { do(n) })
	}
}

// Faults lets the recommended policy serve conversations while things go wrong.
func Faults(ctx context.Context, cfg Config) (*Report, error) {
	engines, tasks := 8, 12
	if cfg.Quick {
		engines, tasks = 3, 3
	}
	fleet := slices.Repeat([]model.Config{{MaxRunning: 32}}, engines)
	p := newPool(ctx, cfg)
	p.expect(len(faults) * cfg.seeds())
	var rows []*Row
	for _, f := range faults {
		one := ours(policy.ProjectedTime)[0]
		one.Name, one.Setting = f.name, f.text
		got, err := p.measure([]Contender{one}, cfg.seeds(), func(seed uint64) (*Case, error) {
			w, err := workload.Agentic{Seed: seed, Tasks: tasks, Turns: workload.Dist{Median: 12, Sigma: 0.5, Min: 2, Max: 40}, Arrivals: workload.Arrivals{Rate: 0.1}}.Workload()
			c := &Case{Engines: fleet, Work: w, Seed: seed, Dispatchers: 2, Options: sim.Options{Audit: true}}
			f.apply(c)
			return c, err
		})
		if err != nil {
			return nil, err
		}
		rows = append(rows, got...)
	}
	r := newReport("faults", cfg, rows, "trajectory_p90_s", "hit_rate", "cache_overclaimed", "ran_again", "unanswered", "problems", "share_max")
	r.Workload = fmt.Sprintf("%d tasks of 8 trajectories of about 12 turns, %d engines of 32 slots, two dispatchers, policy %s; one fault after the other", tasks, engines, policy.ProjectedTime)
	quiet := r.row("none")
	broken, lost := 0.0, 0.0
	byFault := map[string]any{}
	for _, row := range rows {
		broken += sum(row.values["problems"])
		lost += sum(row.values["unanswered"])
		byFault[row.Name] = map[string]any{
			"trajectory_p90_ratio": round(r.paired(row, quiet, "trajectory_p90_s").Mean), "hit_rate": round(row.Figures["hit_rate"].Mean),
			"cache_overclaimed": round(row.Figures["cache_overclaimed"].Mean), "ran_again": round(row.Figures["ran_again"].Mean),
			"broken_invariants": sum(row.values["problems"]), "not_completed": sum(row.values["unanswered"]),
		}
	}
	late, gone := r.row("cache events late"), r.row("cache events lost")
	r.extra(map[string]any{"broken_invariants": broken, "not_completed": lost, "by_fault": byFault})
	r.atMost("broken invariants, all faults and seeds", Stat{Mean: broken, N: cfg.seeds()}, 0, "see the report's rows; a seed reproduces it")
	r.atMost("rollouts that were not completed", Stat{Mean: lost, N: cfg.seeds()}, 0, "attempts ran out")
	for _, row := range []*Row{late, gone} {
		r.atMost("cache claimed and not found: "+row.Name, row.Figures["cache_overclaimed"], 0.05, "what was evicted counts until its event comes")
		r.atLeast("hit rate against no fault: "+row.Name, stat(differences(row.values["hit_rate"], quiet.values["hit_rate"])), -0.1, "no credit is given before a snapshot is whole")
	}
	slow := slices.MaxFunc(rows, func(a, b *Row) int {
		return sign(a.Figures["trajectory_p90_s"].Mean - b.Figures["trajectory_p90_s"].Mean)
	})
	r.Conclusion = fmt.Sprintf("Under %d kinds of faults %.0f invariants were broken and %.0f rollouts not completed; the slowest fault (%s) made the p90 of trajectories %.2f times as long. %s",
		len(faults)-1, broken, lost, slow.Name, r.paired(slow, quiet, "trajectory_p90_s").Mean, r.verdict())
	r.barPicture("trajectory_p90_s")
	r.barPicture("hit_rate")
	r.barPicture("cache_overclaimed")
	r.fleetPictures(quiet, r.row("engines restarted"))
	r.hitPicture(quiet, late, gone, r.row("engines restarted"))
	r.latencyPicture("trajectories", rows...)
	r.sharePicture(quiet, r.row("no load reports"))
	return r, nil
}

func sum(v []float64) float64 {
	s := 0.0
	for _, x := range v {
		s += x
	}
	return s
}
