package model

import "time"

// ps is picoseconds: 106 days of them.
type ps int64

const maxPS = ps(1<<63 - 1)

// since is a time as picoseconds after the origin; what is before it is 0.
func (m *Model) since(t time.Duration) ps {
	d := max(0, t-m.origin)
	if d > time.Duration(maxPS/1000) {
		return maxPS / 1000 * 1000
	}
	return ps(d) * 1000
}

// time rounds up: what is reported as of a time has happened by then.
func (m *Model) time(t ps) time.Duration { return m.origin + time.Duration((t+999)/1000) }

// rebase moves the origin up to the step that is due, by whole nanoseconds.
func (m *Model) rebase() {
	m.origin += time.Duration(m.at / 1000)
	m.at %= 1000
	m.stats.Busy += time.Duration(m.busy / 1000)
	m.busy %= 1000
}

// wait moves what is due to now, if that is later.
func (m *Model) wait(now time.Duration) {
	if m.since(now) > m.at {
		m.origin, m.at = now, 0
	}
}
