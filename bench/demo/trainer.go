package demo

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/bench/demo/local"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

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

// submit stores one request and tells whether an answer may come.
func (t *trainer) submit(ctx context.Context, r *subjects.Request) bool {
	h, err := t.c.Submit(ctx, r)
	switch {
	case err == nil:
		t.rec.Accepted(h.Job, h.ID, h.Seq)
		return true
	case errors.Is(err, client.ErrUnknown) || ctx.Err() != nil:
		t.rec.Unknown(t.job, r.ID, err)
		return true
	}
	t.rec.Refused(t.job, r.ID, err)
	return false
}

// read takes every answer: it is handed one, says so, and receives it.
func (t *trainer) read(ctx context.Context, answered chan<- *subjects.Result) error {
	for res, err := range t.c.Results(ctx) {
		if res == nil {
			return fmt.Errorf("answers of job %s: %w", t.job, err)
		}
		if err != nil {
			return fmt.Errorf("answer of %s.%s: %w", res.Job, res.ID, err)
		}
		t.rec.Handed(res.Job, res.ID)
		select {
		case answered <- res:
		case <-ctx.Done():
			return nil
		}
		if err := t.c.Done(ctx, res); err != nil {
			if ctx.Err() != nil {
				return nil // told to end: the answer stays unread
			}
			return fmt.Errorf("receive %s.%s: %w", res.Job, res.ID, err)
		}
		t.rec.Received(res.Job, res.ID)
	}
	return nil
}
