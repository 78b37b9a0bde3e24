package baseline

import "fmt"

// Request is what a router sees of a rollout.
type Request struct {
	Session string   // trajectory, else group, else the rollout itself
	Tokens  int      // of the prompt
	Blocks  []uint64 // chained names of the prompt's whole blocks
}

// Router chooses an engine for each request as it arrives.
type Router interface {
	Route(q *Request) int
	// Done tells that a request is answered.
	Done(q *Request, engine int)
}

// Fleet is what a router is configured with.
type Fleet struct {
	Slots []int // of each engine: requests that it runs at once
}

// Setting is a router with its configuration.
type Setting struct {
	Label string
	Make  func(f Fleet) Router
}

// Family is a kind of router and the three settings it may choose from.
type Family struct {
	Name     string
	Settings []Setting
}

// Families are all of them. What the description gives as default stands first.
func Families() []Family {
	hash := func(c ConsistentHash) func(Fleet) Router {
		return func(f Fleet) Router { return NewConsistentHash(len(f.Slots), c) }
	}
	aware := func(c CacheAware) Setting {
		return Setting{fmt.Sprintf("threshold %v, abs %d, rel %v", c.Threshold, c.Abs, c.Rel), func(f Fleet) Router { return NewCacheAware(len(f.Slots), c) }}
	}
	sticky := func(size int) Setting {
		return Setting{fmt.Sprintf("%d sessions", size), func(f Fleet) Router { return NewSticky(len(f.Slots), size) }}
	}
	return []Family{
		{"round_robin", []Setting{
			{"by one", func(f Fleet) Router { return NewRoundRobin(ones(len(f.Slots))) }},
			{"by slots", func(f Fleet) Router { return NewRoundRobin(f.Slots) }},
			{"by sessions", func(f Fleet) Router { return NewSticky(len(f.Slots), 0) }},
		}},
		{"sticky_lru", []Setting{sticky(10_000), sticky(1_000), sticky(100)}},
		{"consistent_hash", []Setting{
			{"by session", hash(ConsistentHash{})},
			{"by the first 1,024 tokens", hash(ConsistentHash{Prefix: 16})},
			{"by session, load bounded to 1.25 of the mean", hash(ConsistentHash{Bound: 1.25})},
		}},
		{"cache_aware", []Setting{
			aware(CacheAware{Threshold: 0.5, Abs: 32, Rel: 1.1}),
			aware(CacheAware{Threshold: 0.3, Abs: 64, Rel: 1.5}),
			aware(CacheAware{Threshold: 0.5, Abs: 8, Rel: 1.1}),
		}},
		{"load_only", []Setting{
			{"requests", func(f Fleet) Router { return NewLoadOnly(ones(len(f.Slots)), false) }},
			{"requests over slots", func(f Fleet) Router { return NewLoadOnly(f.Slots, false) }},
			{"prompt tokens", func(f Fleet) Router { return NewLoadOnly(ones(len(f.Slots)), true) }},
		}},
	}
}

func ones(n int) []int {
	w := make([]int, n)
	for i := range w {
		w[i] = 1
	}
	return w
}

// counts are requests in flight, by engine.
type counts []int

// least is the engine with the fewest, in turn among equal ones.
func (c counts) least(turn *int) int {
	best := -1
	for k := range c {
		i := (*turn + k) % len(c)
		if best < 0 || c[i] < c[best] {
			best = i
		}
	}
	*turn = (best + 1) % len(c)
	return best
}
