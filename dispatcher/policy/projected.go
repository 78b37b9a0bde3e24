package policy

import (
	"math"
	"time"

	"github.com/cespare/xxhash/v2"
)

// projectedTime is S3: the seconds until the request would have its first token
// and its fair share of the engine; least wins.
//
//	queue   = prompts still to compute there / prefill + the wait for a slot
//	active  = active_share x output still to make there / decode
//	prefill = max(0, prompt - credit) / prefill x (1 + interference x requests there)
//	barrier = barrier x k / (1 - k), k = occupancy with this request, at most 0.999
//
// An engine computes a prompt in steps that its running requests wait for: what
// recomputing a prefix costs is their time too, not only the request's.
//
// Agents tell what their runs have still to do. When one of them does not, it is
// guessed for all: what waits has all of its prompt and output before it and is
// waited for, what runs has computed its prompt and none of its output.
//
// On reservations alone (basis reserved) the same is computed from them, and no
// cached prefix is credited: load decides, since an engine that does not report
// its load may be the one that everybody's prefix sits on.
type projectedTime struct{}

// times are the addends of one candidate, seconds. Not more than four: a larger
// struct lives in memory.
type times struct{ queue, active, prefill, barrier float64 }

func (t times) load() float64 { return t.queue + t.active + t.barrier }
func (t times) all() float64  { return t.load() + t.prefill }

const maxOccupancy = 0.999

func (p *projectedTime) score(r *round) {
	out := r.grow()
	r.load = growTo(r.load, len(out))
	r.learnPeers()
	// Nothing in the loop is read through r more often than needed: there may be
	// thousands of candidates.
	cands, loads, known := r.in.Candidates, r.load[:len(out)], r.rate[:len(out)]
	decode, prefill := bandOf(r.peers.decode), bandOf(r.peers.prefill)
	least := math.MaxFloat64
	for k, i := range r.adm[:len(out)] {
		t := r.times(&cands[i], decode.of(known[k].decode), prefill.of(known[k].prefill))
		load := t.load()
		out[k], loads[k] = load+t.prefill, load
		if load < least {
			least = load
		}
	}
	r.leastLoad = least
}

// learnPeers takes the mean of the rates that are known. They were noted while
// the candidates were looked at anyway, by their reports: on reservations alone
// their profiles count.
func (r *round) learnPeers() {
	if r.basis != BasisEngine {
		for k, i := range r.adm {
			c := &r.in.Candidates[i]
			r.rate[k] = rates{c.ProfileDecodeTokS, c.ProfilePrefillTokS}
		}
	}
	var sum rates
	decodes, prefills := 0, 0
	for _, known := range r.rate {
		if known.decode > 0 {
			sum.decode += known.decode
			decodes++
		}
		if known.prefill > 0 {
			sum.prefill += known.prefill
			prefills++
		}
	}
	r.peers = rates{r.s.DecodeTokS, r.s.PrefillTokS}
	if decodes > 0 {
		r.peers.decode = sum.decode / float64(decodes)
	}
	if prefills > 0 {
		r.peers.prefill = sum.prefill / float64(prefills)
	}
}

// times computes a candidate's, with its rates. One function, since it runs for
// every engine of every decision.
func (r *round) times(c *Candidate, decode, prefill float64) (t times) {
	there := r.requests(c)
	if r.pending {
		o := c.Observed
		_, cached := r.expected(c)
		prompts := float64(o.PendingPrefillTokens + max(0, o.NewerPrefillTokens-cached))
		tokens := float64(o.PendingOutputTokens + max(0, o.NewerTokens-o.NewerPrefillTokens))
		if o.ExternalRequests > 0 { // nobody tells what they have left
			tokens += float64(float64(o.ExternalRequests) * r.output(c))
		}
		t.queue, t.active = prompts/prefill, float64(tokens*r.s.ActiveShare)/decode
		if there >= c.Slots {
			t.queue += r.slotWait(c, there, decode)
		}
	} else if r.basis == BasisEngine {
		o, output := c.Observed, r.output(c)
		// What is reserved and not yet seen by the engine waits too.
		waiting := o.Waiting + max(0, c.ReservedRequests-o.Running-o.Waiting-o.NewerRequests)
		tokens := float64(float64(waiting)*output) + float64(max(0, o.NewerTokens-o.NewerPrefillTokens))
		cached, newer := r.expected(c)
		prompts := float64(max(0, o.NewerPrefillTokens-newer))
		if r.uncached {
			prompts += float64(o.WaitingUncachedTokens)
		} else if waiting > 0 && c.ReservedRequests > 0 {
			prompts += float64(waiting) * float64(max(0, c.ReservedPromptTokens-cached)) / float64(c.ReservedRequests)
		}
		t.queue = tokens/decode + prompts/prefill
		t.active = float64(float64(o.Running)*float64(output*r.s.ActiveShare)) / decode
	} else {
		t.queue, t.active = r.reservedWork(c, decode, prefill)
	}
	if left := float64(r.in.Request.PromptTokens) - r.credit(c); left > 0 {
		t.prefill = left / prefill
		if r.basis == BasisEngine {
			t.prefill += float64(t.prefill * float64(r.s.Interference*float64(there)))
		}
	}
	if r.capacity {
		t.barrier = r.barrier(c)
	}
	return t
}

// slotWait is until a slot is free: one of those that run ends, on average, each
// output / decode seconds.
func (r *round) slotWait(c *Candidate, there int, decode float64) float64 {
	if c.Slots <= 0 {
		return 0
	}
	return float64(float64(max(0, there+1-c.Slots))*r.output(c)) / decode
}

// expected is how much of what is reserved there, and of what its report does
// not know yet, was placed for a prefix that it holds: nobody waits for that.
func (r *round) expected(c *Candidate) (reserved, newer int64) {
	if c.MatchApproximate && !r.s.ApproximateCredit {
		return 0, 0
	}
	return c.ReservedCachedTokens, c.Observed.NewerCachedTokens
}

// bounded is an engine's own rate, tokens/s, if it reports one: held within
// rate_bound of its profile or the pool's default. Else it is those.
func bounded(own, reference, bound float64) float64 {
	switch {
	case !(own > 0):
		return reference
	case own > float64(reference*bound):
		return float64(reference * bound)
	case float64(own*bound) < reference:
		return reference / bound
	}
	return own
}

// rates are the candidate's, tokens/s: what it showed when it was busy, else its
// profile, else the mean of the candidates that have one of those, else the
// pool's defaults. An engine that was never busy is as good as its peers: by a
// default of its own it would look better or worse than they for nothing. And
// what is within peerBand of that mean is the mean: equal engines are measured
// that far apart, and what looks faster would get more.
func (r *round) rates(c *Candidate) (decode, prefill float64) {
	decode, prefill = r.known(c)
	return bandOf(r.peers.decode).of(decode), bandOf(r.peers.prefill).of(prefill)
}

const peerBand = 0.25

// band is the mean of the peers' rates, and what is taken for it.
type band struct{ mean, low, high float64 }

func bandOf(mean float64) band {
	return band{mean, float64((1 - peerBand) * mean), float64((1 + peerBand) * mean)}
}

// of is an engine's rate for the decision; own is 0 when it is not known.
func (b band) of(own float64) float64 {
	if !(own > 0) || own > b.low && own < b.high {
		return b.mean
	}
	return own
}

// known rates of a candidate; 0 = none.
func (r *round) known(c *Candidate) (decode, prefill float64) {
	if r.basis != BasisEngine {
		return c.ProfileDecodeTokS, c.ProfilePrefillTokS
	}
	known := c.shown(r.s)
	return known.decode, known.prefill
}

// shown rates are those of a report, held to profile and defaults, else the profile's.
func (c *Candidate) shown(s *Settings) rates {
	known := rates{c.ProfileDecodeTokS, c.ProfilePrefillTokS}
	o := c.Observed
	if o == nil {
		return known
	}
	if o.DecodeTokS > 0 {
		known.decode = bounded(o.DecodeTokS, or(known.decode, s.DecodeTokS), s.RateBound)
	}
	if o.PrefillTokS > 0 {
		known.prefill = bounded(o.PrefillTokS, or(known.prefill, s.PrefillTokS), s.RateBound)
	}
	return known
}

func or(v, other float64) float64 {
	if v > 0 {
		return v
	}
	return other
}

// source tells where rates took one from.
func (r *round) source(own, profile, used, standard float64) RateSource {
	switch {
	case own > 0:
		return RateEngine
	case profile > 0:
		return RateProfile
	case used != standard:
		return RatePeers
	}
	return RateDefault
}

// Profile bounds rates that an engine showed earlier, tokens/s, so that they may
// stand in a Candidate: within rate_bound of the pool's defaults, 0 = none.
func (s *Settings) Profile(decode, prefill float64) (float64, float64) {
	if decode > 0 {
		decode = bounded(decode, s.DecodeTokS, s.RateBound)
	} else {
		decode = 0
	}
	if prefill > 0 {
		prefill = bounded(prefill, s.PrefillTokS, s.RateBound)
	} else {
		prefill = 0
	}
	return decode, prefill
}

// output is what one request of this engine is expected to make: the mean of
// what is reserved there, else this request's own; at least one token.
func (r *round) output(c *Candidate) float64 {
	n := float64(r.in.Request.ExpectedTokens)
	if c.ReservedRequests > 0 && c.ReservedPromptTokens > 0 {
		n = float64(c.ReservedTokens-c.ReservedPromptTokens) / float64(c.ReservedRequests)
	}
	if n < 1 {
		return 1
	}
	return n
}

// reservedWork takes as many reservations for running as there are slots.
func (r *round) reservedWork(c *Candidate, decode, prefill float64) (queue, active float64) {
	if c.ReservedRequests <= 0 {
		return 0, 0
	}
	runs := min(1, float64(max(0, c.Slots))/float64(c.ReservedRequests))
	prompts := float64(c.ReservedPromptTokens)
	output := float64(max(0, c.ReservedTokens-c.ReservedPromptTokens))
	queue = float64(output*(1-runs))/decode + float64(prompts*(1-runs))/prefill
	active = float64(output*float64(runs*r.s.ActiveShare)) / decode
	return queue, active
}

// credit is how many tokens of the prompt need no prefill there.
func (r *round) credit(c *Candidate) float64 {
	if r.basis != BasisEngine || !c.MatchKnown || c.MatchApproximate && !r.s.ApproximateCredit {
		return 0
	}
	n := float64(c.MatchGPU)
	if c.MatchCPU|c.MatchSSD != 0 {
		n += float64(r.s.CreditCPU*float64(c.MatchCPU)) + float64(r.s.CreditSSD*float64(c.MatchSSD))
	}
	return n
}

// barrier keeps work from an engine whose KV is nearly full: with k the share of
// its capacity that would be full, barrier x k / (1 - k), written in tokens, so
// that it takes one division. It needs every candidate's capacity; the fullest
// rank's usage counts when all tell it.
func (r *round) barrier(c *Candidate) float64 {
	own := float64(r.in.Request.PromptTokens + max(0, r.in.Request.ExpectedTokens))
	capacity := float64(c.CapacityTokens)
	full := float64(r.tokens(c)) + own
	if r.kv {
		if worst := float64(c.Observed.KVUsageWorst*capacity) + float64(own*float64(max(1, c.Ranks))); worst > full {
			full = worst
		}
	}
	if most := float64(maxOccupancy * capacity); full > most {
		full = most
	}
	if full <= 0 {
		return 0
	}
	return float64(r.s.Barrier*full) / (capacity - full)
}

func (p *projectedTime) pick(r *round) (int, Reason) {
	k := r.tie(r.score, r.limit(r.best))
	if r.basis != BasisEngine {
		return k, ReasonNoTelemetry
	}
	if r.load[k] > r.limit(r.leastLoad) && r.credit(&r.in.Candidates[r.adm[k]]) > 0 {
		return k, ReasonPrefixCredit
	}
	return k, ReasonLeastTime
}

// limit is up to where a time is as good as the best.
func (r *round) limit(best float64) float64 { return best + float64(best*r.s.TieRatio) }

// escape takes the load-only winner when the winner's load is out of proportion.
func (p *projectedTime) escape(r *round, k int) (int, bool) {
	if r.load[k] <= float64(r.s.EscapeRatio*r.leastLoad)+r.s.EscapeFloor {
		return k, false
	}
	return r.tie(r.load, r.limit(r.leastLoad)), true
}

// wait looks for a full engine that would be free soon and so much quicker then
// that waiting for it beats the winner.
func (p *projectedTime) wait(r *round, k int) (candidate int, span time.Duration, ok bool) {
	left := r.left()
	if left <= 0 || r.basis != BasisEngine || r.count[FilterWindow] == 0 {
		return -1, 0, false
	}
	candidate = -1
	best := r.score[k]
	var top uint64
	key := xxhash.Sum64String(r.in.Request.Affinity)
	for i, f := range r.filter {
		c := &r.in.Candidates[i]
		if f != FilterWindow || r.credit(c) <= 0 {
			continue
		}
		decode, prefill := r.rates(c)
		t := r.times(c, decode, prefill)
		if r.pending { // the slot is what it would wait for
			t.queue -= r.slotWait(c, r.requests(c), decode)
		}
		// One of them ends, on average, each output / decode seconds, and others
		// may wait for the same.
		over := c.ReservedRequests + c.Observed.ExternalRequests - c.Window + 1 + c.Awaited
		free := float64(r.output(c) / decode * float64(max(1, over)))
		if free > left.Seconds() || t.load() > float64(r.s.EscapeRatio*r.leastLoad)+r.s.EscapeFloor {
			continue
		}
		total := free + t.all()
		if h := rank(key, c.hash()); total < best || total == best && candidate >= 0 && h > top {
			best, candidate, top = total, i, h
			span = time.Duration(float64(free * float64(time.Second)))
		}
	}
	return candidate, span, candidate >= 0
}

func (p *projectedTime) explain(r *round, k int, out *Scored) {
	c := &r.in.Candidates[r.adm[k]]
	out.DecodeTokS, out.PrefillTokS = r.rates(c)
	t := r.times(c, out.DecodeTokS, out.PrefillTokS)
	out.part(PartQueue, t.queue)
	out.part(PartActive, t.active)
	out.part(PartPrefill, t.prefill)
	out.part(PartBarrier, t.barrier)
	out.Cached = min(r.credit(c), float64(r.in.Request.PromptTokens))
	var own Observed
	if r.basis == BasisEngine {
		own = *c.Observed
	}
	out.DecodeFrom, out.PrefillFrom = r.source(own.DecodeTokS, c.ProfileDecodeTokS, out.DecodeTokS, r.s.DecodeTokS), r.source(own.PrefillTokS, c.ProfilePrefillTokS, out.PrefillTokS, r.s.PrefillTokS)
}

func growTo(s []float64, n int) []float64 {
	if cap(s) < n {
		return make([]float64, n)
	}
	return s[:n]
}
