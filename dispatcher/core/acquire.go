package core

import (
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// externalEpoch stands for the epoch of servers that nobody watches.
const externalEpoch = "external"

// setServers takes the servers of the settings in, and out.
func (c *Core) setServers(servers []subjects.Server) {
	named := make(map[string]bool, len(servers))
	for _, s := range servers {
		named[s.Name] = true
		e := c.engine(s.Name)
		if e.known && !e.external && !e.lost() {
			c.count("servers_refused", "an engine with an agent has that name")
			continue
		}
		e.external, e.known, e.gone = true, true, false
		e.reg = subjects.Engine{Engine: s.Name, Epoch: externalEpoch, Kind: externalEpoch, Model: s.Model,
			State: subjects.EngineReady, Slots: s.Slots, Ranks: 1, Events: eventsNone}
		if s.CapacityTokens > 0 {
			n := s.CapacityTokens
			e.reg.CapacityTokens = &n
		}
		c.judge(e)
		c.refresh(e)
	}
	for _, n := range c.names {
		if e := c.engines[n]; e.external && !named[n] {
			e.external, e.gone = false, true
			c.judge(e)
			c.refresh(e)
		}
	}
}

// open lets an acquire choose servers too; shut takes that back.
func (c *Core) open(it *item) {
	if it.ttl == 0 {
		return
	}
	for _, s := range c.settings.Servers {
		if e := c.engines[s.Name]; e != nil && e.external {
			c.cands[e.at].State = policy.Ready
		}
	}
}

func (c *Core) shut(it *item) {
	if it.ttl == 0 {
		return
	}
	for _, s := range c.settings.Servers {
		if e := c.engines[s.Name]; e != nil && e.external {
			c.cands[e.at].State = policy.Down
		}
	}
}

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
