package prefix

import (
	"time"
)

// Tier is where an engine holds a block.
type Tier uint8

// Tiers, the quickest first.
const (
	GPU Tier = iota
	CPU
	SSD

	tiers
)

// ParseTier reads a tier's name; ok is false for any other. The empty one is GPU.
func ParseTier(s string) (t Tier, ok bool) {
	switch s {
	case "", "gpu":
		return GPU, true
	case "cpu":
		return CPU, true
	case "ssd":
		return SSD, true
	}
	return 0, false
}

// Options of an Index. The zero value means the defaults.
type Options struct {
	// MaxBytes bounds the index's memory, bytes. 512 MiB when 0.
	MaxBytes int64
	// LowerTTL is how long a block in CPU memory or on disk counts after it was
	// stored: some engines never report that they dropped it. It ends between
	// LowerTTL and a quarter more. 30 minutes when 0.
	LowerTTL time.Duration
	// JumpFrom is the number of blocks that a match walks one by one before it
	// jumps (see Match for what that assumes). 64 when 0; negative = never.
	JumpFrom int
	// MaxBuffered bounds the block hashes that are kept for one engine while its
	// snapshot is on its way. 65,536 when 0.
	MaxBuffered int
}

func (o Options) withDefaults() Options {
	if o.MaxBytes == 0 {
		o.MaxBytes = 512 << 20
	}
	if o.LowerTTL == 0 {
		o.LowerTTL = 30 * time.Minute
	}
	if o.JumpFrom == 0 {
		o.JumpFrom = 64
	}
	if o.MaxBuffered == 0 {
		o.MaxBuffered = 1 << 16
	}
	return o
}

// Index knows which engine holds which block. See the package's doc.
type Index struct {
	opt     Options
	blocks  *table // block hash -> set
	sets    *sets
	engines map[string]*engine
	byID    []*engine // nil = free
	tags    []int     // of engines, by id
	slots   []slot
	noSlots []uint32 // free slots
	dead    int      // slots that a sweep has to reclaim
	period  int64    // of lower tiers, now
	evicted uint64   // blocks forgotten for the budget, ever
	hand    int      // directory place of the eviction clock
	sweep   sweep
	scratch scratch
	stats   Stats
}

// slot is one life of one tier of one engine: the member of sets.
type slot struct {
	engine uint32
	tier   Tier
	state  slotState
	period int64 // of a lower tier
}

type slotState uint8

const (
	slotFree   slotState = iota
	slotHidden           // filling from a snapshot
	slotLive             // counts
	slotDead             // counts no more, and waits for the sweep
)

// periods is how many parts a lower tier's life has.
const periods = 5

const noSlot = ^uint32(0)

// Stats of an index, since it was made where not said otherwise.
type Stats struct {
	Bytes    int64 // held now
	Blocks   int   // known now
	Sets     int   // of holders, known now
	Engines  int   // now
	Trusted  int   // engines, now
	Stored   uint64
	Removed  uint64
	Evicted  uint64 // blocks, for the budget
	Expired  uint64 // periods of lower tiers
	Lookups  uint64 // prompts
	Matched  uint64 // prompts that some engine holds a block of
	Resyncs  uint64
	Buffered int // block hashes, now
}

// New makes an empty index.
func New(o Options) *Index {
	return &Index{opt: o.withDefaults(), blocks: newTable(), sets: newSets(), engines: map[string]*engine{}}
}

// Stats of the index now.
func (x *Index) Stats() Stats {
	s := x.stats
	s.Bytes, s.Blocks, s.Engines, s.Evicted = x.bytes(), x.blocks.n, len(x.engines), x.evicted
	s.Sets = x.sets.byHash.n
	for _, e := range x.byID {
		if e == nil {
			continue
		}
		s.Buffered += e.buffered
		if e.state == trusted {
			s.Trusted++
		}
	}
	return s
}

// bytes is what the index holds, as it accounts for it.
func (x *Index) bytes() int64 {
	return x.blocks.bytes() + x.sets.byHash.bytes() + x.sets.bytes + int64(cap(x.sets.free))*4 + int64(cap(x.slots))*24
}

// alive tells whether a slot is anybody's.
func (x *Index) alive(s uint32) bool { return x.slots[s].state != slotDead }

// filter is what new sets leave out; nil when there is nothing to leave out.
func (x *Index) filter() func(uint32) bool {
	if x.dead == 0 {
		return nil
	}
	return x.alive
}

func (x *Index) newSlot(e *engine, t Tier, st slotState) uint32 {
	var at uint32
	if n := len(x.noSlots); n > 0 {
		at, x.noSlots = x.noSlots[n-1], x.noSlots[:n-1]
	} else {
		at = uint32(len(x.slots))
		x.slots = append(x.slots, slot{})
	}
	x.slots[at] = slot{engine: e.id, tier: t, state: st, period: x.period}
	return at
}

// kill ends a slot: nothing under it counts from now on.
func (x *Index) kill(s *uint32) {
	if *s != noSlot {
		x.slots[*s].state = slotDead
		x.dead++
		*s = noSlot
	}
}

// slotFor is the slot to store under.
func (x *Index) slotFor(e *engine, t Tier) uint32 {
	st := slotLive
	if e.state != trusted {
		st = slotHidden
	}
	if t == GPU {
		if e.gpu == noSlot {
			e.gpu = x.newSlot(e, GPU, st)
		}
		return e.gpu
	}
	p := &e.lower[t-1][x.period%periods]
	if *p != noSlot && x.slots[*p].period != x.period {
		x.kill(p)
	}
	if *p == noSlot {
		*p = x.newSlot(e, t, st)
	}
	return *p
}

// store notes blocks of one engine, parent before child.
func (x *Index) store(e *engine, t Tier, blocks []uint64) {
	x.stats.Stored += uint64(len(blocks))
	x.fit()
	sl, alive := x.slotFor(e, t), x.filter()
	for _, b := range blocks {
		p := x.blocks.place(b)
		if p.new && p.seg.n >= segMost {
			x.room(&p)
		}
		from := p.seg.vals[p.at]
		to := x.sets.with(from, sl, alive)
		if to != from {
			x.sets.ref(to)
			x.sets.unref(from)
		}
		x.blocks.put(p, to)
	}
}

// drop notes that an engine holds blocks no longer.
func (x *Index) drop(e *engine, t Tier, blocks []uint64) {
	x.stats.Removed += uint64(len(blocks))
	for _, b := range blocks {
		if t == GPU {
			x.dropFrom(e.gpu, b)
			continue
		}
		for _, s := range e.lower[t-1] {
			x.dropFrom(s, b)
		}
	}
}

func (x *Index) dropFrom(sl uint32, b uint64) {
	if sl == noSlot {
		return
	}
	id := x.blocks.get(b)
	if id == 0 {
		return
	}
	to := x.sets.without(id, sl, x.filter())
	switch {
	case to == id:
		return
	case to == 0:
		x.blocks.remove(b)
	default:
		x.sets.ref(to)
		x.blocks.set(b, to)
	}
	x.sets.unref(id)
}

// holds tells whether the engine has the block in any tier.
func (x *Index) holds(e *engine, b uint64) bool {
	id := x.blocks.get(b)
	if id == 0 {
		return false
	}
	for _, m := range x.sets.at(id).members {
		if x.slots[m].engine == e.id && x.slots[m].state != slotDead {
			return true
		}
	}
	return false
}

// room makes way for a new block in a full segment: the segment splits, or
// forgets some of its blocks where the budget has no room for another.
func (x *Index) room(p *place) {
	if x.bytes()+segBytes > x.opt.MaxBytes || !x.blocks.split(p.seg, p.key) {
		x.evict(p.seg)
	}
	*p = x.blocks.place(p.key)
}

// fit forgets blocks while sets take the index beyond its budget: those that
// nobody else has go with their blocks.
func (x *Index) fit() {
	for tries := 0; x.bytes() > x.opt.MaxBytes && x.blocks.n > 0 && tries < 64; tries++ {
		x.hand = (x.hand + 1) % len(x.blocks.dir)
		x.evict(x.blocks.dir[x.hand])
	}
}

func (x *Index) evict(s *segment) {
	for range evictBatch {
		i := s.victim()
		if i < 0 {
			return
		}
		id := s.vals[i]
		x.blocks.removeAt(s, i)
		x.sets.unref(id)
		x.evicted++
	}
}
