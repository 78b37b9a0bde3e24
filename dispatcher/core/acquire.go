package core

import (
	"time"
)

// defaultHold is the TTL of an acquired reservation whose caller names none.
const defaultHold = time.Minute

// acquire places a request that its caller moves itself (S5's balancer
// interface). It goes through the same decision, guard and view as every
// other; only its bytes are somewhere else. It is never requeued and has no
// result: when its caller is gone, the server reclaims it by its TTL.
func (c *Core) acquire(a Acquire) {
	it := &item{
		h: a.Handle, queue: Queue{Job: a.Facts.Job, Lane: a.Facts.Lane}, facts: a.Facts,
		stored: c.server.estimate(c.now), at: c.now, ttl: time.Duration(a.TTLMS) * time.Millisecond,
	}
	if it.ttl <= 0 {
		it.ttl = defaultHold
	}
	it.lane = laneRank(it.queue)
	c.hand[a.Handle] = it
	switch {
	case !c.deciding():
		c.nak(it, 0)
	case c.byKey[it.key()] != nil || c.held[it.key()] != nil:
		c.ack(it, "reserved")
	default:
		c.enqueue(it)
	}
}
