package prefix

import "time"

// sweep is where the reclaiming of dead slots stands: first every set is
// rid of them, then every block whose set is empty goes, then the slots are free.
type sweep struct {
	on     bool
	dying  []uint32 // dead when the sweep began
	set    int      // next set
	place  int      // next directory place
	blocks bool     // the second half
}

// tickWork is how many steps of the sweep a Tick takes: well under a millisecond.
const tickWork = 1 << 13

// Tick lets lower tiers expire and reclaims memory. Call it now and then, at
// least a few times a second while engines come and go.
func (x *Index) Tick(now time.Duration) {
	x.setNow(now)
	x.step(tickWork)
}

// setNow moves on to the period of now and ends those that are over.
func (x *Index) setNow(now time.Duration) {
	p := int64(now / (x.opt.LowerTTL / (periods - 1)))
	if p <= x.period {
		return
	}
	x.period = p
	for _, e := range x.byID {
		if e == nil {
			continue
		}
		for t := range e.lower {
			for i := range e.lower[t] {
				if s := &e.lower[t][i]; *s != noSlot && x.slots[*s].period <= p-periods {
					x.kill(s)
					x.stats.Expired++
				}
			}
		}
	}
}

// step does a bounded part of the sweep.
func (x *Index) step(work int) {
	if !x.sweep.on {
		if x.dead == 0 && !x.sparse() {
			return
		}
		x.begin()
	}
	for work > 0 && x.sweep.on {
		if !x.sweep.blocks {
			work -= x.sweepSet()
		} else {
			work -= x.sweepSegment()
		}
	}
}

// sparse tells whether segments stand mostly empty, as after a great eviction.
func (x *Index) sparse() bool {
	return x.blocks.segs > 8 && x.blocks.n < x.blocks.segs*segMerge*3/8
}

func (x *Index) begin() {
	w := &x.sweep
	w.on, w.blocks, w.set, w.place = true, false, 1, 0
	w.dying = w.dying[:0]
	for i := range x.slots {
		if x.slots[i].state == slotDead {
			w.dying = append(w.dying, uint32(i))
		}
	}
}

func (x *Index) sweepSet() (work int) {
	w := &x.sweep
	if w.set >= len(x.sets.pages)*pageSets {
		w.blocks = true
		return 1
	}
	id := uint32(w.set)
	w.set++
	if x.sets.at(id).refs > 0 {
		x.sets.purge(id, x.alive)
	}
	return 1 + len(x.sets.at(id).members)/8
}

func (x *Index) sweepSegment() (work int) {
	w, t := &x.sweep, x.blocks
	if w.place >= len(t.dir) {
		x.endSweep()
		return 1
	}
	s := t.dir[w.place]
	for i := segPlaces - 1; i >= 0; i-- {
		// A removal moves a later entry into the gap: look at the place again.
		for s.keys[i] != 0 && len(x.sets.at(s.vals[i]).members) == 0 {
			id := s.vals[i]
			t.removeAt(s, i)
			x.sets.unref(id)
		}
	}
	first, n := t.spanAt(s, w.place)
	if first&n != 0 {
		t.merge(w.place) // it is the upper of two: both are swept
	}
	w.place = first + n
	return segPlaces / 8
}

// spanAt is span by directory place.
func (t *table) spanAt(s *segment, place int) (first, n int) {
	n = 1 << (t.depth - s.depth)
	return place &^ (n - 1), n
}

func (x *Index) endSweep() {
	for _, s := range x.sweep.dying {
		x.slots[s] = slot{}
		x.noSlots = append(x.noSlots, s)
		x.dead--
	}
	x.sweep.on = false
	x.blocks.shrink()
	x.sets.trim()
	x.sets.shrinkIndex()
}

// shrinkIndex merges what has become empty of the index of sets.
func (s *sets) shrinkIndex() {
	t := s.byHash
	for place := 0; place < len(t.dir); {
		t.merge(place)
		first, n := t.spanAt(t.dir[place], place)
		place = first + n
	}
	t.shrink()
}
