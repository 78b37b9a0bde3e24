package faults

import (
	"context"
	"testing"
	"time"
)

// A fifth of production's liveness timings: 25 s are 5 s here.
const scale = 0.2

func scaled(d time.Duration) time.Duration { return time.Duration(float64(d) * scale) }

// scenario F9
func TestANATSOutageOf25SecondsAbortsNoRun(t *testing.T) {
	r := strike(t, Config{Dispatchers: 2, Engines: 2, Rollouts: 200, Scale: scale, rate: 12, script: func(ctx context.Context, p *pool, _ func(Struck)) error {
		if err := pause(ctx, 4*time.Second); err != nil {
			return err
		}
		return p.outage(ctx, scaled(25*time.Second))
	}})
	if r.Silence < scaled(25*time.Second) {
		t.Errorf("answers were at most %v apart: there was no outage", r.Silence)
	}
	if f := r.Figures; f.Requeued != 0 || f.Completed != 200 {
		t.Errorf("%d rollouts were bound again and %d completed; want none and all 200: a run was aborted", f.Requeued, f.Completed)
	}
}

// scenario F2
// scenario F4
func TestADispatcherStoppedForAMinuteDoesNoHarm(t *testing.T) {
	r := strike(t, Config{Engines: 2, Rollouts: 200, Scale: scale, rate: 12, script: follow([]Fault{
		{After: 2 * time.Second, Kind: Dispatcher, N: 0, Pause: true, Down: scaled(time.Minute)},
		{After: time.Second, Kind: Dispatcher, N: 1, Pause: true, Down: scaled(30 * time.Second)},
		{After: time.Second, Kind: Agent, N: 1, Pause: true, Down: scaled(45 * time.Second)}, // beyond its lease
	})})
	if r.Pauses != 3 || r.Figures.Completed != 200 {
		t.Errorf("%d processes were stopped and %d rollouts completed; want 3 and 200", r.Pauses, r.Figures.Completed)
	}
	if r.Figures.Requeued == 0 {
		t.Error("nothing of the stopped agent was bound again: it was not stopped beyond its lease")
	}
}

// scenario F8
// scenario B4
// scenario B8
func TestARollingRestartOfTheClusterUnderLoadLosesNothing(t *testing.T) {
	r := strike(t, Config{Dispatchers: 2, Engines: 2, Rollouts: 200, Scale: scale, rate: 12, script: func(ctx context.Context, p *pool, _ func(Struck)) error {
		if err := pause(ctx, 3*time.Second); err != nil {
			return err
		}
		return p.roll(ctx)
	}})
	if r.Figures.Completed != 200 {
		t.Errorf("%d of 200 rollouts completed", r.Figures.Completed)
	}
	if r.Silence > 10*time.Second {
		t.Errorf("no answer came for %v: throughput must be back within 10 s", r.Silence)
	}
}

// scenario F18
// scenario F2
func TestSeedsSurviveDispatchersKilledAndStopped(t *testing.T) {
	var faults []Fault
	for i := range 8 {
		faults = append(faults, Fault{After: 1200 * time.Millisecond, Kind: Dispatcher, N: i % 4, Pause: i%4 == 3, Down: scaled(time.Duration(5+5*(i%3)) * time.Second)})
	}
	faults = append(faults, Fault{After: time.Second, Kind: Agent, N: 1, Down: time.Second}, Fault{After: time.Second, Kind: NATS, N: 0, Down: time.Second})
	r := strike(t, Config{Dispatchers: 4, Engines: 4, Rollouts: 300, Scale: scale, rate: 16, hot: 3, script: follow(faults)})
	t.Logf("%d messages at seeds, %d entries of the owner map", r.Seeds, r.Owned)
	if r.Seeds == 0 || r.Owned == 0 {
		t.Errorf("%d seeds and %d entries of the owner map were written: nothing was at stake", r.Seeds, r.Owned)
	}
}

// Most agents fall silent at once: it is rather the network than all of them.
// Nothing is taken away from them, and they go on with what they had.
//
// scenario F16
// scenario F4
func TestAMassLossOfRegistrationsTakesNothingAway(t *testing.T) {
	var faults []Fault
	for i := range 3 {
		fault := Fault{Kind: Agent, N: i, Pause: true, Down: scaled(50 * time.Second)} // lost after 30 s, were it one of them
		if i == 0 {
			fault.After = 3 * time.Second
		}
		faults = append(faults, fault)
	}
	r := strike(t, Config{Dispatchers: 2, Engines: 3, Rollouts: 150, Scale: scale, rate: 12, script: follow(faults)})
	if r.Pauses != 3 || r.Figures.Completed != 150 {
		t.Errorf("%d agents were stopped and %d rollouts completed; want 3 and 150", r.Pauses, r.Figures.Completed)
	}
	if r.Silence < scaled(30*time.Second) {
		t.Errorf("answers were at most %v apart: the agents were not stopped for long enough", r.Silence)
	}
	if r.Figures.Requeued != 0 {
		t.Errorf("%d rollouts were bound again: requeueing was not frozen", r.Figures.Requeued)
	}
}
