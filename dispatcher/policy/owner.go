package policy

import (
	"slices"
	"time"
)

// ownerPressure is S2. A prompt's beginning (its owner key) belongs to the few
// engines that are proven to have it cached; its requests stay with them while
// they are not pressured, and one more engine is added at a time, by a seed:
//
//	owner under the watermark, within owner_slack of the least pressured  -> cached_owner_hold
//	all owners pressured, a clean peer, no seed, no cooldown, no ceiling  -> owner_pressure_spill (a seed)
//	all owners pressured, no safe spill: the least pressured owner, or wait -> no_safe_spill_hold
//	no owner: the engine of the key's oldest reservation, under the watermark -> provisional_hold
//	          else another one, which nobody follows                      -> provisional_stray
//	          no reservation either                                       -> first_owner
//	owners that may not serve this request                                -> owner_unavailable
//
// Admission and selection are one decision: a full owner is pressured, never a
// refusal, as long as one candidate can take the request.
//
// pressure = max(KV use of the fullest rank, fused tokens / capacity, (running +
// waiting) / max_running). Each of the three counts only when every eligible
// candidate has it: occupancy needs the caps of every rank of each of them.
// Without a complete report of all of them reservations over slots stand in,
// and nobody has headroom.
type ownerPressure struct {
	occupancy bool // of all
	backend   bool // KV use of all
	values    []float64
}

// SeedState tells which live seed targets a candidate.
type SeedState uint8

// Seed states. One engine is the target of one seed at a time.
const (
	SeedNone  SeedState = iota
	SeedOther           // of another key
	SeedSame            // of this request's key: nobody may join it
)

// NoSpill says why a request of pressured owners made no seed.
type NoSpill string

// Why there was no spill, the first that applies.
const (
	NoSpillNone       NoSpill = ""
	NoSpillRequeued   NoSpill = "requeued"    // it came back once: it is ordinary traffic now
	NoSpillCeiling    NoSpill = "ceiling"     // as many owners as there may be
	NoSpillCooldown   NoSpill = "cooldown"    // the last seed was proven a moment ago
	NoSpillSeed       NoSpill = "seed_live"   // one seed a key
	NoSpillTelemetry  NoSpill = "telemetry"   // not every candidate has a complete, fresh report
	NoSpillHeadroom   NoSpill = "no_headroom" // no peer is clean
	NoSpillUnprovable NoSpill = "unprovable"  // clean peers whose cache nobody can follow could never be proven
)

// NoSpills is the whole list, NoSpillNone left out.
func NoSpills() []NoSpill {
	return []NoSpill{NoSpillRequeued, NoSpillCeiling, NoSpillCooldown, NoSpillSeed, NoSpillTelemetry, NoSpillHeadroom, NoSpillUnprovable}
}

func (p *ownerPressure) score(r *round) {
	p.occupancy, p.backend = r.running, r.kv
	for i := range r.in.Candidates {
		if o := r.in.Candidates[i].Observed; o != nil && o.CountsScraped && r.filter[i].Eligible() {
			p.occupancy = false
		}
	}
	out := r.grow()
	for k, i := range r.adm {
		out[k] = p.pressure(r, &r.in.Candidates[i])
	}
}

// pressure of a candidate, on what all of them have.
func (p *ownerPressure) pressure(r *round, c *Candidate) float64 {
	if r.basis != BasisEngine {
		return float64(c.ReservedRequests) / float64(max(1, c.Slots))
	}
	v := 0.0
	if p.backend {
		v = c.Observed.KVUsageWorst
	}
	if r.used && r.capacity {
		v = max(v, float64(c.Observed.UsedTokens)/float64(c.CapacityTokens))
	}
	if p.occupancy {
		v = max(v, float64(r.requests(c))/float64(c.Observed.MaxRunning))
	}
	if !p.backend && !p.occupancy {
		v = max(v, float64(c.ReservedRequests)/float64(max(1, c.Slots)))
	}
	return v
}

func (p *ownerPressure) pick(r *round) (int, Reason) { return r.tieBest(), ReasonLeastPressure }

func (p *ownerPressure) explain(r *round, k int, out *Scored) {
	c := &r.in.Candidates[r.adm[k]]
	out.part(PartPressure, r.score[k])
	switch {
	case c.Owner:
		out.part(PartOwner, 1)
	case c.Provisional:
		out.part(PartOwner, 0.5)
	case r.in.Request.OwnerKey != "":
		out.part(PartOwner, 0)
	}
}

// guard decides for requests that have an owner key.
func (p *ownerPressure) guard(r *round) (v verdict, ok bool) {
	req := &r.in.Request
	if req.OwnerKey == "" {
		return v, false
	}
	v = verdict{outcome: OutcomePlaced, basis: r.basis, tied: 1, waitFor: -1}
	owned, provisional := false, false
	for i := range r.in.Candidates {
		if c := &r.in.Candidates[i]; r.filter[i].Eligible() {
			owned = owned || c.Owner
			provisional = provisional || c.Provisional
		}
	}
	var k int
	switch {
	case owned:
		k = p.amongOwners(r, &v)
	case req.Owners > 0:
		k = p.cold(r, &v) // together, as long as no owner may serve them
		v.reason = ReasonOwnerUnavailable
	case provisional:
		k = p.cold(r, &v)
	default:
		v.reason = ReasonFirstOwner
		k = p.best(r, func(c *Candidate, _ float64) bool { return c.Seeding != SeedSame })
	}
	if k < 0 {
		v.outcome, v.chosen = OutcomeNoneAdmissible, -1
		return v, true
	}
	v.chosen = int(r.adm[k])
	return v, true
}

// amongOwners is hold, spill or neither, for a key that has owners.
func (p *ownerPressure) amongOwners(r *round, v *verdict) int {
	v.reason = ReasonOwnerHold
	k := p.best(r, func(c *Candidate, pressure float64) bool { return c.Owner && pressure < r.s.Watermark })
	if k >= 0 {
		return k
	}
	if k, v.noSpill = p.spill(r); k >= 0 {
		v.reason, v.seed = ReasonSpill, true
		return k
	}
	v.reason = ReasonNoSafeSpill
	return p.best(r, func(c *Candidate, _ float64) bool { return c.Owner })
}

// cold follows the provisional owner up to the watermark.
func (p *ownerPressure) cold(r *round, v *verdict) int {
	v.reason = ReasonProvisional
	k := p.best(r, func(c *Candidate, pressure float64) bool { return c.Provisional && pressure < r.s.Watermark })
	if k >= 0 {
		return k
	}
	v.reason = ReasonStray
	k = p.best(r, func(c *Candidate, _ float64) bool { return !c.Provisional && c.Seeding != SeedSame })
	if k >= 0 {
		return k
	}
	v.reason = ReasonProvisional // pressured, and nobody else is free
	return p.best(r, func(c *Candidate, _ float64) bool { return c.Provisional })
}

// spill is the target of a seed, -1 and why not.
func (p *ownerPressure) spill(r *round) (int, NoSpill) {
	req := &r.in.Request
	switch {
	case req.NoSeed:
		return -1, NoSpillRequeued
	case req.Owners >= r.s.OwnerCeiling:
		return -1, NoSpillCeiling
	case req.SeedLive:
		return -1, NoSpillSeed
	case req.Cooldown:
		return -1, NoSpillCooldown
	case r.basis != BasisEngine || !p.backend:
		return -1, NoSpillTelemetry
	}
	values := p.room(r)
	least, clean := float64(outside), false
	for k, i := range r.adm {
		c := &r.in.Candidates[i]
		values[k] = outside
		if c.Owner || c.Seeding != SeedNone || !p.headroom(r, c, r.score[k]) {
			continue
		}
		clean = true
		if c.Provable {
			values[k] = r.score[k]
			least = min(least, values[k])
		}
	}
	switch {
	case least < outside:
		return r.tie(values, least), NoSpillNone
	case clean:
		return -1, NoSpillUnprovable
	}
	return -1, NoSpillHeadroom
}

// headroom tells whether a peer may be added. Its own report must be whole, with
// the cap of every rank, also when another candidate's is not and occupancy
// counts for nobody.
func (p *ownerPressure) headroom(r *round, c *Candidate, pressure float64) bool {
	o := c.Observed
	return pressure < r.s.Watermark && o != nil && o.KVUsageWorst >= 0 && o.MaxRunning > 0 && !o.CountsScraped &&
		float64(r.requests(c))/float64(o.MaxRunning) < r.s.Watermark
}

// best is, of those that may be chosen and are within owner_slack of the least
// pressured of them, the one that holds most of the prompt, then the least
// pressured, then the highest hash(key, engine). -1 = none.
func (p *ownerPressure) best(r *round, may func(c *Candidate, pressure float64) bool) int {
	least := float64(outside)
	for k, i := range r.adm {
		if may(&r.in.Candidates[i], r.score[k]) {
			least = min(least, r.score[k])
		}
	}
	values := p.room(r)
	top := 0
	for k, i := range r.adm {
		c := &r.in.Candidates[i]
		values[k] = outside
		if r.score[k] <= least+r.s.OwnerSlack && may(c, r.score[k]) {
			values[k] = r.score[k]
			top = max(top, r.matched(c))
		}
	}
	limit := float64(outside)
	for k, i := range r.adm {
		if values[k] < outside && r.matched(&r.in.Candidates[i]) < top {
			values[k] = outside
		}
		limit = min(limit, values[k])
	}
	if limit >= outside {
		return -1
	}
	return r.tie(values, limit)
}

// room is for a value of each admissible candidate.
func (p *ownerPressure) room(r *round) []float64 {
	p.values = slices.Grow(p.values[:0], len(r.adm))[:len(r.adm)]
	return p.values
}

// seconds is for knobs.
func seconds(v float64) time.Duration { return time.Duration(v * float64(time.Second)) }
