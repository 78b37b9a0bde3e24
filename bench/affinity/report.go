package affinity

import (
	"encoding/json"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Report is what a run saw. Tokens everywhere.
type Report struct {
	Pool    string   `json:"pool"`
	Job     string   `json:"job"`
	Policy  string   `json:"policy"` // of the arm with affinity
	Seed    uint64   `json:"seed"`   // of the prompts
	Engines []Engine `json:"engines"`
	Arms    []Arm    `json:"arms"`
	// Restored tells whether the pool's settings are as they were.
	Restored bool   `json:"settings_restored"`
	Problem  string `json:"problem,omitempty"` // what ended the run early
	OK       bool   `json:"ok"`
}

// Engine is one that takes part.
type Engine struct {
	Name  string `json:"name"`
	URL   string `json:"url"`
	Kind  string `json:"kind"`
	Block int    `json:"block_tokens"` // of its cache
	// Source is where its hits are read: a counter of its own, or the sum of its
	// answers' cached_tokens where it has none (SGLang without metrics).
	Source string `json:"source"`
	summed bool
}

// Arm is the same work under one setting.
type Arm struct {
	Affinity string  `json:"affinity"` // off, on
	Policy   string  `json:"policy"`
	Mode     string  `json:"mode"`
	Phases   []Phase `json:"phases"`
}

// Kinds of prompts.
const (
	Repeated  = "repeated"
	MultiTurn = "multi_turn"
	Distinct  = "distinct"
)

// Phase is one kind of prompts in one arm.
type Phase struct {
	Kind     string    `json:"kind"`
	Requests []Request `json:"requests"`
	Engines  []Counted `json:"engines"`
	Hits     int64     `json:"hits"`     // of all engines, by their counters
	Possible int64     `json:"possible"` // if every request had found all of it cached that was computed before
	Share    float64   `json:"share"`    // of the hits, on the engine with most of them; of the requests when there are none
	Checks   []Check   `json:"checks"`
}

// Request is one rollout with the decision that placed it.
type Request struct {
	Rollout      string `json:"rollout"`
	PromptTokens int    `json:"prompt_tokens"`
	Engine       string `json:"engine"`
	Policy       string `json:"policy"`
	Mode         string `json:"mode"`
	Reason       string `json:"reason"`
	// Predicted is what the dispatcher thought to be cached there; null without a
	// view of its cache.
	Predicted *int `json:"predicted_cached_tokens"`
	// Cached is what the engine's usage says; null when it says nothing.
	Cached *int `json:"cached_tokens"`
	// Decision is the whole record as published, candidates included.
	Decision *Decision `json:"decision"`
}

// Decision is a published decision record.
type Decision struct {
	core.Decision
	Dispatcher string `json:"dispatcher"`
}

// Counted are one engine's hits in one phase.
type Counted struct {
	Engine     string `json:"engine"`
	Requests   int    `json:"requests"`
	Before     int64  `json:"before"` // its counter
	After      int64  `json:"after"`
	Hits       int64  `json:"hits"`
	Usage      int64  `json:"usage_cached_tokens"` // of the answers
	Untold     int    `json:"untold"`              // answers without it
	Difference int64  `json:"difference"`
	Allowed    int64  `json:"allowed"`
}

// Check is one condition.
type Check struct {
	What string `json:"what"`
	OK   bool   `json:"ok"`
	Text string `json:"text"`
}

// Failed are the checks that did not hold, each with its place.
func (r *Report) Failed() []string {
	var out []string
	for i := range r.Arms {
		for j := range r.Arms[i].Phases {
			p := &r.Arms[i].Phases[j]
			for _, c := range p.Checks {
				if !c.OK {
					out = append(out, "affinity "+r.Arms[i].Affinity+", "+p.Kind+": "+c.Text)
				}
			}
		}
	}
	return out
}

// readDecision reads a published decision.
func readDecision(b []byte) (*Decision, bool) {
	var d Decision
	return &d, json.Unmarshal(b, &d) == nil && d.Rollout != ""
}
