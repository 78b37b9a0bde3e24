package kvevents

import (
	"bytes"
	"fmt"
	"time"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

// Apply takes the events of one batch. The caller holds the view.
func (x *Index) Apply(now time.Duration, b *Batch, alone bool) {
	x.now = now
	for i := range b.Events {
		e := &b.Events[i]
		switch e.Kind {
		case Stored:
			x.stats.Stored++
			x.store(e)
		case Removed:
			x.stats.Removed++
			x.remove(e)
		case Cleared:
			x.stats.Cleared++
			x.clear(alone)
		}
	}
}

func (x *Index) remove(e *Event) {
	x.sink += x.byHash.touch(e.Hashes)
	for _, h := range e.Hashes {
		i := x.byHash.get(h)
		if i == 0 {
			if !x.parked.remove(h) {
				x.stats.UnknownRemoved++
			}
			continue
		}
		if g := x.nodes[i].group; e.Group >= 0 && g >= 0 && int(g) != e.Group {
			x.stats.OtherGroup++ // the same hash in a sliding window's group
			continue
		}
		x.unset(i, e.Tier)
	}
}

// store takes a store: of nodes that are known only the tier changes; new ones
// continue the chain of their parent. Stores that waited for them follow.
func (x *Index) store(e *Event) {
	if !x.chain(e) || x.parked.len() == 0 {
		return
	}
	todo := append([]uint64(nil), e.Hashes...)
	for len(todo) > 0 {
		h := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, p := range x.parked.take(h) {
			if x.chain(&p.e) {
				todo = append(todo, p.e.Hashes...)
			}
		}
	}
}

// spot is where the next engine block of a chain begins.
type spot struct {
	node  uint32
	chain uint64
	ns    uint64
	end   uint32
	chunk uint32
	tail  int
	flags uint8
}

func (x *Index) spotAt(i uint32) spot {
	n := &x.nodes[i]
	return spot{node: i, chain: n.chain, ns: n.ns, end: n.end, chunk: n.chunk, tail: int(n.tail), flags: n.flags}
}

// chain applies one store; false when it came to nothing or was parked.
func (x *Index) chain(e *Event) bool {
	k := len(e.Hashes)
	switch {
	case k == 0:
		return false
	case !e.attention():
		x.stats.OtherGroup++
		return false
	case len(e.Tokens) == 0:
		x.move(e)
		return false
	case e.BlockSize*k != len(e.Tokens):
		x.stats.Mismatched++
		x.alarm(AlarmTokens, fmt.Sprintf("a store of %d blocks of %d tokens carries %d tokens; it is not indexed", k, e.BlockSize, len(e.Tokens)))
		return false
	}
	x.checkSize(e.BlockSize)
	at, ok := x.begin(e)
	if !ok {
		return false
	}
	x.stats.Blocks += int64(k)
	x.sink += x.byHash.touch(e.Hashes)
	size := e.BlockSize
	for i, h := range e.Hashes {
		if known := x.byHash.get(h); known != 0 {
			if n := &x.nodes[known]; n.parent != at.node || n.ns != at.ns && n.flags&at.flags&opaque == 0 {
				x.ambiguous(known)
				return true
			}
			x.set(known, e.Tier)
			at = x.spotAt(known)
			continue
		}
		if x.foreign(e, i) && at.flags&opaque == 0 {
			at.flags |= opaque
		}
		n := x.alloc()
		if n == 0 {
			x.stats.Full += int64(k - i)
			x.alarm(AlarmFull, fmt.Sprintf("%d engine blocks are followed, the bound; more are not indexed", x.cfg.MaxNodes))
			return true
		}
		x.grow(n, at, e, i*size)
		x.byHash.put(h, n)
		x.set(n, e.Tier)
		at = x.spotAt(n)
	}
	return true
}

// begin finds where a store's first block begins: behind its parent, or at the
// root of a namespace. A store behind an unknown parent is parked.
func (x *Index) begin(e *Event) (spot, bool) {
	if e.HasParent {
		i := x.byHash.get(e.Parent)
		if i == 0 {
			if !x.parked.add(e, x.now, x.cfg.MaxParked) {
				x.stats.Orphans++
			}
			return spot{}, false
		}
		return x.spotAt(i), true
	}
	lora := e.LoRA
	if len(lora) == 0 && e.HasLoRAID {
		x.stats.UnnamedLoRA++
		x.alarm(AlarmLoRA, fmt.Sprintf("events name LoRA %d by its number only: its blocks cannot be matched with requests", e.LoRAID))
		return spot{flags: opaque}, true
	}
	salt := e.Salt
	if len(salt) == 0 && len(e.Extra) > 0 {
		rest, n := leftover(e.Extra[0], lora)
		if n > 1 || e.Extra[0].Other {
			x.stats.Opaque++
			return spot{flags: opaque}, true
		}
		salt = rest
	}
	ns := blockhash.Namespace(x.cfg.Model, string(lora), string(salt))
	return spot{chain: ns, ns: ns}, true
}

// leftover are the extra keys of a block beside its LoRA's name.
func leftover(k ExtraKeys, lora []byte) (last []byte, n int) {
	for _, s := range k.Texts {
		if !bytes.Equal(s, lora) {
			last, n = s, n+1
		}
	}
	return last, n
}

// foreign tells whether block i of a store has something in its hash that no
// prompt of text has. The salt stands at the first block of a prompt only.
func (x *Index) foreign(e *Event, i int) bool {
	if i >= len(e.Extra) || i == 0 && !e.HasParent {
		return false
	}
	_, n := leftover(e.Extra[i], e.LoRA)
	if n > 0 || e.Extra[i].Other {
		x.stats.Opaque++
		return true
	}
	return false
}

// grow makes node n the block of size tokens at offset off of the store.
func (x *Index) grow(i uint32, at spot, e *Event, off int) {
	size, b := e.BlockSize, x.cfg.BlockTokens
	tokens := e.Tokens[off : off+size]
	n := &x.nodes[i]
	*n = node{hash: e.Hashes[off/size], chain: at.chain, ns: at.ns, parent: at.node, end: at.end + uint32(size), size: uint32(size),
		group: int16(e.Group), flags: at.flags}
	if at.node != 0 {
		p := &x.nodes[at.node]
		if n.next = p.child; n.next != 0 {
			x.nodes[n.next].prev = i
		}
		p.child = i
	}
	if at.flags&opaque != 0 {
		return
	}
	if at.tail+size < b {
		n.chunk = x.extend(at.chunk, at.tail, tokens)
		n.tail = uint16(at.tail + size)
		return
	}
	several := (at.tail+size)/b > 1
	var blocks []uint64
	rest, chain := tokens, at.chain
	if at.tail > 0 {
		whole := x.scratch
		if from := off - at.tail; from >= 0 { // all of it is in this store
			whole = e.Tokens[from : from+b]
		} else {
			whole = append(append(whole[:0], x.chunkOf(at.chunk)[:at.tail]...), tokens[:b-at.tail]...)
			x.scratch = whole
		}
		chain = blockhash.Block(chain, whole)
		if several {
			blocks = append(blocks, chain)
		}
		rest = tokens[b-at.tail:]
	}
	for len(rest) >= b {
		chain = blockhash.Block(chain, rest[:b])
		if several {
			blocks = append(blocks, chain)
		}
		rest = rest[b:]
	}
	n.chain = chain
	if len(rest) > 0 {
		n.chunk, n.tail = x.extend(0, 0, rest), uint16(len(rest))
	}
	if several {
		x.multi[i] = blocks
	}
}

// move takes a store without tokens: blocks that are known from another tier.
func (x *Index) move(e *Event) {
	for _, h := range e.Hashes {
		if i := x.byHash.get(h); i != 0 {
			x.set(i, e.Tier)
		} else {
			x.stats.UnknownMoved++
		}
	}
}

// ambiguous: the engine uses one hash for blocks behind different parents, so
// nothing that hangs below it can be placed.
func (x *Index) ambiguous(i uint32) {
	x.stats.Ambiguous++
	x.alarm(AlarmAmbiguous, "one block hash appears behind two parents: this engine's hashes are not chained; such blocks are not indexed")
	x.obscure(i)
}

// obscure makes a node and all below it opaque.
func (x *Index) obscure(i uint32) {
	n := &x.nodes[i]
	if n.flags&opaque != 0 {
		return
	}
	for t := range Tier(tiers) {
		bit := uint8(1) << t
		for j, b := range x.blocksOf(i) {
			if j == 0 && n.first&bit != 0 || j > 0 && n.tiers&bit != 0 {
				x.del(t, n.ns, b)
			}
		}
	}
	n.first = 0
	n.flags |= opaque
	for c := n.child; c != 0; c = x.nodes[c].next {
		x.obscure(c)
	}
}

func (x *Index) checkSize(size int) {
	if x.sized {
		return
	}
	if want := x.cfg.EngineBlock; want > 0 && want != size {
		x.sized = true
		x.alarm(AlarmBlockSize, fmt.Sprintf("blocks of %d tokens in the events, %d advertised: the events decide", size, want))
	}
}
