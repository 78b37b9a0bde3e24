package core

import (
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// item is a message in hand. The core owns it from Fetched to Ack or NakDelay:
//
//	checking --register says no--> waiting --decision--> binding --ok--> ack
//	    |                             ^   |                 | moved, busy
//	    '--answered, live--> ack      '---+-----------------'
//	                                  |   '--held too long, nothing eligible--> nak
//	                                  '-- room, time over -- holding <--worth it-- decision
//	burying --> answering --> ack      (bad, expired, cancelled, too large)
type item struct {
	h      Handle
	queue  Queue
	facts  subjects.Facts
	seq    uint64
	stored int64
	lane   int
	at     time.Duration // fetched
	stage  itemStage
	ttl    time.Duration // > 0: an Acquire, no message; its reservation lives that long

	bind     int // number of the last bind tried
	tokens   int // reserved if bound now
	engine   string
	expected uint64
	busy     int // busy answers in a row
	reason   string
	policy   string
	predict  *int

	holdUntil time.Duration // of a holding item: decided again then, or when engine has room; it holds once
	waitSeq   uint64        // named by a refusal of its bind: decided again when the view has it
	waitUntil time.Duration // or at this time
	askAt     time.Duration // the leader is asked again then
	held      subjects.Held // as last written by its bind

	owner   string // its owner key and anchor, under the settings of revision keyedBy - 1
	anchor  uint64
	keyedBy uint64
	seed    bool          // decided to be a seed
	sown    subjects.Seed // of its SeedBind
	seedAt  uint64
	kept    bool // it has waited for the owners of its key

	result PublishResult // of a burying or answering item
}

type itemStage uint8

const (
	itemNew       itemStage = iota
	itemWaiting             // in its job's lists
	itemAssigned            // decided, behind a bind in flight on its engine; counted there
	itemHolding             // waits for an engine that is full and holds its prefix (wait.go)
	itemChecking            // the leader is asked whether it is answered
	itemBinding             // its bind is in flight, or was refused and the view has to follow
	itemBurying             // being kept in DEAD
	itemAnswering           // its answer is being written
	stageCount
)

func (c *Core) set(it *item, s itemStage) {
	if it.stage != itemNew {
		c.stages[it.stage]--
	}
	it.stage = s
	if s != itemNew {
		c.stages[s]++
	}
}

func (it *item) key() string { return it.facts.Key() }

// rank is the lowest bind number this copy may get. A reservation, or a
// retired one, of that number or a later one has overtaken it: a fresh copy is
// behind any, a requeued one only behind its own number and later ones.
func (it *item) rank() int { return max(1, it.facts.Bind) }

// accepted is the server stamp of the first acceptance.
func (it *item) accepted() int64 {
	if it.facts.Accepted != 0 {
		return it.facts.Accepted
	}
	return it.stored
}

// leftNow is the time to the deadline on the server's clock.
func (c *Core) leftNow(it *item) time.Duration {
	ms := it.facts.LeftMS
	if ms == 0 {
		if ms = it.facts.DeadlineMS; ms == 0 {
			ms = c.settings.Deadline.D().Milliseconds()
		}
	}
	return c.left(ms, it.stored)
}

// waiting is how many messages in hand have no place yet. Those that wait for one
// engine by choice take nobody else's place.
func (c *Core) waiting() int {
	return max(0, c.stages[itemWaiting]-min(c.kept, maxKept)) + c.stages[itemAssigned] + c.stages[itemChecking]
}

func (c *Core) fetched(f Fetched) {
	q := c.queue(f.Queue)
	q.seen, q.backlog = c.now, f.Pending
	if q.pulling > 1 {
		q.pulling--
	}
	it := &item{
		h: f.Handle, queue: f.Queue, facts: f.Facts, seq: f.Seq, stored: f.Stored,
		lane: laneRank(f.Queue), at: c.now, bind: max(0, f.Facts.Bind-1),
	}
	c.server.observe(f.Stored, c.now)
	c.hand[f.Handle] = it
	if !c.deciding() {
		c.nak(it, c.t.NakMin)
		return
	}
	if f.Bad != nil {
		c.bury(it, subjects.Rejected, f.Bad.Code, f.Bad.Message)
		return
	}
	c.admit(it)
}

// admit decides what a message is before it may wait for an engine.
func (c *Core) admit(it *item) {
	key := it.key()
	if twin := c.byKey[key]; twin != nil && twin != it {
		c.meet(it, twin)
		return
	}
	for _, h := range c.held[key] {
		if h.Bind >= it.rank() {
			c.ack(it, "live")
			return
		}
	}
	unsure := c.answered.contains(key) || c.answered.unsure(it.accepted())
	if r, ok := c.retired.byKey[key]; ok && r.bind >= it.rank() {
		if r.requeued {
			c.ack(it, "requeued") // its next place was written before the key went
			return
		}
		unsure = true
	}
	if unsure {
		c.set(it, itemChecking)
		c.byKey[key] = it
		c.ask(it, "")
		return
	}
	c.enqueue(it)
}

// meet settles two copies of one rollout in this dispatcher's hand.
func (c *Core) meet(it, twin *item) {
	switch {
	case it.seq == twin.seq && it.queue == twin.queue && twin.idle():
		// Delivered again because we held it too long: the new delivery counts.
		c.drop(twin)
		it.bind = twin.bind
		c.enqueue(it)
	case it.queue.Retry && !twin.queue.Retry && twin.idle():
		// A requeued copy outranks a fresh one, whose key was deleted after it.
		c.ack(twin, "outranked")
		c.admit(it)
	default:
		c.nak(it, c.t.NakMax) // when it comes back, the other's fate is known
	}
}

func (c *Core) enqueue(it *item) {
	left := c.leftNow(it)
	switch {
	case left <= 0:
		c.answer(it, subjects.Expired, subjects.ResultError{Class: subjects.ClassInfra, Code: "deadline",
			Message: "the deadline passed while it was queued"})
		return
	case c.cancelled(it.facts.Job, it.facts.ID, it.facts.Group, it.facts.Trajectory, it.accepted()):
		c.answer(it, subjects.Cancelled, subjects.ResultError{Class: subjects.ClassData, Code: "cancelled",
			Message: "cancelled while it was queued"})
		return
	}
	c.wait(it)
}

// wait puts an item into its job's lists.
func (c *Core) wait(it *item) {
	c.set(it, itemWaiting)
	c.byKey[it.key()] = it
	c.job(it.facts.Job).put(it)
	c.dirty = true
}

// idle tells whether nothing is being written for the item.
func (it *item) idle() bool {
	return it.stage == itemWaiting || it.stage == itemAssigned || it.stage == itemHolding || it.stage == itemChecking
}

// leave takes an item out of the lists of what waits; it stays in hand, and
// keeps its name so that a twin meets it.
func (c *Core) leave(it *item) {
	switch it.stage {
	case itemWaiting:
		c.job(it.facts.Job).take(it)
	case itemAssigned:
		if e := c.engines[it.engine]; e != nil {
			e.assigned = slices.DeleteFunc(e.assigned, func(x *item) bool { return x == it })
			c.refresh(e)
		}
	case itemHolding:
		c.unhold(it)
	}
	c.set(it, itemNew)
}

// drop ends the core's ownership of a message.
func (c *Core) drop(it *item) {
	c.leave(it)
	if c.byKey[it.key()] == it {
		delete(c.byKey, it.key())
	}
	delete(c.hand, it.h)
}

func (c *Core) ack(it *item, why string) {
	c.drop(it)
	if it.ttl > 0 {
		if why != "bound" {
			c.emit(Refused{Handle: it.h, Code: why, Message: "rollout " + it.key() + " is " + why + " already: acquire each request once"})
		}
		return
	}
	c.emit(Ack{Handle: it.h})
	c.count("acks", why)
}

func (c *Core) nak(it *item, delay time.Duration) {
	c.drop(it)
	if it.ttl > 0 {
		c.emit(Refused{Handle: it.h, Code: "unavailable", Message: "no engine can take the request now: try again"})
		return
	}
	c.emit(NakDelay{Handle: it.h, Delay: delay})
	if q := c.queues[it.queue]; q != nil {
		q.backlog++
	}
}

// later gives a message back for a time that differs between messages, so that
// they do not all come again at once.
func (c *Core) later(it *item) {
	span := uint64(c.t.NakMax - c.t.NakMin)
	c.nak(it, c.t.NakMin+time.Duration(rendezvous(it.key(), c.cfg.Dispatcher)%(span+1)))
}

// giveBack returns everything that waits. What is being written stays until
// its answer.
func (c *Core) giveBack(delay time.Duration) {
	if c.stopped {
		c.caughtUpAll() // nothing waits for a view any more
	}
	for _, h := range sortedKeys(c.hand) {
		if it := c.hand[h]; it != nil && it.idle() {
			c.nak(it, delay)
		}
	}
}

// sweepHand gives back what was held too long and ends what has expired.
func (c *Core) sweepHand() {
	c.caughtUpAll() // the view may not come
	if !c.freshView(ViewReservations) {
		c.giveBack(c.t.NakMin)
		return
	}
	for _, h := range sortedKeys(c.hand) {
		it := c.hand[h]
		if it == nil {
			continue
		}
		if it.stage == itemChecking && it.askAt != 0 && c.now >= it.askAt {
			c.ask(it, it.engine)
		}
		switch {
		case !it.idle():
		case c.now-it.at > c.t.HoldInHand:
			c.later(it)
		case it.stage != itemChecking && c.leftNow(it) <= 0:
			c.leave(it)
			c.enqueue(it) // answers it as expired
		}
	}
}

func (c *Core) cancelInHand() {
	for _, h := range sortedKeys(c.hand) {
		it := c.hand[h]
		if it != nil && it.idle() && it.stage != itemChecking && c.cancelled(it.facts.Job, it.facts.ID, it.facts.Group, it.facts.Trajectory, it.accepted()) {
			c.leave(it)
			c.enqueue(it) // answers it as cancelled
		}
	}
}
