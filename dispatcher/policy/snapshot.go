package policy

// loadSnapshot is S4: among the engines that hold most of the prompt, the least
// loaded one; if nobody holds enough, the least loaded of all. Load is in
// requests, read once for the whole decision, so that the balance test and the
// tie-break see one picture.
//
// Holders that are out of balance are left out of the matched set one by one:
// the others keep their affinity (scenario P3), and the least loaded engine
// wins only when no holder is left (P1: never the emptiest cache).
type loadSnapshot struct {
	matched bool // somebody in balance holds enough
	holders bool // somebody holds enough
}

// outside is added to the score of engines outside the matched set; larger than
// any number of requests.
const outside = 1e9

func (p *loadSnapshot) score(r *round) {
	out := r.grow()
	least := outside
	for k, i := range r.adm {
		out[k] = float64(r.requests(&r.in.Candidates[i]))
		least = min(least, out[k])
	}
	p.holders, p.matched = false, false
	longest := 0
	enough := float64(r.s.MatchThreshold * float64(r.in.Request.PromptTokens))
	for k, i := range r.adm {
		m := r.matched(&r.in.Candidates[i])
		if m == 0 || float64(m) < enough {
			continue
		}
		p.holders = true
		if !p.unbalanced(r, out[k], least) {
			p.matched, longest = true, max(longest, m)
		}
	}
	if !p.matched {
		return
	}
	for k, i := range r.adm {
		if r.matched(&r.in.Candidates[i]) < longest || p.unbalanced(r, out[k], least) {
			out[k] += outside
		}
	}
}

func (p *loadSnapshot) unbalanced(r *round, load, least float64) bool {
	return load-least > r.s.BalanceAbs && load > float64(r.s.BalanceRel*least)
}

func (p *loadSnapshot) pick(r *round) (int, Reason) {
	switch {
	case p.matched:
		return r.tieBest(), ReasonPrefixMatch
	case p.holders:
		return r.tieBest(), ReasonImbalance
	}
	return r.tieBest(), ReasonLeastLoad
}

func (p *loadSnapshot) explain(r *round, k int, out *Scored) {
	c := &r.in.Candidates[r.adm[k]]
	out.part(PartRequests, float64(r.requests(c)))
	if n := r.in.Request.PromptTokens; n > 0 {
		out.part(PartMatch, float64(r.matched(c))/float64(n))
	}
}

// matched is how many tokens of the prompt the engine holds, in any tier.
func (r *round) matched(c *Candidate) int {
	if !c.MatchKnown {
		return 0
	}
	return min(c.MatchGPU+c.MatchCPU+c.MatchSSD, r.in.Request.PromptTokens)
}
