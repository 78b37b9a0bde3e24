package kvevents

import (
	"fmt"
	"sync"
)

// Audit compares what the view predicts with what the engine reports as cached,
// run by run: it is the only witness of a mapping that is wrong in silence
// (another model name in the namespace, another block size, two engines on one
// port). Safe for concurrent use.
type Audit struct {
	alarm func(AlarmKind, string)

	mu        sync.Mutex
	runs      int // since the last judgement
	seen      int // of these, runs whose prompt was in the view before or after
	matched   int // runs with a predicted block since the last judgement of those
	confirmed int // of these, runs with cached tokens
}

// auditRuns are enough to say something.
const auditRuns = 50

// NewAudit makes one. alarm may be called at the end of every 50 runs.
func NewAudit(alarm func(AlarmKind, string)) *Audit {
	if alarm == nil {
		alarm = func(AlarmKind, string) {}
	}
	return &Audit{alarm: alarm}
}

// AuditedRun is one that completed.
type AuditedRun struct {
	PromptBlocks int  // whole pool blocks of its prompt
	Predicted    int  // of these, held by the view when it began
	Appeared     int  // held when it ended: the engine has just computed them
	Held         int  // blocks of anything in the view when it began
	Cached       *int // tokens that the engine reports as cached, nil = it does not
}

// Run takes one. Prompts without a whole block say nothing, and neither does an
// empty view: before the first events, or while its ranks are degraded.
func (a *Audit) Run(r AuditedRun) {
	if r.PromptBlocks == 0 || r.Held == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.runs++
	if r.Predicted > 0 || r.Appeared > 0 {
		a.seen++
	}
	if r.Predicted > 0 && r.Cached != nil {
		a.matched++
		if *r.Cached > 0 {
			a.confirmed++
		}
	}
	if a.runs >= auditRuns {
		if a.seen == 0 {
			a.alarm(AlarmNoMatch, fmt.Sprintf("stores arrive, and none of the last %d prompts was found among them, before or after its run: is the model's name the same, is the port this engine's?", a.runs))
		}
		a.runs, a.seen = 0, 0
	}
	if a.matched >= auditRuns {
		if a.confirmed == 0 {
			a.alarm(AlarmFalseHits, fmt.Sprintf("the last %d prompts that matched blocks of the events had no cached token by the engine's word: are these another engine's events?", a.matched))
		}
		a.matched, a.confirmed = 0, 0
	}
}
