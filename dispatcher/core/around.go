package core

import (
	"slices"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

// StateAround is what a core knew at one moment, for people.
type StateAround struct {
	AtS      float64       `json:"at_s"` // of the core's time
	InHand   int           `json:"in_hand"`
	Waiting  int           `json:"waiting"`  // of them, without a place
	Headroom int           `json:"headroom"` // requests the fleet can be given
	Live     []string      `json:"live_dispatchers"`
	Missing  []ViewKind    `json:"missing_views,omitempty"`
	Policy   string        `json:"policy"`
	Mode     string        `json:"mode"`
	Settings uint64        `json:"settings_revision"`
	Engines  []EngineBrief `json:"engines"`
}

// EngineBrief is one engine in a StateAround.
type EngineBrief struct {
	Engine   string `json:"engine"`
	State    string `json:"state"`
	Epoch    string `json:"epoch"`
	Slots    int    `json:"slots"`
	Requests int    `json:"reserved_requests"`
	Tokens   int64  `json:"reserved_tokens"`
	Seq      uint64 `json:"seq"`
	Behind   int    `json:"decided_behind_a_bind,omitempty"`
	Load     string `json:"load"` // usable, or why it is not
	Trusted  bool   `json:"cache_known"`
}

// Around tells what the core knows now.
func (c *Core) Around() *StateAround {
	s := &StateAround{
		AtS: c.now.Seconds(), InHand: len(c.hand), Waiting: c.waiting(), Headroom: c.headroom(), Live: slices.Clone(c.live),
		Missing: c.Missing(), Policy: c.settings.Policy, Mode: c.settings.Mode, Settings: c.revision, Engines: []EngineBrief{},
	}
	for v := range c.Engines() {
		e := c.engines[v.Name]
		b := EngineBrief{Engine: v.Name, State: v.State, Epoch: e.reg.Epoch, Slots: v.Slots, Requests: v.Requests, Tokens: v.Tokens,
			Seq: e.seq, Behind: len(e.assigned), Load: "none", Trusted: c.index.Trusted(v.Name)}
		switch {
		case e.view.until == 0:
		case e.view.why == policy.WhyUsable:
			b.Load = "usable"
		default:
			b.Load = string(e.view.why)
		}
		s.Engines = append(s.Engines, b)
	}
	return s
}
