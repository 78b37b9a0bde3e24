package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// ReplayOptions change how a journal is re-run. The zero value verifies.
type ReplayOptions struct {
	// Config changes the core's configuration, Event an event before it is
	// stepped: what would have been different. nil = as recorded.
	Config func(*core.Config)
	Event  func(core.Event) core.Event
	// Explain makes the replayed decisions carry their candidates.
	Explain bool
	// Step sees each step with the effects of the replay; they are valid only
	// during the call. An error ends the replay.
	Step func(s *Step, effects []core.Effect) error
	// GoOn does not stop at the first difference.
	GoOn bool
}

// Report of a replay.
type Report struct {
	Dispatcher   string      `json:"dispatcher"`
	Start        string      `json:"start"`
	Program      string      `json:"program,omitempty"`
	Core         int         `json:"core"`        // version that recorded
	CoreHere     int         `json:"core_replay"` // version that replayed
	Events       uint64      `json:"events"`      // compared
	Decisions    uint64      `json:"decisions"`   // of them, decisions
	Differences  int         `json:"differences"` // 1 at most unless told to go on
	First        *Difference `json:"first_difference,omitempty"`
	Ended        bool        `json:"ended"`                // the journal reaches to the dispatcher's orderly stop
	Incomplete   string      `json:"incomplete,omitempty"` // why not everything could be compared
	Unverified   uint64      `json:"unverified,omitempty"` // events that can be read behind a gap, and not compared
	CPUSeconds   float64     `json:"step_seconds"`         // spent in the core
	PerSecond    float64     `json:"decisions_per_s,omitempty"`
	TailMissing  bool        `json:"tail_missing"`
	LastEventNow float64     `json:"last_event_s"` // of the core's time
}

// OK tells whether all that could be read was compared and is the same.
func (r *Report) OK() bool { return r.Differences == 0 && r.Incomplete == "" }

// Difference is the first step at which recorded and replayed differ.
type Difference struct {
	Event           uint64          `json:"event"` // its number
	AtS             float64         `json:"at_s"`  // of the core's time
	Type            string          `json:"type"`
	Body            json.RawMessage `json:"body"`
	Recorded        []core.Decision `json:"recorded_decisions"`
	Replayed        []core.Decision `json:"replayed_decisions"` // with candidates when explained
	RecordedEffects int             `json:"recorded_effects"`
	ReplayedEffects []Effect        `json:"replayed_effects"`
	What            string          `json:"what"`
}

// Effect is one effect, for people.
type Effect struct {
	Type string      `json:"type"`
	Body core.Effect `json:"body"`
}

// Replay re-runs a journal with the core of this program. Its error is the
// caller's Step's, or that nothing could be read at all.
func Replay(j *Journal, opt ReplayOptions) (*Report, error) {
	r, err := NewReader(j)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := j.Begin
	rep := &Report{
		Dispatcher: j.Dispatcher, Start: j.Start, Program: b.Program,
		Core: b.Core, CoreHere: core.Version, Ended: j.Ended, TailMissing: !j.Ended,
	}
	cfg := core.Config{Dispatcher: j.Dispatcher, Timings: b.Timings, MaxInHand: b.MaxInHand, MaxAnswered: b.MaxAnswered, MaxIndexBytes: b.MaxIndex, Explain: opt.Explain}
	if opt.Config != nil {
		opt.Config(&cfg)
	}
	c := core.New(cfg)
	var sum digest
	var spent time.Duration
	for {
		s, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			rep.Incomplete = err.Error()
			rep.Unverified = rest(r)
			break
		}
		ev := s.Event
		if opt.Event != nil {
			ev = opt.Event(ev)
		}
		began := time.Now()
		effects := c.Step(ev, s.Now)
		spent += time.Since(began)
		if len(effects) > 0 {
			sum.step(effects)
		}
		if opt.Step != nil {
			if err := opt.Step(s, effects); err != nil {
				return rep, err
			}
		}
		rep.Events++
		rep.Decisions += uint64(len(s.Decisions))
		rep.LastEventNow = s.Now.Seconds()
		if len(effects) == s.Effects && (s.Effects == 0 || uint32(sum.sum) == s.Digest) {
			continue
		}
		rep.Differences++
		if rep.First == nil {
			rep.First = differ(s, effects)
		}
		if !opt.GoOn {
			break
		}
		// The digest is a chain: go on from the recorded one where it is known.
		if s.Effects > 0 {
			sum.sum = uint64(s.Digest)
		}
	}
	rep.CPUSeconds = spent.Seconds()
	if spent > 0 {
		rep.PerSecond = float64(rep.Decisions) / spent.Seconds()
	}
	return rep, nil
}

// rest counts what can still be read behind a gap.
func rest(r *Reader) (n uint64) {
	for {
		_, err := r.Next()
		if errors.Is(err, io.EOF) {
			return n
		}
		if err == nil {
			n++
		}
	}
}

func differ(s *Step, effects []core.Effect) *Difference {
	d := &Difference{
		Event: s.N, AtS: s.Now.Seconds(), Type: reflect.TypeOf(s.Event).Name(),
		Recorded: s.Decisions, RecordedEffects: s.Effects,
	}
	if d.Recorded == nil {
		d.Recorded = []core.Decision{}
	}
	d.Body, _ = json.Marshal(s.Event) // an event that cannot be shown is shown as null
	d.Replayed = Decisions(effects)
	for _, e := range effects {
		d.ReplayedEffects = append(d.ReplayedEffects, Effect{reflect.TypeOf(e).Name(), e})
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

// Decisions are those among the effects of a step.
func Decisions(effects []core.Effect) []core.Decision {
	out := []core.Decision{}
	for _, e := range effects {
		if d, ok := e.(core.Decision); ok {
			out = append(out, d)
		}
	}
	return out
}
