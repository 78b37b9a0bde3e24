package prefix

// table maps 64-bit hashes to 32-bit numbers. It grows one small segment at a
// time (extendible hashing), so that no insert ever stops to move everything,
// and holds no pointers for the garbage collector to follow. The keys are
// hashes already: their top bits choose the segment, their low bits the place
// in it. Iteration is in order of segments and places, hence the same everywhere.
type table struct {
	dir   []*segment // by the key's top depth bits
	depth uint
	segs  int // distinct segments
	n     int // entries
}

const (
	segPlaces  = 1024
	segMost    = segPlaces * 3 / 4 // entries before a segment splits
	segMerge   = segPlaces / 3     // entries of two buddies that become one
	segBytes   = segPlaces*12 + segPlaces/8 + 64
	maxDepth   = 28
	freshKey   = 1 // stands for the hash 0, which marks an empty place
	evictBatch = segPlaces / 16
)

type segment struct {
	keys  [segPlaces]uint64
	vals  [segPlaces]uint32
	used  [segPlaces / 64]uint64 // stored or matched since the clock's hand passed
	n     int
	depth uint
	hand  int
}

func newTable() *table {
	return &table{dir: []*segment{{}}, segs: 1}
}

func (t *table) bytes() int64 { return int64(t.segs)*segBytes + int64(len(t.dir))*8 }

func (t *table) segment(key uint64) *segment {
	return t.dir[key>>(64-t.depth)] // a shift by 64 is 0
}

func clean(key uint64) uint64 {
	if key == 0 {
		return freshKey
	}
	return key
}

// find is the place of a key, or of the gap where it would be.
func (s *segment) find(key uint64) (int, bool) {
	for i := int(key) & (segPlaces - 1); ; i = (i + 1) & (segPlaces - 1) {
		switch s.keys[i] {
		case key:
			return i, true
		case 0:
			return i, false
		}
	}
}

func (s *segment) touch(i int) { s.used[i>>6] |= 1 << (i & 63) }

// get is the number stored under a key, 0 when there is none.
func (t *table) get(key uint64) uint32 {
	key = clean(key)
	s := t.segment(key)
	if i, ok := s.find(key); ok {
		return s.vals[i]
	}
	return 0
}

// hit is get, and notes that the entry is in use.
func (t *table) hit(key uint64) uint32 {
	key = clean(key)
	s := t.segment(key)
	i, ok := s.find(key)
	if !ok {
		return 0
	}
	s.touch(i)
	return s.vals[i]
}

// set stores a number under a key, splitting segments as needed.
func (t *table) set(key uint64, val uint32) {
	p := t.place(key)
	for p.new && p.seg.n >= segMost && t.split(p.seg, p.key) {
		p = t.place(key)
	}
	t.put(p, val)
}

// place is where a key is, or would be. It holds until the next change.
type place struct {
	seg *segment
	at  int
	key uint64
	new bool
}

func (t *table) place(key uint64) place {
	key = clean(key)
	s := t.segment(key)
	i, ok := s.find(key)
	return place{s, i, key, !ok}
}

// put writes at a place.
func (t *table) put(p place, val uint32) {
	if p.new {
		if p.seg.n == segPlaces-1 {
			return // keys that do not differ are no hashes; nothing is lost but credit
		}
		p.seg.keys[p.at] = p.key
		p.seg.n++
		t.n++
	}
	p.seg.vals[p.at] = val
	p.seg.touch(p.at)
}

func (t *table) split(s *segment, key uint64) bool {
	if s.depth == t.depth {
		if t.depth >= maxDepth || len(t.dir) > 16*t.segs+64 {
			return false
		}
		dir := make([]*segment, 2*len(t.dir))
		for i, s := range t.dir {
			dir[2*i], dir[2*i+1] = s, s
		}
		t.dir = dir
		t.depth++
	}
	bit := 63 - s.depth
	low, high := &segment{depth: s.depth + 1}, &segment{depth: s.depth + 1}
	for i, k := range s.keys {
		if k == 0 {
			continue
		}
		to := low
		if k>>bit&1 == 1 {
			to = high
		}
		to.move(s, i)
	}
	first, span := t.span(s, key)
	for i := range span {
		if i < span/2 {
			t.dir[first+i] = low
		} else {
			t.dir[first+i] = high
		}
	}
	t.segs++
	return true
}

// span is the part of the directory that leads to the segment of key.
func (t *table) span(s *segment, key uint64) (first, n int) {
	n = 1 << (t.depth - s.depth)
	first = int(key>>(64-t.depth)) &^ (n - 1)
	return first, n
}

func (s *segment) move(from *segment, i int) {
	j, _ := s.find(from.keys[i])
	s.keys[j], s.vals[j] = from.keys[i], from.vals[i]
	if from.used[i>>6]>>(i&63)&1 == 1 {
		s.touch(j)
	}
	s.n++
}

func (t *table) remove(key uint64) {
	key = clean(key)
	s := t.segment(key)
	if i, ok := s.find(key); ok {
		t.removeAt(s, i)
	}
}

// removeAt empties a place and moves up what was pushed behind it.
func (t *table) removeAt(s *segment, i int) {
	s.n--
	t.n--
	for j := (i + 1) & (segPlaces - 1); s.keys[j] != 0; j = (j + 1) & (segPlaces - 1) {
		home := int(s.keys[j]) & (segPlaces - 1)
		if (j-home)&(segPlaces-1) < (j-i)&(segPlaces-1) {
			continue // it is nearer to its home than the gap
		}
		s.keys[i], s.vals[i] = s.keys[j], s.vals[j]
		s.used[i>>6] = s.used[i>>6]&^(1<<(i&63)) | s.used[j>>6]>>(j&63)&1<<(i&63)
		i = j
	}
	s.keys[i], s.vals[i] = 0, 0
	s.used[i>>6] &^= 1 << (i & 63)
}

// merge joins the segment at directory place d with its buddy when both are
// nearly empty, so that memory comes back after churn.
func (t *table) merge(d int) {
	s := t.dir[d]
	if s.depth == 0 {
		return
	}
	n := 1 << (t.depth - s.depth)
	first := d &^ (2*n - 1)
	a, b := t.dir[first], t.dir[first+n]
	if a.depth != s.depth || b.depth != s.depth || a.n+b.n > segMerge {
		return
	}
	one := &segment{depth: s.depth - 1}
	for _, from := range [...]*segment{a, b} {
		for i, k := range from.keys {
			if k != 0 {
				one.move(from, i)
			}
		}
	}
	for i := range 2 * n {
		t.dir[first+i] = one
	}
	t.segs--
}

// shrink halves the directory while no segment needs its last bit. It is called
// once a sweep.
func (t *table) shrink() {
	for t.depth > 0 && len(t.dir) > 2*t.segs {
		for i := 0; i < len(t.dir); i += 2 {
			if t.dir[i] != t.dir[i+1] {
				return
			}
		}
		dir := make([]*segment, len(t.dir)/2)
		for i := range dir {
			dir[i] = t.dir[2*i]
		}
		t.dir = dir
		t.depth--
	}
}

// victim advances the clock's hand of a segment to an entry that is not in use,
// and forgets on the way that others were. -1 = the segment is empty.
func (s *segment) victim() int {
	if s.n == 0 {
		return -1
	}
	for {
		i := s.hand
		s.hand = (i + 1) & (segPlaces - 1)
		if s.keys[i] == 0 {
			continue
		}
		if s.used[i>>6]>>(i&63)&1 == 1 {
			s.used[i>>6] &^= 1 << (i & 63)
			continue
		}
		return i
	}
}

// mix spreads a small number over 64 bits (the finaliser of splitmix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
