package model

const none = int32(-1)

// pool keeps the KV blocks: blocks = used + idle + anon + free. Only blocks
// that have or had a name are structs; the others are counted.
type pool struct {
	blocks int
	used   int // named (once), referenced
	idle   int // named, unreferenced: cached
	anon   int // referenced without a name

	slots   []slot
	spare   int32 // head of the list of slots not in use
	byName  map[uint64]int32
	oldest  int32
	newest  int32
	evicted func(name uint64)
}

type slot struct {
	name       uint64
	refs       int32
	prev, next int32 // in order of last use while idle; next links spare slots
	forgotten  bool  // lost its name while referenced
}

func newPool(blocks int, evicted func(uint64)) pool {
	return pool{blocks: blocks, spare: none, oldest: none, newest: none, byName: map[uint64]int32{}, evicted: evicted}
}

// available is what can be taken, cached blocks included.
func (p *pool) available() int { return p.blocks - p.used - p.anon }

func (p *pool) free() int { return p.blocks - p.used - p.anon - p.idle }

// take reserves n blocks without a name; the caller has seen that they are available.
func (p *pool) take(n int) {
	for p.free() < n {
		p.evict()
	}
	p.anon += n
}

func (p *pool) evict() {
	i := p.oldest
	name := p.slots[i].name
	p.unlink(i)
	p.idle--
	delete(p.byName, name)
	p.release(i)
	p.evicted(name)
}

func (p *pool) find(name uint64) (int32, bool) {
	i, ok := p.byName[name]
	return i, ok
}

func (p *pool) ref(i int32) {
	s := &p.slots[i]
	if s.refs == 0 {
		p.unlink(i)
		p.idle--
		p.used++
	}
	s.refs++
}

func (p *pool) unref(i int32) {
	s := &p.slots[i]
	if s.refs--; s.refs > 0 {
		return
	}
	p.used--
	if s.forgotten {
		p.release(i)
		return
	}
	p.idle++
	s.prev, s.next = p.newest, none
	if p.newest == none {
		p.oldest = i
	} else {
		p.slots[p.newest].next = i
	}
	p.newest = i
}

// name turns one unnamed referenced block into a named one, or into one more
// reference to the block that has that name already.
func (p *pool) name(name uint64) (i int32, fresh bool) {
	p.anon--
	if i, ok := p.byName[name]; ok {
		p.ref(i)
		return i, false
	}
	if i = p.spare; i == none {
		p.slots = append(p.slots, slot{})
		i = int32(len(p.slots) - 1)
	} else {
		p.spare = p.slots[i].next
	}
	p.slots[i] = slot{name: name, refs: 1, prev: none, next: none}
	p.byName[name] = i
	p.used++
	return i, true
}

func (p *pool) unlink(i int32) {
	s := &p.slots[i]
	if s.prev == none {
		p.oldest = s.next
	} else {
		p.slots[s.prev].next = s.next
	}
	if s.next == none {
		p.newest = s.prev
	} else {
		p.slots[s.next].prev = s.prev
	}
	s.prev, s.next = none, none
}

func (p *pool) release(i int32) {
	p.slots[i] = slot{prev: none, next: p.spare}
	p.spare = i
}

// clear forgets every name. Referenced blocks stay with their requests and are
// free when those end.
func (p *pool) clear() {
	for p.oldest != none {
		i := p.oldest
		p.unlink(i)
		p.release(i)
	}
	p.idle = 0
	for _, i := range p.byName {
		if p.slots[i].refs > 0 {
			p.slots[i].forgotten = true
		}
	}
	clear(p.byName)
}
