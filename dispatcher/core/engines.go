package core

import (
	"iter"
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// engine is what the core knows of one engine. Its sums change by insert and
// remove of a held reservation alone (scenarios P9, P10): they cannot drift.
//
//	unknown --put--> live --15 s without renewal--> suspect --15 s more--> lost
//	                  ^------------- put ----------------'------------------'
//	live|suspect --goodbye--> lost
//
// Ages are counted on the contact clock.
type engine struct {
	name  string
	tag   int           // in Core.tags, while it lives
	askAt time.Duration // its snapshot is asked for again then; 0 = not
	at    int           // index in Core.names and Core.cands

	reg      subjects.Engine
	revision uint64        // of the registration
	known    bool          // a registration was seen
	gone     bool          // it said goodbye
	external bool          // a server of the settings: no agent, only acquired
	renewed  time.Duration // contact clock
	health   policy.State  // Ready stands for "live" here
	past     []string      // its last epochs, known to be over; at most maxPast

	seq  uint64 // last sequence seen under $KV.<reservations>.<engine>.>
	held map[string]*held

	sum policy.Reserved // counted reservations: bound or external, of the current epoch

	binding  *item   // the one bind in flight
	assigned []*item // decided behind it, at most maxAssigned
	awaited  int     // items that wait for it to have room
	picked   uint64
	view     loadView

	// What it showed when it was busy, tokens/s; kept when its report is lost and
	// when it begins a new life. 0 = not known.
	decode, prefill float64
}

// maxPast is how many ended epochs of an engine are remembered: keys of older
// ones are long requeued.
const maxPast = 8

func (c *Core) engine(name string) *engine {
	e := c.engines[name]
	if e == nil {
		e = &engine{name: name, held: map[string]*held{}, renewed: c.contact.total}
		c.engines[name] = e
		c.tag(e)
		c.reindex()
	}
	return e
}

// reindex keeps names and candidates in order; engines come and go rarely.
func (c *Core) reindex() {
	c.names = sortedKeys(c.engines)
	c.cands = make([]policy.Candidate, len(c.names))
	for i, n := range c.names {
		e := c.engines[n]
		e.at = i
		c.refresh(e)
	}
}

func (c *Core) putEngine(p EnginePut) {
	e := c.engine(p.Engine.Engine)
	if p.Revision < e.revision {
		return // an older renewal, delivered again by a view made anew
	}
	if e.external {
		return // the settings named it first; an agent must choose another name
	}
	fresh := !e.known || e.reg.Epoch != p.Epoch
	if e.known && fresh {
		e.past = append(e.past[max(0, len(e.past)-maxPast+1):len(e.past):len(e.past)], e.reg.Epoch)
	}
	moved := fresh || !sameVersion(e.reg.WeightVersion, p.WeightVersion)
	age := min(c.server.since(p.Stored, c.now), c.t.Lost)
	e.reg, e.known, e.gone, e.revision = p.Engine, true, false, p.Revision
	e.renewed = c.contact.total - age
	if fresh {
		// A new life of the cache: nothing that was observed holds.
		e.view = loadView{}
		e.recount()
	}
	c.judge(e)
	c.know(e)
	if moved {
		c.engineMoved(e.name)
	}
	if c.frozen != 0 && slices.Contains(c.freezeFor, e.name) && e.health == policy.Ready {
		// The others fell silent for the same reason: they get the time to say so.
		c.frozen, c.freezeFor = min(c.frozen, c.contact.total+c.t.Suspect), nil
	}
	c.refresh(e)
}

// recount sums what is held from nothing; needed when the epoch changes.
func (e *engine) recount() {
	e.sum, e.view.newer = policy.Reserved{}, policy.Reserved{}
	for _, h := range e.held {
		h.counted = false
	}
	for _, h := range e.held {
		e.countIn(h)
	}
}

func (e *engine) countIn(h *held) {
	// An epoch not heard of is taken for a newer one: keys and registrations
	// come by two streams, and the key may be first.
	h.ended = h.ended || e.over(h.Epoch)
	live := h.State == subjects.StateExternal || h.State == subjects.StateBound && !h.ended
	if live && !h.counted {
		h.counted = true
		add(&e.sum, h, 1)
		if h.Revision > e.view.load.AppliedRevision {
			add(&e.view.newer, h, 1)
		}
	}
}

// over tells whether an epoch of this engine is known to have ended.
func (e *engine) over(epoch string) bool { return slices.Contains(e.past, epoch) }

func (e *engine) countOut(h *held) {
	if h.counted {
		h.counted = false
		add(&e.sum, h, -1)
		if h.Revision > e.view.load.AppliedRevision {
			add(&e.view.newer, h, -1)
		}
	}
}

func add(r *policy.Reserved, h *held, sign int) {
	r.Requests += sign
	r.Tokens += int64(sign * h.Tokens)
	r.PromptTokens += int64(sign * h.PromptTokens)
	if h.PredictedCached != nil {
		r.CachedTokens += int64(sign * min(*h.PredictedCached, h.PromptTokens))
	}
}

func (c *Core) engineGone(g EngineGone) {
	e := c.engines[g.Engine]
	if e == nil || g.Revision < e.revision {
		return
	}
	e.gone = true
	e.view = loadView{}
	e.recount()
	c.judge(e)
	c.know(e)
	c.refresh(e)
}

// judge sets the engine's health from its age on the contact clock.
func (c *Core) judge(e *engine) {
	age := c.contact.total - e.renewed
	switch {
	case e.external:
		e.health = policy.Ready // its callers know whether it lives
	case e.gone, age >= c.t.Lost:
		e.health = policy.Down
	case age >= c.t.Suspect, !e.known:
		e.health = policy.Suspect
	default:
		e.health = policy.Ready
	}
}

// lost tells whether work bound to the engine must be placed elsewhere.
func (e *engine) lost() bool { return e.health == policy.Down }

// recheck ages every engine and dispatcher, and freezes requeueing when many
// engines fall silent at once: then NATS is suspected, not they.
func (c *Core) recheck() {
	var silent []string
	members := 0
	for _, n := range c.names {
		e := c.engines[n]
		before := e.health
		c.judge(e)
		if e.health != before && e.lost() {
			c.know(e)
		}
		if c.age(e) || e.health != before {
			c.refresh(e)
		}
		if e.known && !e.gone && !e.external {
			members++
			age := c.contact.total - e.renewed
			if age >= c.t.Suspect && age < 2*c.t.Suspect {
				silent = append(silent, n)
			}
		}
	}
	if c.frozen == 0 && len(silent) >= 3 && 2*len(silent) >= members && !slices.Equal(silent, c.freezeFor) {
		c.frozen, c.freezeFor = c.contact.total+c.t.FreezeMost, silent
		c.count("requeue_freezes", "")
	}
	if c.frozen != 0 && c.contact.total >= c.frozen {
		c.frozen = 0 // freezeFor stays: the same silence freezes once
	}
	c.forgetEngines()
	c.countLive()
}

// forgetEngines drops engines that are lost and hold nothing, after a while.
func (c *Core) forgetEngines() {
	n := len(c.engines)
	for _, name := range c.names {
		e := c.engines[name]
		if e.lost() && len(e.held) == 0 && e.binding == nil && c.contact.total-e.renewed > 4*c.t.Lost {
			c.index.Remove(name)
			c.tags[e.tag] = nil
			delete(c.engines, name)
		}
	}
	if len(c.engines) != n {
		c.reindex()
	}
}

func (c *Core) putDispatcher(p DispatcherPut) {
	if p.Dispatcher == c.cfg.Dispatcher {
		return
	}
	c.others[p.Dispatcher] = c.contact.total - min(c.server.since(p.Stored, c.now), c.t.Lost)
	c.countLive()
}

func (c *Core) countLive() {
	c.live = append(c.live[:0], c.cfg.Dispatcher)
	for d, at := range c.others {
		switch age := c.contact.total - at; {
		case age < c.t.Suspect:
			c.live = append(c.live, d)
		case age > 4*c.t.Lost:
			delete(c.others, d)
		}
	}
	slices.Sort(c.live)
}

// refresh writes the engine's part of its candidate; what belongs to a request
// or to the moment is filled in by place.
func (c *Core) refresh(e *engine) {
	if e.at >= len(c.cands) {
		return
	}
	cand := &c.cands[e.at]
	*cand = policy.Candidate{
		Engine: e.name, NameHash: policy.HashName(e.name), Epoch: e.reg.Epoch, State: e.state(),
		Model: e.reg.Model, LoRAs: e.reg.LoRAs, WeightVersion: e.reg.WeightVersion, Ranks: e.reg.Ranks,
		Slots: e.reg.Slots, Window: e.reg.Slots + c.settings.PrefetchSlots(),
		ReservedRequests: e.sum.Requests, ReservedTokens: e.sum.Tokens, ReservedPromptTokens: e.sum.PromptTokens,
		ReservedCachedTokens: e.sum.CachedTokens,
		LastPicked:           e.picked, Awaited: e.awaited, PreemptionBlockUntil: e.view.preempted, KVBlocked: e.view.kvBlocked,
		Observed:   e.observed(),
		MatchKnown: c.index.Trusted(e.name), MatchApproximate: e.reg.Events == eventsApproximate, Provable: c.provable(e),
	}
	cand.ProfileDecodeTokS, cand.ProfilePrefillTokS = c.policy.Profile(e.profile())
	if e.reg.MaxModelLen != nil {
		cand.MaxModelLen = *e.reg.MaxModelLen
	}
	if e.reg.CapacityTokens != nil {
		cand.CapacityTokens = *e.reg.CapacityTokens
	}
	if it := e.binding; it != nil && !e.follows(it) {
		it.countOn(cand)
	}
	for _, it := range e.assigned {
		it.countOn(cand)
	}
	c.dirty = true
}

// follows tells whether the view has the bind of an item already: it may be
// quicker than the answer, and then the reservation counts.
func (e *engine) follows(it *item) bool {
	h := e.held[it.key()]
	return h != nil && h.counted && h.Bind == it.bind
}

// profile is what the engine showed before: to this dispatcher, else to its
// agent. A report of its own that tells rates counts before it (policy).
func (e *engine) profile() (decode, prefill float64) {
	decode, prefill = e.decode, e.prefill
	if decode == 0 && e.reg.DecodeTokS != nil {
		decode = *e.reg.DecodeTokS
	}
	if prefill == 0 && e.reg.PrefillTokS != nil {
		prefill = *e.reg.PrefillTokS
	}
	return decode, prefill
}

// countTo counts n requests like it as on their way to an engine, in the sums
// and, since no report can know of it, in what is newer than the report.
func countTo(cand *policy.Candidate, it *item, n int) {
	tokens, prompt := int64(n*it.tokens), int64(n*it.facts.PromptTokens)
	cand.ReservedRequests += n
	cand.ReservedTokens += tokens
	cand.ReservedPromptTokens += prompt
	if o := cand.Observed; o != nil {
		o.NewerRequests += n
		o.NewerTokens += tokens
		o.ComingTokens += prompt
		o.NewerPrefillTokens += prompt
		if o.UsedTokens >= 0 {
			o.UsedTokens += tokens
		}
	}
}

// countOn counts the item itself, with the prefix that it was placed for.
func (it *item) countOn(cand *policy.Candidate) {
	countTo(cand, it, 1)
	if it.predict == nil {
		return
	}
	cached := int64(min(*it.predict, it.facts.PromptTokens))
	cand.ReservedCachedTokens += cached
	if o := cand.Observed; o != nil {
		o.NewerCachedTokens += cached
		o.ComingTokens -= cached
	}
}

func (e *engine) state() policy.State {
	switch {
	case e.external:
		return policy.Down // but for acquire
	case e.health != policy.Ready:
		return e.health
	}
	switch e.reg.State {
	case subjects.EngineReady:
		return policy.Ready
	case subjects.EnginePaused:
		return policy.Paused
	case subjects.EngineDraining:
		return policy.Draining
	case subjects.EngineStale:
		return policy.Stale
	}
	return policy.Down
}

// Reserved is what is reserved on an engine by every dispatcher, as this one
// knows it; for consoles and tests.
func (c *Core) Reserved(engineName string) (requests int, tokens int64) {
	if e := c.engines[engineName]; e != nil {
		return e.sum.Requests, e.sum.Tokens
	}
	return 0, 0
}

// InHand is how many messages are fetched and not yet given up.
func (c *Core) InHand() int { return len(c.hand) }

// EngineView is one engine as the core sees it; for consoles.
type EngineView struct {
	Name     string
	External bool
	State    string // of policy.State
	Slots    int
	Requests int
	Tokens   int64
}

// Engines yields every engine and server known, in order of their names.
func (c *Core) Engines() iter.Seq[EngineView] {
	return func(yield func(EngineView) bool) {
		for _, n := range c.names {
			e := c.engines[n]
			state := e.state()
			if e.external {
				state = policy.Ready
			}
			if !yield(EngineView{n, e.external, stateNames[state], e.reg.Slots, e.sum.Requests, e.sum.Tokens}) {
				return
			}
		}
	}
}

var stateNames = map[policy.State]string{
	policy.Ready: "ready", policy.Suspect: "suspect", policy.Paused: "paused",
	policy.Draining: "draining", policy.Stale: "stale", policy.Down: "down",
}
