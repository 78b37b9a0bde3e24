package workeragent

import (
	"strings"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// maxWedgeHold bounds the doubling of Timings.WedgeHold.
const maxWedgeHold = 16

// standingLocked is what the registration says of the engine, and why it is not
// ready. Callers hold mu.
//
//	answers, and is paused, asleep, resting or has no room for answers -> paused
//	answers, and has work that nothing moves -> down: what it is given is lost time
//
// Each of these ends by itself: the next look or sample says otherwise, or the
// time is over (scenario P8).
func (u *unit) standingLocked(now time.Time) (state subjects.EngineState, cause string) {
	switch {
	case u.draining:
		return subjects.EngineDraining, "the agent is stopping"
	case !u.probed && !u.down || u.epoch.start == 0:
		return subjects.EngineStarting, ""
	case u.down:
		return subjects.EngineDown, "it does not answer: " + u.downWhy
	case u.asleepLocked():
		return subjects.EnginePaused, "it sleeps, by somebody's call"
	case u.pausedLocked(): // nothing moves then, and it is not wedged
		return subjects.EnginePaused, "it is paused, by somebody's call"
	case u.wedgedLocked(now):
		return subjects.EngineDown, "wedged: it has work and nothing moves"
	case now.Before(u.resting):
		return subjects.EnginePaused, "it refused work and is left alone for a while"
	case u.spooling:
		return subjects.EnginePaused, "answers cannot be stored, and the spool is full"
	}
	return subjects.EngineReady, ""
}

func (u *unit) wedgedLocked(now time.Time) bool { return now.Before(u.wedgedUntil) }

// asleepLocked: the load tells it soonest, a look more surely.
func (u *unit) asleepLocked() bool { return u.health.Asleep || is(u.caps.Asleep) && is(u.caps.Paused) }

// pausedLocked: what it is given now would hang until somebody resumes it.
func (u *unit) pausedLocked() bool { return u.health.Asleep || is(u.caps.Paused) }

func is(v *bool) bool { return v != nil && *v }

// feelLocked takes what the samples of the load so far come to. Callers hold mu.
func (u *unit) feelLocked(h engine.Health, now time.Time) {
	before := u.health
	u.health = h
	switch {
	case h.Asleep != before.Asleep:
		if h.Asleep {
			u.emptiedLocked()
		}
		u.log.Info("the engine's sleep changed behind the agent's back", "asleep", h.Asleep)
		kick(u.kickReg)
		kick(u.kickLook)
	case h.Wedged && !u.wedgedLocked(now):
		u.wedgeHold = min(max(u.a.t.WedgeHold, 2*u.wedgeHold), maxWedgeHold*u.a.t.WedgeHold)
		u.log.Warn("the engine has work and nothing moves: it counts as down", "runs", len(u.runs), "left alone for", u.wedgeHold)
		kick(u.kickReg)
	case h.Moved && u.wedgedLocked(now):
		u.wedgedUntil = time.Time{}
		u.log.Info("the engine moves again")
		kick(u.kickReg)
	}
	if h.Wedged { // and for a while after its last run was taken away
		u.wedgedUntil = now.Add(u.wedgeHold)
	}
	if h.Problem != "" {
		word, _, _ := strings.Cut(h.Problem, ":")
		u.a.metrics.loadProblems.WithLabelValues(u.name, word).Inc()
	}
	if h.Problem != before.Problem {
		u.log.Debug("whether the engine's own picture counts", "problem", h.Problem)
	}
}

// noticeLocked compares a look with the one before it: what was done behind the
// agent's back and empties the cache, whenever the engine's events say so.
// Callers hold mu.
func (u *unit) noticeLocked(c *engine.Capabilities) {
	old := &u.caps
	if is(c.Asleep) && !is(old.Asleep) {
		u.emptiedLocked()
	}
	if !u.probed {
		return
	}
	if old.WeightVersion != nil && c.WeightVersion != nil && *old.WeightVersion != *c.WeightVersion {
		u.log.Info("the engine has other weights", "version", *c.WeightVersion, "before", *old.WeightVersion)
		u.emptiedLocked() // what was computed with other weights is no prefix
		for _, r := range u.runs {
			if r.phase == running && len(r.synced) < maxSyncs {
				r.synced = append(r.synced, weightSync{r.made, *c.WeightVersion})
			}
		}
	}
	if is(c.Paused) != is(old.Paused) {
		u.log.Info("the engine's pause changed behind the agent's back", "paused", is(c.Paused))
	}
}
