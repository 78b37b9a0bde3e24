package policy

// leastRequests is the baseline: least reserved requests, whatever the engines
// say, whatever the size.
type leastRequests struct{}

func (leastRequests) score(r *round) {
	out := r.grow()
	for k, i := range r.adm {
		out[k] = float64(r.in.Candidates[i].ReservedRequests)
	}
}

func (leastRequests) pick(r *round) (int, Reason) { return r.tieBest(), ReasonLeastRequests }

func (leastRequests) explain(r *round, k int, out *Scored) { out.part(PartRequests, r.score[k]) }

// kvTokens is S1: load = tokens / KV capacity, so that a long prompt weighs
// more than a short one and a small engine fills sooner than a big one. Tokens
// are fused with the engines' reports when all of them have one. If any
// candidate's capacity is unknown, requests are compared for all: such an
// engine is neither starved nor preferred.
type kvTokens struct{}

func (kvTokens) score(r *round) {
	out := r.grow()
	if !r.capacity {
		for k, i := range r.adm {
			out[k] = float64(r.requests(&r.in.Candidates[i]))
		}
		return
	}
	for k, i := range r.adm {
		c := &r.in.Candidates[i]
		out[k] = float64(r.tokens(c)) / float64(c.CapacityTokens)
	}
}

func (kvTokens) pick(r *round) (int, Reason) {
	if !r.capacity {
		return r.tieBest(), ReasonNoCapacity
	}
	return r.tieBest(), ReasonLeastTokens
}

func (kvTokens) explain(r *round, k int, out *Scored) {
	if r.capacity {
		out.part(PartTokens, r.score[k])
	} else {
		out.part(PartRequests, r.score[k])
	}
}
