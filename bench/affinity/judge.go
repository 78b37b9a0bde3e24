package affinity

import "fmt"

// What the validator asks for.
const (
	// concentrated is the least share of the hits on one engine with affinity.
	concentrated = 0.9
	// found is the least share of what could be found cached with affinity: one
	// request in a few may go astray while the news of a cache travel.
	found = 0.8
)

// scattered is the largest share of one of n engines without affinity: midway
// between all of it and an even share.
func scattered(n int) float64 { return (1 + 1/float64(n)) / 2 }

// judge fills in a phase's sums and checks.
func (p *Phase) judge(arm *Arm, engines []Engine) {
	p.count(engines)
	check := func(ok bool, what, format string, args ...any) {
		p.Checks = append(p.Checks, Check{what, ok, fmt.Sprintf(format, args...)})
	}
	p.checkModes(arm, check)
	p.checkUsage(engines, check)
	switch {
	case p.Kind == Distinct:
		most := int64(0)
		for i := range p.Engines {
			most += p.Engines[i].Allowed
		}
		check(p.Hits <= most, "no_hits", "prompts that share nothing hit %d tokens, want at most a block a request, %d", p.Hits, most)
	case arm.Affinity == affinityOn:
		check(p.Hits > 0 && p.Share >= concentrated, "concentrates", "%.0f%% of %d hit tokens are on one engine, want at least %.0f%%", 100*p.Share, p.Hits, 100*concentrated)
		check(float64(p.Hits) >= found*float64(p.Possible), "finds", "%d of %d tokens that were computed before were found cached, want at least %.0f%%", p.Hits, p.Possible, 100*found)
	default:
		most := scattered(len(engines))
		check(p.Share <= most, "scatters", "%.0f%% of %d hit tokens are on one engine, want at most %.0f%%", 100*p.Share, p.Hits, 100*most)
	}
}

// count sums by engine.
func (p *Phase) count(engines []Engine) {
	most, requests := int64(0), 0
	p.Hits = 0
	for i := range p.Engines {
		c := &p.Engines[i]
		c.Requests, c.Usage, c.Untold = 0, 0, 0
		for j := range p.Requests {
			r := &p.Requests[j]
			switch {
			case r.Engine != c.Engine:
			case r.Cached == nil:
				c.Requests++
				c.Untold++
			default:
				c.Requests++
				c.Usage += int64(*r.Cached)
			}
		}
		if engines[i].summed {
			c.Before, c.After = 0, c.Usage
		}
		c.Hits = c.After - c.Before
		c.Difference = c.Hits - c.Usage
		c.Allowed = int64(c.Requests) * int64(engines[i].Block)
		p.Hits += c.Hits
		most, requests = max(most, c.Hits), max(requests, c.Requests)
	}
	switch {
	case p.Hits > 0:
		p.Share = float64(most) / float64(p.Hits)
	case len(p.Requests) > 0:
		p.Share = float64(requests) / float64(len(p.Requests))
	}
}

// checkModes wants every decision to be one of the arm.
func (p *Phase) checkModes(arm *Arm, check func(bool, string, string, ...any)) {
	for i := range p.Requests {
		r := &p.Requests[i]
		if r.Mode != arm.Mode || r.Policy != arm.Policy {
			check(false, "settings", "rollout %s was decided by %s in mode %s (%s), want %s in mode %s", r.Rollout, r.Policy, r.Mode, r.Reason, arm.Policy, arm.Mode)
			return
		}
	}
	check(len(p.Requests) > 0, "settings", "%d decisions by %s in mode %s", len(p.Requests), arm.Policy, arm.Mode)
}

// checkUsage wants each engine's counter to say what its answers say.
func (p *Phase) checkUsage(engines []Engine, check func(bool, string, string, ...any)) {
	for i := range p.Engines {
		c := &p.Engines[i]
		switch {
		case c.Untold > 0:
			check(false, "usage", "engine %s tells no cached_tokens in %d of %d answers: vLLM does with --enable-prompt-tokens-details", c.Engine, c.Untold, c.Requests)
		case engines[i].summed:
			check(true, "usage", "engine %s has no counter: its hits are what its answers say", c.Engine)
		case c.Hits < 0:
			check(false, "usage", "the counter of engine %s fell by %d: it was restarted", c.Engine, -c.Hits)
		default:
			check(max(c.Difference, -c.Difference) <= c.Allowed, "usage", "engine %s counted %d hit tokens and its %d answers say %d: want a difference of at most a block of %d a request; is there other traffic?",
				c.Engine, c.Hits, c.Requests, c.Usage, engines[i].Block)
		}
	}
}
