package policy

import (
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

// HashName is the hash of an engine's name that ties are broken by.
func HashName(engine string) uint64 { return xxhash.Sum64String(engine) }

// rank orders engines for a key: hash(key, engine), the same at every
// dispatcher. Both are hashed already; the product mixes them.
func rank(key, engine uint64) uint64 {
	hi, lo := bits.Mul64(key^0x9e3779b97f4a7c15, engine^0xd1b54a32d192ed03)
	h := hi ^ lo
	h ^= h >> 32
	h *= 0xe9846af9b1a615d
	return h ^ h>>28
}

func (c *Candidate) hash() uint64 {
	if c.NameHash != 0 {
		return c.NameHash
	}
	return HashName(c.Engine)
}

// tie picks among the positions whose value is at most limit. Requests of one
// affinity meet at the highest hash(affinity, engine), whoever decides; others
// go to the engine that this dispatcher chose longest ago, and among those by
// hash(dispatcher, engine), so that dispatchers rarely collide. Never the first
// in the list (scenario P2).
func (r *round) tie(values []float64, limit float64) int {
	at := -1
	r.tied = 0
	affine := r.in.Request.Affinity != ""
	var key, top uint64
	if affine {
		key = xxhash.Sum64String(r.in.Request.Affinity)
	} else {
		key = xxhash.Sum64String(r.in.Dispatcher)
	}
	var oldest uint64
	for k, v := range values {
		if v > limit {
			continue
		}
		r.tied++
		c := &r.in.Candidates[r.adm[k]]
		if !affine && at >= 0 && c.LastPicked != oldest {
			if c.LastPicked > oldest {
				continue
			}
			at = -1
		}
		h := rank(key, c.hash())
		if at < 0 || h > top || h == top && c.Engine < r.in.Candidates[r.adm[at]].Engine {
			at, top, oldest = k, h, c.LastPicked
		}
	}
	return at
}

// tieBest picks among the best scores.
func (r *round) tieBest() int { return r.tie(r.score, r.best) }

// sticky is the position of the candidate that the request should stay on, -1
// for none. It is asked after eligibility and admission, so a blocked or full
// engine is never kept (S1.5).
func (r *round) sticky() (int, Reason) {
	if !r.s.StickyTrajectory && !r.s.StickyGroup {
		return -1, ""
	}
	at := -1
	for k, i := range r.adm {
		c := &r.in.Candidates[i]
		if !c.Sticky {
			continue
		}
		room := r.s.StickyCap == 0 || c.KeyInFlight < r.s.StickyCap // the key's own requests count, not the engine's (scenario P18)
		switch {
		case !c.StickyGroup:
			if room && r.s.StickyTrajectory && r.within(c) {
				return k, ReasonSticky
			}
			return -1, "" // a trajectory has one last engine
		case room && r.s.StickyGroup && c.Slots > 0 && r.requests(c) < c.Slots && (at < 0 || r.fuller(i, r.adm[at])):
			at = k // of several engines of a group the one that has most of it
		}
	}
	return at, ReasonGroup
}

// fuller tells whether engine i has more of the request's group than engine j.
func (r *round) fuller(i, j int32) bool {
	a, b := &r.in.Candidates[i], &r.in.Candidates[j]
	return a.KeyInFlight > b.KeyInFlight || a.KeyInFlight == b.KeyInFlight && a.hash() > b.hash()
}

// within tells whether a trajectory may stay: not saturated, and not too far
// above the least loaded engine (scenarios P16, P17).
func (r *round) within(c *Candidate) bool {
	n := r.requests(c)
	least := n
	for _, i := range r.adm {
		least = min(least, r.requests(&r.in.Candidates[i]))
	}
	if float64(n-least) > r.s.StickyMargin {
		return false
	}
	if r.kv && c.Observed.KVUsageWorst > r.s.StickyThreshold {
		return false
	}
	most := c.Slots
	if r.running {
		most = c.Observed.MaxRunning
	}
	return most <= 0 || float64(n)/float64(most) <= r.s.StickyThreshold
}
