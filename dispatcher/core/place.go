package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// freeEngine frees an engine for its next bind. Of what was decided behind the
// last one the first is decided again, on what its answer brought; if it goes
// elsewhere, place takes the next.
func (c *Core) freeEngine(e *engine) {
	e.binding = nil
	c.refresh(e)
	c.again(e)
}

// again has the first of those that were decided behind a bind decided anew.
func (c *Core) again(e *engine) bool {
	if e.binding != nil || len(e.assigned) == 0 {
		return false
	}
	it := e.assigned[0]
	c.leave(it)
	c.wait(it)
	return true
}

const (
	// maxMisses bounds how many requests in a row may find no engine before a
	// pass ends: admission does not depend on the request, eligibility may.
	maxMisses = 8
	// maxAssigned is how many items may be decided behind a bind in flight. They
	// count as load there, so that the next ones find another engine: with too
	// few, whatever waits is held up by the least loaded engine.
	maxAssigned = 8
)

// place binds what waits, in fair order, until engines or work run out.
func (c *Core) place() {
	if !c.dirty || !c.deciding() {
		return
	}
	c.dirty = false
	c.endHolds()
	misses := 0
	clear(c.keeping)
	var again []*item
	for misses < maxMisses && c.bindRoom() && c.room() {
		it := c.nextWaiting()
		if it == nil {
			if c.againSome() {
				continue
			}
			break
		}
		c.leave(it)
		switch c.try(it) {
		case missed:
			misses++
			again = append(again, it)
		case kept:
			again = append(again, it)
		}
	}
	c.kept = len(again) - misses
	for _, it := range again {
		c.set(it, itemWaiting)
		c.job(it.facts.Job).put(it)
	}
}

// room is false while every engine that could take more has as much decided
// behind a bind in flight as it may have: whatever is chosen now has to wait.
func (c *Core) room() bool {
	full := false
	for i := range c.cands {
		cand := &c.cands[i]
		if cand.State != policy.Ready || cand.ReservedRequests >= cand.Window {
			continue
		}
		e := c.engines[c.names[i]]
		if e.binding == nil || len(e.assigned) < maxAssigned {
			return true
		}
		full = true
	}
	return !full
}

// againSome is again wherever an engine is free and something was decided for it.
func (c *Core) againSome() bool {
	if c.stages[itemAssigned] == 0 {
		return false
	}
	some := false
	for _, n := range c.names {
		if c.again(c.engines[n]) {
			some = true
		}
	}
	return some
}

// nextWaiting is the head of the most urgent lane of the job with the least share.
func (c *Core) nextWaiting() *item {
	var best *job
	var least float64
	for _, j := range c.jobs { // the least by (share, name): order plays no part
		if j.waits == 0 {
			continue
		}
		if s := c.share(j); best == nil || s < least || s == least && j.name < best.name {
			best, least = j, s
		}
	}
	if best == nil {
		return nil
	}
	var head *item
	var soonest time.Duration
	for lane := range best.waiting {
		if q := best.waiting[lane]; len(q) > 0 {
			if u := c.urgency(lane, q[0].accepted()); head == nil || u < soonest {
				head, soonest = q[0], u
			}
		}
	}
	return head
}

type tried uint8

const (
	placed tried = iota // bound, assigned, held for an engine, answered or given back
	missed              // nothing can take it now
	kept                // its key's owners cannot take it now; others' may
)

func (c *Core) try(it *item) tried {
	if c.keepsWaiting(it) {
		return kept
	}
	chosen := c.decide(it)
	if chosen < 0 {
		return c.unplaced(it)
	}
	if q := c.queues[it.queue]; q != nil {
		q.misfits = 0
	}
	e := c.engines[c.names[chosen]]
	if it.ttl == 0 { // as its reservation will teach every dispatcher
		c.sticky.Learn(it.facts.Job, it.facts.Trajectory, it.facts.Group, e.name)
	}
	switch {
	case e.binding == nil:
		c.bindTo(it, e, false)
	case it.seed:
		return missed // decided again when the engine is free for it
	case len(e.assigned) < maxAssigned:
		it.engine = e.name
		c.set(it, itemAssigned)
		e.assigned = append(e.assigned, it)
		c.refresh(e)
	default:
		return missed
	}
	return placed
}

// decide asks the policy; -1 = nowhere now.
func (c *Core) decide(it *item) int {
	f := &it.facts
	expected := c.lengths.Expect(f.Job, f.Group, f.ExpectedTokens, f.MaxTokens)
	it.tokens = f.PromptTokens + expected
	in := policy.Input{
		Now: c.now, Dispatcher: c.cfg.Dispatcher,
		Request: policy.Request{
			Rollout: it.key(), Model: f.Model, LoRA: f.LoRA,
			PromptTokens: f.PromptTokens, MaxTokens: f.MaxTokens, ExpectedTokens: expected,
			BlockTokens: c.settings.BlockTokens, Affinity: cmp.Or(f.Affinity, f.Group),
			WeightMin: c.oldest(f), WeightExact: f.WeightExact, Tried: f.Tried, Rank: f.Rank, Waited: c.server.since(it.accepted(), c.now), MayWait: c.mayWait(it),
		},
		Candidates: c.cands,
	}
	c.match(f)
	c.open(it)
	c.markSticky(f)
	unmark := c.markOwners(it, &in)
	unlean := c.lean(it, in.Request.Affinity)
	at := c.decider.Decide(&in, &c.rec)
	if c.cfg.Beside != nil {
		c.cfg.Beside(&in, &c.rec)
	}
	it.seed = c.rec.Seed
	it.predict = nil
	if at >= 0 {
		it.predict = c.predicted(at)
	}
	unlean()
	unmark()
	c.unmarkSticky()
	c.shut(it)
	c.unmatch()
	it.reason, it.policy = string(c.rec.Reason), c.rec.Policy
	return at
}

func (c *Core) unplaced(it *item) tried {
	f := &it.facts
	switch {
	case c.rec.Outcome == policy.OutcomeWait:
		c.hold(it)
		return placed
	case c.rec.Outcome == policy.OutcomeTooLarge:
		c.reject(it, "too_large", c.rec.Detail)
		return placed
	case c.rec.Outcome == policy.OutcomeNoneEligible && c.wrongModel(f):
		c.reject(it, "unknown_model", "model "+f.Model+" is not served in this pool: engines serve "+c.models())
		return placed
	case c.rec.Outcome == policy.OutcomeNoneEligible && c.settings.KnownLoRAs && c.unknownLoRA(f):
		c.reject(it, "unknown_lora", "lora "+f.LoRA+" is loaded by no engine of this pool")
		return placed
	case c.rec.Outcome == policy.OutcomeNoneEligible:
		c.misfit(c.queues[it.queue])
		c.record(it, -1)
		c.nak(it, c.t.NakMax)
		return placed
	case c.rec.Outcome == policy.OutcomeNoneAdmissible && it.owner != "" && c.rec.Admissible > 0:
		return c.keep(it)
	}
	return missed
}

// misfit notes that nobody may serve a request of the queue. What it asks for, an
// adapter, a weight version, may be its own affair, so that those behind it are
// fetched all the same; after some in a row, or with nobody to serve any, the
// queue rests: it would only be fetched and given back over and over.
func (c *Core) misfit(q *queue) {
	if q == nil {
		return
	}
	q.misfits++
	if q.misfits >= maxMisfits || c.headroom() == 0 {
		q.misfits, q.next = 0, c.now+c.t.NakMax
	}
}

// maxMisfits is how many requests of a queue in a row may be fetched and given
// back because nobody may serve them, before it rests.
const maxMisfits = 16

// wrongModel tells whether the pool has engines, and none that could ever serve it.
func (c *Core) wrongModel(f *subjects.Facts) bool {
	if f.Model == "" {
		return false
	}
	if f.Model == c.settings.Model {
		return false
	}
	some := c.settings.Model != ""
	for _, n := range c.names {
		e := c.engines[n]
		if !e.known || e.lost() {
			continue
		}
		if e.reg.Model == f.Model || slices.Contains(e.reg.LoRAs, f.Model) {
			return false
		}
		some = true
	}
	return some
}

// unknownLoRA tells whether the pool has engines, and none that has the adapter.
func (c *Core) unknownLoRA(f *subjects.Facts) bool {
	some := false
	for _, n := range c.names {
		e := c.engines[n]
		if !e.known || e.lost() {
			continue
		}
		if slices.Contains(e.reg.LoRAs, f.LoRA) {
			return false
		}
		some = true
	}
	return some && f.LoRA != ""
}

func (c *Core) models() string {
	if c.settings.Model != "" {
		return c.settings.Model
	}
	seen := map[string]bool{}
	for _, n := range c.names {
		if e := c.engines[n]; e.known && e.reg.Model != "" {
			seen[e.reg.Model] = true
		}
	}
	out := ""
	for i, m := range sortedKeys(seen) {
		if i > 0 {
			out += ", "
		}
		out += m
	}
	return out
}
