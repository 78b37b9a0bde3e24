package baseline

import "github.com/hashicorp/golang-lru/v2/simplelru"

// RoundRobin sends to engines in turn, each as often as its weight says: the
// smooth weighted kind, so that a heavy engine's turns are spread out.
type RoundRobin struct{ weight, credit []int }

// NewRoundRobin takes the weight of each engine.
func NewRoundRobin(weight []int) *RoundRobin {
	return &RoundRobin{weight: weight, credit: make([]int, len(weight))}
}

// Route takes the engine with the most credit; what it gives costs it the sum of all weights.
func (r *RoundRobin) Route(*Request) int {
	best, sum := 0, 0
	for i, w := range r.weight {
		r.credit[i] += w
		sum += w
		if r.credit[i] > r.credit[best] {
			best = i
		}
	}
	r.credit[best] -= sum
	return best
}

// Done changes nothing.
func (r *RoundRobin) Done(*Request, int) {}

// LoadOnly takes the engine with the least in flight over its weight.
type LoadOnly struct {
	weight   []int
	byTokens bool
	load     []int
	turn     int
}

// NewLoadOnly counts requests, or the tokens of their prompts.
func NewLoadOnly(weight []int, byTokens bool) *LoadOnly {
	return &LoadOnly{weight: weight, byTokens: byTokens, load: make([]int, len(weight))}
}

func (l *LoadOnly) size(q *Request) int {
	if l.byTokens {
		return max(1, q.Tokens)
	}
	return 1
}

// Route compares what each would hold with the request, in turn among equals.
func (l *LoadOnly) Route(q *Request) int {
	best, n := -1, len(l.load)
	for k := range n {
		i := (l.turn + k) % n
		// (load + size) / weight, without dividing
		if best < 0 || (l.load[i]+l.size(q))*l.weight[best] < (l.load[best]+l.size(q))*l.weight[i] {
			best = i
		}
	}
	l.turn = (best + 1) % n
	l.load[best] += l.size(q)
	return best
}

// Done takes it off.
func (l *LoadOnly) Done(q *Request, engine int) { l.load[engine] -= l.size(q) }

// Sticky keeps a session on its engine while it is remembered.
type Sticky struct {
	known *simplelru.LRU[string, int]
	load  counts
	turn  int
	one   map[string]int // with size 0: sessions in turn, never forgotten
}

// NewSticky remembers that many sessions, the least recently used going first.
// With size 0 it remembers all and gives new sessions to engines in turn.
func NewSticky(engines, size int) *Sticky {
	s := &Sticky{load: make(counts, engines)}
	if size == 0 {
		s.one = map[string]int{}
		return s
	}
	s.known, _ = simplelru.NewLRU[string, int](size, nil) // fails for sizes below 1 only
	return s
}

// Route is the session's engine, else the one with the fewest requests in flight.
func (s *Sticky) Route(q *Request) int {
	var at int
	var ok bool
	if s.known != nil {
		at, ok = s.known.Get(q.Session)
	} else {
		at, ok = s.one[q.Session]
	}
	switch {
	case ok:
	case s.known == nil:
		at = s.turn
		s.turn = (s.turn + 1) % len(s.load)
		s.one[q.Session] = at
	default:
		at = s.load.least(&s.turn)
		s.known.Add(q.Session, at)
	}
	s.load[at]++
	return at
}

// Done takes it off.
func (s *Sticky) Done(_ *Request, engine int) { s.load[engine]-- }
