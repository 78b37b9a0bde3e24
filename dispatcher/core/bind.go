package core

import (
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// bindTo writes the reservation: the next place of the request. The message is
// acked only when that is proven. again says that no new decision led to it.
func (c *Core) bindTo(it *item, e *engine, again bool) {
	left := c.leftNow(it)
	if left <= 0 {
		c.enqueue(it) // answers it as expired
		return
	}
	it.bind++
	it.engine, it.expected = e.name, e.seq
	c.set(it, itemBinding)
	e.binding = it
	c.picks++
	e.picked = c.picks
	if !again {
		c.record(it, e.at) // c.rec is of whatever was decided last
	}
	c.refresh(e)
	f := &it.facts
	it.held = subjects.Held{
		Engine: e.name, Job: f.Job, ID: f.ID, State: subjects.StateBound,
		Bind: it.bind, Burnt: f.Burnt, Epoch: e.reg.Epoch, LeftMS: left.Milliseconds(),
		Tokens: it.tokens, PromptTokens: f.PromptTokens, MaxTokens: f.MaxTokens,
		Lane: f.Lane, Reader: f.Reader, Group: f.Group, Trajectory: f.Trajectory, Turn: f.Turn,
		Affinity: f.Affinity, Tried: f.Tried, Dispatcher: c.cfg.Dispatcher,
		Policy: it.policy, Reason: it.reason, Accepted: it.accepted(),
		MaxAttempts: f.MaxAttempts, AttemptTimeoutMS: f.AttemptTimeoutMS,
		Weights: weights(f), Rank: f.Rank, PredictedCached: it.predict,
	}
	c.nameKey(it, e)
	ttl := left + reservationGrace
	if it.ttl > 0 {
		it.held.State, ttl = subjects.StateExternal, it.ttl
	}
	if it.seed {
		c.emit(c.seedBind(it, ttl))
		return
	}
	c.emit(Bind{Handle: it.h, Expected: it.expected, TTL: ttl, Held: it.held})
}

// reservationGrace is added to the time left in a reservation's TTL: what
// nobody retires is reclaimed by the server, long after its deadline.
const reservationGrace = subjects.ReservationGraceMS * time.Millisecond

func (c *Core) bindAnswer(a BindAnswer) {
	it := c.hand[a.Handle]
	if it == nil || it.stage != itemBinding || it.bind != a.Bind || it.engine != a.Engine {
		return
	}
	e := c.engine(a.Engine)
	c.landed(it, a)
	switch a.Answer {
	case OK:
		c.stood()
		c.bound(it, e, a)
		return
	case Duplicate:
		if h := e.held[it.key()]; h != nil && h.Revision == a.Seq && h.Bind == it.bind && h.State == subjects.StateBound {
			c.bound(it, e, a)
			return
		}
		// Seen before, by whoever held this message before us. A duplicate is
		// never success by itself: the leader knows.
		c.freeEngineKeeping(e, it)
		c.set(it, itemChecking)
		c.ask(it, a.Engine)
		return
	}
	c.count("bind_refusals", string(a.Answer))
	switch a.Answer {
	case Conflict:
		if a.Actual > it.expected {
			c.refused()
		}
		if !a.Seed && c.conflict(it, e, a) {
			return // it stays in front of its engine until the view is there
		}
	case Busy:
		c.refused()
		it.busy++
		if it.busy == 1 && !it.seed && e.seq == it.expected && c.deciding() {
			c.freeEngineKeeping(e, it)
			c.bindTo(it, e, true) // once more with the same expectation; then decide again
			return
		}
		it.busy = 0
	case Full:
		c.freeEngineKeeping(e, it)
		c.nak(it, c.t.NakMax)
		return
	default:
		c.freeEngineKeeping(e, it)
		c.later(it)
		return
	}
	c.freeEngineKeeping(e, it)
	c.readmit(it)
}

// freeEngineKeeping ends the bind in flight; the item is in no list after it.
func (c *Core) freeEngineKeeping(e *engine, it *item) {
	c.set(it, itemNew)
	if e.binding == it {
		c.freeEngine(e)
	}
}

// readmit looks at a message again from the start: it may have been answered
// or bound by another dispatcher meanwhile.
func (c *Core) readmit(it *item) {
	if c.stopped {
		c.nak(it, 0)
		return
	}
	delete(c.byKey, it.key())
	c.admit(it)
}

// conflict: somebody else's bind, a release or a marker's expiry moved the
// engine's sequence. It is decided again when the view has what moved it; until
// then nothing is bound there, since it would only be refused once more. True
// says that the view is still to come.
func (c *Core) conflict(it *item, e *engine, a BindAnswer) bool {
	switch {
	case a.Actual < it.expected: // 0 too: nothing stands there
		// The last message under this engine has expired. Nothing newer exists.
		if e.seq == it.expected {
			e.seq = a.Actual
		}
	case c.stopped || e.binding != it:
	case e.seq < a.Actual:
		it.waitSeq, it.waitUntil = a.Actual, c.now+c.t.ViewWait
		c.lagging++
		c.dirty = true // another bind may be in flight
		return true
	}
	return false
}

// caughtUp decides again what waited for the view of its engine.
func (c *Core) caughtUp(e *engine) {
	it := e.binding
	if it == nil || it.waitSeq == 0 || !c.stopped && e.seq < it.waitSeq && c.now < it.waitUntil {
		return
	}
	it.waitSeq = 0
	c.lagging--
	c.freeEngineKeeping(e, it)
	c.readmit(it)
}

// caughtUpAll is caughtUp wherever the wait may be over.
func (c *Core) caughtUpAll() {
	for _, n := range c.names {
		c.caughtUp(c.engines[n])
	}
}

// bound: the reservation stands. Its place is written, so the message may go.
func (c *Core) bound(it *item, e *engine, a BindAnswer) {
	stored := a.Stored
	if stored == 0 {
		stored = c.server.estimate(c.now)
	}
	c.set(it, itemNew)
	if e.binding == it {
		e.binding = nil // its load is the reservation's from here on
	}
	h := e.held[it.key()]
	seen := h != nil && h.Revision >= a.Seq
	if !seen && c.passed(it, e, a.Seq) {
		// An engine may be quicker than this answer: the view has had the key, and
		// its end. To put it back would hold its slot for ever.
		c.freeEngine(e)
		if it.ttl > 0 {
			c.drop(it)
			c.emit(Refused{Handle: it.h, Code: "gone", Message: "the reservation was released before it was granted: acquire it again"})
			return
		}
		c.ack(it, "bound")
		return
	}
	c.putReservation(ReservationPut{
		Held: it.held, Revision: a.Seq, Stored: stored,
		TTLMS: it.ttlMS(),
	})
	if h := e.held[it.key()]; h != nil && h.Revision == a.Seq && !seen {
		h.unseen = true
	}
	if it.ttl > 0 {
		c.emit(Granted{Handle: it.h, Held: it.held, Revision: a.Seq})
	}
	c.freeEngine(e)
	c.ack(it, "bound")
}

// passed tells whether the view is beyond a bind that it does not hold.
func (c *Core) passed(it *item, e *engine, seq uint64) bool {
	r, ok := c.retired.byKey[it.key()]
	return e.seq >= seq || ok && r.bind >= it.bind
}

func (it *item) ttlMS() int64 {
	if it.ttl > 0 {
		return it.ttl.Milliseconds()
	}
	return it.held.LeftMS + subjects.ReservationGraceMS
}

// ask reads the key and the register from the leader.
func (c *Core) ask(it *item, engineName string) {
	it.engine, it.askAt = engineName, 0
	c.emit(GetFromLeader{Handle: it.h, Engine: engineName, Job: it.facts.Job, ID: it.facts.ID, Reader: it.facts.Reader})
}

func (c *Core) leaderAnswer(a LeaderAnswer) {
	it := c.hand[a.Handle]
	if it == nil || it.stage != itemChecking {
		return
	}
	switch {
	case a.Err != "":
		it.askAt = c.now + c.t.NakMin
		return
	case a.Answered != nil:
		c.putAnswer(*a.Answered, true)
		c.ack(it, "answered")
		return
	case a.Reservation != nil && a.Reservation.Bind >= it.rank():
		// Bound, by us under an earlier life of this message or by another.
		c.learn(*a.Reservation)
		c.ack(it, "live")
		return
	}
	// Not answered, not bound: the number is used up, the next one decides.
	c.set(it, itemNew)
	c.enqueue(it)
}

// answer writes the terminal answer of a message that never ran, then acks it.
func (c *Core) answer(it *item, status subjects.Status, why subjects.ResultError) {
	if it.ttl > 0 {
		c.drop(it)
		c.emit(Refused{Handle: it.h, Code: why.Code, Message: why.Message})
		return
	}
	c.byKey[it.key()] = it
	it.result = PublishResult{
		Handle: it.h, Job: it.facts.Job, ID: it.facts.ID, Reader: it.facts.Reader, Attempt: it.facts.Bind,
		Status: status, Error: why, Group: it.facts.Group, LeftMS: max(0, c.leftNow(it).Milliseconds()),
	}
	c.set(it, itemAnswering)
	c.emit(it.result)
}

// reject ends what can never run here: kept in DEAD, then answered.
func (c *Core) reject(it *item, code, message string) {
	if it.ttl > 0 {
		c.answer(it, subjects.Rejected, subjects.ResultError{Class: subjects.ClassData, Code: code, Message: message})
		return
	}
	c.byKey[it.key()] = it
	c.bury(it, subjects.Rejected, code, message)
}

// bury keeps in DEAD what cannot be a rollout, then answers it if it has a name.
func (c *Core) bury(it *item, status subjects.Status, code, message string) {
	it.result = PublishResult{
		Handle: it.h, Job: it.facts.Job, ID: it.facts.ID, Reader: it.facts.Reader, Status: status,
		Error: subjects.ResultError{Class: subjects.ClassData, Code: code, Message: message},
	}
	c.set(it, itemBurying)
	c.emit(PublishDead{Handle: it.h, Job: it.facts.Job, ID: it.facts.ID, Code: code, Reason: message})
}

func (c *Core) deadAnswer(a DeadAnswer) {
	if a.Handle == 0 {
		for _, h := range c.held[subjects.RolloutKey(a.Job, a.ID)] {
			if h.acting == stageDead {
				c.heldDead(h, a)
				return
			}
		}
		return
	}
	it := c.hand[a.Handle]
	if it == nil || it.stage != itemBurying {
		return
	}
	switch {
	case a.Answer != OK && a.Answer != Duplicate:
		c.nak(it, c.t.NakMax)
	case it.facts.ID == "":
		c.ack(it, "dead")
	default:
		c.set(it, itemAnswering)
		c.emit(it.result)
	}
}

func (c *Core) resultAnswer(a ResultAnswer) {
	if a.Handle == 0 {
		for _, h := range c.held[subjects.RolloutKey(a.Job, a.ID)] {
			if h.acting == stageResult {
				c.heldResult(h, a)
				return
			}
		}
		return
	}
	it := c.hand[a.Handle]
	if it == nil || it.stage != itemAnswering {
		return
	}
	if a.Answer == OK || a.Answer == Superseded {
		c.answered.add(it.key(), c.server.estimate(c.now))
		c.ack(it, string(it.result.Status))
		return
	}
	c.nak(it, c.t.NakMax)
}
