package sim

import (
	"fmt"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// The audit holds what a core decides against what was true (Options.Audit):
// the basis of a decision against the reports that there were, the prefix that
// it counted on against what the engine held, and, when all is quiet, its sums
// against the keys that stand.

const (
	auditLag   = 200 * time.Millisecond // of ticks and of what is on its way
	mostAudits = 20                     // kept
)

func (w *World) found(format string, args ...any) {
	if len(w.audited) < mostAudits {
		w.audited = append(w.audited, fmt.Sprintf(format, args...))
	}
}

// auditBasis: a decision on the engines' own reports has one from every engine
// that it may choose (S4's gap: never some by reports and some by counters). A
// request that comes again may not choose the engines it was on.
func (w *World) auditBasis(d core.Decision) {
	if !w.opts.Audit || d.Basis != "engine" || d.Bind > 1 {
		return
	}
	fresh := max(3*w.opts.Telemetry.LoadEvery, time.Second) + w.opts.WatchDelay + auditLag
	for _, name := range w.nodeNames() {
		n := w.Nodes[name]
		listed := n.Reg.State == subjects.EngineReady && w.Now-n.registered < w.opts.Timings.Suspect
		if n.tell != nil && listed && w.Now-n.told > fresh {
			w.found("basis mixed: %s was placed by reports, and %s had told nothing for %v", d.Rollout, name, w.Now-n.told)
		}
	}
}

// auditCache: no credit for what the engine does not hold and did not hold a
// moment ago (scenarios C1, C5). A lost event shows with the next one only.
func (w *World) auditCache(d *Dispatcher, h subjects.Held) {
	n := w.Nodes[h.Engine]
	if !w.opts.Audit || w.Now < d.blind[h.Engine] || h.PredictedCached == nil || n == nil || n.tell == nil || !n.alive || n.Reg.Epoch != h.Epoch {
		return
	}
	since := w.Now - w.opts.Telemetry.CacheDelay - w.opts.WatchDelay - auditLag
	blocks := w.Accepted[h.Key()].Blocks
	held := 0
	for held < len(blocks) && n.tell.held(blocks[held], since) {
		held++
	}
	if most := held * n.Reg.BlockTokens; *h.PredictedCached > most {
		w.found("cache: %s was placed on %s for %d cached tokens, of which it had %d", h.Key(), h.Engine, *h.PredictedCached, most)
	}
}

// held tells whether a block was cached at some time since then.
func (t *reports) held(block uint64, since time.Duration) bool {
	if _, ok := t.holds[block]; ok {
		return true
	}
	at, ok := t.removed[block]
	return ok && at >= since
}

// drift compares every dispatcher's sums with the keys that stand. Only when
// nothing is on its way any more.
func (w *World) drift() {
	if !w.opts.Audit || len(w.Bus.keys) > 0 || len(w.Answers) != len(w.Accepted) {
		return
	}
	for _, name := range sorted(w.Cores) {
		if d := w.Cores[name]; d.paused {
			continue
		}
		for _, e := range w.nodeNames() {
			if requests, tokens := w.Cores[name].Core.Reserved(e); requests != 0 || tokens != 0 {
				w.found("I3: %s counts %d requests and %d tokens on %s, where nothing is reserved", name, requests, tokens, e)
			}
		}
	}
}
