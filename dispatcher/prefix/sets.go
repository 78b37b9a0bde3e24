package prefix

import "slices"

// sets are the sets of slots that hold a block, each stored once. Set 0 is
// empty. A set that nobody refers to is freed.
//
// A set is found by its hash, the exclusive or of its members' mixed numbers:
// the hash of "this set and one more" is known without building it. Members are
// not compared on a hit: at a million sets two of them share a hash with a
// probability of 1 in 30 million.
type sets struct {
	pages  [][]set
	free   []uint32
	byHash *table
	bytes  int64 // of pages and members
	memo   move  // the last change: neighbouring blocks change alike
}

type set struct {
	hash    uint64
	refs    uint32
	listed  bool     // byHash leads here
	members []uint32 // slots, ascending
}

type move struct {
	from, slot, to uint32
	add, ok        bool
}

const (
	pageSets  = 256
	setBytes  = 40
	pageBytes = pageSets * setBytes
)

func newSets() *sets {
	s := &sets{byHash: newTable()}
	s.newPage()
	s.free = s.free[:len(s.free)-1] // number 0 is the empty set
	return s
}

func (s *sets) newPage() {
	at := uint32(len(s.pages) * pageSets)
	s.pages = append(s.pages, make([]set, pageSets))
	s.bytes += pageBytes
	for i := range uint32(pageSets) {
		s.free = append(s.free, at+pageSets-1-i)
	}
}

func (s *sets) at(id uint32) *set { return &s.pages[id/pageSets][id%pageSets] }

// ref counts one more block with this set.
func (s *sets) ref(id uint32) {
	if id != 0 {
		s.at(id).refs++
	}
}

// unref counts one block less.
func (s *sets) unref(id uint32) {
	if id == 0 {
		return
	}
	e := s.at(id)
	e.refs--
	if e.refs > 0 {
		return
	}
	s.unlist(id, e)
	s.bytes -= int64(cap(e.members)) * 4
	*e = set{}
	s.free = append(s.free, id)
	s.memo.ok = false
}

func (s *sets) unlist(id uint32, e *set) {
	if e.listed {
		s.byHash.remove(e.hash)
		e.listed = false
	}
}

func (s *sets) list(id uint32, e *set) {
	if s.byHash.get(e.hash) == 0 {
		s.byHash.set(e.hash, id)
		e.listed = true
	}
}

func hashSlot(slot uint32) uint64 { return mix(uint64(slot)) }

// with is the set that has one slot more. alive filters what a new set takes
// over; nil when every slot is alive. The caller moves its reference.
func (s *sets) with(from, slot uint32, alive func(uint32) bool) uint32 {
	if s.memo.ok && s.memo.add && s.memo.from == from && s.memo.slot == slot {
		return s.memo.to
	}
	to := from
	if _, has := slices.BinarySearch(s.at(from).members, slot); !has {
		to = s.change(from, slot, true, alive)
	}
	s.memo = move{from: from, slot: slot, to: to, add: true, ok: true}
	return to
}

// without is the set that lacks the slot.
func (s *sets) without(from, slot uint32, alive func(uint32) bool) uint32 {
	if s.memo.ok && !s.memo.add && s.memo.from == from && s.memo.slot == slot {
		return s.memo.to
	}
	to := from
	if _, has := slices.BinarySearch(s.at(from).members, slot); has {
		to = s.change(from, slot, false, alive)
	}
	s.memo = move{from: from, slot: slot, to: to, ok: true}
	return to
}

func (s *sets) change(from, slot uint32, add bool, alive func(uint32) bool) uint32 {
	e := s.at(from)
	n := len(e.members) + 1
	if !add {
		n = len(e.members) - 1
	}
	if n == 0 {
		return 0
	}
	clean := alive == nil || !slices.ContainsFunc(e.members, func(m uint32) bool { return m != slot && !alive(m) })
	if clean {
		hash := e.hash ^ hashSlot(slot)
		if id := s.byHash.get(hash); id != 0 && len(s.at(id).members) == n {
			return id
		}
		if e.refs == 1 {
			s.inPlace(from, e, slot, add, hash)
			return from
		}
	}
	members := make([]uint32, 0, n)
	hash := uint64(0)
	take := func(m uint32) {
		members = append(members, m)
		hash ^= hashSlot(m)
	}
	for _, m := range e.members {
		if add && slot < m {
			take(slot)
			add = false
		}
		if m != slot && (alive == nil || alive(m)) {
			take(m)
		}
	}
	if add {
		take(slot)
	}
	if len(members) == 0 {
		return 0
	}
	if id := s.byHash.get(hash); id != 0 && len(s.at(id).members) == len(members) {
		return id
	}
	return s.create(hash, members)
}

// inPlace changes a set that only one block has: nobody else can tell.
func (s *sets) inPlace(id uint32, e *set, slot uint32, add bool, hash uint64) {
	s.unlist(id, e)
	s.bytes -= int64(cap(e.members)) * 4
	i, _ := slices.BinarySearch(e.members, slot)
	if add {
		e.members = slices.Insert(e.members, i, slot)
	} else {
		e.members = slices.Delete(e.members, i, i+1)
	}
	s.bytes += int64(cap(e.members)) * 4
	e.hash = hash
	s.list(id, e)
}

func (s *sets) create(hash uint64, members []uint32) uint32 {
	if len(s.free) == 0 {
		s.newPage()
	}
	id := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	e := s.at(id)
	*e = set{hash: hash, members: members}
	s.bytes += int64(cap(members)) * 4
	s.list(id, e)
	return id
}

// purge drops the dead members of a set. An empty one stays until its blocks
// are swept.
func (s *sets) purge(id uint32, alive func(uint32) bool) {
	e := s.at(id)
	if !slices.ContainsFunc(e.members, func(m uint32) bool { return !alive(m) }) {
		return
	}
	s.unlist(id, e)
	s.memo.ok = false
	s.bytes -= int64(cap(e.members)) * 4
	kept := e.members[:0]
	e.hash = 0
	for _, m := range e.members {
		if alive(m) {
			kept = append(kept, m)
			e.hash ^= hashSlot(m)
		}
	}
	e.members = slices.Clip(slices.Clone(kept))
	s.bytes += int64(cap(e.members)) * 4
	if len(kept) > 0 {
		s.list(id, e) // an equal one may be listed already: then both live on
	}
}

// trim gives back pages at the end that nobody uses. The lowest numbers are
// given out next, so that the last pages empty as blocks change.
func (s *sets) trim() {
	if len(s.free) > 2*pageSets && 2*len(s.free) > len(s.pages)*pageSets {
		s.free = s.free[:0]
		for id := uint32(len(s.pages)*pageSets - 1); id > 0; id-- {
			if s.at(id).refs == 0 {
				s.free = append(s.free, id)
			}
		}
	}
	keep := len(s.pages)
	for keep > 1 && !slices.ContainsFunc(s.pages[keep-1], func(e set) bool { return e.refs > 0 }) {
		keep--
	}
	if keep == len(s.pages) {
		return
	}
	s.bytes -= int64(len(s.pages)-keep) * pageBytes
	clear(s.pages[keep:])
	s.pages = s.pages[:keep]
	s.free = slices.Clip(slices.DeleteFunc(s.free, func(id uint32) bool { return int(id) >= keep*pageSets }))
}
