package core

import (
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// oldest is the lowest weight version that may answer: min, and not more than
// max_staleness below the newest that an engine of the pool serves now. Of
// weights that no engine has told yet nothing is known: version 0 is asked for
// then, which only an engine that tells its version can meet.
func (c *Core) oldest(f *subjects.Facts) *int64 {
	if f.WeightStaleness == nil {
		return f.WeightMin
	}
	least := max(0, c.newest(f.Model)-*f.WeightStaleness)
	if f.WeightMin != nil {
		least = max(least, *f.WeightMin)
	}
	return &least
}

// newest is the highest weight version that engines of the model have accepted;
// one that is lost, starts, or has not accepted its weights says nothing.
func (c *Core) newest(model string) int64 {
	var v int64
	for i := range c.cands {
		cand := &c.cands[i]
		switch cand.State {
		case policy.Ready, policy.Paused, policy.Draining:
			if cand.WeightVersion != nil && cand.Serves(model) {
				v = max(v, *cand.WeightVersion)
			}
		}
	}
	return v
}

// weights is what the request asks of weights, as its reservation says it.
func weights(f *subjects.Facts) string {
	if f.WeightMin == nil && f.WeightExact == nil && f.WeightStaleness == nil {
		return ""
	}
	return subjects.FormatWeights(&subjects.WeightVersion{Min: f.WeightMin, Exact: f.WeightExact, MaxStaleness: f.WeightStaleness})
}
