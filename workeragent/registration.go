package workeragent

import (
	"context"
	"errors"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// registerLoop writes and renews the registration: at a heartbeat, and at once
// when something changed. The first one that is written gives the epoch its start.
func (u *unit) registerLoop(ctx context.Context) {
	// Who is there already? Without an answer (no contact yet, or a credential
	// that does not allow to look) it goes on: start numbers still order agents.
	t := time.NewTimer(3 * u.a.t.StoreTimeout)
	select {
	case <-u.seenRegs:
	case <-t.C:
	case <-ctx.Done():
	}
	t.Stop()
	pause := pauses{min: u.a.t.RepeatMin, max: u.a.t.RepeatMax}
	for ctx.Err() == nil && !u.isReplaced() {
		wait := jitter(u.a.t.Heartbeat, 0.2)
		if u.register(ctx) {
			pause.next = 0
		} else {
			wait = min(wait, pause.step())
		}
		for _, rest := range u.restLeft() {
			if rest > 0 {
				wait = min(wait, rest)
			}
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-u.kickReg:
		case <-u.replaced:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// unregistered is why the registration is not written any more, for so long that
// dispatchers suspect the engine; nil = it is. NATS may be there and take
// nothing, as with a full disk (scenario B9).
func (u *unit) unregistered() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.unwritten == nil || time.Since(u.written) < 3*u.a.t.Heartbeat {
		return nil
	}
	return u.unwritten
}

// restLeft is how long the engine is still left alone, by each reason for it.
func (u *unit) restLeft() [2]time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return [2]time.Duration{time.Until(u.resting), time.Until(u.wedgedUntil)} // of the year 1: far below 0
}

func (u *unit) register(ctx context.Context) bool {
	u.mu.Lock()
	if u.over {
		u.mu.Unlock()
		return false
	}
	reg := u.registrationLocked()
	u.mu.Unlock()
	rev, err := u.a.store.PutEngine(ctx, reg)
	if err != nil {
		if ctx.Err() == nil {
			u.log.Debug("registration not written", "error", err)
			u.mu.Lock()
			u.unwritten = err
			u.mu.Unlock()
		}
		return false
	}
	u.a.alive()
	u.a.metrics.registrations.WithLabelValues(u.name).Inc()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.revision = max(u.revision, rev)
	u.written, u.unwritten = time.Now(), nil
	if u.epoch.start == 0 {
		// A stream that was made anew counts from 1 again: be later than whoever
		// is seen there all the same.
		u.epoch.start = max(rev, u.rival+1)
		state, _ := u.standingLocked(time.Now())
		u.log.Info("registered", "epoch", u.epoch.String(), "state", state)
		close(u.started)
		kick(u.kickReg)
	}
	return true
}

func (u *unit) registrationLocked() subjects.Engine {
	c := &u.caps
	state, cause := u.standingLocked(time.Now())
	e := subjects.Engine{
		SchemaVersion: subjects.SchemaVersion, Engine: u.name, Agent: u.a.cfg.Name, Epoch: u.epoch.String(),
		Kind: or(u.cfg.Kind, or(c.Kind, "openai")), Model: or(u.cfg.Model, c.Model), LoRAs: c.LoRAs,
		State: state, Cause: cause, Slots: u.slotsLocked(), Ranks: u.ranksLocked(),
		EngineBlock: c.EngineBlock, BlockTokens: u.a.settings.Load().BlockTokens,
		Events: u.eventsLocked(), WeightVersion: c.WeightVersion,
		Versions: map[string]string{"agent": u.a.cfg.Version},
	}
	if e.EngineBlock == nil && u.told.block > 0 {
		n := u.told.block
		e.EngineBlock = &n
	}
	if c.Version != "" {
		e.Versions["engine"] = c.Version
	}
	if n, source := u.capacityLocked(); n > 0 {
		e.CapacityTokens, e.CapacitySource = &n, source
	}
	if n := u.maxModelLenLocked(); n > 0 {
		e.MaxModelLen = &n
	}
	u.shown.tell(&e)
	return e
}

// deregister takes the own registration away, after the last one was written.
// One that a later agent has written since stands at another revision and stays.
// A renewal without an answer may stand there too: the follower, which still
// runs, tells its revision.
func (u *unit) deregister() {
	ctx, cancel := context.WithTimeout(u.life, 2*u.a.t.StoreTimeout)
	defer cancel()
	pause := u.a.pauses()
	for tries := 0; ; {
		u.mu.Lock()
		rev, over := u.revision, u.over
		u.mu.Unlock()
		if rev == 0 || over {
			return
		}
		err := u.a.store.DeleteEngine(ctx, u.name, rev)
		switch {
		case err == nil:
			u.log.Info("deregistered")
			return
		case errors.Is(err, kvstate.ErrGone):
			return
		case errors.Is(err, kvstate.ErrSuperseded):
			if tries++; tries > 3 {
				return
			}
		}
		if !pause.wait(ctx) {
			u.log.Warn("the registration could not be taken away and will expire", "error", err)
			return
		}
	}
}

// followRegistrations watches the own registration for other agents.
func (u *unit) followRegistrations(ctx context.Context) {
	first := true
	u.a.follow(ctx, "own registration", func() error {
		return u.a.store.FollowEngines(ctx, kvstate.FollowConfig{Name: u.name, Filter: u.name, Agent: true},
			kvstate.Handler[kvstate.Value[subjects.Engine], kvstate.Value[struct{}]]{
				Swap: func(all []kvstate.Value[subjects.Engine], _ []kvstate.Value[struct{}]) {
					for _, v := range all {
						u.seeRegistration(v)
					}
					if first {
						first = false
						close(u.seenRegs)
					}
				},
				Put:   u.seeRegistration,
				Gone:  func(kvstate.Value[struct{}]) { kick(u.kickReg) }, // expired, or taken away by mistake: write it again
				Alive: u.a.alive,
			})
	})
}

// seeRegistration steps aside for a later agent and writes over an earlier one.
func (u *unit) seeRegistration(v kvstate.Value[subjects.Engine]) {
	e, ours := parseEpoch(v.V.Epoch)
	u.mu.Lock()
	defer u.mu.Unlock()
	if ours && e.mark == u.epoch.mark {
		u.revision = max(u.revision, v.Revision)
		return
	}
	start := startOf(v.V.Epoch, v.Revision)
	u.rival = max(u.rival, start)
	switch {
	case u.over || u.epoch.start == 0:
	case start > u.epoch.start:
		u.over = true
		u.log.Warn("a later agent serves this engine: stepping aside", "its agent", v.V.Agent, "its epoch", v.V.Epoch)
		close(u.replaced)
	case v.Revision > u.revision:
		kick(u.kickReg)
	}
}
