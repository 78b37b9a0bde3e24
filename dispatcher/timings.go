package dispatcher

import (
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Timings are every duration of a dispatcher, the core's beside the shell's, so
// that a test scales them together. Zero fields take the default.
type Timings struct {
	Core core.Timings

	Heartbeat    time.Duration // 5s between renewals of the registration, each jittered by a fifth
	JobsPoll     time.Duration // 1s between looks at ROLLOUTS and RETRY; each is also a sample of the server's clock
	PingGap      time.Duration // 20ms at least between two looks that clients ask for
	ContactEvery time.Duration // 100ms at least between two Contact events of one follower

	Attempt      time.Duration // 2s that one publish or request waits for its answer
	AttemptsFor  time.Duration // 60s that a write without an answer is repeated
	RepeatMin    time.Duration // 50ms before the first repetition, doubled and jittered
	RepeatMax    time.Duration // 1s most between repetitions
	FollowBeat   time.Duration // 500ms between heartbeats of a follower; four missed = it starts over
	AckWait      time.Duration // 30s until an unacked message comes back; part of the consumers' configuration
	Inactive     time.Duration // 1h until an unused consumer goes; part of the consumers' configuration
	PullBeat     time.Duration // 500ms between heartbeats of a waiting pull; two missed = silent
	PullGrace    time.Duration // 2s that a pull may answer late
	RestartMin   time.Duration // 100ms before a failed follower or look is begun anew, doubled and jittered
	RestartMax   time.Duration // 5s most between them
	SnapshotIdle time.Duration // 5s without a part ends a snapshot as failed

	WalkEvery time.Duration // 1s between looks of the expiry walker
	WalkAge   time.Duration // 5s that a message waits before the walker reads it: most are taken before

	StopBudget time.Duration // 5s for a soft stop
	ReadyAge   time.Duration // 5s without contact end readiness
}

// DefaultTimings are those of production.
func DefaultTimings() Timings {
	return Timings{
		Core:      core.DefaultTimings(),
		Heartbeat: 5 * time.Second, JobsPoll: time.Second, PingGap: 20 * time.Millisecond,
		ContactEvery: 100 * time.Millisecond,
		Attempt:      2 * time.Second, AttemptsFor: time.Minute,
		RepeatMin: 50 * time.Millisecond, RepeatMax: time.Second,
		FollowBeat: 500 * time.Millisecond,
		AckWait:    30 * time.Second, Inactive: time.Hour,
		PullBeat: 500 * time.Millisecond, PullGrace: 2 * time.Second,
		RestartMin: 100 * time.Millisecond, RestartMax: 5 * time.Second,
		SnapshotIdle: 5 * time.Second,
		WalkEvery:    time.Second, WalkAge: 5 * time.Second,
		StopBudget: 5 * time.Second, ReadyAge: 5 * time.Second,
	}
}

// WithDefaults fills in what is zero.
func (t Timings) WithDefaults() Timings {
	def := DefaultTimings()
	eachDuration(reflect.ValueOf(&t).Elem(), reflect.ValueOf(&def).Elem(), "", func(_ string, v, d reflect.Value) {
		if v.Int() == 0 {
			v.SetInt(d.Int())
		}
	})
	return t
}

// Scale multiplies every duration, those of the consumers included. Dispatchers
// of one pool must agree on AckWait and Inactive.
func (t Timings) Scale(by float64) Timings {
	eachDuration(reflect.ValueOf(&t).Elem(), reflect.ValueOf(&t).Elem(), "", func(_ string, v, _ reflect.Value) {
		v.SetInt(int64(float64(v.Int()) * by))
	})
	return t
}

// Validate joins every complaint.
func (t Timings) Validate() error {
	var errs []error
	eachDuration(reflect.ValueOf(&t).Elem(), reflect.ValueOf(&t).Elem(), "", func(name string, v, _ reflect.Value) {
		if v.Int() <= 0 {
			errs = append(errs, fmt.Errorf("timings: %s is %v: give a positive duration", name, time.Duration(v.Int())))
		}
	})
	below := func(a string, x time.Duration, b string, y time.Duration) {
		if x >= y {
			errs = append(errs, fmt.Errorf("timings: %s (%v) must be shorter than %s (%v)", a, x, b, y))
		}
	}
	below("Core.HoldInHand", t.Core.HoldInHand, "AckWait", t.AckWait)
	below("FollowBeat", t.FollowBeat, "Core.ContactFresh", t.Core.ContactFresh)
	below("Heartbeat", t.Heartbeat, "Core.Suspect", t.Core.Suspect)
	below("Core.Suspect", t.Core.Suspect, "Core.Lost", t.Core.Lost)
	below("ContactEvery", t.ContactEvery, "Core.ContactFresh", t.Core.ContactFresh)
	if t.RepeatMin > t.RepeatMax {
		errs = append(errs, fmt.Errorf("timings: RepeatMin (%v) must not exceed RepeatMax (%v)", t.RepeatMin, t.RepeatMax))
	}
	if t.RestartMin > t.RestartMax {
		errs = append(errs, fmt.Errorf("timings: RestartMin (%v) must not exceed RestartMax (%v)", t.RestartMin, t.RestartMax))
	}
	return errors.Join(errs...)
}

// eachDuration visits the duration fields of two structs of one type side by
// side. Fields that the core adds are scaled and checked without a change here.
func eachDuration(v, w reflect.Value, prefix string, visit func(name string, v, w reflect.Value)) {
	for i := range v.NumField() {
		name := prefix + v.Type().Field(i).Name
		switch f := v.Field(i); {
		case f.Type() == reflect.TypeFor[time.Duration]():
			visit(name, f, w.Field(i))
		case f.Kind() == reflect.Struct:
			eachDuration(f, w.Field(i), name+".", visit)
		}
	}
}
