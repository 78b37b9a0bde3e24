package workeragent

import (
	"context"
	"slices"
	"time"
)

// watchLoop takes runs from an engine that does not move them (scenario R6).
func (u *unit) watchLoop(ctx context.Context) {
	t := time.NewTicker(u.a.t.Watch)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			u.watch(time.Now())
		case <-ctx.Done():
			return
		}
	}
}

// watch ends runs that gave no output for ProgressTimeout. The time that a run
// stands in the engine's queue does not count: while the engine moves other runs
// and either has its slots full of earlier ones or reports a queue.
func (u *unit) watch(now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var at []*run
	for _, r := range u.runs {
		if r.phase == running {
			at = append(at, r)
		}
	}
	slices.SortFunc(at, func(a, b *run) int { return a.handed.Compare(b.handed) })
	slots := u.slotsLocked()
	reported := u.queued > 0 && now.Sub(u.queuedAt) < 5*u.a.t.LoadEvery
	paused := u.pausedLocked()
	for i, r := range at {
		if paused { // whoever paused it resumes it, or the attempt's time ends
			r.since = now
			continue
		}
		// Its own output does not speak for the others.
		moves := now.Sub(u.lastMove) < u.a.t.ProgressTimeout && !r.moved.Equal(u.lastMove)
		if moves && (i >= slots || reported) {
			r.since = now
			continue
		}
		if silent := now.Sub(later(r.since, r.moved)); silent >= u.a.t.ProgressTimeout {
			u.log.Warn("a run makes no progress and is taken from the engine", "rollout", r.res.Key(), "bind", r.res.Bind, "silent", silent)
			r.cancel(errNoProgress)
		}
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
