package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/bench/demo/local"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// Arrival is a request and when it is submitted, from the start of the trace.
type Arrival struct {
	At      time.Duration
	Request *subjects.Request
}

// submitsInFlight bounds the submits that await their ack.
const submitsInFlight = 128

// trainer is one job: it submits and reads as a training run does, with the
// public client, and tells the recorder what it learns.
type trainer struct {
	job string
	nc  *nats.Conn
	c   *client.Client
	rec *checker.Recorder
}

func newTrainer(ctx context.Context, pool *local.Pool, job string, rec *checker.Recorder) (*trainer, error) {
	nc, err := pool.NATS.Conn("trainer " + job)
	if err != nil {
		return nil, err
	}
	c, err := client.Open(ctx, nc, pool.Name.String(), job, client.ManualDone())
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("client of job %s: %w", job, err)
	}
	return &trainer{job: job, nc: nc, c: c, rec: rec}, nil
}

func (t *trainer) close() {
	t.c.Close()
	t.nc.Close()
}

// submit sends the job's arrivals at their times divided by speed.
func (t *trainer) submit(ctx context.Context, arrivals []Arrival, speed float64) error {
	var acks errgroup.Group
	acks.SetLimit(submitsInFlight)
	start := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for _, a := range arrivals {
		if a.Request.Job != t.job {
			continue
		}
		timer.Reset(time.Until(start.Add(time.Duration(float64(a.At) / speed))))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), acks.Wait())
		}
		acks.Go(func() error {
			h, err := t.c.Submit(ctx, a.Request)
			switch {
			case err == nil:
				t.rec.Accepted(h.Job, h.ID, h.Seq)
			case errors.Is(err, client.ErrUnknown) || ctx.Err() != nil:
				t.rec.Unknown(t.job, a.Request.ID, err)
			default:
				t.rec.Refused(t.job, a.Request.ID, err)
			}
			return nil
		})
	}
	return acks.Wait()
}

// read takes every answer: it is handed one, says so, and receives it.
func (t *trainer) read(ctx context.Context) error {
	for res, err := range t.c.Results(ctx) {
		if res == nil {
			return fmt.Errorf("answers of job %s: %w", t.job, err)
		}
		if err != nil {
			return fmt.Errorf("answer of %s.%s: %w", res.Job, res.ID, err)
		}
		t.rec.Handed(res.Job, res.ID)
		if err := t.c.Done(ctx, res); err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // told to end: the answer stays unread
			}
			return fmt.Errorf("receive %s.%s: %w", res.Job, res.ID, err)
		}
		t.rec.Received(res.Job, res.ID)
	}
	return nil
}
