package core

import (
	"github.com/rollbus/rollbus/dispatcher/prefix"
	"github.com/rollbus/rollbus/subjects"
)

// eventsNone is what an engine without cache events registers; approximate
// marks a view made from what was run there.
const (
	eventsNone        = "none"
	eventsApproximate = "approximate"
)

// know keeps the block index in step with an engine's registration.
func (c *Core) know(e *engine) {
	if e.lost() {
		c.index.Remove(e.name) // zero hits from here on, also for what is in the pipe
		e.askAt = 0
		return
	}
	c.verdict(e, c.index.Put(prefix.Registration{
		Engine: e.name, Epoch: e.reg.Epoch, WeightVersion: e.reg.WeightVersion, Tag: e.tag,
		Events: e.reg.Events != "" && e.reg.Events != eventsNone,
	}))
}

func (c *Core) verdict(e *engine, v prefix.Verdict) {
	if v.Why != prefix.WhyNone {
		c.count("cache_resyncs", string(v.Why))
	}
	if v.Resync {
		e.askAt = 0
		c.emit(AskSnapshot{Engine: e.name, Epoch: e.reg.Epoch})
	}
}

var cacheOps = map[string]prefix.Op{"stored": prefix.Stored, "removed": prefix.Removed, "cleared": prefix.Cleared}

func (c *Core) putCache(ev Cache) {
	e := c.engines[ev.Engine]
	op, known := cacheOps[ev.Op]
	tier, tiered := prefix.ParseTier(ev.Tier)
	if e == nil || !known || !tiered && ev.Op != "cleared" {
		c.count("cache_events", "ignored")
		return
	}
	v := c.index.Apply(c.now, prefix.Event{
		Engine: ev.Engine, Epoch: ev.Epoch, Seq: ev.Seq, Op: op, Tier: tier, Namespace: ev.Namespace, Blocks: ev.Blocks,
		Parent: ev.Parent, HasParent: ev.HasParent,
	})
	c.verdict(e, v)
	c.cacheMoved(ev)
	if v.Did == prefix.Lost {
		c.refresh(e)
	}
}

func (c *Core) putSnapshot(s Snapshot) {
	e := c.engines[s.Engine]
	if e == nil {
		return
	}
	switch s.Phase {
	case "begin":
		c.verdict(e, c.index.Begin(s.Engine, s.Epoch, s.AsOf))
	case "part":
		if tier, ok := prefix.ParseTier(s.Tier); ok {
			c.index.Part(c.now, s.Engine, s.Epoch, tier, s.Blocks)
		}
	case "end":
		c.verdict(e, c.index.End(c.now, s.Engine, s.Epoch))
		c.cacheKnown(s.Engine)
	case "failed":
		// Not at once: an agent that is not there answers so immediately.
		if v := c.index.Failed(s.Engine, s.Epoch); v.Resync {
			e.askAt = c.now + c.t.Backoff
		}
	}
	c.refresh(e)
}

// askAgain asks for the snapshots whose time has come.
func (c *Core) askAgain() {
	for _, n := range c.names {
		if e := c.engines[n]; e.askAt != 0 && c.now >= e.askAt {
			e.askAt = 0
			c.emit(AskSnapshot{Engine: n, Epoch: e.reg.Epoch})
		}
	}
}

// match tells every candidate how much of the prompt its engine holds.
func (c *Core) match(f *subjects.Facts) {
	c.hits = c.index.Match(f.Blocks, c.hits)
	size := c.settings.BlockTokens
	for i := range c.hits {
		h := &c.hits[i]
		cand := &c.cands[c.tags[h.Tag].at]
		cand.MatchGPU, cand.MatchCPU, cand.MatchSSD = h.GPU*size, h.CPU*size, h.SSD*size
	}
}

// unmatch takes it out again: candidates live longer than a request.
func (c *Core) unmatch() {
	for i := range c.hits {
		cand := &c.cands[c.tags[c.hits[i].Tag].at]
		cand.MatchGPU, cand.MatchCPU, cand.MatchSSD = 0, 0, 0
	}
}

// predicted is the part of the prompt that the chosen engine should have cached.
func (c *Core) predicted(at int) *int {
	cand := &c.cands[at]
	if !cand.MatchKnown {
		return nil
	}
	n := cand.MatchGPU + cand.MatchCPU + cand.MatchSSD
	return &n
}

// tag gives an engine a number that stays while others come and go.
func (c *Core) tag(e *engine) {
	for i, old := range c.tags {
		if old == nil {
			e.tag, c.tags[i] = i, e
			return
		}
	}
	e.tag = len(c.tags)
	c.tags = append(c.tags, e)
}
