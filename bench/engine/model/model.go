package model

import (
	"fmt"
	"time"
)

// Model is one engine. Make it with New.
type Model struct {
	cfg  Config
	pool pool

	origin  time.Duration // what at counts from; moved up at every plan, so that at stays small
	at      ps            // start of the step that is planned or due
	seg     segment
	frozen  bool
	runs    map[string]*run
	running []*run // in order of admission
	waiting queue
	events  []Event
	handed  bool // events were returned by Advance and may be overwritten
	stats   Stats
	busy    ps       // of the steps since Stats.Busy was last added to
	most    int      // steps in one segment
	phases  [][]*run // scratch of walk
	named   []Event  // scratch of walk
}

// segment is the steps that are planned: all of one batch. The zero segment
// means that nothing is planned.
type segment struct {
	steps   int
	decodes int
	kv      int // tokens read by the first of the steps
	prefill ps  // of the first step
	stored  []Event
}

// run is a request in the engine.
type run struct {
	req       Request
	names     []uint64 // of its blocks as far as known
	held      []int32  // its named blocks, a prefix of its sequence
	anon      int      // its blocks after those
	nameable  bool
	target    int // tokens to be computed before it decodes
	computed  int // tokens whose KV exists
	generated int
	chunk     int // tokens planned in this step
	inStep    bool
	running   bool
	gone      bool
	cached    int
}

func (r *run) decoding() bool { return r.computed >= r.target }

// maxSteps bounds a segment, so that its time fits (see Config's bounds).
const maxSteps = 1 << 14

// New makes an idle engine.
func New(c Config) (*Model, error) {
	c = c.WithDefaults()
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("engine model: %w", err)
	}
	m := &Model{cfg: c, runs: map[string]*run{}, most: maxSteps}
	m.pool = newPool(c.KVTokens/c.BlockTokens, m.evicted)
	return m, nil
}

// Config is the configuration with its defaults.
func (m *Model) Config() Config { return m.cfg }

// Add puts a request at the end of the queue. It joins at the next step that
// starts at or after now and has room.
func (m *Model) Add(now time.Duration, r Request) error {
	switch {
	case r.ID == "" || r.PromptTokens < 1 || r.OutputTokens < 1:
		return fmt.Errorf("request %q with %d prompt and %d output tokens: %w: give an id and at least one of each",
			r.ID, r.PromptTokens, r.OutputTokens, ErrBadRequest)
	case m.runs[r.ID] != nil:
		return fmt.Errorf("request %q: %w", r.ID, ErrDuplicate)
	case r.PromptTokens > m.cfg.Capacity() || r.OutputTokens > m.cfg.Capacity()-r.PromptTokens:
		return fmt.Errorf("request %q of %d + %d tokens, pool of %d: %w",
			r.ID, r.PromptTokens, r.OutputTokens, m.cfg.Capacity(), ErrTooLarge)
	}
	m.advance(now, false)
	whole := r.PromptTokens / m.cfg.BlockTokens
	if len(r.Blocks) > whole {
		r.Blocks = r.Blocks[:whole]
	}
	x := &run{req: r, cached: -1, names: r.Blocks[:len(r.Blocks):len(r.Blocks)]}
	if len(r.Blocks) < whole {
		x.req.Output = nil
	}
	if len(m.runs) == 0 && m.seg.steps == 0 {
		m.wait(now)
	}
	m.runs[r.ID] = x
	if m.waiting.empty() && len(m.running) < m.cfg.MaxRunning {
		m.cut()
	}
	m.waiting.push(x)
	return nil
}

// cut lets the step in flight end and plans anew after it.
func (m *Model) cut() { m.seg.steps = min(m.seg.steps, 1) }

// Abort removes a request at once, wherever it is, and tells how many tokens
// it had generated; false when there is none of that id.
func (m *Model) Abort(now time.Duration, id string) (generated int, ok bool) {
	m.advance(now, false)
	r := m.runs[id]
	if r == nil {
		return 0, false
	}
	m.cut()
	delete(m.runs, id)
	m.stats.Aborted++
	if r.running {
		m.leave(r)
		m.removeRunning(r)
	} else {
		m.waiting.drop(r)
	}
	return r.generated, true
}

func (m *Model) removeRunning(r *run) {
	for i, x := range m.running {
		if x == r {
			m.running = append(m.running[:i], m.running[i+1:]...)
			return
		}
	}
}

// Flush forgets all cached blocks. What requests hold stays with them, but
// nobody finds it any more.
func (m *Model) Flush(now time.Duration) {
	m.advance(now, false)
	m.pool.clear()
	m.seg.stored = nil
	for _, r := range m.running {
		r.nameable = false
	}
	if m.cfg.CacheEvents {
		m.emit(Event{Kind: Cleared, At: now})
	}
}

// Freeze stops the engine after the step in flight, or lets it go on.
// Requests stay where they are.
func (m *Model) Freeze(now time.Duration, on bool) {
	m.advance(now, false)
	if m.frozen == on {
		return
	}
	m.frozen = on
	m.cut()
	if !on && m.seg.steps == 0 {
		m.wait(now)
	}
}

// Next is when Advance has something to do; false when it never has.
func (m *Model) Next() (time.Duration, bool) {
	switch {
	case m.seg.steps > 0:
		return m.time(m.at + m.span(m.seg.steps)), true
	case m.frozen || len(m.runs) == 0:
		return 0, false
	}
	return m.time(m.at), true
}

// Advance runs the engine up to and including to, and returns what happened
// since the last Advance, in order. The slice is valid until the next call.
func (m *Model) Advance(to time.Duration) []Event {
	if m.handed {
		m.events, m.handed = m.events[:0], false
	}
	m.advance(to, true)
	m.handed = true
	return m.events
}

func (m *Model) emit(e Event) {
	if m.handed {
		m.events, m.handed = m.events[:0], false
	}
	m.events = append(m.events, e)
}

// Generated is how many tokens a request has so far.
func (m *Model) Generated(id string) (int, bool) {
	r := m.runs[id]
	if r == nil {
		return 0, false
	}
	return r.generated, true
}

// Stats as of the last call that took a time.
func (m *Model) Stats() Stats {
	s := m.stats
	s.Running, s.Waiting, s.Frozen = len(m.running), m.waiting.n, m.frozen
	s.Busy += time.Duration(m.busy / 1000)
	s.KVUsed = (m.pool.used + m.pool.anon) * m.cfg.BlockTokens
	s.KVCached = m.pool.idle * m.cfg.BlockTokens
	s.Capacity = m.cfg.Capacity()
	s.WaitingTokens = m.waiting.tokens
	for _, r := range m.running {
		s.PrefillTokens += max(0, r.target-r.computed)
	}
	return s
}

// queue is a FIFO that can take back at its head.
type queue struct {
	runs   []*run
	head   int
	n      int
	tokens int
}

func (q *queue) empty() bool { return q.n == 0 }

func (r *run) tokens() int { return r.req.PromptTokens + r.generated }

func (q *queue) push(r *run) {
	if q.head > 64 && q.head > len(q.runs)/2 {
		q.runs = append(q.runs[:0], q.runs[q.head:]...)
		q.head = 0
	}
	q.runs = append(q.runs, r)
	q.n++
	q.tokens += r.tokens()
}

func (q *queue) unshift(r *run) {
	if q.head == 0 {
		const room = 16
		q.runs = append(make([]*run, room, room+len(q.runs)+1), q.runs...)
		q.head = room
	}
	q.head--
	q.runs[q.head] = r
	q.n++
	q.tokens += r.tokens()
}

func (q *queue) peek() *run {
	for q.head < len(q.runs) && q.runs[q.head].gone {
		q.runs[q.head] = nil
		q.head++
	}
	if q.head == len(q.runs) {
		return nil
	}
	return q.runs[q.head]
}

func (q *queue) pop() {
	q.tokens -= q.runs[q.head].tokens()
	q.runs[q.head] = nil
	q.head++
	q.n--
}

func (q *queue) drop(r *run) {
	r.gone = true
	q.n--
	q.tokens -= r.tokens()
	if q.n == 0 {
		clear(q.runs)
		q.runs, q.head = q.runs[:0], 0
	}
}

// Counts of running and waiting requests, cheaply.
func (m *Model) Counts() (running, waiting int) { return len(m.running), m.waiting.n }
