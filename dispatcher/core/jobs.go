package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// job is one training run: the unit of fairness.
type job struct {
	name     string
	reserved int64   // tokens in reservations, any dispatcher's
	count    int     // reservations
	used     float64 // tokens of finished work, decaying with FairWindow
	waiting  [laneCount][]*item
	waits    int
}

// lane ranks: urgent, retry, continue, normal, batch.
const (
	rankUrgent = iota
	rankRetry
	rankContinue
	rankNormal
	rankBatch
	laneCount
)

func laneRank(q Queue) int {
	if q.Retry {
		return rankRetry
	}
	switch q.Lane {
	case subjects.LaneUrgent:
		return rankUrgent
	case subjects.LaneContinue:
		return rankContinue
	case subjects.LaneBatch:
		return rankBatch
	}
	return rankNormal
}

func (c *Core) job(name string) *job {
	j := c.jobs[name]
	if j == nil {
		j = &job{name: name}
		c.jobs[name] = j
	}
	return j
}

func (j *job) add(h *held) {
	j.count++
	j.reserved += int64(h.Tokens)
}

func (j *job) remove(h *held) {
	j.count--
	j.reserved -= int64(h.Tokens)
}

// share is what the job has of the fleet, over its weight: the job with the
// least is served next. Same inputs at every dispatcher, since reservations
// and releases are seen by all.
func (c *Core) share(j *job) float64 {
	w := c.settings.JobWeights[j.name]
	if w <= 0 {
		w = 1
	}
	return (float64(j.reserved) + j.used) / w
}

// put queues an item: older steps first within what is in hand, then FIFO.
func (j *job) put(it *item) {
	q := &j.waiting[it.lane]
	at, _ := slices.BinarySearchFunc(*q, it, func(a, b *item) int {
		switch {
		case a.facts.Step != b.facts.Step:
			return cmp.Compare(uint64(a.facts.Step), uint64(b.facts.Step))
		case a.stored != b.stored:
			return cmp.Compare(uint64(a.stored), uint64(b.stored))
		}
		return cmp.Compare(a.seq, b.seq)
	})
	*q = slices.Insert(*q, at, it)
	j.waits++
}

func (j *job) take(it *item) {
	q := &j.waiting[it.lane]
	if i := slices.Index(*q, it); i >= 0 {
		*q = slices.Delete(*q, i, i+1)
		j.waits--
	}
}

// urgency of a queue's head: lower is sooner. Every AgingStep of waiting
// outweighs one lane, so that after laneCount steps nothing that came later is
// served before it (scenario P19: the wait has a bound).
func (c *Core) urgency(lane int, stored int64) time.Duration {
	return time.Duration(lane)*c.t.AgingStep - c.server.since(stored, c.now)
}

// sweepJobs ages what was used and forgets jobs that have nothing.
func (c *Core) sweepJobs(dt time.Duration) {
	keep := 1 - min(1, float64(dt)/float64(c.t.FairWindow))
	busy := map[string]bool{}
	for q := range c.queues {
		busy[q.Job] = true
	}
	for name, j := range c.jobs {
		j.used = float64(j.used * keep)
		if j.count == 0 && j.waits == 0 && j.used < 1 && !busy[name] {
			delete(c.jobs, name)
		}
	}
}
