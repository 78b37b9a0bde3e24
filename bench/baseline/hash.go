package baseline

import (
	"cmp"
	"math"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// ConsistentHash of a key on a ring.
type ConsistentHash struct {
	Nodes  int     // virtual nodes of an engine; default 160
	Prefix int     // key = this many first blocks of the prompt; 0 = the session
	Bound  float64 // an engine above this many times the mean load is passed over; 0 = never
	Hash   func(s string) uint64
}

type point struct {
	at     uint64
	engine int
}

type ring struct {
	c      ConsistentHash
	points []point
	load   counts
	sum    int
}

// NewConsistentHash builds the ring.
func NewConsistentHash(engines int, c ConsistentHash) Router {
	c.Nodes = cmp.Or(c.Nodes, 160)
	if c.Hash == nil {
		c.Hash = xxhash.Sum64String
	}
	r := &ring{c: c, load: make(counts, engines)}
	for e := range engines {
		for v := range c.Nodes {
			r.points = append(r.points, point{c.Hash(strconv.Itoa(e) + "#" + strconv.Itoa(v)), e})
		}
	}
	slices.SortFunc(r.points, func(a, b point) int { return cmp.Or(cmp.Compare(a.at, b.at), a.engine-b.engine) })
	return r
}

// Route is the first point at or after the key's, passing over engines that
// hold more than their bound.
func (r *ring) Route(q *Request) int {
	key := q.Session
	if r.c.Prefix > 0 && len(q.Blocks) > 0 {
		key = strconv.FormatUint(q.Blocks[min(r.c.Prefix, len(q.Blocks))-1], 10) // names are chained: one says all before it
	}
	h := r.c.Hash(key)
	at, _ := slices.BinarySearchFunc(r.points, h, func(p point, h uint64) int { return cmp.Compare(p.at, h) })
	most := math.MaxInt
	if r.c.Bound > 0 {
		most = int(math.Ceil(r.c.Bound * float64(r.sum+1) / float64(len(r.load))))
	}
	chosen := r.points[at%len(r.points)].engine
	for k := range r.points {
		if e := r.points[(at+k)%len(r.points)].engine; r.load[e]+1 <= most {
			chosen = e
			break
		}
	}
	r.load[chosen]++
	r.sum++
	return chosen
}

// Done takes it off.
func (r *ring) Done(_ *Request, engine int) {
	r.load[engine]--
	r.sum--
}
