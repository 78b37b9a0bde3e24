package kvevents

import (
	"container/list"
	"time"
)

// Approximate is the view of an engine that publishes no events: what ran there
// lately is taken to be cached, until it expires or more has run than fits. It
// is a guess and must be registered as one (events: approximate). Not safe for
// concurrent use.
type Approximate struct {
	view   *View
	ttl    time.Duration
	max    int
	blocks map[uint64]*list.Element
	order  list.List // of ran, most recently used first
}

type ran struct {
	block, ns uint64
	at        time.Duration
}

// NewApproximate guesses into view. A block is believed for ttl (default 10
// min) after its last use; maxBlocks (default 16,384) is what fits into the
// engine's cache: its capacity over the pool's block size.
func NewApproximate(view *View, ttl time.Duration, maxBlocks int) *Approximate {
	if ttl <= 0 {
		ttl = 10 * time.Minute
	}
	if maxBlocks <= 0 {
		maxBlocks = 16_384
	}
	return &Approximate{view: view, ttl: ttl, max: maxBlocks, blocks: map[uint64]*list.Element{}}
}

// Ran takes the chained pool blocks of a prompt and its output, in their
// namespace, after a run.
func (a *Approximate) Ran(now time.Duration, ns uint64, blocks []uint64) {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	if len(blocks) > a.max {
		blocks = blocks[:a.max]
	}
	for i := len(blocks) - 1; i >= 0; i-- { // the prompt's start is used last: it goes last
		b := blocks[i]
		if e := a.blocks[b]; e != nil {
			e.Value = ran{b, ns, now}
			a.order.MoveToFront(e)
			continue
		}
		a.blocks[b] = a.order.PushFront(ran{b, ns, now})
	}
	parent := ns
	for _, b := range blocks { // parents first
		if a.view.blocks.get(b) == (holders{}) {
			a.view.add(GPU, ns, parent, b)
		}
		parent = b
	}
	for a.order.Len() > a.max {
		a.forget(a.order.Back())
	}
	a.expire(now)
	a.view.flush()
}

// Expire takes back what was used too long ago.
func (a *Approximate) Expire(now time.Duration) {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	a.expire(now)
	a.view.flush()
}

func (a *Approximate) expire(now time.Duration) {
	for e := a.order.Back(); e != nil && now-e.Value.(ran).at >= a.ttl; e = a.order.Back() {
		a.forget(e)
	}
}

func (a *Approximate) forget(e *list.Element) {
	r := a.order.Remove(e).(ran)
	delete(a.blocks, r.block)
	a.view.del(GPU, r.ns, r.block)
}

// Emptied forgets everything: the engine restarted, slept, or got new weights.
func (a *Approximate) Emptied() {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	clear(a.blocks)
	a.order.Init()
	a.view.reset()
}
