package workeragent

import (
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// audited is an exact view that runs are held against: whether its events and
// its mapping are this engine's shows only there (scenarios C6, C13).
type audited struct {
	view  *kvevents.View
	audit *kvevents.Audit
	block int // of the pool, tokens
}

// matched is what the view said of a run's prompt when it was handed over. The
// zero one compares nothing.
type matched struct {
	by     *audited
	blocks []uint64
	run    kvevents.AuditedRun
}

// match looks a prompt up, as the dispatchers do.
func (u *unit) match(req *subjects.Request) matched {
	u.mu.Lock()
	by := u.audited
	u.mu.Unlock()
	if by == nil || len(req.PromptTokenIDs) == 0 {
		return matched{}
	}
	blocks := blockhash.Chain(nil, u.namespace(req), req.PromptTokenIDs, by.block)
	m := matched{by: by, blocks: blocks, run: kvevents.AuditedRun{PromptBlocks: len(blocks), Held: by.view.Len()}}
	m.run.Predicted, _ = by.view.Match(blocks)
	return m
}

// compared offers a run that has ended to be held against what the engine says
// it found. That is done a little later: its events may come after its answer.
func (u *unit) compared(m matched, o *engine.Outcome) {
	if m.by == nil || o.Kind != engine.Completed {
		return
	}
	if o.Usage != nil {
		m.run.Cached = o.Usage.CachedTokens
	}
	select {
	case u.ended <- m:
	default: // some are enough
	}
}

// compare holds the runs that have ended against the view.
func (c *cacheView) compare() {
	for {
		select {
		case m := <-c.u.ended:
			if m.by == c.audited { // else of another view
				m.run.Appeared, _ = m.by.view.Match(m.blocks)
				m.by.audit.Run(m.run)
			}
		default:
			return
		}
	}
}

// namespace of a request's blocks.
func (u *unit) namespace(req *subjects.Request) uint64 {
	model := req.Model
	if model == "" {
		model = u.a.settings.Load().Model
	}
	return blockhash.Namespace(model, req.LoRA, req.CacheSalt)
}
