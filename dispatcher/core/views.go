package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// held is one reservation in the view.
//
//	watched --due--> acting --answer--> gone | watched (backed off)
//
// Any dispatcher may end a reservation that nobody else will; they take turns
// by rendezvous, and the exact guard makes a second one harmless.
type held struct {
	ReservationPut
	counted bool // in its engine's sums
	ended   bool // its epoch is known to be over, and stays so when the engine's list forgets it
	unseen  bool // known from our own bind's answer; the follower has not delivered it yet

	cause  cause         // why it must end, none while its agent is at it
	since  time.Duration // when the cause was first seen
	acting stage
	next   time.Duration // not before
}

// cause says why a reservation has to be ended by a dispatcher.
type cause uint8

const (
	causeNone     cause = iota
	causeAnswered       // the register has its answer, the key is still there
	causeExpired
	causeCancelled // and its engine cannot say so itself
	causeReturned
	causeEpoch // its engine lives another life
	causeLost
)

// stage is what this dispatcher is waiting for.
type stage uint8

const (
	stageIdle stage = iota
	stageRetry
	stageDead
	stageResult
	stageDelete
)

func (c *Core) swap(v ViewSwap) {
	c.ready[v.Kind] = true
	c.proof[v.Kind] = c.now
	switch v.Kind {
	case ViewReservations:
		c.swapReservations(v)
	case ViewResults:
		// Only grows: what was answered stays answered.
		for _, a := range v.Answered {
			c.putAnswer(a, false)
		}
	case ViewEngines:
		c.swapEngines(v)
	case ViewDispatchers:
		clear(c.others)
		for _, d := range v.Dispatchers {
			c.putDispatcher(d)
		}
		c.countLive()
	case ViewCancels:
		clear(c.cancels)
		for _, x := range v.Cancels {
			c.cancels[x.Key()] = x
		}
		c.cancelInHand()
	case ViewPools:
		if v.Pool != nil {
			c.putPool(*v.Pool)
		}
	case ViewOwners:
		c.swapOwners(v)
	}
}

func (c *Core) swapEngines(v ViewSwap) {
	seen := make(map[string]bool, len(v.Engines))
	for _, p := range v.Engines {
		seen[p.Engine.Engine] = true
		c.engine(p.Engine.Engine).revision = 0 // the stream may have been made anew
		c.putEngine(p)
	}
	for _, n := range c.names {
		if e := c.engines[n]; e.known && !seen[n] {
			// Absent from a whole view: expired or deleted. It keeps its age, and is
			// lost when that says so.
			c.judge(e)
			c.refresh(e)
		}
	}
}

// swapReservations replaces the view. Our own binds may be ahead of it: those
// that no follower has delivered yet are kept.
func (c *Core) swapReservations(v ViewSwap) {
	c.swapping = true // nothing follows from what is absent until all is there
	newest := newestSeed(v)
	fresh := make(map[string]uint64, len(v.Reservations)) // subject -> revision
	for _, r := range v.Reservations {
		newest = max(newest, r.Revision)
		fresh[r.Engine+"."+r.Key()] = r.Revision
		c.server.observe(r.Stored, c.now)
	}
	for _, g := range v.Gone {
		newest = max(newest, g.Revision)
	}
	var stale []*held
	for _, hs := range c.held {
		for _, h := range hs {
			if fresh[h.Engine+"."+h.Key()] != h.Revision && !(h.unseen && h.Revision > newest) {
				stale = append(stale, h)
			}
		}
	}
	slices.SortFunc(stale, func(a, b *held) int { return cmp.Compare(a.Revision, b.Revision) })
	for _, h := range stale {
		c.remove(h)
	}
	for _, n := range c.names {
		if e := c.engines[n]; e.seq <= newest {
			e.seq = 0 // the entries below say where it stands
		}
	}
	for _, r := range v.Reservations {
		c.follow(r)
	}
	c.swapSeeds(v, newest)
	for _, g := range v.Gone {
		c.followGone(g)
	}
	c.swapping = false
	c.attendSeeds()
	c.caughtUpAll()
}

func (c *Core) find(engineName, rollout string) *held {
	if e := c.engines[engineName]; e != nil {
		return e.held[rollout]
	}
	return nil
}

// putReservation takes an entry of the stream in its order: everything before
// it under its engine has been seen.
func (c *Core) putReservation(r ReservationPut) {
	c.follow(r)
	c.caughtUp(c.engine(r.Engine))
}

func (c *Core) follow(r ReservationPut) {
	e := c.engine(r.Engine)
	e.seq = max(e.seq, r.Revision)
	c.learn(r)
}

// learn takes an entry that was read out of order. It does not move the
// engine's sequence: a bind guarded by it would be unaware of what lies between.
func (c *Core) learn(r ReservationPut) {
	e := c.engine(r.Engine)
	key := r.Key()
	if old := e.held[key]; old != nil {
		if old.Revision >= r.Revision {
			old.unseen = old.unseen && old.Revision != r.Revision
			return
		}
		c.remove(old)
	}
	h := &held{ReservationPut: r}
	e.held[key] = h
	e.countIn(h)
	c.held[key] = append(c.held[key], h)
	c.keyed(h)
	c.refresh(e)
	c.job(r.Job).add(h)
	if c.answered.contains(key) {
		c.blame(h, causeAnswered)
	}
	if r.State == subjects.StateBound {
		c.sticky.Learn(r.Job, r.Trajectory, r.Group, r.Engine)
	}
}

// remove takes a reservation out of the view; the only way its load goes.
func (c *Core) remove(h *held) {
	e := c.engines[h.Engine]
	key := h.Key()
	e.countOut(h)
	delete(e.held, key)
	hs := slices.DeleteFunc(c.held[key], func(x *held) bool { return x == h })
	if len(hs) == 0 {
		delete(c.held, key)
	} else {
		c.held[key] = hs
	}
	c.job(h.Job).remove(h)
	c.unkeyed(h)
	c.refresh(e)
}

// gone takes a marker of the stream in its order.
func (c *Core) gone(g ReservationGone) {
	c.followGone(g)
	c.caughtUp(c.engine(g.Engine))
}

func (c *Core) followGone(g ReservationGone) {
	e := c.engine(g.Engine)
	e.seq = max(e.seq, g.Revision)
	c.unlearn(g)
}

// unlearn takes a retirement known out of order, as learn does.
func (c *Core) unlearn(g ReservationGone) {
	e := c.engine(g.Engine)
	key := subjects.RolloutKey(g.Job, g.ID)
	h := e.held[key]
	if h != nil && h.Revision >= g.Revision {
		h = nil
	}
	c.released(h, g)
	if h != nil {
		c.remove(h)
	}
	fresh := c.retired.add(key, g.Bind, g.Outcome == subjects.OutcomeRequeued, int64(c.now))
	if fresh && g.CompletionTokens != nil {
		c.lengths.Learn(g.Job, g.Group, *g.CompletionTokens)
		c.job(g.Job).used += float64(g.PromptTokens + *g.CompletionTokens)
	}
}

func (c *Core) putAnswer(a Answered, live bool) {
	key := a.Key()
	if !c.answered.add(key, a.Stored) {
		return
	}
	// The release says the lengths too, but its marker lives a minute: a new
	// dispatcher learns from what the register keeps.
	if !live && a.CompletionTokens != nil {
		c.lengths.Learn(a.Job, a.Group, *a.CompletionTokens)
	}
	for _, h := range c.held[key] {
		if h.acting == stageIdle {
			c.blame(h, causeAnswered)
		}
	}
}

// accepted is the server stamp at which the rollout of a reservation entered.
func (h *held) accepted() int64 {
	if h.Accepted != 0 {
		return h.Accepted
	}
	return h.Stored
}

// left is the time to the deadline on the server's clock.
func (c *Core) left(leftMS, stored int64) time.Duration {
	return time.Duration(leftMS)*time.Millisecond - c.server.since(stored, c.now)
}

// cancelled tells whether a cancel reaches work that was accepted before it.
func (c *Core) cancelled(job, id, group, trajectory string, accepted int64) bool {
	if len(c.cancels) == 0 {
		return false
	}
	hit := func(kind, value string) bool {
		if value == "" && kind != subjects.CancelJob {
			return false
		}
		x, ok := c.cancels[subjects.Cancel{Kind: kind, Job: job, Value: value}.Key()]
		return ok && accepted <= x.Stored
	}
	return hit(subjects.CancelID, id) || hit(subjects.CancelGroup, group) ||
		hit(subjects.CancelTrajectory, trajectory) || hit(subjects.CancelJob, "")
}
