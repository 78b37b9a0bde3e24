package core

import "slices"

// What keeps dispatchers, and a dispatcher and the releases of agents, out of
// each other's way. Both only save refused binds: the guard is what is right or
// wrong, whatever stands here (docs/decisions/0010).
//
// How many binds are in flight at once adapts to what is refused: it grows by
// one sixteenth with each bind that stands and shrinks by a quarter with each
// that met a moved sequence, so that it rests where one of five is refused.
// Without refusals there is no limit but one an engine. What is not bound waits
// undecided, and is decided on a newer view.
const (
	bindUnit   = 16           // parts of a bind that atOnce counts in
	bindGrow   = 1            // for each that stands
	bindShrink = 4            // for each that is refused
	bindLeast  = 2 * bindUnit // never fewer at once
)

// bindRoom tells whether one more bind may be in flight.
func (c *Core) bindRoom() bool {
	return c.atOnce == 0 || c.inFlight()*bindUnit < c.atOnce
}

// inFlight is how many binds are unanswered; a refused one that waits for the
// view is answered.
func (c *Core) inFlight() int { return c.stages[itemBinding] - c.lagging }

// stood and refused follow the answers to binds.
func (c *Core) stood() {
	if c.atOnce == 0 {
		return
	}
	if c.atOnce += bindGrow; c.atOnce >= len(c.cands)*bindUnit {
		c.atOnce = 0
	}
}

func (c *Core) refused() {
	if c.atOnce == 0 {
		c.atOnce = (c.inFlight() + 1) * bindUnit
	}
	c.atOnce = max(bindLeast, c.atOnce-bindShrink)
}

// crowded tells whether this dispatcher has so much to place that, if the others
// have as much, one of four binds would meet another one.
func (c *Core) crowded() bool {
	const chance = 4
	others := len(c.live) - 1
	return others > 0 && chance*others*(c.waiting()+c.stages[itemBinding]) >= len(c.cands)
}

// lean has a crowded dispatcher take it that each engine of another dispatcher's
// share is about to be given one more request like this one, by that dispatcher.
// Among engines that are equal or nearly so (by what one rollout weighs under
// the policy in force) it thus prefers its own share; one that is emptier by
// more is taken, whosever it is. Shares are equal parts of the engines by name.
// No engine becomes inadmissible by it.
//
// Requests with an affinity or a group are placed alike by all dispatchers: for
// them nothing is changed. The returned func takes it back.
func (c *Core) lean(it *item, affinity string) (undo func()) {
	if affinity != "" || !c.crowded() {
		return func() {}
	}
	c.expect(it, 1)
	return func() { c.expect(it, -1) }
}

// notOurs in LastPicked has an engine lose every tie but those among its like.
const notOurs = 1 << 63

func (c *Core) expect(it *item, n int) {
	share, shares := slices.Index(c.live, c.cfg.Dispatcher), len(c.live)
	for i := range c.cands {
		cand := &c.cands[i]
		if i%shares == share || cand.KVBlocked {
			continue // a blocked engine may be admissible for having nothing to do
		}
		cand.Window += n
		cand.LastPicked ^= notOurs
		countTo(cand, it, n)
	}
}
