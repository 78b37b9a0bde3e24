package workeragent

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Reasons of a return. Those of a failed attempt carry the outcome's code after
// a colon.
const (
	returnOverCapacity = "over_capacity" // more was bound than fits
	returnDraining     = "draining"      // the agent is stopping
	returnEngineDown   = "engine_down"
	returnEngineBusy   = "engine_busy" // it refused lately
	returnWedged       = "engine_wedged"
	returnPaused       = "engine_paused" // or asleep, by somebody else's call
	returnSpoolFull    = "spool_full"    // answers cannot be stored
	returnEpoch        = "epoch"         // bound to an earlier life of the engine
	returnRestarted    = "engine_restarted"
	returnNoProgress   = "no_progress"
	returnTimeout      = "attempt_timeout"
	returnFailed       = "failed"
	returnDataError    = "data_error"
	returnNotAccepted  = "not_accepted"
	returnAborted      = "aborted"
)

// swap takes a complete view of the own keys: what is not in it any more is
// dropped, what is new is seen.
func (u *unit) swap(all []kvstate.Reservation, _ []kvstate.Marker) {
	at := make(map[string]uint64, len(all))
	for i := range all {
		at[all[i].Key()] = all[i].Revision
	}
	u.mu.Lock()
	for key, r := range u.runs {
		if at[key] != r.res.Revision {
			u.drop(key, r)
		}
	}
	u.mu.Unlock()
	all = slices.SortedFunc(slices.Values(all), func(a, b kvstate.Reservation) int { return cmp.Compare(a.Revision, b.Revision) })
	for i := range all {
		u.see(all[i])
	}
}

// gone takes the end of a key.
func (u *unit) gone(m kvstate.Marker) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen = max(u.seen, m.Revision)
	key := subjects.RolloutKey(m.Job, m.ID)
	// A late delete of an earlier attempt says nothing of the one that runs.
	if r := u.runs[key]; r != nil && r.res.Revision < m.Revision {
		u.drop(key, r)
	}
}

// see takes a key as it stands: it is run, given back, or left alone.
func (u *unit) see(res kvstate.Reservation) {
	u.mu.Lock()
	u.seen = max(u.seen, res.Revision)
	key := res.Key()
	if old := u.runs[key]; old != nil {
		if old.res.Revision >= res.Revision {
			u.mu.Unlock()
			return
		}
		u.drop(key, old)
	}
	if res.State != subjects.StateBound || u.handing[key] == res.Revision || u.over {
		u.mu.Unlock()
		return
	}
	e, known := parseEpoch(res.Epoch)
	switch {
	case known && e == u.epoch:
		reason := u.refusalLocked(time.Now())
		if reason == "" {
			u.start(key, res)
			u.mu.Unlock()
			return
		}
		u.handing[key] = res.Revision
		u.mu.Unlock()
		u.handingBack(func() { u.giveBack(res, reason, 0) })
	case known && e.mark == u.epoch.mark:
		// Of an earlier life of the engine under this agent, and not running:
		// it never ran.
		u.handing[key] = res.Revision
		u.mu.Unlock()
		u.handingBack(func() { u.giveBack(res, returnEpoch, 0) })
	case known && e.start > u.epoch.start:
		u.mu.Unlock()
		u.log.Info("a key of a later agent is left alone", "rollout", key, "its epoch", res.Epoch)
	default:
		u.handing[key] = res.Revision
		u.mu.Unlock()
		u.handingBack(func() { u.leftover(res) })
	}
}

// refusalLocked is why nothing more can be taken now, "" when it can.
func (u *unit) refusalLocked(now time.Time) string {
	switch {
	case u.draining:
		return returnDraining
	case u.down:
		return returnEngineDown
	case u.pausedLocked():
		return returnPaused
	case u.wedgedLocked(now):
		return returnWedged
	case now.Before(u.resting):
		return returnEngineBusy
	case u.a.spool.over():
		return returnSpoolFull
	case len(u.runs) >= u.slotsLocked()+u.a.settings.Load().PrefetchSlots():
		return returnOverCapacity
	}
	return ""
}

// handingBack runs f beside the follower, which waits when too many do.
func (u *unit) handingBack(f func()) {
	select {
	case u.handBack <- struct{}{}:
	case <-u.life.Done():
		return
	}
	u.wg.Go(func() {
		defer func() { <-u.handBack }()
		f()
	})
}

// leftover ends a key of an earlier agent: what was answered is released, the
// rest goes back with what its checkpoint kept.
func (u *unit) leftover(res kvstate.Reservation) {
	pause := u.a.pauses()
	for {
		_, err := u.a.store.Result(u.life, res.Job, res.Reader, res.ID)
		switch {
		case err == nil:
			u.release(released(res, subjects.OutcomeSuperseded, nil), res.Revision)
			u.doneHanding(res)
			return
		case errors.Is(err, kvstate.ErrGone):
			u.giveBack(u.withCheckpoint(res), returnEpoch, 1)
			return
		case errors.Is(err, kvstate.ErrRefused):
			u.log.Error("the register cannot be read: the key is left to dispatchers", "rollout", res.Key(), "error", err)
			u.doneHanding(res)
			return
		}
		if !pause.wait(u.life) {
			u.doneHanding(res)
			return
		}
	}
}

// returnReasons are those that can be; metrics show each at 0.
var returnReasons = [...]string{
	returnOverCapacity, returnDraining, returnEngineDown, returnEngineBusy, returnWedged, returnPaused, returnSpoolFull, returnEpoch,
	returnRestarted, returnNoProgress, returnTimeout, returnFailed, returnDataError, returnNotAccepted, returnAborted,
}

// giveBack returns a key, again until it is answered. The key is in u.handing.
func (u *unit) giveBack(res kvstate.Reservation, reason string, burn int) {
	defer u.doneHanding(res)
	received := time.Now()
	left := res.LeftMS
	pause := u.a.pauses()
	for {
		res.LeftMS = max(0, left-time.Since(received).Milliseconds())
		_, err := u.a.store.Return(u.life, res, reason, res.Burnt+burn)
		switch {
		case err == nil:
			u.a.alive()
			u.a.metrics.returns.WithLabelValues(u.name, word(reason)).Inc()
			u.log.Debug("returned", "rollout", res.Key(), "bind", res.Bind, "reason", reason, "burnt", res.Burnt+burn)
			return
		case errors.Is(err, kvstate.ErrSuperseded), errors.Is(err, kvstate.ErrGone):
			return
		case errors.Is(err, kvstate.ErrRefused):
			u.log.Error("a return is refused: the key is left to dispatchers", "rollout", res.Key(), "error", err)
			return
		}
		u.a.metrics.repeats.WithLabelValues(u.name, "return").Inc()
		if !pause.wait(u.life) {
			return
		}
	}
}

func (u *unit) doneHanding(res kvstate.Reservation) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.handing[res.Key()] == res.Revision {
		delete(u.handing, res.Key())
	}
	kick(u.changed)
}

// word is a reason without its detail.
func word(reason string) string {
	for i := range len(reason) {
		if reason[i] == ':' {
			return reason[:i]
		}
	}
	return reason
}

// release deletes a key, again until it is answered.
func (u *unit) release(r subjects.Released, revision uint64) {
	pause := u.a.pauses()
	for {
		_, err := u.a.store.Release(u.life, r, revision)
		switch {
		case err == nil:
			u.a.alive()
			return
		case errors.Is(err, kvstate.ErrSuperseded), errors.Is(err, kvstate.ErrGone):
			return // somebody else did, or an earlier attempt of ours
		case errors.Is(err, kvstate.ErrRefused):
			u.log.Error("a release is refused: the key is left to dispatchers", "rollout", subjects.RolloutKey(r.Job, r.ID), "error", err)
			return
		}
		u.a.metrics.repeats.WithLabelValues(u.name, "release").Inc()
		if !pause.wait(u.life) {
			return
		}
	}
}

func released(res kvstate.Reservation, o subjects.Outcome, usage *subjects.Usage) subjects.Released {
	r := subjects.Released{
		Engine: res.Engine, Job: res.Job, ID: res.ID, Outcome: o, Bind: res.Bind, Epoch: res.Epoch,
		Tokens: res.Tokens, PromptTokens: res.PromptTokens, Group: res.Group,
	}
	if usage != nil {
		r.CompletionTokens, r.CachedTokens = &usage.CompletionTokens, usage.CachedTokens
	}
	return r
}

func (a *Agent) pauses() pauses { return pauses{min: a.t.RepeatMin, max: a.t.RepeatMax} }

// start runs a key. Callers hold mu.
func (u *unit) start(key string, res kvstate.Reservation) {
	ctx, cancel := context.WithCancelCause(u.life)
	now := time.Now()
	r := &run{res: res, received: now, since: now, ctx: ctx, cancel: cancel, id: newRunID()}
	u.runs[key] = r
	u.wg.Go(func() {
		defer cancel(nil)
		u.settle(r, u.attempt(r))
	})
}
