package contest

import (
	"context"
	"fmt"
	"slices"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

// CanaryScene are the figures of a scene, means over the seeds.
type CanaryScene struct {
	Engines        int     `json:"engines"`
	Dispatchers    int     `json:"dispatchers"`
	Ratio          float64 `json:"ratio"`           // output rate of owner_pressure over control's
	Bound          float64 `json:"bound,omitempty"` // of it, with one seed after another
	ProjectedRatio float64 `json:"projected_ratio"` // of projected_time
	S              float64 `json:"s,omitempty"`     // seeded turn with its cold prefill, in turns of a full batch
}

// Canary plays the canary of S2: two engines of 38 slots and 76 trajectories, by
// one dispatcher and by four; then four engines and 152 trajectories.
//
// A turn at batch 38 is a sixth of control's wall time: 228 turns on 38 slots.
func Canary(ctx context.Context, cfg Config) (*Report, error) {
	p := newPool(ctx, cfg)
	scenes := []canaryScene{{2, 76, 1}, {2, 76, 4}, {4, 152, 4}}
	if cfg.Quick {
		scenes = scenes[:1]
	}
	p.expect(len(scenes) * len(CanaryPolicies()) * cfg.seeds())
	var rows []*Row
	arms := []*CanaryArm{}
	var out []CanaryScene
	r := newReport("canary", cfg, nil, "output_tok_s", "makespan_s", "latency_p50_s", "latency_p90_s", "hit_rate", "engines_used")
	for _, s := range scenes {
		got, err := p.measure(s.contenders(), cfg.seeds(), s.build)
		if err != nil {
			return nil, err
		}
		rows = append(rows, got...)
		r.Contenders = rows
		scene, err := r.canaryTargets(s, got[0].arms, got[1].arms, got[2].arms)
		if err != nil {
			return nil, err
		}
		out = append(out, scene)
		for _, row := range got {
			arms = append(arms, row.arms[0])
		}
	}
	r.Workload = fmt.Sprintf("76 trajectories with one %d-token beginning x %d turns x %d output tokens on 2 engines of %d slots: %d run on the owner, then the other 41 are released; 152 on 4 engines",
		canaryPrefix, canaryTurns, canaryOutput, canarySlots, canaryFirst)
	first := out[0]
	r.extra(map[string]any{"arms": arms, "scenes": out, "ratio": first.Ratio, "bound": first.Bound, "projected_ratio": first.ProjectedRatio})
	r.Conclusion = fmt.Sprintf("owner_pressure generates %.3f times control's rate, of a bound of %.3f (s = %.3f); projected_time %.3f times. %s",
		first.Ratio, first.Bound, first.S, first.ProjectedRatio, r.verdict())
	r.Notes = append(r.Notes, "control is owner_pressure that never seeds (owner_ceiling 1). arms in the JSON are those of the first seed. "+
		"Cached prompts count what an engine found when it first admitted them. Outputs are stand-ins here: their hash says that every turn said all it should, not what.")
	r.barPicture("output_tok_s")
	r.barPicture("hit_rate")
	return r, nil
}

func (s canaryScene) contenders() []Contender {
	var out []Contender
	for _, a := range CanaryPolicies() {
		kind := KindOurs
		if a.Name == "control" {
			kind = KindBaseline
		}
		out = append(out, Contender{Name: s.label(a.Name), Kind: kind, Setting: fmt.Sprintf("%d engines, %d dispatchers", s.engines, s.dispatchers),
			Run: func(c *Case) (*Outcome, error) {
				arm, o, err := s.play(c, a.Name, a.Settings)
				if err != nil {
					return nil, err
				}
				o.canary = arm
				return o, nil
			}})
	}
	return out
}

func (s canaryScene) label(arm string) string {
	return fmt.Sprintf("%s %dx%d", arm, s.engines, s.dispatchers)
}

// canaryTargets judges a scene.
func (r *Report) canaryTargets(s canaryScene, c, o, j []*CanaryArm) (CanaryScene, error) {
	var ratios, bounds, parts, projections, share, cache, cacheJ []float64
	worst := CanaryArm{Completed: s.turns(), Coverage: 1, Active: s.engines}
	same, start := 1.0, 1.0
	for i := range c {
		if c[i].SettingsDigest == o[i].SettingsDigest || o[i].SettingsDigest == j[i].SettingsDigest {
			return CanaryScene{}, fmt.Errorf("two arms ran with the same settings (digest %s): the comparison says nothing", o[i].SettingsDigest)
		}
		turn := c[i].WallS / float64(canaryTurns*s.trajectories/canarySlots)
		part := o[i].SeedS / turn
		ratios, projections = append(ratios, o[i].TokS/c[i].TokS), append(projections, j[i].TokS/c[i].TokS)
		parts, bounds = append(parts, part), append(bounds, 6/(3+part))
		share = append(share, ratios[i]/bounds[i])
		cache, cacheJ = append(cache, c[i].CachedFraction-o[i].CachedFraction), append(cacheJ, c[i].CachedFraction-j[i].CachedFraction)
		for _, a := range []*CanaryArm{c[i], o[i], j[i]} {
			worst.Completed, worst.Coverage = min(worst.Completed, a.Completed), min(worst.Coverage, a.Coverage)
			if a.OutputSHA256 != c[i].OutputSHA256 {
				same = 0
			}
			if a.Start[0] != canaryFirst || total(a.Start) != canaryFirst {
				if a.Name != policy.ProjectedTime {
					start = 0
				}
			}
		}
		worst.Spills, worst.MostSeeds, worst.MostOwners = max(worst.Spills, o[i].Spills), max(worst.MostSeeds, o[i].MostSeeds), max(worst.MostOwners, o[i].MostOwners)
		worst.Active = min(worst.Active, o[i].Active)
		worst.Preemptions = max(worst.Preemptions, o[i].Preemptions-c[i].Preemptions)
		worst.Turns = max(worst.Turns, c[i].Completed-o[i].Completed)
	}
	of := func(v float64) Stat { return Stat{Mean: v, N: len(c)} }
	name := fmt.Sprintf("%d engines, %d dispatchers: ", s.engines, s.dispatchers)
	r.atLeast(name+"turns completed", of(float64(worst.Completed)), float64(s.turns()), "turns failed")
	r.atLeast(name+"the same outputs", of(same), 1, "an arm generated something else")
	r.atLeast(name+"35 on the owner and nothing elsewhere at the start", of(start), 1, "the owner was pressured earlier, or later")
	out := CanaryScene{Engines: s.engines, Dispatchers: s.dispatchers, Ratio: round(mean(ratios)), ProjectedRatio: round(mean(projections))}
	if s.engines == 2 {
		out.Bound, out.S = round(mean(bounds)), round(mean(parts))
		r.atLeast(name+"owner_pressure / bound", stat(share), 0.97, "requests wait at one owner while the other has room")
		r.atLeast(name+"owner_pressure / control", stat(ratios), 1.6, "the peer takes too little")
		r.atLeast(name+"projected_time / control", stat(projections), 1.85, "the peer takes too little")
		r.atMost(name+"prompt tokens cached, owner_pressure below control", stat(cache), 0.01, "the peer computes the beginning too")
		r.atMost(name+"prompt tokens cached, projected_time below control", stat(cacheJ), 0.01, "the peer computes the beginning too")
		r.atMost(name+"seeds", of(float64(worst.Spills)), 1, "more than one seed for one peer")
		r.atMost(name+"live seeds at once", of(float64(worst.MostSeeds)), 1, "two seeds of a key were live")
		return out, nil
	}
	r.atLeast(name+"engines at work", of(float64(worst.Active)), 3, "seeding is serial")
	r.atMost(name+"owners of the key", of(float64(worst.MostOwners)), 4, "the ceiling does not hold")
	r.atMost(name+"live seeds at once", of(float64(worst.MostSeeds)), 1, "two seeds of a key were live")
	r.atLeast(name+"decisions on complete reports", of(worst.Coverage), 1, "an engine's report was missing or stale")
	r.atMost(name+"preemptions above control", of(float64(worst.Preemptions)), 0, "the owners are too full")
	r.atMost(name+"turns failed above control", of(float64(worst.Turns)), 0, "turns failed")
	r.atMost(name+"prompt tokens cached, owner_pressure below control", stat(cache), 0.10, "every owner computes the beginning")
	return out, nil
}

// LiveCanary reports arms that were played over real processes, at a time scale:
// times are those of the modelled engines. One run, and so its tolerance is its own.
func LiveCanary(arms []*CanaryArm, scale float64) (*Report, error) {
	r := newReport("canary", Config{Seeds: 1}, nil, "output_tok_s", "makespan_s", "latency_p50_s", "hit_rate")
	by := map[string]*CanaryArm{}
	for _, a := range arms {
		by[a.Name] = a
		row := &Row{Name: a.Name, Kind: KindOurs, Setting: fmt.Sprintf("%d engines, %d dispatchers", a.Engines, a.Dispatchers), Figures: map[string]Stat{}}
		for k, v := range map[string]float64{"output_tok_s": a.TokS, "makespan_s": a.WallS, "latency_p50_s": a.P50S, "hit_rate": a.CachedFraction} {
			row.Figures[k] = Stat{Mean: v, N: 1}
		}
		r.Contenders = append(r.Contenders, row)
	}
	c, o, j := by["control"], by[policy.OwnerPressure], by[policy.ProjectedTime]
	if c == nil || o == nil || j == nil {
		return nil, fmt.Errorf("a canary of %d arms: want control, owner_pressure and projected_time", len(arms))
	}
	if c.SettingsDigest == o.SettingsDigest || o.SettingsDigest == j.SettingsDigest {
		return nil, fmt.Errorf("two arms ran with the same settings (digest %s): the comparison says nothing", o.SettingsDigest)
	}
	one := func(v float64) Stat { return Stat{Mean: v, N: 1} }
	s := o.SeedS / (c.WallS / 6)
	ratio, bound, projected := o.TokS/c.TokS, 6/(3+s), j.TokS/c.TokS
	same := 0.0
	if c.OutputSHA256 == o.OutputSHA256 && c.OutputSHA256 == j.OutputSHA256 {
		same = 1
	}
	r.atLeast("turns completed", one(float64(min(c.Completed, o.Completed, j.Completed))), float64(c.Turns), "turns failed")
	r.atLeast("the same outputs", one(same), 1, "an arm generated something else")
	start := canaryFirst
	for _, a := range []*CanaryArm{c, o} {
		start = min(start, slices.Max(a.Start))
	}
	r.atLeast("running on the owner when the rest is released, of 35", one(float64(start)), canaryFirst,
		"the owner was pressured earlier: one of the first ones was the seed")
	r.atLeast("owner_pressure / bound", one(ratio/bound), 0.9, "requests wait at one owner while the other has room, or this machine was busy")
	r.atLeast("owner_pressure / control", one(ratio), 1.6, "the peer takes too little, or this machine was busy")
	r.atLeast("projected_time / control", one(projected), 1.85, "the peer takes too little, or this machine was busy")
	r.atMost("prompt tokens cached, owner_pressure below control", one(c.CachedFraction-o.CachedFraction), 0.01, "the peer computes the beginning too")
	r.atMost("seeds", one(float64(o.Spills)), 1, "more than one seed for one peer")
	r.atMost("live seeds at once", one(float64(o.MostSeeds)), 1, "two seeds of a key were live")
	r.Workload = fmt.Sprintf("the canary over real HTTP engines, agents and dispatchers, each a process of its own, %g times as fast as the engines modelled", scale)
	r.extra(map[string]any{"arms": arms, "ratio": round(ratio), "bound": round(bound), "projected_ratio": round(projected), "s": round(s), "time_scale": scale})
	r.Conclusion = fmt.Sprintf("owner_pressure generates %.3f times control's rate, of a bound of %.3f (s = %.3f); projected_time %.3f times. %s", ratio, bound, s, projected, r.verdict())
	r.Notes = append(r.Notes, "Seconds are those of the modelled engines: wall time x time scale. Settings are read back from the pool that the processes follow, programs from the running processes.")
	return r, nil
}
