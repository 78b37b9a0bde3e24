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
	runs      int64 // with a whole block in the prompt, after stores had arrived
	matched   int64 // with a predicted block
	confirmed int64 // of these, with cached tokens
	missed    int64 // cached tokens without a predicted block
}

// Enough runs to say something.
const auditRuns = 50

// NewAudit makes one.
func NewAudit(alarm func(AlarmKind, string)) *Audit {
	if alarm == nil {
		alarm = func(AlarmKind, string) {}
	}
	return &Audit{alarm: alarm}
}

// Run takes one finished run: whole blocks of its prompt, how many of them the
// view held when it began, how many blocks the view held at all, and the cached
// tokens that the engine reported, nil when it does not.
func (a *Audit) Run(promptBlocks, predicted, held int, cached *int) {
	if promptBlocks == 0 || held == 0 {
		return
	}
	a.mu.Lock()
	a.runs++
	switch {
	case predicted > 0:
		a.matched++
		if cached != nil && *cached > 0 {
			a.confirmed++
		}
	case cached != nil && *cached > 0:
		a.missed++
	}
	runs, matched, confirmed, missed := a.runs, a.matched, a.confirmed, a.missed
	a.mu.Unlock()
	if runs%auditRuns != 0 {
		return
	}
	if matched == 0 && missed > 0 {
		a.alarm(AlarmNoMatch, fmt.Sprintf("%d runs, the engine reported cached tokens for %d of them, and no prompt ever matched a block of its events: is the model's name the same, is the port this engine's?", runs, missed))
	}
	if cached != nil && matched >= auditRuns && confirmed == 0 {
		a.alarm(AlarmFalseHits, fmt.Sprintf("%d runs matched blocks of the events, the engine confirmed none: are these another engine's events?", matched))
	}
}
