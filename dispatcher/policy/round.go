package policy

import (
	"fmt"
	"slices"
	"time"
)

// round is one decision's working memory. Everything that is compared between
// candidates is decided here once for all of them: a quantity counts only when
// every eligible candidate has it.
type round struct {
	in   *Input
	s    *Settings
	need int64 // prompt + max_tokens: what the request may grow to

	plain    bool     // the request asks nothing special
	filter   []Filter // by candidate
	count    [numFilters]int
	eligible int
	lifted   bool // nobody is excluded for having been tried

	// What all eligible candidates have.
	basis    Basis
	capacity bool // KV capacity
	slots    bool // how many run at once
	// On basis engine only.
	used     bool // tokens in use
	kv       bool // KV usage of the fullest rank
	running  bool // the engine's own limit of running requests
	pending  bool // what runs there still has to do
	uncached bool // waiting tokens to prefill; asked for only without pending

	adm   []int32   // admissible candidates, ascending
	score []float64 // of adm; the least wins
	load  []float64 // of adm; seconds without prefill, projected_time only
	best  float64   // least score
	// leastLoad is the least of load.
	peers     rates   // of projected_time: mean rates of the candidates that have some
	rate      []rates // of adm, known from reports
	leastLoad float64
	tied      int
}

func (r *round) begin(in *Input, s *Settings) {
	r.in, r.s = in, s
	r.need = int64(in.Request.PromptTokens) + int64(max(0, in.Request.MaxTokens))
	r.plain = in.Request.LoRA == "" && in.Request.WeightMin == nil && in.Request.WeightExact == nil && in.Request.Rank == nil
	n := len(in.Candidates)
	r.filter = slices.Grow(r.filter[:0], n)[:n]
	r.adm = slices.Grow(r.adm[:0], n)
	r.lifted = false
}

// filterAll finds who may serve the request, on which basis, and who of them
// can take it now.
func (r *round) filterAll() {
	r.pass(len(r.in.Request.Tried) > 0)
	if r.eligible == 0 && r.count[FilterTried] > 0 {
		r.lifted = true
		r.pass(false)
	}
}

func (r *round) pass(exclude bool) {
	r.count = [numFilters]int{}
	r.eligible = 0
	r.adm = r.adm[:0]
	r.capacity, r.slots = true, true
	observed, used, kv, running, pending := true, true, true, true, true
	r.rate = r.rate[:0]
	rated := r.s.Policy == ProjectedTime
	req := &r.in.Request
	cands, filter := r.in.Candidates, r.filter[:len(r.in.Candidates)]
	for i := range cands {
		c := &cands[i]
		f := FilterNone
		if !r.plainly(c) {
			f = r.ineligible(c)
		}
		if f == FilterNone && exclude && slices.Contains(req.Tried, c.Engine) {
			f = FilterTried
		}
		if f == FilterNone {
			// Only eligible engines enter any statistic (scenario P11).
			r.eligible++
			r.capacity = r.capacity && c.CapacityTokens > 0
			r.slots = r.slots && c.Slots > 0
			if o := c.Observed; o != nil {
				used = used && o.UsedTokens >= 0
				kv = kv && o.KVUsageWorst >= 0
				running = running && o.MaxRunning > 0
				pending = pending && o.PendingTold
			} else {
				observed = false
			}
			if !r.plainlyFree(c) {
				f = r.inadmissible(c)
			}
		}
		filter[i] = f
		if f == FilterNone {
			r.adm = append(r.adm, int32(i))
			if rated {
				r.rate = append(r.rate, c.shown(r.s))
			}
		} else {
			r.count[f]++
		}
	}
	r.basis = BasisReserved
	if observed {
		r.basis = BasisEngine
	}
	r.used, r.kv, r.running, r.pending = observed && used, observed && kv, observed && running, observed && pending
	r.uncached = rated && observed && !pending && r.allUncached()
}

// allUncached tells whether every eligible candidate says what of its queue is
// to be computed.
func (r *round) allUncached() bool {
	for i, f := range r.filter {
		if f.Eligible() && r.in.Candidates[i].Observed.WaitingUncachedTokens < 0 {
			return false
		}
	}
	return true
}

var stateFilters = [...]Filter{
	Ready: FilterNone, Suspect: FilterSuspect, Paused: FilterPaused, Draining: FilterDraining, Stale: FilterStale, Down: FilterDown,
}

// plainly tells quickly that a candidate is eligible; when it does not,
// ineligible has the last word. Nearly all are, and there may be thousands.
func (r *round) plainly(c *Candidate) bool {
	return r.plain && c.State == Ready && c.Ranks <= 1 && c.Model == r.in.Request.Model &&
		r.need <= int64(c.MaxModelLen) && r.need <= c.CapacityTokens
}

func (r *round) ineligible(c *Candidate) Filter {
	if c.State != Ready {
		if int(c.State) < len(stateFilters) {
			return stateFilters[c.State]
		}
		return FilterDown
	}
	req := &r.in.Request
	if !c.Serves(req.Model) {
		return FilterModel
	}
	if req.LoRA != "" && !slices.Contains(c.LoRAs, req.LoRA) {
		return FilterLoRA
	}
	if req.WeightExact != nil && (c.WeightVersion == nil || *c.WeightVersion != *req.WeightExact) ||
		req.WeightMin != nil && (c.WeightVersion == nil || *c.WeightVersion < *req.WeightMin) {
		return FilterWeights
	}
	if req.Rank != nil && (*req.Rank < 0 || *req.Rank >= max(1, c.Ranks)) {
		return FilterRank
	}
	if c.MaxModelLen > 0 && r.need > int64(c.MaxModelLen) {
		return FilterContext
	}
	if c.CapacityTokens > 0 && r.need > c.rankCapacity() {
		return FilterCapacity
	}
	return FilterNone
}

// Serves tells whether the engine has the model, under its own name or as an
// adapter's.
func (c *Candidate) Serves(model string) bool {
	return model == "" || c.Model == model || c.Model == "" || slices.Contains(c.LoRAs, model)
}

// rankCapacity is the KV capacity of one rank: a request lives on one rank.
func (c *Candidate) rankCapacity() int64 {
	if c.Ranks > 1 {
		return c.CapacityTokens / int64(c.Ranks)
	}
	return c.CapacityTokens
}

// plainlyFree tells quickly that a candidate can take work, as plainly does.
func (r *round) plainlyFree(c *Candidate) bool {
	o := c.Observed
	return o != nil && c.ReservedRequests+o.ExternalRequests < c.Window && !c.KVBlocked &&
		o.KVUsageWorst <= r.s.KVBlock && r.in.Now >= c.PreemptionBlockUntil && !r.s.fills(c)
}

// kvShort tells whether the engine's KV will not take more: it is above the mark,
// or what it was given and has not begun will bring it there. Without the latter
// the first engine to come below the mark would be given all that waits, and one
// whose next prompt does not fit would go on being given more.
func (r *round) kvShort(c *Candidate) bool {
	o := c.Observed
	if o == nil || c.ReservedRequests+o.ExternalRequests+o.Running+o.Waiting == 0 {
		// An engine without any work cannot come below the mark by finishing
		// some: what fills it can only be evicted by new work.
		return false
	}
	return r.s.KVGate(c.KVBlocked, o.KVUsageWorst) || o.KVUsageWorst >= 0 && c.CapacityTokens > 0 && r.s.fills(c)
}

// fills tells whether what the engine was given and has not begun brings its KV
// above the mark.
func (s *Settings) fills(c *Candidate) bool {
	o := c.Observed
	return float64(o.ComingTokens) > float64((s.KVBlock-o.KVUsageWorst)*float64(c.CapacityTokens))
}

// inadmissible judges one engine by what is known of it alone; nothing is
// compared, so its own report serves even when another engine has none.
func (r *round) inadmissible(c *Candidate) Filter {
	if c.Full() {
		return FilterWindow
	}
	if r.kvShort(c) {
		return FilterKV
	}
	if r.in.Now < c.PreemptionBlockUntil {
		return FilterPreempting
	}
	return FilterNone
}

// reservedOnly makes the decision one on reservations.
func (r *round) reservedOnly() {
	r.basis = BasisReserved
	r.used, r.kv, r.running, r.pending, r.uncached = false, false, false, false, false
}

// requests is the load of a candidate in requests, on the decision's basis. An
// engine's report can only add to what is reserved there: a sample taken before
// the engine has looked at new work must not make it look emptier.
func (r *round) requests(c *Candidate) int {
	if r.basis != BasisEngine {
		return c.ReservedRequests
	}
	o := c.Observed
	return max(o.Running+o.Waiting+o.NewerRequests, c.ReservedRequests)
}

// tokens is the load of a candidate in tokens, on the decision's basis.
func (r *round) tokens(c *Candidate) int64 {
	if r.used {
		return c.Observed.UsedTokens
	}
	return c.ReservedTokens
}

// least finds the least score; false when a score is not a finite number.
func (r *round) least() bool {
	const limit = 1e300
	r.best = limit
	for _, s := range r.score {
		if !(s > -limit && s < limit) {
			return false
		}
		if s < r.best {
			r.best = s
		}
	}
	return len(r.score) == len(r.adm) && len(r.adm) > 0
}

// grow makes room for the scores of adm.
func (r *round) grow() []float64 {
	n := len(r.adm)
	r.score = slices.Grow(r.score[:0], n)[:n]
	return r.score
}

// position finds a candidate in adm; -1 = not there.
func (r *round) position(candidate int) int {
	if candidate < 0 {
		return -1
	}
	if k, ok := slices.BinarySearch(r.adm, int32(candidate)); ok {
		return k
	}
	return -1
}

func (r *round) features(out *Scored) {
	c := &r.in.Candidates[out.Index]
	out.Requests, out.Tokens, out.KVUsage = float64(c.ReservedRequests), c.ReservedTokens, -1
	if r.basis == BasisEngine && c.Observed != nil {
		out.Requests, out.Tokens, out.KVUsage = float64(r.requests(c)), r.tokens(c), c.Observed.KVUsageWorst
	}
	if c.MatchKnown {
		out.Cached = float64(min(c.MatchGPU+c.MatchCPU+c.MatchSSD, r.in.Request.PromptTokens))
	}
}

// tooLarge tells whether no engine of the model could ever hold the request,
// whatever its state now: then waiting is pointless (scenario P22).
func (r *round) tooLarge(rec *Record) bool {
	var most int64
	var at *Candidate
	what := ""
	for i := range r.in.Candidates {
		c := &r.in.Candidates[i]
		if !c.Serves(r.in.Request.Model) {
			continue
		}
		limit, kind := int64(c.MaxModelLen), "context length"
		if capacity := c.rankCapacity(); limit == 0 || capacity > 0 && capacity < limit {
			limit, kind = capacity, "KV capacity of a rank"
		}
		if limit <= 0 || r.need <= limit {
			return false
		}
		if at == nil || limit > most {
			most, at, what = limit, c, kind
		}
	}
	if at == nil {
		return false
	}
	rec.Detail = fmt.Sprintf("prompt %d + max_tokens %d = %d tokens; the largest engine, %s, takes %d (%s): ask for fewer tokens",
		r.in.Request.PromptTokens, max(0, r.in.Request.MaxTokens), r.need, at.Engine, most, what)
	return true
}

// left is how much longer a policy may keep the request waiting: wait_max counts
// from its acceptance, so that no number of waits in a row exceeds it.
func (r *round) left() time.Duration {
	return min(r.s.WaitMax-r.in.Request.Waited, r.in.Request.MayWait)
}
