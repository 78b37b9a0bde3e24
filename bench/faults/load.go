package faults

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// Bounds of the load.
const (
	window     = 300 // rollouts submitted and not answered
	submitters = 16  // submits under way at once, of each job
	receivers  = 8   // receipts under way at once, of each job
	sweepAfter = 3 * time.Second
)

// trainer is one job: it submits and reads as a training run does.
type trainer struct {
	job  string
	nc   *nats.Conn
	c    *client.Client
	rec  *checker.Recorder
	n    int // rollouts to submit
	hot  int // beginnings that they share; 0 = none
	next atomic.Int64
	// may tells how many of this job may be submitted by now.
	may func() int

	mu      sync.Mutex
	answers map[string][sha256.Size]byte // by id: what was handed out first
	done    map[string]bool              // received
	second  int                          // answers that say something else than the first one
	errs    []error
}

func (p *pool) newTrainer(ctx context.Context, job string, n int, rec *checker.Recorder) (*trainer, error) {
	nc, err := p.connect("trainer " + job)
	if err != nil {
		return nil, err
	}
	c, err := client.Open(ctx, nc, poolName, job, client.ManualDone(), client.RetryFor(time.Minute))
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("client of job %s: %w", job, err)
	}
	return &trainer{job: job, nc: nc, c: c, rec: rec, n: n, hot: p.cfg.hot, answers: map[string][sha256.Size]byte{}, done: map[string]bool{}}, nil
}

func (t *trainer) close() {
	t.c.Close()
	t.nc.Close()
}

func (t *trainer) note(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.errs) < 20 {
		t.errs = append(t.errs, err)
	}
}

func rolloutID(n int) string { return fmt.Sprintf("%06d", n) }

// submitAll submits as the pace allows and returns when all are acknowledged.
func (t *trainer) submitAll(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for range submitters {
		wg.Go(func() {
			for {
				n := int(t.next.Add(1)) - 1
				if n >= t.n {
					return
				}
				for n >= t.may() {
					if pause(ctx, poll) != nil {
						return
					}
				}
				if !t.submit(ctx, n) {
					return
				}
			}
		})
	}
}

// submit repeats until the rollout is acknowledged. Every tenth is submitted twice.
func (t *trainer) submit(ctx context.Context, n int) bool {
	r := &subjects.Request{
		SchemaVersion: subjects.SchemaVersion, Job: t.job, ID: rolloutID(n), Prompt: fmt.Sprintf("%s, question %d", t.job, n),
		Sampling: subjects.SamplingParams{MaxTokens: 60 + n%200, IgnoreEOS: true},
	}
	if t.hot > 0 {
		r.Affinity = fmt.Sprintf("beginning %d", n%t.hot)
	}
	again := n%10 == 0
	for {
		h, err := t.c.Submit(ctx, r)
		var wait time.Duration
		switch {
		case err == nil:
			t.rec.Accepted(h.Job, h.ID, h.Seq)
			if !again {
				return true
			}
			again = false
		case ctx.Err() != nil:
			t.rec.Unknown(t.job, r.ID, err)
			return false
		case errors.Is(err, client.ErrUnknown), errors.Is(err, client.ErrUnavailable):
			t.rec.Unknown(t.job, r.ID, err)
			wait = 10 * poll
		case errors.Is(err, client.ErrBackpressure):
			wait = 10 * poll
		default:
			t.rec.Refused(t.job, r.ID, err)
			t.note(err)
			return true
		}
		if pause(ctx, wait) != nil {
			return false
		}
	}
}

// read takes answers until ctx ends, and receives each once the recorder has
// seen it too: what is overwritten before that would be missing in the history.
func (t *trainer) read(ctx context.Context) {
	ch := make(chan *subjects.Result, window)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(ch)
	for range receivers {
		wg.Go(func() {
			for res := range ch {
				t.receive(ctx, res)
			}
		})
	}
	for res, err := range t.c.Results(ctx) {
		if err != nil {
			t.note(fmt.Errorf("read job %s: %w", t.job, err))
			if res == nil {
				return
			}
		}
		t.handed(res)
		ch <- res
	}
}

func (t *trainer) handed(res *subjects.Result) {
	t.rec.Handed(res.Job, res.ID)
	sum := sha256.Sum256(fmt.Append(nil, res.Status, res.Text, res.TokenIDs, res.FinishReason))
	t.mu.Lock()
	defer t.mu.Unlock()
	if first, ok := t.answers[res.ID]; ok && first != sum {
		t.second++
	}
	t.answers[res.ID] = sum
}

func (t *trainer) receive(ctx context.Context, res *subjects.Result) {
	for !t.rec.Answered(res.Job, res.ID) {
		if pause(ctx, poll) != nil {
			return
		}
	}
	if err := t.c.Done(ctx, res); err != nil {
		if ctx.Err() == nil {
			t.note(fmt.Errorf("receive %s: %w", res.Key(), err))
		}
		return
	}
	t.mu.Lock()
	first := !t.done[res.ID]
	t.done[res.ID] = true
	t.mu.Unlock()
	if first {
		t.rec.Received(res.Job, res.ID)
	}
}

// sweep asks for each answer that is in the register and was not handed out: a
// delivery that died with its server comes again only after a minute.
func (t *trainer) sweep(ctx context.Context) {
	for n := range t.n {
		id := rolloutID(n)
		t.mu.Lock()
		_, ok := t.answers[id]
		t.mu.Unlock()
		if ok {
			continue
		}
		res, err := t.c.Wait(ctx, t.c.Handle(id))
		switch {
		case err == nil:
			t.handed(res)
			t.receive(ctx, res)
		case errors.Is(err, client.ErrReceived): // the reader was quicker
		case ctx.Err() != nil:
			return
		default:
			t.note(fmt.Errorf("wait for %s: %w", id, err))
		}
	}
}
