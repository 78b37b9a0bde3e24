package workeragent

import (
	"path/filepath"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

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
	if n := u.measured; now.CapacityTokens == nil {
		now.CapacityTokens = &n
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

// measureLocked takes the capacity out of a load, for engines that tell it
// nowhere else. Callers hold mu.
func (u *unit) measureLocked(l *subjects.Load) {
	if l.Problem != "" || len(l.Ranks) < u.ranksLocked() {
		return
	}
	var sum int64
	for _, r := range l.Ranks {
		if r.KVCapacityTokens == nil {
			return
		}
		sum += *r.KVCapacityTokens
	}
	u.measured = sum
}
