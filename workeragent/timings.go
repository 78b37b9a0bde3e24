package workeragent

import (
	"errors"
	"fmt"
	"reflect"
	"time"
)

// Timings are every duration of an agent, in one struct so that a test scales
// them together. Zero fields take the default.
type Timings struct {
	Heartbeat time.Duration // 5s between renewals of a registration, jittered by a fifth; also at once on change
	LoadEvery time.Duration // 200ms between load snapshots, jittered by a tenth; also on change, at most twice as often

	Probe        time.Duration // 5s between looks at an engine's capabilities
	ProbeDown    time.Duration // 1s between them while it does not answer
	ProbeTimeout time.Duration // 5s for one look
	DownAfter    time.Duration // 15s of unanswered looks until an engine counts as down; refused connections count at once; also until a port for cache events counts as mute

	ProgressTimeout time.Duration // 2m without output until a run is taken from its engine
	Watch           time.Duration // 1s between looks for such runs
	AbortTimeout    time.Duration // 5s for an abort at the engine

	BackoffMin time.Duration // 500ms that an engine is left alone after it refused, doubled each time
	BackoffMax time.Duration // 30s most
	WedgeHold  time.Duration // 30s that an engine still counts as down after it was wedged and nothing runs there, doubled each time up to 16-fold

	CacheGuess time.Duration // 10m for which a prompt that ran at an engine without cache events is taken to be cached there

	StoreTimeout   time.Duration // 2s that one write waits for its answer
	StoreHeartbeat time.Duration // 500ms between signs of life of an idle follower
	RepeatMin      time.Duration // 50ms before a write is repeated, doubled and jittered
	RepeatMax      time.Duration // 2s most between repetitions
	ReadyAge       time.Duration // 5s without contact end readiness

	DrainTimeout time.Duration // 5m that Stop lets runs finish
	HandBack     time.Duration // 10s that Stop takes to give back the rest
}

// DefaultTimings are those of production.
func DefaultTimings() Timings {
	return Timings{
		Heartbeat: 5 * time.Second, LoadEvery: 200 * time.Millisecond,
		Probe: 5 * time.Second, ProbeDown: time.Second, ProbeTimeout: 5 * time.Second, DownAfter: 15 * time.Second,
		ProgressTimeout: 2 * time.Minute, Watch: time.Second, AbortTimeout: 5 * time.Second,
		BackoffMin: 500 * time.Millisecond, BackoffMax: 30 * time.Second, WedgeHold: 30 * time.Second,
		CacheGuess:   10 * time.Minute,
		StoreTimeout: 2 * time.Second, StoreHeartbeat: 500 * time.Millisecond,
		RepeatMin: 50 * time.Millisecond, RepeatMax: 2 * time.Second, ReadyAge: 5 * time.Second,
		DrainTimeout: 5 * time.Minute, HandBack: 10 * time.Second,
	}
}

// WithDefaults fills in what is zero.
func (t Timings) WithDefaults() Timings {
	def := reflect.ValueOf(DefaultTimings())
	t.each(func(i int, v reflect.Value) {
		if v.Int() == 0 {
			v.Set(def.Field(i))
		}
	})
	return t
}

// Scale multiplies every duration.
func (t Timings) Scale(by float64) Timings {
	t.each(func(_ int, v reflect.Value) { v.SetInt(int64(float64(v.Int()) * by)) })
	return t
}

func (t *Timings) each(f func(i int, v reflect.Value)) {
	v := reflect.ValueOf(t).Elem()
	for i := range v.NumField() {
		f(i, v.Field(i))
	}
}

// Validate joins every complaint. It expects defaults to be filled in.
func (t Timings) Validate() error {
	var errs []error
	names := reflect.TypeFor[Timings]()
	t.each(func(i int, v reflect.Value) {
		if v.Int() <= 0 {
			errs = append(errs, fmt.Errorf("timings: %s is %v: give a positive duration", names.Field(i).Name, time.Duration(v.Int())))
		}
	})
	ordered := func(a string, x time.Duration, b string, y time.Duration) {
		if x > y {
			errs = append(errs, fmt.Errorf("timings: %s (%v) must not exceed %s (%v)", a, x, b, y))
		}
	}
	ordered("BackoffMin", t.BackoffMin, "BackoffMax", t.BackoffMax)
	ordered("RepeatMin", t.RepeatMin, "RepeatMax", t.RepeatMax)
	ordered("Watch", t.Watch, "ProgressTimeout", t.ProgressTimeout)
	ordered("StoreTimeout", t.StoreTimeout, "HandBack", t.HandBack)
	return errors.Join(errs...)
}
