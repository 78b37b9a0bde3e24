package model

import (
	"sort"
	"time"
)

// advance applies every whole step that ends by to and plans what starts
// before it; inclusive: also what starts exactly then.
func (m *Model) advance(until time.Duration, inclusive bool) {
	m.stats.Now = max(m.stats.Now, until)
	for {
		to := m.since(until)
		if m.seg.steps == 0 {
			if m.frozen || len(m.runs) == 0 || m.at > to || m.at == to && !inclusive {
				return
			}
			m.rebase()
			to = m.since(until)
			m.plan()
			if m.seg.steps == 0 {
				return
			}
		}
		n := m.seg.steps
		if m.at+m.span(n) > to {
			n = sort.Search(n, func(i int) bool { return m.at+m.span(i+1) > to })
		}
		if n == 0 {
			return
		}
		m.apply(n)
	}
}

// span is the time of the next n planned steps.
func (m *Model) span(n int) ps {
	p, s := &m.cfg.Profile, &m.seg
	k, d := ps(n), ps(s.decodes)
	reads := k*ps(s.kv) + d*(k*(k-1)/2)
	return k*(ps(p.Step)+d*ps(p.Sequence))*1000 + reads*ps(p.KVReadPS) + s.prefill
}

// plan makes the next segment; none when nothing can run.
func (m *Model) plan() {
	preempted := false
	for m.need(1) > m.pool.available() {
		m.preempt(m.running[len(m.running)-1])
		preempted = true
	}
	s := segment{stored: m.seg.stored[:0]}
	budget, left := m.cfg.StepTokens, 0
	for _, r := range m.running {
		r.inStep = r.decoding()
		if r.inStep {
			s.decodes++
			s.kv += r.computed
			budget--
			if rest := r.req.OutputTokens - r.generated; left == 0 || rest < left {
				left = rest
			}
		}
	}
	m.seg = s
	chunks, reserve := false, m.need(1)
	for _, r := range m.running {
		if !r.decoding() {
			budget -= m.chunk(r, budget)
			chunks = true
		}
	}
	for !preempted && budget > 0 && len(m.running) < m.cfg.MaxRunning {
		r := m.waiting.peek()
		if r == nil || !m.admit(r, reserve) {
			break
		}
		budget -= m.chunk(r, budget)
		chunks = true
	}
	switch {
	case len(m.running) == 0:
	case chunks || preempted:
		m.seg.steps = 1
	default:
		left = min(left, m.most)
		if m.need(left) > m.pool.available() {
			left = sort.Search(left, func(i int) bool { return m.need(i+1) > m.pool.available() })
		}
		m.seg.steps = left
	}
}

// need is how many more blocks the decoding requests take in n steps.
func (m *Model) need(n int) int {
	b, sum := m.cfg.BlockTokens, 0
	for _, r := range m.running {
		if r.decoding() {
			sum += blocksOf(r.computed+n, b) - blocksOf(r.computed, b)
		}
	}
	return sum
}

func blocksOf(tokens, b int) int { return (tokens + b - 1) / b }

// admit moves the head of the queue into the batch if its blocks fit beside
// those that this step's decodes will take.
func (m *Model) admit(r *run, reserve int) bool {
	b, total := m.cfg.BlockTokens, r.tokens()
	hits, idle := 0, 0
	if !m.cfg.NoCache {
		for most := min(len(r.names), (total-1)/b); hits < most; hits++ {
			i, ok := m.pool.find(r.names[hits])
			if !ok {
				break
			}
			if m.pool.slots[i].refs == 0 {
				idle++
			}
		}
	}
	fresh := blocksOf(total, b) - hits
	if fresh > m.pool.available()-idle-reserve {
		return false
	}
	for _, name := range r.names[:hits] {
		i, _ := m.pool.find(name)
		m.pool.ref(i)
		r.held = append(r.held, i)
	}
	m.pool.take(fresh)
	m.waiting.pop()
	r.anon, r.nameable, r.running = fresh, !m.cfg.NoCache, true
	r.target, r.computed = total, hits*b
	if r.cached < 0 {
		r.cached = r.computed
		m.stats.PrefixQueries += int64(total)
		m.stats.PrefixHits += int64(r.computed)
	} else {
		m.stats.RecomputedTokens += int64(total - r.computed)
	}
	m.running = append(m.running, r)
	m.emit(Event{Kind: Started, At: m.time(m.at), ID: r.req.ID, Tokens: r.computed})
	return true
}

// chunk plans as much of r's prompt as the budget allows.
func (m *Model) chunk(r *run, budget int) int {
	r.chunk = min(r.target-r.computed, budget)
	r.inStep = r.chunk > 0
	if r.chunk == 0 {
		return 0
	}
	m.seg.prefill += m.cfg.Profile.chunk(r.chunk, r.computed)
	m.seg.stored = m.nameTo(m.seg.stored, r, r.computed+r.chunk)
	return r.chunk
}

// nameTo names the blocks of r that are whole at that many computed tokens and
// appends what is new in the cache to dst.
func (m *Model) nameTo(dst []Event, r *run, computed int) []Event {
	b, more := m.cfg.BlockTokens, false
	for i := len(r.held); r.nameable && (i+1)*b <= computed; i++ {
		if i == len(r.names) {
			if r.req.Output == nil {
				r.nameable = false
				break
			}
			r.names = append(r.names, r.req.Output(i))
		}
		s, fresh := m.pool.name(r.names[i])
		r.held = append(r.held, s)
		r.anon--
		switch {
		case !m.cfg.CacheEvents:
		case !fresh:
			more = false
		case more:
			dst[len(dst)-1].Blocks = append(dst[len(dst)-1].Blocks, r.names[i])
		default:
			e := Event{Kind: Stored, ID: r.req.ID, First: i, Blocks: []uint64{r.names[i]}}
			if i > 0 {
				e.Parent = r.names[i-1]
			}
			dst, more = append(dst, e), true
		}
	}
	return dst
}

// apply lets the next n planned steps happen.
func (m *Model) apply(n int) {
	start, span := m.at, m.span(n)
	m.decode(n)
	m.at = start + span
	m.stats.Steps += int64(n)
	m.busy += span
	for _, e := range m.seg.stored {
		e.At = m.time(m.at)
		m.emit(e)
	}
	m.seg.stored = m.seg.stored[:0]
	keep := m.running[:0]
	for _, r := range m.running {
		if r.inStep && m.progress(r, n) {
			continue
		}
		keep = append(keep, r)
	}
	clear(m.running[len(keep):])
	m.running = keep
	m.seg.steps -= n
	m.seg.kv += n * m.seg.decodes
	m.seg.prefill = 0
}

// progress counts the tokens of n steps and ends r when it is complete.
func (m *Model) progress(r *run, n int) (ended bool) {
	switch {
	case r.chunk > 0:
		r.computed += r.chunk
		r.chunk = 0
		if !r.decoding() {
			return false
		}
		if r.generated == 0 {
			m.stats.PromptTokens += int64(r.req.PromptTokens)
			m.emit(Event{Kind: FirstToken, At: m.time(m.at), ID: r.req.ID, Tokens: 1})
		}
		r.generated++
		m.stats.GenerationTokens++
	default:
		r.computed += n
		r.generated += n
		m.stats.GenerationTokens += int64(n)
	}
	if r.generated < r.req.OutputTokens {
		return false
	}
	m.emit(Event{Kind: Finished, At: m.time(m.at), ID: r.req.ID, Tokens: r.generated})
	m.stats.Finished++
	delete(m.runs, r.req.ID)
	m.leave(r)
	return true
}

// decode takes and names the blocks of n decode steps. Only when somebody can
// see the order in which that happens is it done step by step.
func (m *Model) decode(n int) {
	b, need, walk := m.cfg.BlockTokens, 0, false
	for _, r := range m.running {
		if r.inStep && r.chunk == 0 {
			need += blocksOf(r.computed+n, b) - blocksOf(r.computed, b)
			walk = walk || r.nameable && (len(r.held)+1)*b <= r.computed+n
		}
	}
	if walk || m.cfg.CacheEvents && need > m.pool.free() {
		m.walk(n)
		return
	}
	for _, r := range m.running {
		if r.inStep && r.chunk == 0 {
			more := blocksOf(r.computed+n, b) - blocksOf(r.computed, b)
			m.pool.take(more)
			r.anon += more
		}
	}
}

// walk is decode step by step, touching only requests at a block's edge.
func (m *Model) walk(n int) {
	b := m.cfg.BlockTokens
	if m.phases == nil {
		m.phases = make([][]*run, b)
	}
	for _, r := range m.running {
		if r.inStep && r.chunk == 0 {
			m.phases[r.computed%b] = append(m.phases[r.computed%b], r)
		}
	}
	start := m.at
	for j := 1; j <= n; j++ {
		m.at = start + m.span(j)
		for _, r := range m.phases[(b-(j-1)%b)%b] { // (computed + j - 1) % b == 0
			m.pool.take(1)
			r.anon++
		}
		for _, r := range m.phases[(b-j%b)%b] { // (computed + j) % b == 0
			m.named = m.nameTo(m.named[:0], r, r.computed+j)
			for _, e := range m.named {
				e.At = m.time(m.at)
				m.emit(e)
			}
		}
	}
	m.at = start
	for i := range m.phases {
		clear(m.phases[i])
		m.phases[i] = m.phases[i][:0]
	}
}

// preempt takes a request out of the batch, back to the head of the queue.
func (m *Model) preempt(r *run) {
	m.leave(r)
	m.running = m.running[:len(m.running)-1]
	m.stats.Preemptions++
	m.waiting.unshift(r)
	m.emit(Event{Kind: Preempted, At: m.time(m.at), ID: r.req.ID, Tokens: r.generated})
}

// leave gives back what r holds, the end of its chain first.
func (m *Model) leave(r *run) {
	for i := len(r.held) - 1; i >= 0; i-- {
		m.pool.unref(r.held[i])
	}
	m.pool.anon -= r.anon
	r.held, r.anon, r.computed, r.target, r.chunk = r.held[:0], 0, 0, 0, 0
	r.running, r.inStep = false, false
}

func (m *Model) evicted(name uint64) {
	m.stats.Evictions++
	if !m.cfg.CacheEvents {
		return
	}
	at := m.time(m.at)
	if n := len(m.events); n > 0 && !m.handed && m.events[n-1].Kind == Removed && m.events[n-1].At == at {
		m.events[n-1].Blocks = append(m.events[n-1].Blocks, name)
		return
	}
	m.emit(Event{Kind: Removed, At: at, Blocks: []uint64{name}})
}
