package workload

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"
)

// Arrivals in an open loop: Poisson at Rate groups (or trajectories) a second,
// Burst of them at once. Rate 0 is a closed loop: all of a step at its start.
type Arrivals struct {
	Rate  float64 `json:"rate"`
	Burst int     `json:"burst"` // default 1
}

type arrivals struct {
	Arrivals
	rng  *rand.Rand
	at   time.Duration
	left int
}

func (a *arrivals) next() time.Duration {
	if a.Rate <= 0 {
		return 0
	}
	if a.left == 0 {
		a.left = max(1, a.Burst)
		a.at += time.Duration(a.rng.ExpFloat64() * float64(max(1, a.Burst)) / a.Rate * float64(time.Second))
	}
	a.left--
	return a.at
}

// Reasoning is single-turn work with long tails: Groups samples of N to each
// prompt, Steps times. Zero values take the defaults.
type Reasoning struct {
	Seed   uint64
	Job    string // default "reason"
	Steps  int    // default 1
	Groups int    // of each step; default 32
	// N samples a group, drawn evenly from NMin to NMax; default 8 to 16.
	NMin, NMax int
	System     int  // tokens of the system prompt that all share; default 256, below 0 none
	Prompt     Dist // default ReasoningPrompt
	Output     Dist // default ReasoningOutput
	// Rho is the correlation of the lengths in a group (of their normal
	// scores); default 0.5, below 0 none. Published traces do not give it.
	Rho      float64
	Arrivals Arrivals
}

// Workload draws it.
func (c Reasoning) Workload() (Workload, error) {
	c.Job, c.Steps, c.Groups = orText(c.Job, "reason"), orInt(c.Steps, 1), orInt(c.Groups, 32)
	c.NMin, c.System = orInt(c.NMin, 8), orInt(c.System, 256)
	c.NMax = orInt(c.NMax, max(16, c.NMin))
	c.Prompt, c.Output = orDist(c.Prompt, ReasoningPrompt), orDist(c.Output, ReasoningOutput)
	if c.Rho == 0 {
		c.Rho = 0.5
	}
	rho := min(1, max(0, c.Rho))
	if err := errors.Join(positive("steps", c.Steps), positive("groups", c.Groups), positive("n", c.NMin),
		positive("n range", c.NMax-c.NMin+1), c.Prompt.check("prompt"), c.Output.check("output"),
		most(c.Steps*c.Groups*c.NMax)); err != nil {
		return Workload{}, fmt.Errorf("reasoning workload: %w", err)
	}
	rng := rand.New(rand.NewPCG(c.Seed, 0x7265_6173))
	w := Workload{Name: "reasoning", Closed: c.Arrivals.Rate <= 0}
	arr := arrivals{Arrivals: c.Arrivals, rng: rng}
	seed := strconv.FormatUint(c.Seed, 10)
	for step := range c.Steps {
		for g := range c.Groups {
			group := fmt.Sprintf("s%d-g%04d", step+1, g)
			prompt := system(c.Job, c.System)
			prompt = append(prompt, Segment{ID: contentID("problem", seed, c.Job, group), Tokens: c.Prompt.Draw(rng)})
			n, z, at := c.NMin+rng.IntN(c.NMax-c.NMin+1), rng.NormFloat64(), arr.next()
			for i := range n {
				w.Rollouts = append(w.Rollouts, Rollout{Job: c.Job, ID: fmt.Sprintf("%s-%02d", group, i), Prompt: prompt,
					Output: c.Output.At(correlated(rng, z, rho)), Limit: c.Output.Max, At: at, Step: int64(step + 1), Group: group, Index: i, Size: n})
			}
		}
	}
	return w, nil
}

// Agentic is multi-turn work: each prompt is the whole conversation so far.
type Agentic struct {
	Seed        uint64
	Job         string // default "agent"
	Steps       int    // default 1
	Tasks       int    // of each step; default 16
	N           int    // trajectories of each task, a group; default 8
	System      int    // tokens of the system prompt and tools that all share; default 2,048, below 0 none
	Task        Dist   // tokens of a task; default 900, sigma 0.6
	Turns       Dist   // default AgentTurns
	Output      Dist   // of a turn; default AgentOutput
	Observation Dist   // default AgentObservation
	// MaxContext ends a trajectory before its prompt and output exceed it,
	// tokens; default 131,072.
	MaxContext int
	NoGaps     bool // tools take no time
	Arrivals   Arrivals
}

// Workload draws it.
func (c Agentic) Workload() (Workload, error) {
	c.Job, c.Steps, c.Tasks = orText(c.Job, "agent"), orInt(c.Steps, 1), orInt(c.Tasks, 16)
	c.N, c.System, c.MaxContext = orInt(c.N, 8), orInt(c.System, 2048), orInt(c.MaxContext, 131_072)
	c.Task = orDist(c.Task, Dist{Median: 900, Sigma: 0.6, Min: 32, Max: 16_384})
	c.Turns, c.Output = orDist(c.Turns, AgentTurns), orDist(c.Output, AgentOutput)
	c.Observation = orDist(c.Observation, AgentObservation)
	if err := errors.Join(positive("steps", c.Steps), positive("tasks", c.Tasks), positive("n", c.N), c.Task.check("task"),
		c.Turns.check("turns"), c.Output.check("output"), c.Observation.check("observation"),
		most(c.Steps*c.Tasks*c.N)); err != nil {
		return Workload{}, fmt.Errorf("agentic workload: %w", err)
	}
	rng := rand.New(rand.NewPCG(c.Seed, 0x6167_656e))
	w := Workload{Name: "agentic", Closed: c.Arrivals.Rate <= 0}
	arr := arrivals{Arrivals: c.Arrivals, rng: rng}
	seed := strconv.FormatUint(c.Seed, 10)
	for step := range c.Steps {
		for task := range c.Tasks {
			group := fmt.Sprintf("s%d-t%04d", step+1, task)
			prompt := system(c.Job, c.System)
			prompt = append(prompt, Segment{ID: contentID("task", seed, c.Job, group), Tokens: c.Task.Draw(rng)})
			at := arr.next()
			for i := range c.N {
				first := Rollout{Job: c.Job, Group: group, Index: i, Size: c.N, Step: int64(step + 1), At: at, Limit: c.Output.Max,
					Trajectory: fmt.Sprintf("%s-%02d", group, i), Prompt: prompt}
				w.Rollouts = appendTurns(w.Rollouts, first, c.fit(rng, first.PromptTokens()))
			}
		}
	}
	if err := most(len(w.Rollouts)); err != nil {
		return Workload{}, fmt.Errorf("agentic workload: %w", err)
	}
	return w, nil
}

type turn struct {
	out, obs int
	gap      time.Duration
}

// fit draws the turns of a trajectory, as many as the context holds.
func (c *Agentic) fit(rng *rand.Rand, context int) []turn {
	turns := make([]turn, 0, 32)
	for range c.Turns.Draw(rng) {
		t := turn{out: c.Output.Draw(rng), obs: c.Observation.Draw(rng), gap: ToolGap(rng)}
		if c.NoGaps {
			t.gap = 0
		}
		if len(turns) > 0 && context+t.out > c.MaxContext {
			break
		}
		context += t.out + t.obs
		turns = append(turns, t)
	}
	return turns
}

// ToolGap draws the time between two turns: 86 % under 1 s, 95 % under 10 s,
// evenly in each class (0.05 to 1 s, 1 to 10 s, 10 to 60 s).
func ToolGap(rng *rand.Rand) time.Duration {
	lo, hi := 10.0, 60.0
	switch u := rng.Float64(); {
	case u < 0.86:
		lo, hi = 0.05, 1
	case u < 0.95:
		lo, hi = 1, 10
	}
	return time.Duration((lo + float64((hi-lo)*rng.Float64())) * float64(time.Second))
}

// HotPrefix is many requests that share a few long prefixes, in bursts: what
// piles up on one engine when affinity knows no queue.
type HotPrefix struct {
	Seed     uint64
	Job      string // default "hot"
	Requests int    // default 4,000
	Prefixes int    // hot prefixes, used alike often; default 1
	Prefix   int    // tokens of each; default 16,384
	Suffix   Dist   // tokens of their own; default 128, sigma 0.5
	Output   Dist   // default 256, sigma 0.5
	// Cold is the share of requests whose prompt nobody shares; default 0.
	Cold     float64
	Arrivals Arrivals // Rate 0 = all at once
}

// Workload draws it.
func (c HotPrefix) Workload() (Workload, error) {
	c.Job, c.Requests, c.Prefixes = orText(c.Job, "hot"), orInt(c.Requests, 4000), orInt(c.Prefixes, 1)
	c.Prefix = orInt(c.Prefix, 16_384)
	c.Suffix = orDist(c.Suffix, Dist{Median: 128, Sigma: 0.5, Min: 8, Max: 2_048})
	c.Output = orDist(c.Output, Dist{Median: 256, Sigma: 0.5, Min: 8, Max: 4_096})
	if err := errors.Join(positive("requests", c.Requests), positive("prefixes", c.Prefixes), positive("prefix", c.Prefix),
		c.Suffix.check("suffix"), c.Output.check("output"), most(c.Requests)); err != nil {
		return Workload{}, fmt.Errorf("hot prefix workload: %w", err)
	}
	rng := rand.New(rand.NewPCG(c.Seed, 0x686f_7470))
	w := Workload{Name: "hot-prefix", Rollouts: make([]Rollout, 0, c.Requests)}
	arr := arrivals{Arrivals: c.Arrivals, rng: rng}
	seed := strconv.FormatUint(c.Seed, 10)
	for i := range c.Requests {
		id := fmt.Sprintf("%06d", i+1)
		shared := contentID("hot", seed, c.Job, strconv.Itoa(rng.IntN(c.Prefixes)))
		if rng.Float64() < c.Cold {
			shared = contentID("cold", seed, c.Job, id)
		}
		w.Rollouts = append(w.Rollouts, Rollout{Job: c.Job, ID: id, Output: c.Output.Draw(rng), Limit: c.Output.Max, At: arr.next(), Index: i,
			Prompt: []Segment{{shared, c.Prefix}, {contentID("own", seed, c.Job, id), c.Suffix.Draw(rng)}}})
	}
	return w, nil
}

func system(job string, tokens int) []Segment {
	if tokens < 1 {
		return nil
	}
	return []Segment{{ID: contentID("system", job), Tokens: tokens}}
}

func orInt(v, def int) int {
	if v == 0 {
		return def
	}
	return v
}

func orText(v, def string) string {
	if v == "" {
		return def
	}
	return v
}

func orDist(v, def Dist) Dist {
	if v == (Dist{}) {
		return def
	}
	return v
}

func positive(what string, n int) error {
	if n < 1 {
		return fmt.Errorf("%s is %d: give at least 1", what, n)
	}
	return nil
}

func most(n int) error {
	if n > MaxRows {
		return fmt.Errorf("%d rollouts or more: at most %d", n, MaxRows)
	}
	return nil
}

func (d Dist) check(what string) error {
	if d.Min < 1 || d.Max < d.Min || d.Max > MaxInput || !(d.Median > 0) || d.Sigma < 0 ||
		d.TailShare < 0 || d.TailShare > 1 || d.TailShare > 0 && (!(d.TailMed > 0) || !(d.TailSigma > 0) || d.Sigma == 0) {
		return fmt.Errorf("distribution of %s %+v: give medians above 0, sigmas of 0 or more, 1 <= min <= max <= %d", what, d, MaxInput)
	}
	return nil
}
