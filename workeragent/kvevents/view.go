package kvevents

import (
	"encoding/binary"
	"sync"
)

// View is which pool blocks an engine holds, over all its ranks, and the stream
// of changes of it. A block that several ranks hold is stored once and removed
// when the last of them removes it. Safe for concurrent use.
type View struct {
	mu      sync.Mutex
	publish func(message []byte)
	epoch   string
	seq     uint64 // of the last change published
	blocks  table[holders]

	// The change being written: head and hashes in buf, sent when another kind
	// of change comes, when it is full, or at flush.
	buf  []byte
	kind Kind
	tier Tier
	ns   uint64
	room int
}

// holders counts who holds a block, by tier.
type holders [3]uint16

// maxBlocksPerChange bounds a message: 32 KiB of hashes.
const maxBlocksPerChange = 4096

// NewView makes an empty one. publish gets every change, encoded, in order; the
// bytes are valid only during the call, and the call must not block.
func NewView(epoch string, publish func(message []byte)) *View {
	if publish == nil {
		publish = func([]byte) {}
	}
	return &View{publish: publish, epoch: epoch}
}

// SetEpoch begins another life of the engine's cache: everything is gone, the
// sequence goes on from 0 in the new epoch.
func (v *View) SetEpoch(epoch string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.flush()
	v.blocks = table[holders]{}
	v.epoch, v.seq = epoch, 0
	v.change(Cleared, GPU, 0)
	v.flush()
}

// Len is how many blocks are held.
func (v *View) Len() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.blocks.len()
}

// Seq is the epoch and the sequence of the last change.
func (v *View) Seq() (epoch string, seq uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.epoch, v.seq
}

// Match is how many of a prompt's blocks, from the first on, are held in any
// tier, and how many in each.
func (v *View) Match(blocks []uint64) (n int, byTier [3]int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, b := range blocks {
		h := v.blocks.get(b)
		if h == (holders{}) {
			return n, byTier
		}
		n++
		for t, c := range h {
			if c > 0 {
				byTier[t]++
				break
			}
		}
	}
	return n, byTier
}

// add counts a holder of a block; the first one is published. parent is the
// block before it, the namespace for the first of a prompt. Shared memory is
// nobody's. Call with mu held.
func (v *View) add(t Tier, ns, parent, block uint64) {
	if t > SSD {
		return
	}
	h := v.blocks.get(block)
	if h[t]++; h[t] == 0 {
		h[t]-- // 65,536 holders: stuck, until the engine clears
	}
	v.blocks.put(block, h)
	if h[t] == 1 {
		v.write(Stored, t, ns, parent, block)
	}
}

// del takes a holder away; the last one is published.
func (v *View) del(t Tier, ns, block uint64) {
	if t > SSD {
		return
	}
	h := v.blocks.get(block)
	if h[t] == 0 {
		return
	}
	h[t]--
	v.blocks.put(block, h) // nobody left: deleted
	if h[t] == 0 {
		v.write(Removed, t, ns, 0, block)
	}
}

// reset forgets everything and says so in one message.
func (v *View) reset() {
	v.flush()
	v.blocks = table[holders]{}
	v.change(Cleared, GPU, 0)
	v.flush()
}

func (v *View) write(k Kind, t Tier, ns, parent, block uint64) {
	if v.kind != k || v.tier != t || v.ns != ns || v.room == 0 {
		v.flush()
		v.change(k, t, ns)
		// Who follows can check that it has the parent too (scenario C4), so it is
		// named only when it is in this view: a lower tier may keep a block whose
		// parent has gone, and its blocks expire there at another time than here.
		if k == Stored && (parent == ns || v.blocks.get(parent)[GPU] > 0) {
			v.buf[1] |= parentFlag
			v.buf = binary.LittleEndian.AppendUint64(v.buf, parent)
		}
	}
	v.buf = binary.LittleEndian.AppendUint64(v.buf, block)
	v.room--
}

func (v *View) change(k Kind, t Tier, ns uint64) {
	v.seq++
	v.kind, v.tier, v.ns, v.room = k, t, ns, maxBlocksPerChange
	v.buf = appendHead(v.buf[:0], byte(k), t, v.epoch, v.seq, ns)
}

// flush sends the change being written. Call with mu held.
func (v *View) flush() {
	if v.kind == 0 {
		return
	}
	v.kind = 0
	v.publish(v.buf)
}

// maxPart bounds a part of a snapshot: 512 KiB with its head.
const maxPart = 65000

// Snapshot gives the whole block set in parts, at least one, each encoded by
// AppendPart; the bytes are valid only during the call. The set is copied
// first: send may be slow.
func (v *View) Snapshot(send func(part []byte) error) error {
	v.mu.Lock()
	v.flush()
	epoch, seq := v.epoch, v.seq
	var sets [3][]uint64
	for b, h := range v.blocks.all() {
		for t, n := range h {
			if n > 0 {
				sets[t] = append(sets[t], b)
			}
		}
	}
	v.mu.Unlock()
	var parts []Part
	for t, set := range sets {
		for len(set) > 0 {
			n := min(len(set), maxPart)
			parts = append(parts, Part{Tier: Tier(t), Blocks: set[:n]})
			set = set[n:]
		}
	}
	if len(parts) == 0 {
		parts = []Part{{}}
	}
	var buf []byte
	for i := range parts {
		p := &parts[i]
		p.Epoch, p.AsOf, p.Number, p.Last = epoch, seq, uint32(i), i == len(parts)-1
		buf = AppendPart(buf[:0], p)
		if err := send(buf); err != nil {
			return err
		}
	}
	return nil
}
