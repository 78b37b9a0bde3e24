package journal

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Difference is the first step at which recorded and replayed differ.
type Difference struct {
	Event           uint64            `json:"event"` // its number
	AtS             float64           `json:"at_s"`  // of the core's time
	Type            string            `json:"type"`
	Body            json.RawMessage   `json:"body"`
	Recorded        []core.Decision   `json:"recorded_decisions"`
	Replayed        []core.Decision   `json:"replayed_decisions"` // with candidates when explained
	RecordedEffects int               `json:"recorded_effects"`
	ReplayedEffects []Effect          `json:"replayed_effects"`
	State           *core.StateAround `json:"state"` // of the replaying core, behind the event
	What            string            `json:"what"`
}

func differ(s *Step, effects []core.Effect) *Difference {
	d := &Difference{
		Event: s.N, AtS: s.Now.Seconds(), Type: Name(s.Event), Body: body(s.Event),
		Recorded: s.Decisions, RecordedEffects: s.Effects, Replayed: Decisions(effects), ReplayedEffects: Effects(effects),
	}
	if d.Recorded == nil {
		d.Recorded = []core.Decision{}
	}
	d.What = d.what()
	return d
}

func (d *Difference) what() string {
	for i := range max(len(d.Recorded), len(d.Replayed)) {
		switch {
		case i >= len(d.Replayed):
			return fmt.Sprintf("decision %d was recorded and is not made now: %s", i, brief(d.Recorded[i]))
		case i >= len(d.Recorded):
			return fmt.Sprintf("decision %d is made now and was not recorded: %s", i, brief(d.Replayed[i]))
		}
		now := d.Replayed[i]
		now.Candidates, now.Filtered = nil, nil
		if !reflect.DeepEqual(d.Recorded[i], now) {
			return fmt.Sprintf("decision %d: recorded %s, replayed %s", i, brief(d.Recorded[i]), brief(now))
		}
	}
	if d.RecordedEffects != len(d.ReplayedEffects) {
		return fmt.Sprintf("the decisions are the same; %d effects were recorded, %d are replayed", d.RecordedEffects, len(d.ReplayedEffects))
	}
	return "the decisions are the same; an effect differs in a field"
}

func brief(d core.Decision) string {
	to := d.Engine
	if to == "" {
		to = "nowhere"
	}
	return fmt.Sprintf("%s bind %d to %s (%s, %s, %s, %d tokens)", d.Rollout, d.Bind, to, d.Reason, d.Policy, d.Mode, d.Tokens)
}
