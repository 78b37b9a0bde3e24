package core

import (
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

// queue is a durable consumer shared by all dispatchers.
type queue struct {
	Queue
	backlog uint64        // known to wait
	seen    time.Duration // last time it held anything
	pulling int           // messages asked for in the pull that is open; 0 = none
	next    time.Duration // no pull before
	misfits int           // messages in a row that nobody may serve
}

// putJobs takes the census: which queues hold messages, fetched ones included.
func (c *Core) putJobs(j Jobs) {
	found := make(map[Queue]uint64, len(j.Queues))
	for _, d := range j.Queues {
		found[d.Queue] = d.Messages
		c.queue(d.Queue).seen = c.now
	}
	inHand := map[Queue]uint64{}
	for _, it := range c.hand {
		inHand[it.queue]++
	}
	for _, k := range c.order {
		q := c.queues[k]
		n := found[k]
		q.backlog = n - min(n, inHand[k])
	}
	c.forgetQueues()
	c.dirty = true
}

func (c *Core) queue(k Queue) *queue {
	q := c.queues[k]
	if q == nil {
		q = &queue{Queue: k, seen: c.now}
		c.queues[k] = q
		c.sortQueues()
		c.emit(EnsureConsumer{Queue: k})
	}
	return q
}

func (c *Core) sortQueues() {
	c.order = c.order[:0]
	for k := range c.queues {
		c.order = append(c.order, k)
	}
	slices.SortFunc(c.order, func(a, b Queue) int {
		if r := laneRank(a) - laneRank(b); r != 0 {
			return r
		}
		switch {
		case a.Job < b.Job:
			return -1
		case a.Job > b.Job:
			return 1
		}
		return 0
	})
}

func (c *Core) forgetQueues() {
	n := len(c.queues)
	for k, q := range c.queues {
		if q.pulling == 0 && q.backlog == 0 && c.now-q.seen > c.t.QueueIdle {
			delete(c.queues, k)
		}
	}
	if len(c.queues) != n {
		c.sortQueues()
	}
}

// headroom is how many more requests the fleet can be given.
func (c *Core) headroom() int {
	n := 0
	for i := range c.cands {
		cand := &c.cands[i]
		if cand.State == policy.Ready {
			n += max(0, cand.Window-cand.ReservedRequests)
		}
	}
	return n
}

// Headroom is how many more requests the fleet can be given, and Slots how many
// it runs at once; for consoles and tests.
func (c *Core) Headroom() int { return c.headroom() }

// Slots is the sum of the slots of the engines that take work.
func (c *Core) Slots() int {
	n := 0
	for i := range c.cands {
		if c.cands[i].State == policy.Ready {
			n += c.cands[i].Slots
		}
	}
	return n
}

const (
	maxPull     = 256 // messages of one pull
	maxIdlePull = 16  // messages a pull on an empty queue may bring at once
	maxIdle     = 64  // pulls that wait on empty queues
)

// fetch asks for what can be placed, and no more (scenario B6): this
// dispatcher's part of the headroom, less what it has. Work that nobody can
// take stays in the stream, where every dispatcher sees it.
//
// Queues known to hold work share the budget by fair share; empty ones get a
// small waiting pull, so that a fresh request starts at once.
func (c *Core) fetch() {
	if !c.deciding() {
		return
	}
	part := (c.headroom() + len(c.live) - 1) / len(c.live)
	budget := min(part, c.cfg.MaxInHand-c.stages[itemHolding]) - c.waiting()
	if budget <= 0 {
		return
	}
	idle := 0
	var backed []*queue
	for _, k := range c.order {
		q := c.queues[k]
		switch {
		case q.pulling > 0 && q.backlog > 0:
			budget -= q.pulling
		case q.pulling > 0:
			idle++
		case q.backlog > 0 && c.now >= q.next:
			backed = append(backed, q)
		}
	}
	if budget <= 0 {
		return
	}
	slices.SortStableFunc(backed, func(a, b *queue) int {
		sa, sb := c.share(c.job(a.Job)), c.share(c.job(b.Job))
		switch {
		case sa < sb:
			return -1
		case sa > sb:
			return 1
		}
		return 0
	})
	for i, q := range backed {
		if budget <= 0 {
			return
		}
		n := (budget + len(backed) - i - 1) / (len(backed) - i)
		n = int(min(uint64(n), q.backlog, maxPull))
		budget -= n
		c.pull(q, n)
	}
	c.waitOnEmpty(budget, idle)
}

// waitOnEmpty opens small pulls on queues that hold nothing now, in turn.
func (c *Core) waitOnEmpty(budget, idle int) {
	n := len(c.order)
	if n == 0 || budget <= 0 {
		return
	}
	each := min(maxIdlePull, max(1, budget/min(n, maxIdle)))
	for range n {
		if idle >= maxIdle || idle >= budget {
			return
		}
		q := c.queues[c.order[c.idle%n]]
		c.idle = (c.idle + 1) % n
		if q.pulling == 0 && q.backlog == 0 && c.now >= q.next {
			c.pull(q, each)
			idle++
		}
	}
}

func (c *Core) pull(q *queue, n int) {
	q.pulling = n
	c.emit(Fetch{Queue: q.Queue, N: n, Wait: c.t.FetchExpiry})
}

func (c *Core) fetchDone(d FetchDone) {
	q := c.queues[d.Queue]
	if q == nil {
		return
	}
	q.pulling = 0
	c.dirty = true
	switch {
	case d.Err != "":
		q.next = c.now + c.t.Backoff
		c.count("fetch_errors", "")
		c.emit(EnsureConsumer{Queue: d.Queue})
	case d.Delivered < d.Asked:
		q.backlog = 0 // it was drained; the next census says more
	}
}
