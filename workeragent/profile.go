package workeragent

import (
	"path/filepath"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// measured is what the load tells of an engine's size, over all ranks; 0 = not.
type measured struct {
	tokens int64
	slots  int
}

// profilePath is where the engine's profile is kept, "" = nowhere.
func (u *unit) profilePath() string {
	if u.a.cfg.StateDir == "" {
		return ""
	}
	return filepath.Join(u.a.cfg.StateDir, u.a.cfg.Pool+"."+u.name+".json")
}

// recall reads what the engine reported in an earlier life of the agent. It is
// no loss when that cannot be read.
func (u *unit) recall() {
	path := u.profilePath()
	if path == "" {
		return
	}
	var err error
	if u.profile, err = telemetry.ReadProfile(path); err != nil {
		u.log.Warn("what the engine reported earlier is not known", "error", err)
	}
}

// profiledLocked: a profile is of a model; until the engine has answered it is
// taken for that engine's. Callers hold mu.
func (u *unit) profiledLocked() bool { return !u.probed || u.profile.Model == u.caps.Model }

// remember keeps what the engine reports. It is called by the probing goroutine
// alone.
func (u *unit) remember() {
	u.mu.Lock()
	if !u.probed {
		u.mu.Unlock()
		return
	}
	now := telemetry.Profile{Model: u.caps.Model, CapacityTokens: u.caps.CapacityTokens, Slots: u.caps.Slots}
	if m := u.measured; now.CapacityTokens == nil {
		now.CapacityTokens = &m.tokens
	}
	if m := u.measured; now.Slots == nil {
		now.Slots = &m.slots
	}
	next := u.profile.Merge(now)
	news := !next.Equal(u.profile) && (next.CapacityTokens != nil || next.Slots != nil)
	if news {
		u.profile = next
	}
	u.mu.Unlock()
	path := u.profilePath()
	if !news || path == "" {
		return
	}
	if err := next.Write(path); err != nil {
		u.log.Warn("what the engine reports is not kept", "error", err)
	}
}

// measureLocked takes capacity and slots out of a load, for engines that tell
// them nowhere else. Callers hold mu.
func (u *unit) measureLocked(l *subjects.Load) {
	if l.Problem != "" || len(l.Ranks) < u.ranksLocked() {
		return
	}
	tokens, slots := int64(0), 0
	all, every := true, true // every rank tells
	for _, r := range l.Ranks {
		if r.KVCapacityTokens != nil {
			tokens += *r.KVCapacityTokens
		} else {
			all = false
		}
		if r.MaxRunning != nil {
			slots += *r.MaxRunning
		} else {
			every = false
		}
	}
	if all {
		u.measured.tokens = tokens
	}
	if every {
		u.measured.slots = slots
	}
}
