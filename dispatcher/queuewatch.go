package dispatcher

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// serverClock estimates the NATS server's clock for what the shell stamps and
// expires. It never runs ahead (a sample is as old as its way here) and never
// goes back; the core keeps an estimate of its own from the same samples.
type serverClock struct {
	mu     sync.Mutex
	sample int64
	at     time.Time
	floor  int64
}

func (c *serverClock) observe(ts time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.floor = c.estimate(now)
	c.sample, c.at = ts.UnixNano(), now
}

// now is the server's time in unix ns; 0 before the first sample.
func (c *serverClock) now() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.estimate(time.Now())
}

func (c *serverClock) estimate(now time.Time) int64 {
	if c.sample == 0 {
		return 0
	}
	return max(c.floor, c.sample+int64(now.Sub(c.at)))
}

// recent tells whether the last sample is younger than age.
func (c *serverClock) recent(age time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sample != 0 && time.Since(c.at) < age
}

// watchQueues tells the core every JobsPoll what waits in which queue, and at
// once when a client says that it has submitted.
func (d *Dispatcher) watchQueues(ctx context.Context) error {
	sub, err := d.nc.Subscribe(d.pool.Ping(), func(*nats.Msg) {
		select {
		case d.looks <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	again := newPause(d.cfg.Timings.RestartMin, d.cfg.Timings.RestartMax)
	for {
		looked := time.Now()
		if err := d.look(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			d.ready.report(partQueues, err)
			d.metrics.looks.WithLabelValues("error").Inc()
			d.log.Debug("cannot look at the queues", "err", err)
			if !again.wait(ctx) {
				return nil
			}
			continue
		}
		again.reset()
		d.ready.report(partQueues, nil)
		d.metrics.looks.WithLabelValues("ok").Inc()
		// A tenth of jitter: dispatchers started together do not ask together.
		poll := d.cfg.Timings.JobsPoll
		next := time.NewTimer(poll - rand.N(poll/10+1))
		select {
		case <-ctx.Done():
		case <-next.C:
		case <-d.looks:
			gap := newPause(d.cfg.Timings.PingGap, d.cfg.Timings.PingGap)
			if time.Since(looked) < d.cfg.Timings.PingGap {
				gap.wait(ctx)
			}
		}
		next.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

func (d *Dispatcher) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	rollouts, err := d.api.streamInfo(ctx, d.pool.Rollouts(), d.pool.SubmitFilter())
	if err != nil {
		return err
	}
	retry, err := d.api.streamInfo(ctx, d.pool.Retry(), d.pool.RetryFilter())
	if err != nil {
		return err
	}
	d.clock.observe(retry.TS)
	d.send(ctx, core.ServerTime{UnixNano: retry.TS.UnixNano()})
	d.walker.depth(queueRollouts, rollouts)
	d.walker.depth(queueRetry, retry)

	var jobs core.Jobs
	var stray, waiting uint64
	var strays []string
	for s, n := range rollouts.State.Subjects {
		job, lane, ok := d.pool.ParseSubmitSubject(s)
		if !ok || !goodToken(job) {
			stray += n
			strays = append(strays, s)
			continue
		}
		waiting += n
		jobs.Queues = append(jobs.Queues, core.QueueDepth{Queue: core.Queue{Job: job, Lane: lane}, Messages: n})
	}
	for s, n := range retry.State.Subjects {
		job, ok := d.pool.ParseRetrySubject(s)
		if !ok || !goodToken(job) {
			stray += n
			continue
		}
		waiting += n
		jobs.Queues = append(jobs.Queues, core.QueueDepth{Queue: core.Queue{Job: job, Retry: true}, Messages: n})
	}
	// Map order must not reach the core.
	slices.SortFunc(jobs.Queues, func(a, b core.QueueDepth) int {
		retry := 0
		if a.Retry != b.Retry {
			if retry = 1; a.Retry {
				retry = -1
			}
		}
		return cmp.Or(cmp.Compare(a.Job, b.Job), retry, cmp.Compare(a.Lane, b.Lane))
	})
	d.metrics.waiting.Set(float64(waiting))
	d.walker.strayed(strays)
	d.metrics.stray.Set(float64(stray))
	d.metrics.jobs.Set(float64(len(jobs.Queues)))
	d.send(ctx, jobs)
	return nil
}
