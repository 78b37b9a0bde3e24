package kvevents

import (
	"math"
	"time"
)

// IndexConfig of one rank's index; zero = the default.
type IndexConfig struct {
	// Model is the base model's name, part of every namespace.
	Model string
	// BlockTokens is the pool's block size, tokens. Default 64.
	BlockTokens int
	// EngineBlock is the block size that the engine advertises, tokens; 0 =
	// unknown. The events decide; a difference is an alarm (scenario C13).
	EngineBlock int
	// MaxNodes bounds the engine blocks that are followed, about 100 bytes and,
	// for blocks smaller than the pool's, a share of a pool block's tokens each.
	// Default 2,000,000; what does not fit is not indexed.
	MaxNodes int
	// MaxParked bounds the tokens of stores whose parent is not known (yet).
	// Default 1,000,000.
	MaxParked int
	// LowerTTL is how long a block of a lower tier is believed: some producers
	// never report its removal. Default 10 min.
	LowerTTL time.Duration
}

func (c IndexConfig) withDefaults() IndexConfig {
	if c.BlockTokens <= 0 || c.BlockTokens > math.MaxUint16 {
		c.BlockTokens = 64
	}
	if c.MaxNodes <= 0 || c.MaxNodes > math.MaxUint32/2 {
		c.MaxNodes = 2_000_000
	}
	if c.MaxParked <= 0 {
		c.MaxParked = 1_000_000
	}
	if c.LowerTTL <= 0 {
		c.LowerTTL = 10 * time.Minute
	}
	return c
}

// Stats count what an index saw.
type Stats struct {
	Stored, Removed, Cleared int64 // events applied
	Blocks                   int64 // engine blocks stored, repeats included
	Nodes                    int   // engine blocks followed now
	Parked                   int   // stores that wait for their parent
	Orphans                  int64 // stores whose parent never came
	UnknownRemoved           int64 // removals of blocks that are not known
	UnknownMoved             int64 // location-only stores of blocks that are not known
	OtherGroup               int64 // events of cache groups that hold no prefix
	Mismatched               int64 // block size x blocks is not the number of tokens
	UnnamedLoRA              int64 // a LoRA that has only a number
	Opaque                   int64 // blocks with an image, or the like, in their hash
	Ambiguous                int64 // one hash under two parents
	Full                     int64 // blocks that did not fit
}

// Index follows the engine blocks of one rank and tells the View which pool
// blocks they make up. The nodes are a forest by parent hash; each knows the
// chain hash of the last whole pool block before its end and the tokens after
// it. It is not safe for concurrent use: whoever applies holds the view.
type Index struct {
	cfg   IndexConfig
	view  *View
	alarm func(AlarmKind, string)
	shown bool // false: degraded, nothing of it is in the view
	now   time.Duration
	stats Stats

	byHash  table[uint32]
	nodes   []node // [0] is nobody
	free    uint32 // list of free nodes, by next
	tokens  []uint32
	chunks  []chunk // [0] is nobody
	freed   []uint32
	multi   map[uint32][]uint64 // pool blocks of nodes that complete several
	parked  parking
	lower   []lowered // stores to lower tiers, oldest first
	scratch []uint32
	sink    uint64 // keeps touch from being optimised away
	sized   bool   // an alarm about the block size was given
}

// node is one engine block.
type node struct {
	hash   uint64 // the engine's
	chain  uint64 // of the last whole pool block at or before the end; the namespace if none
	ns     uint64
	parent uint32
	child  uint32 // first one; siblings by next and prev
	next   uint32
	prev   uint32
	chunk  uint32 // where the tokens after that pool block are
	end    uint32 // tokens from the prompt's start to this block's end
	size   uint32 // tokens
	stamp  uint32 // second of the last store to a lower tier
	tail   uint16 // tokens after the last whole pool block
	group  int16
	tiers  uint8 // where it is, a bit a tier
	first  uint8 // tiers in which the first pool block that it completes is present
	flags  uint8
}

const (
	opaque    = 1 // no prompt of text leads here
	queuedCPU = 2 // stands in Index.lower for CPU
	queuedSSD = 4 // and for SSD
)

// chunk is the unfinished part of a pool block; nodes that end inside the same
// one share it.
type chunk struct {
	refs uint32
	fill uint16
}

type lowered struct {
	node  uint32
	hash  uint64
	tier  Tier
	stamp uint32
}

// NewIndex makes an empty one that writes to view.
func NewIndex(cfg IndexConfig, view *View, alarm func(AlarmKind, string)) *Index {
	if alarm == nil {
		alarm = func(AlarmKind, string) {}
	}
	x := &Index{cfg: cfg.withDefaults(), view: view, alarm: alarm, shown: true}
	x.empty()
	return x
}

func (x *Index) empty() {
	x.byHash = table[uint32]{}
	x.nodes, x.free = make([]node, 1, 64), 0
	x.chunks, x.freed, x.tokens = make([]chunk, 1, 16), nil, make([]uint32, x.cfg.BlockTokens)
	x.multi = map[uint32][]uint64{}
	x.parked = parking{}
	x.lower = nil
}

// Stats so far.
func (x *Index) Stats() Stats {
	s := x.stats
	s.Nodes, s.Parked = x.byHash.len(), x.parked.len()
	return s
}

// clear forgets everything. alone: no other rank has blocks in the view.
func (x *Index) clear(alone bool) {
	if x.shown {
		if alone {
			x.view.reset()
		} else {
			x.walk(x.hide)
		}
	}
	x.empty()
}

// show puts the rank's blocks into the view or takes them out.
func (x *Index) show(shown bool) {
	if x.shown == shown {
		return
	}
	x.shown = shown
	if shown {
		x.walk(x.view.add)
	} else {
		x.walk(x.hide)
	}
}

func (x *Index) hide(t Tier, ns, _, block uint64) { x.view.del(t, ns, block) }

// walk visits every pool block that is present, with the one before it.
func (x *Index) walk(f func(t Tier, ns, parent, block uint64)) {
	for i := 1; i < len(x.nodes); i++ {
		n := &x.nodes[i]
		if n.tiers == 0 || n.flags&opaque != 0 {
			continue
		}
		for t := range Tier(tiers) {
			bit := uint8(1) << t
			parent := x.chainBefore(n)
			for j, b := range x.blocksOf(uint32(i)) {
				if j == 0 && n.first&bit != 0 || j > 0 && n.tiers&bit != 0 {
					f(t, n.ns, parent, b)
				}
				parent = b
			}
		}
	}
}

// blocksOf are the pool blocks that end inside a node.
func (x *Index) blocksOf(i uint32) []uint64 {
	n := &x.nodes[i]
	b := uint32(x.cfg.BlockTokens)
	switch n.end/b - (n.end-n.size)/b {
	case 0:
		return nil
	case 1:
		return []uint64{n.chain}
	}
	return x.multi[i]
}

// chainBefore is the last whole pool block before a node's first token, the
// namespace if there is none.
func (x *Index) chainBefore(n *node) uint64 {
	if n.parent == 0 {
		return n.ns
	}
	return x.nodes[n.parent].chain
}

func (x *Index) add(t Tier, ns, parent, block uint64) {
	if x.shown {
		x.view.add(t, ns, parent, block)
	}
}

func (x *Index) del(t Tier, ns, block uint64) {
	if x.shown {
		x.view.del(t, ns, block)
	}
}

// set marks a node present in a tier.
func (x *Index) set(i uint32, t Tier) {
	n := &x.nodes[i]
	if t == CPU || t == SSD {
		x.queue(i, t)
	}
	bit := uint8(1) << t
	if n.tiers&bit != 0 {
		return
	}
	n.tiers |= bit
	if n.flags&opaque != 0 {
		return
	}
	b := uint32(x.cfg.BlockTokens)
	count := n.end/b - (n.end-n.size)/b
	if count > 0 && x.covered(n, bit) {
		n.first |= bit
		if count == 1 {
			x.add(t, n.ns, x.chainBefore(n), n.chain)
		} else {
			x.add(t, n.ns, x.chainBefore(n), x.multi[i][0])
		}
	}
	if count > 1 {
		for j, block := range x.multi[i][1:] {
			x.add(t, n.ns, x.multi[i][j], block)
		}
	}
	if n.tail > 0 { // else nothing below leans on it
		for c := n.child; c != 0; c = x.nodes[c].next {
			x.raise(c, t)
		}
	}
}

// queue notes when a block of a lower tier was last said to be there.
func (x *Index) queue(i uint32, t Tier) {
	n, flag := &x.nodes[i], uint8(queuedCPU)
	if t == SSD {
		flag = queuedSSD
	}
	n.stamp = uint32(x.now / time.Second)
	if n.flags&flag == 0 {
		n.flags |= flag
		x.lower = append(x.lower, lowered{i, n.hash, t, n.stamp})
	}
}

// covered tells whether the pool block that n completes first lies wholly in
// blocks that are present in the tier: n, and those before it.
func (x *Index) covered(n *node, bit uint8) bool {
	b := uint32(x.cfg.BlockTokens)
	start := (n.end - n.size) / b * b
	for n.end-n.size > start {
		if n.parent == 0 {
			return false
		}
		if n = &x.nodes[n.parent]; n.tiers&bit == 0 {
			return false
		}
	}
	return true
}

// raise looks again at the first pool blocks below a node that came back.
func (x *Index) raise(i uint32, t Tier) {
	n, bit := &x.nodes[i], uint8(1)<<t
	if n.tiers&bit == 0 || n.flags&opaque != 0 {
		return
	}
	if blocks := x.blocksOf(i); len(blocks) > 0 {
		if n.first&bit == 0 && x.covered(n, bit) {
			n.first |= bit
			x.add(t, n.ns, x.chainBefore(n), blocks[0])
		}
		return
	}
	for c := n.child; c != 0; c = x.nodes[c].next {
		x.raise(c, t)
	}
}

// unset takes a node out of a tier, and the node away when it is in none and
// nothing hangs below it.
func (x *Index) unset(i uint32, t Tier) {
	n, bit := &x.nodes[i], uint8(1)<<t
	if n.tiers&bit == 0 {
		return
	}
	n.tiers &^= bit
	if n.flags&opaque == 0 {
		one := [1]uint64{n.chain}
		blocks := one[:]
		if b := uint32(x.cfg.BlockTokens); n.end/b-(n.end-n.size)/b > 1 {
			blocks = x.multi[i]
			for j := len(blocks) - 1; j > 0; j-- {
				x.del(t, n.ns, blocks[j])
			}
		}
		if n.first&bit != 0 {
			n.first &^= bit
			x.del(t, n.ns, blocks[0])
		}
		if n.tail > 0 {
			for c := n.child; c != 0; c = x.nodes[c].next {
				x.lowerFirst(c, t)
			}
		}
	}
	x.drop(i)
}

// lowerFirst takes back the first pool blocks below a node that went.
func (x *Index) lowerFirst(i uint32, t Tier) {
	n, bit := &x.nodes[i], uint8(1)<<t
	b := uint32(x.cfg.BlockTokens)
	if n.end/b > (n.end-n.size)/b {
		if n.first&bit != 0 && (n.end-n.size)%b != 0 { // it began in what went
			n.first &^= bit
			x.del(t, n.ns, x.blocksOf(i)[0])
		}
		return
	}
	for c := n.child; c != 0; c = x.nodes[c].next {
		x.lowerFirst(c, t)
	}
}

// drop frees a node that is nowhere and has no children, and then its parent
// if that was waiting for it.
func (x *Index) drop(i uint32) {
	for i != 0 {
		n := &x.nodes[i]
		if n.tiers != 0 || n.child != 0 {
			return
		}
		up := n.parent
		if n.prev != 0 {
			x.nodes[n.prev].next = n.next
		} else if up != 0 {
			x.nodes[up].child = n.next
		}
		if n.next != 0 {
			x.nodes[n.next].prev = n.prev
		}
		if n.chunk != 0 {
			x.release(n.chunk)
		}
		x.byHash.del(n.hash)
		if len(x.multi) > 0 {
			delete(x.multi, i)
		}
		*n = node{next: x.free}
		x.free = i
		i = up
	}
}

// alloc gives a fresh node, 0 when there are too many.
func (x *Index) alloc() uint32 {
	if i := x.free; i != 0 {
		x.free = x.nodes[i].next
		x.nodes[i] = node{}
		return i
	}
	if len(x.nodes) > x.cfg.MaxNodes {
		return 0
	}
	x.nodes = append(x.nodes, node{})
	return uint32(len(x.nodes) - 1)
}

// chunkOf gives the tokens of a chunk, all BlockTokens of them.
func (x *Index) chunkOf(c uint32) []uint32 {
	b := x.cfg.BlockTokens
	return x.tokens[int(c)*b : int(c)*b+b : int(c)*b+b]
}

// extend gives a chunk that holds the first n tokens of c and then more: c
// itself when nobody wrote behind them yet, else a copy.
func (x *Index) extend(c uint32, n int, more []uint32) uint32 {
	if c != 0 && int(x.chunks[c].fill) == n {
		copy(x.chunkOf(c)[n:], more)
		x.chunks[c].fill += uint16(len(more))
		x.chunks[c].refs++
		return c
	}
	var d uint32
	if k := len(x.freed); k > 0 {
		d, x.freed = x.freed[k-1], x.freed[:k-1]
	} else {
		x.chunks = append(x.chunks, chunk{})
		d = uint32(len(x.chunks) - 1)
		if need := len(x.chunks) * x.cfg.BlockTokens; need <= cap(x.tokens) {
			x.tokens = x.tokens[:need]
		} else {
			x.tokens = append(x.tokens, make([]uint32, x.cfg.BlockTokens)...)
		}
	}
	x.chunks[d] = chunk{refs: 1, fill: uint16(n + len(more))}
	into := x.chunkOf(d)
	if n > 0 {
		copy(into, x.chunkOf(c)[:n])
	}
	copy(into[n:], more)
	return d
}

func (x *Index) release(c uint32) {
	if x.chunks[c].refs--; x.chunks[c].refs == 0 {
		x.freed = append(x.freed, c)
	}
}

// Expire takes back what lower tiers were said to hold too long ago.
func (x *Index) Expire(now time.Duration) {
	x.now = now
	ttl := uint32(x.cfg.LowerTTL / time.Second)
	sec, n, end := uint32(now/time.Second), 0, len(x.lower)
	for ; n < end && (x.lower[n].stamp+ttl <= sec || end-n > 2*x.cfg.MaxNodes); n++ {
		l := x.lower[n]
		if l.node >= uint32(len(x.nodes)) || x.nodes[l.node].hash != l.hash {
			continue
		}
		flag := uint8(queuedCPU)
		if l.tier == SSD {
			flag = queuedSSD
		}
		x.nodes[l.node].flags &^= flag
		switch stamp := x.nodes[l.node].stamp; {
		case x.nodes[l.node].tiers&(1<<l.tier) == 0:
		case stamp+ttl <= sec || stamp == l.stamp:
			x.unset(l.node, l.tier)
		default: // said again since
			x.nodes[l.node].flags |= flag
			x.lower = append(x.lower, lowered{l.node, l.hash, l.tier, stamp})
		}
	}
	if n > 0 {
		x.lower = append(x.lower[:0], x.lower[n:]...)
	}
}
