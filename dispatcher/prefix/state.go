package prefix

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// ErrState says that bytes are no state of an Index, or one of a later version.
var ErrState = errors.New("not the state of a block index")

// stateVersion of AppendState's encoding.
const stateVersion = 1

// maxStateDepth bounds a directory that is read: 128 MiB of it.
const maxStateDepth = 24

// StateBytes is about how much AppendState appends.
func (x *Index) StateBytes() int64 {
	return int64(x.blocks.n+x.sets.byHash.n)*12 + int64(x.blocks.segs+x.sets.byHash.segs)*264 + x.sets.bytes/4 + int64(len(x.slots))*8
}

// AppendState appends all that the index's answers depend on: one restored from
// it answers every later call as this one does, evictions included. Equal
// indexes give equal bytes.
func (x *Index) AppendState(b []byte) []byte {
	w := stateWriter{append(slices.Grow(b, int(x.StateBytes())+1024), stateVersion)}
	w.table(x.blocks)
	w.table(x.sets.byHash)
	w.sets(x.sets)
	w.num(uint64(len(x.byID)))
	for id, e := range x.byID {
		w.num(uint64(x.tags[id]))
		w.flag(e != nil)
		if e != nil {
			w.engine(e)
		}
	}
	w.list(x.noSlots)
	w.num(uint64(len(x.slots)))
	w.num(uint64(cap(x.slots)))
	for _, s := range x.slots {
		w.num(uint64(s.engine))
		w.num(uint64(s.tier)<<2 | uint64(s.state))
		w.num(uint64(s.period))
	}
	for _, n := range []uint64{uint64(x.dead), uint64(x.period), x.evicted, uint64(x.hand), uint64(x.sweep.set), uint64(x.sweep.place)} {
		w.num(n)
	}
	w.flag(x.sweep.on)
	w.flag(x.sweep.blocks)
	w.list(x.sweep.dying)
	st := &x.stats
	for _, n := range []uint64{st.Stored, st.Removed, st.Expired, st.Lookups, st.Matched, st.Resyncs} {
		w.num(n)
	}
	return w.b
}

// RestoreIndex makes the index that AppendState wrote. o are the options of the
// one that was written.
func RestoreIndex(o Options, state []byte) (*Index, error) {
	if len(state) == 0 || state[0] != stateVersion {
		return nil, fmt.Errorf("%w: version", ErrState)
	}
	x := New(o)
	r := stateReader{b: state[1:]}
	x.blocks = r.table()
	byHash := r.table()
	x.sets = r.sets()
	x.sets.byHash = byHash
	ids := r.length(1)
	x.byID, x.tags = make([]*engine, ids), make([]int, ids)
	for id := range ids {
		x.tags[id] = r.int()
		if r.flag() {
			e := r.engine(uint32(id))
			x.byID[id] = e
			x.engines[e.name] = e
		}
	}
	x.noSlots = r.list()
	n, c := r.length(3), r.int()
	if c < n || c > 4*n+64 {
		r.fail("slots")
		c = n
	}
	x.slots = make([]slot, n, c)
	for i := range x.slots {
		s := &x.slots[i]
		s.engine = uint32(r.num())
		k := r.num()
		s.tier, s.state, s.period = Tier(k>>2), slotState(k&3), int64(r.num())
	}
	x.dead, x.period, x.evicted, x.hand, x.sweep.set, x.sweep.place = r.int(), int64(r.num()), r.num(), r.int(), r.int(), r.int()
	x.sweep.on, x.sweep.blocks = r.flag(), r.flag()
	x.sweep.dying = r.list()
	st := &x.stats
	for _, p := range []*uint64{&st.Stored, &st.Removed, &st.Expired, &st.Lookups, &st.Matched, &st.Resyncs} {
		*p = r.num()
	}
	if r.err == nil && len(r.b) > 0 {
		r.fail("something follows it")
	}
	if r.err == nil {
		r.err = x.sound()
	}
	if r.err != nil {
		return nil, r.err
	}
	return x, nil
}

// sound tells whether every number leads somewhere: a state may come from a file.
func (x *Index) sound() error {
	bad := func(what string) error { return fmt.Errorf("%w: %s lead nowhere", ErrState, what) }
	most := uint32(len(x.sets.pages) * pageSets)
	for _, t := range []*table{x.blocks, x.sets.byHash} {
		for p := 0; p < len(t.dir); {
			s := t.dir[p]
			if slices.ContainsFunc(s.vals[:], func(v uint32) bool { return v >= most }) {
				return bad("sets of blocks")
			}
			_, n := t.spanAt(s, p)
			p += n
		}
	}
	slots := func(of []uint32) bool {
		return slices.ContainsFunc(of, func(s uint32) bool { return int(s) >= len(x.slots) })
	}
	for _, p := range x.sets.pages {
		for i := range p {
			if slots(p[i].members) {
				return bad("members of sets")
			}
		}
	}
	for _, s := range x.slots {
		if int(s.engine) >= len(x.byID) && s.state != slotFree || s.tier >= tiers {
			return bad("slots")
		}
	}
	for _, e := range x.byID {
		if e == nil {
			continue
		}
		own := []uint32{e.gpu}
		for t := range e.lower {
			own = append(own, e.lower[t][:]...)
		}
		if slots(slices.DeleteFunc(own, func(s uint32) bool { return s == noSlot })) {
			return bad("slots of an engine")
		}
	}
	m := x.sets.memo
	switch {
	case slots(x.noSlots), slots(x.sweep.dying):
		return bad("free slots")
	case x.hand >= len(x.blocks.dir), x.dead > len(x.slots):
		return bad("hands")
	case slices.ContainsFunc(x.sets.free, func(id uint32) bool { return id == 0 || id >= most }), m.from >= most, m.to >= most:
		return bad("free sets")
	}
	return nil
}

type stateWriter struct{ b []byte }

func (w *stateWriter) num(n uint64)   { w.b = binary.AppendUvarint(w.b, n) }
func (w *stateWriter) fixed(n uint64) { w.b = binary.LittleEndian.AppendUint64(w.b, n) }
func (w *stateWriter) small(n uint32) { w.b = binary.LittleEndian.AppendUint32(w.b, n) }
func (w *stateWriter) text(s string)  { w.num(uint64(len(s))); w.b = append(w.b, s...) }
func (w *stateWriter) flag(v bool)    { w.b = append(w.b, map[bool]byte{true: 1}[v]) }
func (w *stateWriter) hashes(h []uint64) {
	w.num(uint64(len(h)))
	for _, v := range h {
		w.fixed(v)
	}
}

// list keeps the capacity too: memory is accounted for by it.
func (w *stateWriter) list(l []uint32) {
	w.num(uint64(len(l)))
	w.num(uint64(cap(l)))
	for _, v := range l {
		w.num(uint64(v))
	}
}

func (w *stateWriter) table(t *table) {
	w.num(uint64(t.depth))
	w.num(uint64(t.segs))
	for p := 0; p < len(t.dir); {
		s := t.dir[p]
		w.num(uint64(s.depth))
		w.num(uint64(s.hand))
		for _, u := range s.used {
			w.fixed(u)
		}
		var there [segPlaces / 64]uint64
		for i, k := range s.keys {
			if k != 0 {
				there[i>>6] |= 1 << (i & 63)
			}
		}
		for _, u := range there {
			w.fixed(u)
		}
		for i, k := range s.keys {
			if k != 0 {
				w.fixed(k)
				w.small(s.vals[i])
			}
		}
		_, n := t.spanAt(s, p)
		p += n
	}
}

func (w *stateWriter) sets(s *sets) {
	w.num(uint64(len(s.pages)))
	for _, p := range s.pages {
		for i := range p {
			e := &p[i]
			w.num(uint64(e.refs))
			if e.refs > 0 {
				w.flag(e.listed)
				w.list(e.members)
			}
		}
	}
	w.list(s.free)
	w.num(uint64(s.memo.from))
	w.num(uint64(s.memo.slot))
	w.num(uint64(s.memo.to))
	w.flag(s.memo.add)
	w.flag(s.memo.ok)
}

func (w *stateWriter) engine(e *engine) {
	w.text(e.name)
	w.text(e.epoch)
	w.fixed(uint64(e.version))
	w.flag(e.versioned)
	w.num(uint64(len(e.past)))
	for _, p := range e.past {
		w.text(p)
	}
	w.num(uint64(e.state))
	w.small(e.gpu)
	for t := range e.lower {
		for _, s := range e.lower[t] {
			w.small(s)
		}
	}
	for _, n := range []uint64{e.heard, e.asOf, e.evicted, e.dropped} {
		w.num(n)
	}
	w.flag(e.relaxed)
	w.flag(e.asked)
	w.num(uint64(len(e.buffer)))
	for i := range e.buffer {
		ev := &e.buffer[i]
		w.num(ev.Seq)
		w.num(uint64(ev.Op)<<2 | uint64(ev.Tier))
		w.fixed(ev.Parent)
		w.flag(ev.HasParent)
		w.fixed(ev.Namespace)
		w.hashes(ev.Blocks)
	}
}

// stateReader gives zeros after its first error.
type stateReader struct {
	b   []byte
	err error
}

func (r *stateReader) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s", ErrState, what)
	}
	r.b = nil
}

func (r *stateReader) num() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail("it is cut off")
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *stateReader) int() int {
	v := r.num()
	if v > 1<<40 {
		r.fail("a number is out of range")
		return 0
	}
	return int(v)
}

// length is that of a list whose entries take at least that many bytes.
func (r *stateReader) length(each int) int {
	n := r.int()
	if n > len(r.b)/each {
		r.fail("a list is cut off")
		return 0
	}
	return n
}

func (r *stateReader) take(n int) []byte {
	if n > len(r.b) {
		r.fail("it is cut off")
		return make([]byte, n&0xff)
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *stateReader) fixed() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }
func (r *stateReader) small() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *stateReader) flag() bool    { return r.take(1)[0] == 1 }
func (r *stateReader) text() string {
	n := r.length(1)
	return string(r.take(n))
}

func (r *stateReader) list() []uint32 {
	n, c := r.length(1), r.int()
	if c < n || c > 1<<28 {
		r.fail("a list")
		return nil
	}
	if c == 0 {
		return nil
	}
	l := make([]uint32, n, c)
	for i := range l {
		l[i] = uint32(r.num())
	}
	return l
}

func (r *stateReader) table() *table {
	t := &table{depth: uint(r.num()), segs: r.int()}
	if t.depth > maxStateDepth || t.segs > len(r.b)/256+1 {
		r.fail("a directory")
		return newTable()
	}
	t.dir = make([]*segment, 1<<t.depth)
	segs := 0
	for p := 0; p < len(t.dir); segs++ {
		s := &segment{depth: uint(r.num()), hand: r.int()}
		if r.err != nil || s.depth > t.depth || s.hand >= segPlaces {
			r.fail("a segment")
			return newTable()
		}
		for i := range s.used {
			s.used[i] = r.fixed()
		}
		var there [segPlaces / 64]uint64
		for i := range there {
			there[i] = r.fixed()
		}
		for i := range segPlaces {
			if there[i>>6]>>(i&63)&1 == 1 {
				s.keys[i], s.vals[i] = r.fixed(), r.small()
				s.n++
			}
		}
		if s.n >= segPlaces {
			r.fail("a segment without a gap") // find would not end
			return newTable()
		}
		t.n += s.n
		span := 1 << (t.depth - s.depth)
		if p&(span-1) != 0 {
			r.fail("a directory")
			return newTable()
		}
		for range span {
			t.dir[p] = s
			p++
		}
	}
	if segs != t.segs {
		r.fail("segments")
	}
	return t
}

func (r *stateReader) sets() *sets {
	s := &sets{}
	for range r.length(1) {
		p := make([]set, pageSets)
		s.bytes += pageBytes
		for i := range p {
			e := &p[i]
			if e.refs = uint32(r.num()); e.refs == 0 {
				continue
			}
			e.listed, e.members = r.flag(), r.list()
			s.bytes += int64(cap(e.members)) * 4
			for _, m := range e.members {
				e.hash ^= hashSlot(m)
			}
		}
		s.pages = append(s.pages, p)
		if r.err != nil {
			break
		}
	}
	if len(s.pages) == 0 {
		r.fail("no sets")
		return newSets()
	}
	s.free = r.list()
	s.memo.from, s.memo.slot, s.memo.to = uint32(r.num()), uint32(r.num()), uint32(r.num())
	s.memo.add, s.memo.ok = r.flag(), r.flag()
	return s
}

func (r *stateReader) engine(id uint32) *engine {
	e := &engine{id: id, name: r.text(), epoch: r.text(), version: int64(r.fixed()), versioned: r.flag()}
	for range r.length(1) {
		e.past = append(e.past, r.text())
	}
	e.state = feedState(r.num())
	e.gpu = r.small()
	for t := range e.lower {
		for p := range e.lower[t] {
			e.lower[t][p] = r.small()
		}
	}
	e.heard, e.asOf, e.evicted, e.dropped = r.num(), r.num(), r.num(), r.num()
	e.relaxed, e.asked = r.flag(), r.flag()
	for range r.length(1) {
		ev := Event{Engine: e.name, Epoch: e.epoch, Seq: r.num()}
		k := r.num()
		ev.Op, ev.Tier = Op(k>>2), Tier(k&3)
		ev.Parent, ev.HasParent, ev.Namespace = r.fixed(), r.flag(), r.fixed()
		ev.Blocks = make([]uint64, r.length(8))
		for i := range ev.Blocks {
			ev.Blocks[i] = r.fixed()
		}
		e.buffer = append(e.buffer, ev)
		e.buffered += len(ev.Blocks) + 1
	}
	return e
}
