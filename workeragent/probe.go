package workeragent

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"syscall"
	"time"

	"github.com/rollbus/rollbus/workeragent/engine"
)

// probeLoop asks the engine what it is, again and again: that is also how the
// agent sees that it is away, or another life of it.
func (u *unit) probeLoop(ctx context.Context) {
	for ctx.Err() == nil {
		u.probe(ctx)
		u.mu.Lock()
		wait := u.a.t.Probe
		if u.down || !u.probed {
			wait = u.a.t.ProbeDown
		}
		u.mu.Unlock()
		t := time.NewTimer(jitter(wait, 0.2))
		select {
		case <-t.C:
		case <-u.kickLook:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

func (u *unit) probe(ctx context.Context) {
	defer u.remember()
	ctx, cancel := context.WithTimeout(ctx, u.a.t.ProbeTimeout)
	defer cancel()
	caps, err := u.cfg.Adapter.Capabilities(ctx)
	now := time.Now()
	u.mu.Lock()
	defer u.mu.Unlock()
	if err != nil {
		u.unanswered(err, now)
		return
	}
	u.a.metrics.probes.WithLabelValues(u.name, "ok").Inc()
	changed := !u.probed || u.down || !reflect.DeepEqual(caps, u.caps)
	if u.probed && u.isNewLife(caps) {
		u.newLife("the process started anew")
	}
	if u.down || !u.probed {
		u.log.Info("the engine answers", "kind", caps.Kind, "model", caps.Model)
	}
	u.noticeLocked(&caps)
	if caps.Model != u.caps.Model {
		u.forgetLocked()
	}
	u.caps, u.probed, u.down, u.refused, u.failing = caps, true, false, false, time.Time{}
	if changed {
		kick(u.kickReg)
		kick(u.kickCache)
		kick(u.kickLoad)
	}
}

// unanswered counts an engine as down: at once when its port refuses, after a
// while when it is only silent, and not while its runs move.
func (u *unit) unanswered(err error, now time.Time) {
	u.a.metrics.probes.WithLabelValues(u.name, "failed").Inc()
	if u.failing.IsZero() {
		u.failing = now
	}
	refused := errors.Is(err, syscall.ECONNREFUSED)
	u.refused = u.refused || refused
	moving := !u.lastMove.IsZero() && now.Sub(u.lastMove) < u.a.t.DownAfter
	silent := now.Sub(u.failing) >= u.a.t.DownAfter && !moving
	if !u.down && (refused || silent || !u.probed) {
		u.log.Warn("the engine does not answer", "error", err)
		u.down, u.downWhy = true, brief(err.Error())
		kick(u.kickReg)
	}
}

// brief is a text that fits into a registration.
func brief(s string) string {
	const most = 300
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

// isNewLife tells whether the process behind the address is another one. Where
// it does not say when it started, a refused connection since is taken for it.
func (u *unit) isNewLife(c engine.Capabilities) bool {
	if c.StartedAt != nil && u.caps.StartedAt != nil {
		return *c.StartedAt != *u.caps.StartedAt
	}
	return u.refused
}

// newLife begins a new epoch: the cache is gone and so is every run. Callers
// hold mu.
func (u *unit) newLife(why string) {
	u.epoch.life++
	u.forgetLocked()
	u.counters, u.refused, u.lifeBegan = -1, false, time.Now()
	u.log.Warn("the engine has restarted: a new epoch begins", "why", why, "epoch", u.epoch.String(), "runs", len(u.runs))
	u.a.metrics.epochs.WithLabelValues(u.name).Inc()
	for _, r := range u.runs {
		r.cancel(errRestarted)
	}
	kick(u.kickReg)
	kick(u.kickLoad)
	kick(u.kickCache)
}

// forgetLocked drops what was measured of an engine that may be another one now.
// Callers hold mu.
func (u *unit) forgetLocked() {
	u.measured = measured{}
	u.backlog.Restarted()
}

// rest leaves the engine alone for a while after it refused a run; refusals
// within one such while count once.
func (u *unit) rest() {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	if now.Before(u.resting) {
		return
	}
	u.backoff = min(max(u.a.t.BackoffMin, 2*u.backoff), u.a.t.BackoffMax)
	u.resting = now.Add(jitter(u.backoff, 0.2))
	kick(u.kickReg)
}
