package kvevents

import "sync"

// item is what a socket hands to its worker: a message, or news of the
// connection.
type item struct {
	frames [][]byte
	link   link
	same   bool // a new connection is to the same process as the last one
}

type link uint8

const (
	plain link = iota // a message
	linkUp
	linkDown
)

// ring is the bounded queue between a socket and its worker. A message that
// does not fit is dropped and counted, never waited for; news of the connection
// always fit.
type ring struct {
	mu       sync.Mutex
	items    []item
	bytes    int
	maxItems int
	maxBytes int
	dropped  int64
	lost     bool // something was dropped since the last take
	peak     int
	ready    chan struct{}
}

func newRing(maxItems, maxBytes int) *ring {
	return &ring{maxItems: maxItems, maxBytes: maxBytes, ready: make(chan struct{}, 1)}
}

func weight(frames [][]byte) int {
	n := 128 // of the bookkeeping
	for _, f := range frames {
		n += len(f)
	}
	return n
}

func (r *ring) push(it item) {
	r.mu.Lock()
	w := weight(it.frames)
	if it.link == plain && (len(r.items) >= r.maxItems || r.bytes+w > r.maxBytes) {
		r.dropped++
		r.lost = true
	} else {
		r.items = append(r.items, it)
		r.bytes += w
		r.peak = max(r.peak, r.bytes)
	}
	r.mu.Unlock()
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// take gives everything that is queued and leaves into's memory for the next.
func (r *ring) take(into []item) (items []item, lost bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	items, lost = r.items, r.lost
	clear(into)
	r.items, r.bytes, r.lost = into[:0], 0, false
	return items, lost
}

func (r *ring) stats() (dropped int64, peak int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dropped, r.peak
}
