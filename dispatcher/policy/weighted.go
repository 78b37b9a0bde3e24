package policy

// weightedCache is S5: S = alpha x S_cache + (1 - alpha) x S_load, the greatest
// wins. It is a list of strategies; each has a weight and gives 0..1. The record
// shows 1 - S, so that the least wins here as everywhere.
type weightedCache struct {
	weights [len(strategies)]float64
}

// strategy is one opinion of a candidate, 0..1, more is better. Its parameters
// are knobs. A strategy whose quantity some candidate lacks is left out for all.
type strategy struct {
	part  Part
	ready func(r *round) bool
	raw   func(s *Settings) float64 // its share among the load strategies; nil = the cache, which has alpha
	value func(r *round, c *Candidate) float64
}

var strategies = [...]strategy{
	{part: PartCache, ready: func(*round) bool { return true }, value: cacheScore},
	{part: PartKVFree, ready: kvKnown, raw: func(s *Settings) float64 { return s.WeightKV }, value: kvFree},
	{part: PartSlotFree, ready: func(*round) bool { return true }, raw: func(s *Settings) float64 { return s.WeightSlots }, value: slotsFree},
}

func (p *weightedCache) score(r *round) {
	p.weigh(r)
	out := r.grow()
	for k, i := range r.adm {
		c := &r.in.Candidates[i]
		s := 0.0
		for j := range strategies {
			if p.weights[j] > 0 {
				s += float64(p.weights[j] * strategies[j].value(r, c))
			}
		}
		out[k] = 1 - s
	}
}

// weigh shares 1 - alpha among the load strategies that can be had.
func (p *weightedCache) weigh(r *round) {
	sum := 0.0
	for j := range strategies {
		p.weights[j] = 0
		if st := &strategies[j]; st.raw != nil && st.ready(r) {
			p.weights[j] = st.raw(r.s)
			sum += p.weights[j]
		}
	}
	if sum == 0 {
		// Only free KV has a share and its usage is unknown: slots stand in, or
		// load would not count at all.
		p.weights[len(strategies)-1], sum = 1, 1
	}
	for j := range strategies {
		if strategies[j].raw == nil {
			p.weights[j] = r.s.Alpha
		} else {
			p.weights[j] = float64(p.weights[j]*(1-r.s.Alpha)) / sum
		}
	}
}

func (p *weightedCache) pick(r *round) (int, Reason) { return r.tieBest(), ReasonBestScore }

func (p *weightedCache) explain(r *round, k int, out *Scored) {
	c := &r.in.Candidates[r.adm[k]]
	for j := range strategies {
		if p.weights[j] > 0 {
			out.part(strategies[j].part, strategies[j].value(r, c))
		}
	}
}

// cacheScore is the cached share of the prompt, tiers weighed.
func cacheScore(r *round, c *Candidate) float64 {
	n := r.in.Request.PromptTokens
	if !c.MatchKnown || n <= 0 {
		return 0
	}
	s := r.s
	v := float64(s.TierGPU*float64(min(c.MatchGPU, n))) +
		float64(s.TierCPU*float64(min(c.MatchCPU, n))) +
		float64(s.TierSSD*float64(min(c.MatchSSD, n)))
	return min(1, v/float64(n))
}

func kvKnown(r *round) bool { return r.kv || r.capacity }

// kvFree is the free share of KV: of the fullest rank where every engine tells
// it, else of tokens over capacity.
func kvFree(r *round, c *Candidate) float64 {
	if r.kv {
		return 1 - min(1, c.Observed.KVUsageWorst)
	}
	return 1 - min(1, float64(r.tokens(c))/float64(c.CapacityTokens))
}

// slotsFree is the free share of what the engine can run; below its limit it
// falls evenly, and without a limit it is 1/(1 + requests).
func slotsFree(r *round, c *Candidate) float64 {
	n := float64(r.requests(c))
	switch {
	case r.running:
		return 1 - min(1, n/float64(c.Observed.MaxRunning))
	case r.slots:
		return 1 - min(1, n/float64(c.Slots))
	}
	return 1 / (1 + n)
}
