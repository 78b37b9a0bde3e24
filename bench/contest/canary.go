package contest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// The canary of S2: trajectories with one long beginning, whose owner is almost
// full when more of them come.
const (
	canarySlots  = 38
	canaryFirst  = 35 // trajectories that fill the owner up to its watermark
	canaryTurns  = 3
	canaryOutput = 1000    // tokens of a turn
	canaryPrefix = 67_584  // tokens that all prompts begin with
	canaryOwn    = 1_434   // tokens of a trajectory's first prompt after that
	canaryTool   = 500     // tokens between an output and the next turn
	canaryKV     = 1 << 22 // tokens of an engine's cache: all that it can run at once, shared or not
)

// When the workload's parts are due: those that fill the owner, and the rest.
const (
	CanaryReady = 60 * time.Second
	CanaryRest  = CanaryReady + 10*time.Second // the first ones are running by then
)

// CanarySlots and CanaryKV are of one engine; CanaryFirst is how many fill the owner.
const (
	CanaryFirst = canaryFirst
	CanarySlots = canarySlots
	CanaryKV    = canaryKV
)

// CanaryArm is one policy with a number of dispatchers. Field names are fixed.
type CanaryArm struct {
	Name           string             `json:"name"`
	Dispatchers    int                `json:"dispatchers"`
	Engines        int                `json:"engines"`
	TokS           float64            `json:"tok_s"`
	WallS          float64            `json:"wall_s"`
	P50S           float64            `json:"p50_s"` // of a turn, its wait included
	P95S           float64            `json:"p95_s"`
	RunningMax     int                `json:"running_max"` // of the fleet
	Shares         map[string]float64 `json:"shares"`      // of the output, by engine
	CachedFraction float64            `json:"cached_fraction"`
	Decisions      map[string]int     `json:"decisions"`
	BinarySHA256   string             `json:"binary_sha256"`
	CoreVersion    int                `json:"core_version"`
	SettingsDigest string             `json:"settings_digest"` // as the cores hold them

	Completed    int      `json:"completed"`
	Turns        int      `json:"turns"`
	PromptTokens int      `json:"prompt_tokens"`
	OutputSHA256 string   `json:"output_sha256"`
	Spills       int      `json:"spills"` // seeds written
	MostSeeds    int      `json:"most_seeds"`
	MostOwners   int      `json:"most_owners"`
	Coverage     float64  `json:"coverage"` // of decisions on complete reports of every engine
	Preemptions  int64    `json:"preemptions"`
	Active       int      `json:"active"`           // engines that answered a tenth of their part or more
	SeedS        float64  `json:"seed_s,omitempty"` // from the bind of the first seed to its answer
	Start        []int    `json:"start"`            // running on each engine when the rest is released, most first
	Problems     []string `json:"problems,omitempty"`
}

type canaryScene struct {
	engines, trajectories int
	dispatchers           int
}

func (s canaryScene) turns() int { return s.trajectories * canaryTurns }

// workload of a scene: one rollout makes an engine the owner, then come those
// that fill it, then the rest.
func (s canaryScene) workload() workload.Workload {
	w := workload.Workload{Name: "canary"}
	shared := workload.Segment{ID: 1, Tokens: canaryPrefix}
	w.Rollouts = append(w.Rollouts, workload.Rollout{Job: "canary", ID: "owner", Prompt: []workload.Segment{shared, {ID: 2, Tokens: canaryOwn}}, Output: 16, Limit: 1024})
	for i := range s.trajectories {
		prompt := []workload.Segment{shared, {ID: uint64(1000 + i), Tokens: canaryOwn}}
		at := CanaryReady
		if i >= canaryFirst {
			at = CanaryRest
		}
		name, after := fmt.Sprintf("t%03d", i), ""
		for turn := range canaryTurns {
			r := workload.Rollout{Job: "canary", ID: name + "-" + strconv.Itoa(turn+1), Prompt: slices.Clone(prompt), Output: canaryOutput, Limit: 1024,
				At: at, Trajectory: name, Turn: turn + 1, Last: turn == canaryTurns-1, After: after}
			w.Rollouts = append(w.Rollouts, r)
			after = r.ID
			prompt = append(prompt, r.OutputSegment(), workload.Segment{ID: uint64(1_000_000 + canaryTurns*i + turn), Tokens: canaryTool})
		}
	}
	return w
}

// CanaryWorkload is that of the scene with two engines; the first rollout makes
// one of them the owner, the others are due from CanaryReady on.
func CanaryWorkload() workload.Workload { return canaryScene{engines: 2, trajectories: 76}.workload() }

// CanaryPolicy is what an arm runs with.
type CanaryPolicy struct {
	Name     string
	Settings subjects.Settings
}

// CanaryPolicies are the arms: control keeps all work at the owner.
func CanaryPolicies() []CanaryPolicy {
	of := func(p string, knobs map[string]float64) subjects.Settings {
		return subjects.Settings{Policy: p, Mode: subjects.ModeEnforce, Knobs: knobs}
	}
	return []CanaryPolicy{
		{"control", of(policy.OwnerPressure, map[string]float64{"owner_ceiling": 1})},
		{policy.OwnerPressure, of(policy.OwnerPressure, nil)},
		{policy.ProjectedTime, of(policy.ProjectedTime, nil)},
	}
}

// play plays one arm in a scene.
func (s canaryScene) play(c *Case, name string, settings subjects.Settings) (*CanaryArm, *Outcome, error) {
	a := &CanaryArm{Name: name, Dispatchers: s.dispatchers, Engines: s.engines, Turns: s.turns(), Decisions: map[string]int{}, Shares: map[string]float64{}, CoreVersion: core.Version}
	c2 := *c
	watch := &canaryWatch{arm: a, binds: map[string]time.Duration{}, seeds: map[string]bool{}}
	c2.Script = watch.start
	o, err := c2.Bus(settings)
	if err != nil {
		return nil, nil, err
	}
	watch.read(o)
	if a.BinarySHA256, err = ownDigest(); err != nil {
		return nil, nil, err
	}
	return a, o, nil
}

func (s canaryScene) build(seed uint64) (*Case, error) {
	engines := slices.Repeat([]model.Config{{MaxRunning: canarySlots, KVTokens: canaryKV}}, s.engines)
	return &Case{Engines: engines, Work: s.workload(), Seed: seed, From: CanaryReady, Dispatchers: s.dispatchers}, nil
}

// canaryWatch sees a run from within.
type canaryWatch struct {
	arm      *CanaryArm
	run      *Run
	binds    map[string]time.Duration
	seeds    map[string]bool
	complete int
	decided  int
	live     int
}

func (w *canaryWatch) start(r *Run) {
	w.run = r
	from := r.World.Now + CanaryReady
	decision := r.World.OnDecision
	r.World.OnDecision = func(d core.Decision) {
		decision(d)
		if r.World.Now < from {
			return
		}
		w.arm.Decisions[d.Reason]++
		w.decided++
		if d.Basis == string(policy.BasisEngine) {
			w.complete++
		}
		if d.Seed {
			w.seeds[d.Rollout] = true
		}
	}
	r.World.After(CanaryRest-time.Millisecond, func() {
		for _, n := range r.Nodes {
			running, _ := n.Engine().Model.Counts()
			w.arm.Start = append(w.arm.Start, running)
		}
		slices.Sort(w.arm.Start)
		slices.Reverse(w.arm.Start)
	})
	put := r.World.OnPut
	r.World.OnPut = func(p core.ReservationPut) {
		put(p)
		w.binds[p.Key()] = r.World.Now
	}
	r.World.OnTransition = func(t core.Transition) {
		switch t.What {
		case "seeded":
			w.live++
			w.arm.Spills++
			w.arm.MostSeeds = max(w.arm.MostSeeds, w.live)
		case "cooldown", "given_back":
			w.live--
		}
	}
}

func (w *canaryWatch) read(o *Outcome) {
	a := w.arm
	f := o.figures()
	a.WallS, a.TokS = o.Makespan.Seconds(), f["output_tok_s"]
	a.CachedFraction, a.Preemptions, a.Problems = f["hit_rate"], o.preempted, o.Problems
	var whole []float64
	tokens := map[string]int{}
	var said []string
	for i := range o.Done {
		d := &o.Done[i]
		key := d.Rollout.Job + "." + d.Rollout.ID
		whole = append(whole, (d.Ended - d.At).Seconds())
		tokens[w.run.Nodes[d.Engine].Name] += d.Tokens
		a.PromptTokens += d.Prompt
		if d.Completed {
			a.Completed++
		}
		said = append(said, fmt.Sprintf("%s %d %x", key, d.Tokens, d.Rollout.OutputSegment().ID))
		if w.seeds[key] && a.SeedS == 0 {
			a.SeedS = (o.start + w.run.Case.From + d.Ended - w.binds[key]).Seconds()
		}
	}
	slices.Sort(whole)
	slices.Sort(said)
	a.P50S, a.P95S = at(whole, 0.5), at(whole, 0.95)
	a.OutputSHA256 = CanaryDigest(said)
	for _, running := range o.Fleet.Running {
		a.RunningMax = max(a.RunningMax, total(running))
	}
	for _, n := range w.run.Nodes {
		share := ratio(float64(tokens[n.Name]), float64(o.outTokens))
		a.Shares[n.Name] = round(share)
		if share*float64(a.Engines) >= 0.1 {
			a.Active++
		}
	}
	a.MostOwners = w.run.World.Bus.MaxOwners
	a.Coverage = ratio(float64(w.complete), float64(w.decided))
	a.SettingsDigest = CanaryDigest(w.run.World.Cores["d0"].Core.Checkpoint().Settings)
}

func total(v []int) (sum int) {
	for _, x := range v {
		sum += x
	}
	return sum
}

// CanaryDigest of anything, by its JSON.
func CanaryDigest(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// ownDigest is that of the program that runs.
func ownDigest() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("digest of this program: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("digest of this program: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("digest of this program: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
