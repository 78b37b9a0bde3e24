package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// Abort waits until the engine shows no more than it was given, where it tells:
// closing the connection is the abort, and some servers go on all the same
// (scenario R20).
func (a *OpenAI) Abort(ctx context.Context, run Run) error {
	return a.untilStopped(ctx, run, a.shown, nil)
}

// shown is what /metrics says now; nil = nothing that can be read.
func (a *OpenAI) shown(ctx context.Context) (*telemetry.Sample, error) {
	b, ok := a.optional(ctx, "/metrics")
	if !ok {
		return nil, ctx.Err()
	}
	s, _, err := telemetry.ParseMetrics(b)
	if err != nil {
		return nil, nil //nolint:nilerr // a page without a load tells nothing, which is no failure
	}
	return &s, nil
}

// stopped: running and waiting over all ranks are no more than what is in
// flight here. An engine that does not tell is believed.
func (a *OpenAI) stopped(ctx context.Context, look func(context.Context) (*telemetry.Sample, error)) (bool, error) {
	s, err := look(ctx)
	if err != nil {
		return false, err
	}
	if s == nil {
		return true, nil
	}
	shown := 0
	for _, r := range s.Ranks {
		for _, n := range [...]*int{r.Running, r.Waiting} {
			if n != nil {
				shown += *n
			}
		}
	}
	a.gauges.mu.Lock()
	defer a.gauges.mu.Unlock()
	return shown <= a.gauges.inFlight, nil
}

// untilStopped looks until the engine shows no more than it was given. aborted is
// what an abort by name met with; it is told when the engine does not stop.
func (a *OpenAI) untilStopped(ctx context.Context, run Run, look func(context.Context) (*telemetry.Sample, error), aborted error) error {
	t := time.NewTicker(a.cfg.StopCheck)
	defer t.Stop()
	for {
		ok, err := a.stopped(ctx, look)
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("run %s: the engine still shows more than it was given", run.ID), aborted, err)
		case <-t.C:
		}
	}
}
