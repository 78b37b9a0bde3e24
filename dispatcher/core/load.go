package core

import (
	"cmp"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// loadView is what an engine says of itself, judged. A report that cannot be
// used is unknown: own reservations decide and dispatch goes on (scenario P7).
type loadView struct {
	load   subjects.Load // the last one; AppliedRevision splits what it knows from what is newer
	until  time.Duration // stale then; 0 = none
	usable policy.Observed
	why    policy.Why
	newer  policy.Reserved // reservations above AppliedRevision
	fuser  policy.Fuser
	fused  policy.Observed // of the last refresh; a candidate points at it

	kvBlocked  bool
	preempted  time.Duration // blocked until then; every mark expires
	preemptSum int64         // last cumulative count
	counted    bool          // preemptSum is known
}

func (c *Core) putLoad(l Load) {
	e := c.engines[l.Engine]
	if e == nil || !e.known || l.Epoch != e.reg.Epoch {
		return // of another life, or of nobody we know
	}
	v := &e.view
	if v.until != 0 && l.Seq <= v.load.Seq {
		return
	}
	v.load = l.Load
	fresh := policy.Fresh(time.Duration(l.IntervalMS)*time.Millisecond) - time.Duration(max(0, min(l.AgeMS, 60_000))*1e6)
	v.until = c.now + max(1, fresh)
	v.newer = policy.Reserved{}
	for _, h := range e.held {
		if h.counted && h.Revision > l.AppliedRevision {
			add(&v.newer, h, 1)
		}
	}
	v.usable, v.why = policy.Judge(&v.load, 0, policy.Want{Epoch: e.reg.Epoch, Ranks: e.reg.Ranks})
	if v.why == policy.WhyUsable {
		at := policy.Reserved{
			Requests: e.sum.Requests - v.newer.Requests, Tokens: e.sum.Tokens - v.newer.Tokens,
			PromptTokens: e.sum.PromptTokens - v.newer.PromptTokens, CachedTokens: e.sum.CachedTokens - v.newer.CachedTokens,
		}
		if n := v.load.OwnRequests; n != nil {
			at.Requests = *n
		}
		v.fuser.Sample(c.now, &v.usable, at)
		decode, prefill := v.fuser.Rates()
		e.decode, e.prefill = cmp.Or(decode, e.decode), cmp.Or(prefill, e.prefill)
		v.kvBlocked = c.policy.KVGate(v.kvBlocked, v.usable.KVUsageWorst)
	} else {
		v.kvBlocked = false
		c.count("loads_unused", string(v.why))
	}
	c.preemptions(v, &l.Load)
	c.refresh(e)
}

// preemptions are cumulative: an increment is an event that blocks for a while,
// a decrease is a restart of the counter and no event.
func (c *Core) preemptions(v *loadView, l *subjects.Load) {
	var sum int64
	for _, r := range l.Ranks {
		if r.PreemptionsTotal == nil {
			return
		}
		sum += *r.PreemptionsTotal
	}
	if v.counted && sum > v.preemptSum {
		v.preempted = c.now + c.t.PreemptionBlock
	}
	v.preemptSum, v.counted = sum, true
}

// age drops a report that has become stale; it tells whether anything changed.
func (c *Core) age(e *engine) bool {
	v := &e.view
	if v.until == 0 || c.now < v.until || v.why == policy.WhyStale {
		return false
	}
	v.why, v.kvBlocked = policy.WhyStale, false
	return true
}

// observed is the engine's own picture fused with what is reserved now, nil
// when there is none that may be used.
func (e *engine) observed() *policy.Observed {
	v := &e.view
	if v.until == 0 || v.why != policy.WhyUsable {
		return nil
	}
	v.fused = v.usable
	v.fuser.Fuse(&v.fused, e.sum, v.newer)
	return &v.fused
}

// markSticky fills in what belongs to the request: the engines that its trajectory or
// group was bound to last. unmarkSticky takes it out again.
func (c *Core) markSticky(f *subjects.Facts) {
	c.marked = c.marked[:0]
	if f.Trajectory == "" && f.Group == "" || !c.policy.StickyTrajectory && !c.policy.StickyGroup {
		return
	}
	for name, scope := range c.sticky.FindAll(f.Job, f.Trajectory, f.Group) {
		e := c.engines[name]
		if e == nil {
			continue
		}
		cand := &c.cands[e.at]
		cand.Sticky, cand.StickyGroup = true, scope == policy.ScopeGroup
		cand.KeyInFlight = e.inFlight(f, scope)
		c.marked = append(c.marked, e.at)
	}
}

func (c *Core) unmarkSticky() {
	for _, at := range c.marked {
		cand := &c.cands[at]
		cand.Sticky, cand.StickyGroup, cand.KeyInFlight = false, false, 0
	}
}

// inFlight is how many requests of the same trajectory or group are reserved
// here, those on their way included.
func (e *engine) inFlight(f *subjects.Facts, scope policy.Scope) (n int) {
	same := func(job, trajectory, group string) {
		if job == f.Job && (scope == policy.ScopeTrajectory && trajectory == f.Trajectory || scope == policy.ScopeGroup && group == f.Group) {
			n++
		}
	}
	for _, h := range e.held { // a count: order plays no part
		same(h.Job, h.Trajectory, h.Group)
	}
	if it := e.binding; it != nil {
		same(it.facts.Job, it.facts.Trajectory, it.facts.Group)
	}
	for _, it := range e.assigned {
		same(it.facts.Job, it.facts.Trajectory, it.facts.Group)
	}
	return n
}

// record emits the decision that the policy just took.
func (c *Core) record(it *item, chosen int) {
	d := Decision{
		Rollout: it.key(), Bind: it.bind, Policy: c.rec.Policy, Mode: c.rec.Mode,
		Reason: string(c.rec.Reason), Basis: string(c.rec.Basis), Tokens: it.tokens,
		OwnerKey: c.keyOf(it), Seed: c.rec.Seed, NoSpill: string(c.rec.NoSpill),
	}
	if chosen >= 0 {
		d.Engine = c.names[chosen]
	}
	if c.rec.ShadowOutcome != "" {
		d.ShadowWhy = string(c.rec.ShadowReason)
		if c.rec.ShadowChosen >= 0 {
			d.Shadow = c.names[c.rec.ShadowChosen]
		}
		if c.rec.Agrees() {
			c.count("shadow", "agrees")
		} else {
			c.count("shadow", "differs")
		}
	}
	if c.rec.WaitFor >= 0 {
		d.WaitFor, d.WaitMS = c.names[c.rec.WaitFor], c.rec.WaitSpan.Milliseconds()
	}
	if c.cfg.Explain {
		c.explain(&d)
	}
	if c.cfg.Explain || chosen < 0 { // why nobody may serve it is always told
		c.tellFilters(&d)
	}
	c.emit(d)
}

// explain copies the record's candidates: the record is reused.
func (c *Core) explain(d *Decision) {
	for i := range c.rec.Candidates {
		s := &c.rec.Candidates[i]
		parts := map[string]float64{}
		for p, v := range s.Parts() {
			parts[p.String()] = v
		}
		d.Candidates = append(d.Candidates, Considered{
			Engine: c.names[s.Index], Filter: s.Filter.String(), Score: s.Score, Parts: parts,
			Requests: s.Requests, Tokens: s.Tokens, Cached: s.Cached, KVUsage: s.KVUsage,
			DecodeTokS: s.DecodeTokS, PrefillTokS: s.PrefillTokS, DecodeFrom: string(s.DecodeFrom), PrefillFrom: string(s.PrefillFrom),
		})
	}
}

// tellFilters copies how many engines each filter left out.
func (c *Core) tellFilters(d *Decision) {
	for f, n := range c.rec.EachFilter() {
		if d.Filtered == nil {
			d.Filtered = map[string]int{}
		}
		d.Filtered[f.String()] = n
	}
}
