package workeragent

import (
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// shownRates are what an engine showed when it was last busy, tokens/s of all
// ranks together; 0 = never. They stand in its registration, so that a
// dispatcher that has just begun, or an engine that has, is not taken for an
// average one.
type shownRates struct{ decode, prefill float64 }

// learn takes a sample in. An idle engine decodes slowly because it has little to
// do: only a sample of a busy one counts, and only when every rank tells.
func (s *shownRates) learn(l *subjects.Load) {
	var running, waiting, most int
	full := false // the fullest rank's KV is half used or more
	var decode, prefill float64
	decodes, prefills := true, true
	for i := range l.Ranks {
		r := &l.Ranks[i]
		if r.Running == nil || r.Waiting == nil {
			return
		}
		running, waiting = running+*r.Running, waiting+*r.Waiting
		if r.MaxRunning != nil {
			most += *r.MaxRunning
		}
		full = full || telemetry.Used(r) >= 0.5
		if decodes = decodes && r.DecodeTokS != nil && *r.DecodeTokS > 0; decodes {
			decode += *r.DecodeTokS
		}
		if prefills = prefills && r.PrefillTokS != nil && *r.PrefillTokS > 0; prefills {
			prefill += *r.PrefillTokS
		}
	}
	// As the dispatchers judge it (policy.Fuser): what waits for the step in
	// flight beside a small batch does not make an engine busy.
	busy := waiting > 0
	if most > 0 {
		busy = 2*running >= most || waiting > 0 && full
	}
	if busy && decodes && decode > 0 {
		s.decode = decode
	}
	// A prompt's rate is told only when it was seen, be the engine busy or not.
	if prefills && prefill > 0 {
		s.prefill = prefill
	}
}

// tell writes them into a registration.
func (s shownRates) tell(e *subjects.Engine) {
	if s.decode > 0 {
		e.DecodeTokS = &s.decode
	}
	if s.prefill > 0 {
		e.PrefillTokS = &s.prefill
	}
}
