package core

import "github.com/cespare/xxhash/v2"

// answeredSet remembers the last ids that have a terminal answer, as 64-bit
// hashes in a ring: 1 M ids take about 30 MB, and a small pool takes little. A
// hit is a hint: before a message is dropped for it the register is read.
type answeredSet struct {
	most int
	ring []entry
	next int              // ring is full when len(ring) == most: next is the oldest
	has  map[uint64]int64 // hash -> server stamp of the answer
	// horizon is the server stamp of the youngest forgotten answer: an older
	// request may have been answered without our knowing.
	horizon int64
}

type entry struct {
	hash   uint64
	stored int64
}

func newAnsweredSet(most int) *answeredSet {
	return &answeredSet{most: most, has: map[uint64]int64{}}
}

func (s *answeredSet) add(key string, stored int64) (fresh bool) {
	h := xxhash.Sum64String(key)
	if _, dup := s.has[h]; dup {
		return false
	}
	s.has[h] = stored
	if len(s.ring) < s.most {
		s.ring = append(s.ring, entry{h, stored})
		return true
	}
	old := s.ring[s.next]
	delete(s.has, old.hash)
	s.horizon = max(s.horizon, old.stored)
	s.ring[s.next] = entry{h, stored}
	s.next = (s.next + 1) % s.most
	return true
}

func (s *answeredSet) contains(key string) bool {
	_, ok := s.has[xxhash.Sum64String(key)]
	return ok
}

// unsure tells whether a request accepted at that server stamp may have been
// answered beyond the set's memory.
func (s *answeredSet) unsure(accepted int64) bool {
	return s.horizon != 0 && accepted <= s.horizon
}

// retiredLog remembers for a while which bind numbers are over, so that a copy
// of lower or equal rank is not run again (rank guard of the requeue).
type retiredLog struct {
	most  int
	byKey map[string]retiredEntry
	order []retiredAt // by at, oldest first
}

type retiredEntry struct {
	bind     int
	requeued bool
	at       int64 // nanoseconds of now
}

type retiredAt struct {
	key string
	at  int64
}

func newRetiredLog(most int) *retiredLog {
	return &retiredLog{most: most, byKey: map[string]retiredEntry{}}
}

// add reports whether this retirement is news.
func (l *retiredLog) add(key string, bind int, requeued bool, at int64) bool {
	if old, ok := l.byKey[key]; ok && old.bind >= bind {
		return false
	}
	l.byKey[key] = retiredEntry{bind, requeued, at}
	l.order = append(l.order, retiredAt{key, at})
	if len(l.order) > l.most {
		l.drop()
	}
	return true
}

func (l *retiredLog) drop() {
	first := l.order[0]
	l.order = l.order[1:]
	if e, ok := l.byKey[first.key]; ok && e.at == first.at {
		delete(l.byKey, first.key)
	}
}

func (l *retiredLog) expire(before int64) {
	for len(l.order) > 0 && l.order[0].at < before {
		l.drop()
	}
}
