package baseline

import (
	"cmp"
	"slices"
	"sort"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// CacheAware routes by approximate prefix trees: what was sent to an engine is
// taken to be cached there, until its tree is too large.
type CacheAware struct {
	Threshold float64 // share of the prompt that must match
	Abs       int     // loads are out of balance when max - min > Abs
	Rel       float64 // and max > Rel x min
	MaxTree   int     // blocks of a tree; default 65,536 (2^22 tokens of 64 a block)
}

type aware struct {
	c     CacheAware
	load  counts
	turn  int
	trees []*simplelru.LRU[uint64, struct{}]
}

// NewCacheAware starts with empty trees.
func NewCacheAware(engines int, c CacheAware) Router {
	c.MaxTree = cmp.Or(c.MaxTree, 1<<16)
	a := &aware{c: c, load: make(counts, engines)}
	for range engines {
		t, _ := simplelru.NewLRU[uint64, struct{}](c.MaxTree, nil) // fails for sizes below 1 only
		a.trees = append(a.trees, t)
	}
	return a
}

// Route: out of balance the shortest queue; else the longest match, if it is
// long enough, the least loaded of equal ones; else the smallest tree.
func (a *aware) Route(q *Request) int {
	at := a.choose(q)
	for _, b := range slices.Backward(q.Blocks) { // the end of a chain is forgotten first
		a.trees[at].Add(b, struct{}{})
	}
	a.load[at]++
	return at
}

func (a *aware) choose(q *Request) int {
	least, most := slices.Min(a.load), slices.Max(a.load)
	if most-least > a.c.Abs && float64(most) > a.c.Rel*float64(least) {
		return a.load.least(&a.turn)
	}
	best, match := 0, -1
	for e := range a.trees {
		n := a.match(e, q.Blocks)
		if n > match || n == match && a.load[e] < a.load[best] {
			best, match = e, n
		}
	}
	if n := len(q.Blocks); n > 0 && float64(match) > a.c.Threshold*float64(n) {
		return best
	}
	smallest := 0
	for e := range a.trees {
		d := cmp.Or(a.trees[e].Len()-a.trees[smallest].Len(), a.load[e]-a.load[smallest])
		if d < 0 {
			smallest = e
		}
	}
	return smallest
}

// match is how many of the first blocks are in an engine's tree. A block never
// leaves it before those that follow it, so halving finds the end.
func (a *aware) match(e int, blocks []uint64) int {
	return sort.Search(len(blocks), func(i int) bool { return !a.trees[e].Contains(blocks[i]) })
}

// Done takes it off; the tree keeps it.
func (a *aware) Done(_ *Request, engine int) { a.load[engine]-- }
