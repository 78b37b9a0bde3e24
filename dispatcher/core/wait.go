package core

import (
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

// A policy may answer "wait for e, at most t": e is full, holds the prefix, and
// is likely to be quicker than recomputing elsewhere (off by default: wait_max).
// Such an item is held until e has room, is of no use any more, or t is over;
// then it is decided again, in the fair order of all that waits: nobody keeps a
// place for it.
//
// Bounded: t ends before the hand's own limit and before half of the time to
// the deadline, and wait_max counts from the acceptance of the request on the
// server's clock, so that no chain of waits, here or at other dispatchers, is
// longer. A wait whose hope did not come true is not repeated while the item is
// in hand. What is held takes no part in the budget of fetching, ends no pass of
// placing, and is at most a quarter of the hand: it holds up nobody else.

// mayWait is how long a policy may have the item wait now.
func (c *Core) mayWait(it *item) time.Duration {
	if c.policy.WaitMax == 0 || it.holdUntil != 0 || it.ttl > 0 || c.stages[itemHolding] >= c.cfg.MaxInHand/4 {
		return 0 // a caller of Acquire waits for its answer
	}
	return max(0, min(c.t.HoldInHand-(c.now-it.at)-c.t.Sweep, c.leftNow(it)/2))
}

// hold keeps an item for the engine that the record of its decision names.
func (c *Core) hold(it *item) {
	e := c.engines[c.names[c.rec.WaitFor]]
	it.engine, it.holdUntil = e.name, c.now+c.rec.WaitSpan
	c.set(it, itemHolding)
	e.awaited++
	c.cands[e.at].Awaited = e.awaited
	c.record(it, -1)
}

// unhold is called by leave.
func (c *Core) unhold(it *item) {
	if e := c.engines[it.engine]; e != nil && e.awaited > 0 {
		e.awaited--
		c.cands[e.at].Awaited = e.awaited
	}
}

// Holding is how many messages in hand wait for an engine by choice; for consoles and tests.
func (c *Core) Holding() int { return c.stages[itemHolding] }

// endHolds puts back into the lists what has no reason to be held any more.
func (c *Core) endHolds() {
	if c.stages[itemHolding] == 0 {
		return
	}
	for _, h := range sortedKeys(c.hand) {
		if it := c.hand[h]; it.stage == itemHolding && !c.worthHolding(it) {
			c.leave(it)
			c.wait(it)
		}
	}
}

func (c *Core) worthHolding(it *item) bool {
	e := c.engines[it.engine]
	if e == nil || c.now >= it.holdUntil {
		return false
	}
	cand := &c.cands[e.at]
	return cand.State == policy.Ready && cand.MatchKnown && cand.Full()
}
