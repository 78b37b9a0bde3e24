package core

import "github.com/rollbus/rollbus/dispatcher/policy"

// observe fills in what belongs to the moment and the request: the engines' own
// pictures, prefix matches, stickiness.
func (c *Core) observe(in *policy.Input) {
}

// record emits the decision that the policy just took.
func (c *Core) record(it *item, chosen int) {
	d := Decision{
		Rollout: it.key(), Bind: it.bind, Policy: c.rec.Policy, Mode: string(c.rec.Mode),
		Reason: string(c.rec.Reason), Basis: string(c.rec.Basis), Tokens: it.tokens,
	}
	if chosen >= 0 {
		d.Engine = c.names[chosen]
	}
	c.emit(d)
}
