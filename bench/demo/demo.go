package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/bench/demo/local"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/subjects"
)

// Config of a run.
type Config struct {
	Local local.Config // NATS.Dir empty = a temporary folder
	// Workload to run. Later turns of a trajectory wait for the answer before them.
	Workload workload.Workload
	// Speed divides the times between arrivals. The engines' time scale, which
	// should be the same, stands in their own configuration.
	Speed float64
	// Started is called when the pool is up, with what it serves; nil = not.
	Started func(*local.Pool)
	// Progress is called some times a second until the end; nil = not.
	Progress func(Progress)
}

// Progress of a run.
type Progress struct {
	Total, Submitted, Answered, Running int
}

const (
	progressEvery = 200 * time.Millisecond
	// settleWait is how long reservations may take to be retired, and answers
	// to be received, after the last answer.
	settleWait = 10 * time.Second
	stopWait   = 10 * time.Second
)

// Run runs the demo. When ctx ends first, everything is stopped, and the report
// tells how far it came beside the error.
func Run(ctx context.Context, cfg Config) (r Report, err error) {
	if len(cfg.Workload.Rollouts) == 0 || cfg.Speed <= 0 {
		return Report{}, fmt.Errorf("demo: %d rollouts at speed %g: give at least one, and a speed above 0", len(cfg.Workload.Rollouts), cfg.Speed)
	}
	if cfg.Local.NATS.Dir == "" {
		dir, err := os.MkdirTemp("", "rollbus-demo-")
		if err != nil {
			return Report{}, fmt.Errorf("demo: folder for the streams: %w", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		cfg.Local.NATS.Dir = dir
	}
	pool, err := local.Start(ctx, cfg.Local)
	if err != nil {
		return Report{}, fmt.Errorf("demo: %w", err)
	}
	h, err := observed(ctx, cfg, pool)
	soft, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
	defer cancel()
	if ctx.Err() != nil {
		cancel() // nobody waits for what still runs
	}
	stopErr := pool.Stop(soft)
	if ctx.Err() != nil {
		stopErr = nil
	}
	r = newReport(h)
	r.Trace, r.Dispatchers, r.TimeScale = cfg.Workload.Name, cfg.Local.Dispatchers, round(cfg.Speed)
	r.Policy = pool.Settings.Policy
	if pool.Settings.Mode != subjects.ModeEnforce {
		r.Policy = subjects.BaselinePolicy
	}
	return r, errors.Join(err, stopErr)
}

// observed replays the trace under the eyes of the checker.
func observed(ctx context.Context, cfg Config, pool *local.Pool) (checker.History, error) {
	nc, err := pool.NATS.Conn("rollbus checker")
	if err != nil {
		return checker.History{}, err
	}
	defer nc.Close()
	rec, err := checker.Record(ctx, nc, pool.Name)
	if err != nil {
		return checker.History{}, err
	}
	defer rec.Close()
	rec.Prefetch(pool.Settings.PrefetchSlots())
	if cfg.Started != nil {
		cfg.Started(pool)
	}

	run, end := context.WithCancelCause(ctx)
	defer end(nil)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer end(nil)
	fail := func(err error) {
		if err != nil {
			end(err)
		}
	}
	d := newDriver(cfg.Workload, cfg.Speed)
	for job := range d.jobs() {
		t, err := newTrainer(run, pool, job, rec)
		if err != nil {
			return checker.History{}, err
		}
		defer t.close()
		d.trainers[job] = t
		parts.Go(func() { fail(t.read(run, d.answered)) })
	}
	parts.Go(func() { fail(endedEarly(run, pool.Wait(run))) })
	if cfg.Progress != nil {
		parts.Go(func() { report(run, rec, len(cfg.Workload.Rollouts), cfg.Progress) })
	}
	err = d.run(run)
	if err == nil {
		err = settled(run, rec)
	}
	final, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleWait)
	defer cancel()
	h, ferr := rec.Finish(final)
	if err != nil {
		h.Ended = ctx.Err() == nil // told to stop: what is missing is nobody's fault
	}
	return h, errors.Join(err, ferr)
}

// settled waits until everything accepted is answered and received, and every
// reservation retired.
func settled(ctx context.Context, rec *checker.Recorder) error {
	if err := rec.Await(ctx, checker.AllAnswered); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	return rec.Await(ctx, checker.AllReceived)
}

// endedEarly: a dispatcher or agent that ends while the demo runs is a failure.
func endedEarly(run context.Context, err error) error {
	if run.Err() == nil && err == nil {
		return errors.New("a dispatcher or agent ended before the demo did")
	}
	return err
}

func report(ctx context.Context, rec *checker.Recorder, total int, f func(Progress)) {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		c := rec.Counts()
		f(Progress{Total: total, Submitted: c.Submitted, Answered: c.Answered, Running: c.Held})
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
