package checker

import (
	"maps"
	"slices"
	"strings"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// ledger replays one engine's reservations: what is live, and what it sums to.
type ledger struct {
	live   map[string]*Reservation // by rollout, the last write of each live key
	tokens int64
	byLife map[string]int // bound requests by epoch: the window is one life's
	over   map[string]bool
}

// reservations is I3, and the part of I11 that the bucket shows: a key is
// retired once, by a release that names what is held; an engine's sums never
// go below zero and come back to it; no engine is bound beyond its window.
func (c *check) reservations() {
	engines := map[string]*ledger{}
	book := func(engine string) *ledger {
		l := engines[engine]
		if l == nil {
			l = &ledger{live: map[string]*Reservation{}, byLife: map[string]int{}, over: map[string]bool{}}
			engines[engine] = l
		}
		return l
	}
	last := map[string]*Reservation{} // last message of each key
	var newest int64                  // server time
	for i := range c.h.Reservations {
		r := &c.h.Reservations[i]
		newest = max(newest, r.Stored)
		c.guarded(r)
		switch {
		case r.Held != nil:
			c.put(book(r.Held.Engine), r, last)
			last[r.Held.Engine+"."+r.Held.Key()] = r
		case r.Released != nil:
			key := subjects.RolloutKey(r.Released.Job, r.Released.ID)
			c.gone(book(r.Released.Engine), r, key, last[r.Released.Engine+"."+key])
			last[r.Released.Engine+"."+key] = r
		}
	}
	if !c.h.Ended {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(engines)) {
		l := engines[name]
		for _, key := range slices.Sorted(maps.Keys(l.live)) {
			r := l.live[key]
			if !slices.Contains(c.h.Left, name+"."+key) {
				if r.Held.State != subjects.StateExternal && c.h.UnseenReservations == 0 {
					c.violate("I3", key, "the reservation of rollout %s on %s, bind %d at revision %d, vanished without a release", key, name, r.Held.Bind, r.Revision)
				}
				l.tokens -= int64(r.Held.Tokens)
				continue
			}
			c.violate("I3", key, "rollout %s still holds %d tokens on %s at the end: bind %d at revision %d, state %s",
				key, r.Held.Tokens, name, r.Held.Bind, r.Revision, r.Held.State)
			l.tokens -= int64(r.Held.Tokens)
		}
		if l.tokens != 0 && c.h.UnseenReservations == 0 {
			c.violate("I3", "", "the reserved tokens of %s sum to %d after everything was retired, not to 0", name, l.tokens)
		}
	}
	for _, key := range c.h.Left {
		engine, rollout, _ := strings.Cut(key, ".")
		if l := engines[engine]; l == nil || l.live[rollout] == nil {
			if c.h.UnseenReservations == 0 && !last[key].markerOver(newest) {
				c.violate("I3", rollout, "rollout %s holds a reservation on %s at the end that the history retired", rollout, engine)
			}
		}
	}
}

// guarded: every write of the bucket names what it expects, or a late one
// would land on what came after.
func (c *check) guarded(r *Reservation) {
	switch {
	case !r.Unguarded:
	case r.Held != nil:
		c.violate("I3", r.Held.Key(), "rollout %s was written on %s at revision %d without its guard", r.Held.Key(), r.Held.Engine, r.Revision)
	case r.Released != nil:
		key := subjects.RolloutKey(r.Released.Job, r.Released.ID)
		c.violate("I3", key, "rollout %s was released from %s at revision %d without its guard", key, r.Released.Engine, r.Revision)
	}
}

func (c *check) put(l *ledger, r *Reservation, last map[string]*Reservation) {
	h := r.Held
	key := h.Key()
	if was := l.live[key]; was != nil {
		if was.Held.Bind != h.Bind {
			c.violate("I3", key, "rollout %s was bound again to %s at revision %d (bind %d) while bind %d at revision %d was still held there",
				key, h.Engine, r.Revision, h.Bind, was.Held.Bind, was.Revision)
		}
		if was.Held.State == subjects.StateReturned && h.State == subjects.StateBound {
			c.violate("I3", key, "rollout %s on %s went from returned at revision %d back to bound at revision %d", key, h.Engine, was.Revision, r.Revision)
		}
		l.drop(was)
	} else if h.State == subjects.StateReturned && c.h.UnseenReservations == 0 {
		text := "was never bound there"
		if m := last[h.Engine+"."+key]; m != nil {
			text = "had been released"
		}
		c.violate("I3", key, "rollout %s was returned by %s at revision %d although it %s", key, h.Engine, r.Revision, text)
	}
	l.live[key] = r
	l.tokens += int64(h.Tokens)
	if !counts(r) {
		return
	}
	l.byLife[h.Epoch]++
	window, known := c.h.Windows[h.Engine]
	if n := l.byLife[h.Epoch]; known && n > window && !l.over[h.Epoch] {
		l.over[h.Epoch] = true // said once a life: a burst beyond it is one fault
		c.violate("I11", key, "rollout %s is the %d. request bound to %s at once at revision %d: its window is %d", key, n, h.Engine, r.Revision, window)
	}
}

// broughtBack tells whether a release is that of a key that NATS showed again: a
// server that crashes may forget that a marker stood over it, once the marker's
// time is over (docs/decisions/0009). The server took both, under one and the
// same guard; before the marker's end that would be our fault.
func (r *Reservation) broughtBack(again *Reservation) bool {
	return r.markerOver(again.Stored) && r.Guard != 0 && r.Guard == again.Guard
}

// markerOver tells whether this is a release whose marker had expired by then.
func (r *Reservation) markerOver(at int64) bool {
	return r != nil && r.Released != nil && at-r.Stored >= kvstate.MarkerTTL.Nanoseconds()
}

func (c *check) gone(l *ledger, r *Reservation, key string, before *Reservation) {
	g := r.Released
	was := l.live[key]
	if was == nil {
		switch {
		case before.broughtBack(r):
		case before != nil && before.Released != nil && c.h.UnseenReservations == 0:
			c.violate("I3", key, "rollout %s was released from %s twice: at revisions %d and %d", key, g.Engine, before.Revision, r.Revision)
		case c.h.UnseenReservations == 0:
			c.violate("I3", key, "rollout %s was released from %s at revision %d without having been bound there", key, g.Engine, r.Revision)
		}
		return
	}
	// What was overwritten unseen may be a newer bind: then this release may be its.
	if c.h.UnseenReservations == 0 {
		if g.Bind != 0 && g.Bind != was.Held.Bind {
			c.violate("I3", key, "the release of rollout %s from %s at revision %d names bind %d, but bind %d at revision %d was held",
				key, g.Engine, r.Revision, g.Bind, was.Held.Bind, was.Revision)
		}
		if g.Epoch != "" && was.Held.Epoch != "" && g.Epoch != was.Held.Epoch {
			c.violate("I3", key, "the release of rollout %s from %s at revision %d names epoch %s, but it was held under epoch %s at revision %d",
				key, g.Engine, r.Revision, g.Epoch, was.Held.Epoch, was.Revision)
		}
		if g.Tokens != 0 && g.Tokens != was.Held.Tokens {
			c.violate("I3", key, "the release of rollout %s from %s at revision %d gives back %d tokens, but %d were reserved at revision %d",
				key, g.Engine, r.Revision, g.Tokens, was.Held.Tokens, was.Revision)
		}
	}
	l.drop(was)
	if g.Tokens != 0 {
		l.tokens += int64(was.Held.Tokens - g.Tokens)
	}
	delete(l.live, key)
	if l.tokens < 0 && c.h.UnseenReservations == 0 {
		c.violate("I3", key, "the reserved tokens of %s fell to %d at revision %d with the release of rollout %s", g.Engine, l.tokens, r.Revision, key)
	}
}

// counts tells whether a write takes a place of the window. One that was not
// seen itself may have been a return as well as a bind.
func counts(r *Reservation) bool { return r.Held.State == subjects.StateBound && !r.Inferred }

func (l *ledger) drop(was *Reservation) {
	l.tokens -= int64(was.Held.Tokens)
	if counts(was) {
		l.byLife[was.Held.Epoch]--
	}
}
