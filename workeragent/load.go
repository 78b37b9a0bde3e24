package workeragent

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// loadLoop publishes the engine's load at an interval, staggered from its
// siblings by a random phase, and when something changed.
func (u *unit) loadLoop(ctx context.Context) {
	every := u.a.t.LoadEvery
	if !sleep(ctx, time.Duration(rand.Int64N(int64(every)))) {
		return
	}
	var seq uint64
	for ctx.Err() == nil {
		begun := time.Now()
		seq++
		u.publishLoad(ctx, seq)
		next := begun.Add(jitter(every, 0.1))
		soonest := begun.Add(every / 2)
		t := time.NewTimer(time.Until(next))
		select {
		case <-t.C:
		case <-u.kickLoad:
			t.Stop()
			if !sleep(ctx, time.Until(soonest)) {
				return
			}
		case <-ctx.Done():
		}
		t.Stop()
	}
}

func (u *unit) publishLoad(ctx context.Context, seq uint64) {
	l := u.sample(ctx)
	if l == nil || !u.a.nc.IsConnected() {
		return // load is of the moment: nothing waits in a buffer
	}
	l.Seq = seq
	b, err := json.Marshal(l)
	if err != nil {
		u.log.Error("load does not encode", "error", err)
		return
	}
	if err := u.a.nc.Publish(u.a.pool.Load(u.name), b); err != nil {
		u.log.Debug("load not published", "error", err)
		return
	}
	u.a.metrics.loads.WithLabelValues(u.name, l.Source).Inc()
}

// sample reads the engine's own picture and completes it by what the agent
// knows: requests that it has sent and the engine does not show yet are waiting.
// nil while the engine is not known to answer.
func (u *unit) sample(ctx context.Context) *subjects.Load {
	u.mu.Lock()
	usable := u.probed && !u.down
	// Both before the sample: what it may not show yet is neither claimed nor counted.
	applied, own := u.appliedLocked(), u.atEngineLocked()
	prefill, output := u.backlog.Left(applied)
	requests := u.backlog.Own()
	u.mu.Unlock()
	if !usable {
		return nil
	}
	begun := time.Now()
	actx, cancel := context.WithTimeout(ctx, max(u.a.t.LoadEvery, 50*time.Millisecond))
	l, err := u.cfg.Adapter.Load(actx)
	cancel()
	if err != nil || l == nil {
		l = &subjects.Load{Source: "own", Ranks: []subjects.RankLoad{{}}}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.rates(l)
	if l.Source != "own" {
		u.observe(l)
	}
	u.complete(l, own, applied)
	l.SchemaVersion, l.Engine, l.Epoch = subjects.SchemaVersion, u.name, u.epoch.String()
	l.AppliedRevision, l.IntervalMS = applied, int(u.a.t.LoadEvery.Milliseconds())
	l.PendingPrefillTokens, l.PendingOutputTokens, l.OwnRequests = &prefill, &output, &requests
	l.AgeMS += float64(time.Since(begun)) / float64(time.Millisecond)
	if l.RanksAdvertised == nil {
		n := u.ranksLocked()
		l.RanksAdvertised = &n
	}
	return l
}

// observe takes from a sample what the watchdog and the epoch need. Callers
// hold mu.
func (u *unit) observe(l *subjects.Load) {
	var sum int64
	told, waiting, full := false, 0, false
	for i, r := range l.Ranks {
		full = full || telemetry.Used(&l.Ranks[i]) > telemetry.KVRoom
		if r.PreemptionsTotal != nil {
			sum, told = sum+*r.PreemptionsTotal, true
		}
		if r.Waiting != nil {
			waiting += *r.Waiting
		}
	}
	now := time.Now()
	u.queued, u.queuedAt, u.kvFull = waiting, now, full
	u.shown.learn(l)
	fell := told && u.counters > sum
	if told {
		u.counters = sum
	}
	u.measureLocked(l)
	if x, ok := u.cfg.Adapter.(engine.Observer); ok {
		h := x.Health()
		fell = fell || h.Restarts > u.health.Restarts
		u.feelLocked(h, now)
	}
	// A new life that a look at the engine has just told is not told twice.
	if fell && now.Sub(u.lifeBegan) > u.a.t.Probe {
		u.newLife("a counter fell")
		u.counters = sum
		u.caps.StartedAt = nil // the next look tells it anew, and is no second life
	}
}

// rates adds how fast own runs saw the engine compute prompts. And an adapter that
// was not told the slots tells what the batch made, not what a full one would.
// Callers hold mu.
func (u *unit) rates(l *subjects.Load) {
	if len(l.Ranks) == 1 && u.ranksLocked() == 1 {
		if r := &l.Ranks[0]; r.MaxRunning == nil && r.Running != nil && r.DecodeTokS != nil {
			full := telemetry.FullBatch(*r.DecodeTokS, float64(*r.Running), u.slotsLocked(), telemetry.Used(r))
			r.DecodeTokS = &full
		}
	}
	for i := range l.Ranks {
		u.backlog.TellPrefill(&l.Ranks[i])
	}
}

// complete adds own knowledge. Engine gauges are late: what was sent counts
// from when it was sent. Which rank took it is known with one rank only.
// Callers hold mu.
func (u *unit) complete(l *subjects.Load, own int, applied uint64) {
	if len(l.Ranks) != 1 || u.ranksLocked() != 1 {
		return
	}
	r := &l.Ranks[0]
	slots := u.slotsLocked()
	if l.Source == "own" {
		n, w := min(own, slots), max(0, own-slots)
		r.Running, r.Waiting = &n, &w
	} else if r.Running != nil && r.Waiting != nil {
		if missing := own - *r.Running - *r.Waiting; missing > 0 {
			n := *r.Waiting + missing
			r.Waiting = &n
		}
	}
	if r.Waiting != nil && own >= *r.Waiting { // all that waits is known here, siblings too
		n := u.backlog.Waiting(*r.Waiting, applied)
		if r.WaitingUncachedTokens == nil || n < *r.WaitingUncachedTokens {
			r.WaitingUncachedTokens = &n
		}
	}
	if r.MaxRunning == nil {
		r.MaxRunning = &slots
	}
	if n, _ := u.capacityLocked(); n > 0 && r.KVCapacityTokens == nil {
		r.KVCapacityTokens = &n
	}
}

// atEngineLocked counts what runs at the engine, as far as is known here.
func (u *unit) atEngineLocked() int {
	n := u.ghosts
	for _, r := range u.runs {
		if r.phase == running {
			n++
		}
	}
	return n
}

// appliedLocked is the last revision up to which every reservation that was
// seen has been handed to the engine, or is not for it.
func (u *unit) appliedLocked() uint64 {
	at := u.seen
	for _, r := range u.runs {
		if r.phase == pending && r.res.Revision <= at {
			at = r.res.Revision - 1
		}
	}
	return at
}
