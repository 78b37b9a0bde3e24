package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// A stray is a submit whose subject names no job that we would name, such as one
// in capitals. ROLLOUTS takes it and its publisher was told that it is accepted,
// so that it must end: the walker's dispatcher fetches it, keeps it in DEAD, and
// answers it `rejected` where whoever wrote such a job's name reads, as far as
// subjects can spell it. Scenario F14.

// badJob is the code of a stray's rejection.
const badJob = "bad_job"

// Bounds of one step.
const (
	strayQueues = 16 // subjects; the rest waits for the next step
	strayBatch  = 64 // messages of each
)

// strayed notes the subjects of a look that are no queues.
func (w *walker) strayed(subjects []string) {
	slices.Sort(subjects) // those of a map
	w.mu.Lock()
	w.strays = subjects[:min(len(subjects), strayQueues)]
	w.mu.Unlock()
}

// endStrays takes a batch from each.
func (w *walker) endStrays(ctx context.Context) error {
	w.mu.Lock()
	found := w.strays
	w.strays = nil
	w.mu.Unlock()
	for _, subject := range found {
		if err := w.endStraysOf(ctx, subject); err != nil {
			return fmt.Errorf("strays at %s: %w", subject, err)
		}
	}
	return nil
}

// endStraysOf reads a subject by a consumer of its own, which goes again with
// its strays. Two dispatchers that both take it for their task share it.
func (w *walker) endStraysOf(ctx context.Context, subject string) error {
	d := w.d
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(subject)) // never fails
	cfg := jetstream.ConsumerConfig{
		Durable: fmt.Sprintf("x1-%016x", hash.Sum64()), FilterSubject: subject, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: d.cfg.Timings.AckWait, MaxDeliver: -1, MaxAckPending: -1, InactiveThreshold: d.cfg.Timings.Inactive,
	}
	ask, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	cons, err := d.store.JS().CreateConsumer(ask, d.pool.Rollouts(), cfg)
	if err != nil {
		return err
	}
	batch, err := cons.FetchNoWait(strayBatch)
	if err != nil {
		return err
	}
	n := 0
	for m := range batch.Messages() {
		n++
		if err := w.endStray(ctx, m); err != nil {
			return err // it comes again after AckWait
		}
	}
	if err := batch.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
		return err
	}
	if n == strayBatch {
		return nil // there may be more: at the next look
	}
	return d.store.JS().DeleteConsumer(ask, d.pool.Rollouts(), cfg.Durable)
}

// endStray keeps one in DEAD, then answers it, then acks it: a crash in between
// repeats what the message id and the register's guard make harmless.
func (w *walker) endStray(ctx context.Context, m jetstream.Msg) error {
	d := w.d
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	job, _, _ := strings.Cut(strings.TrimPrefix(m.Subject(), "rollout."+d.pool.String()+".submit."), ".")
	why := subjects.CheckToken("job", job)
	if why == nil {
		return nil // it is a queue after all: a later version's
	}
	reason := fmt.Sprintf("submitted to %.200s: %v", m.Subject(), why)
	dead := d.untilAnswered(ctx, "bury", func(ctx context.Context) (uint64, error) {
		return 0, d.store.BuryStray(ctx, meta.Sequence.Stream, kvstate.Dead{Code: badJob, Reason: reason, Body: m.Data(), Header: m.Headers()})
	})
	if dead.answer != core.OK {
		return fmt.Errorf("keep it in DEAD: %w", dead.err)
	}
	if err := w.rejectStray(ctx, job, m, reason); err != nil {
		return err
	}
	d.metrics.strays.Inc()
	return m.DoubleAck(ctx)
}

func (w *walker) rejectStray(ctx context.Context, job string, m jetstream.Msg, reason string) error {
	d := w.d
	named, id, ok := subjects.SplitRolloutKey(m.Headers().Get(subjects.HdrMsgID))
	if !ok || named != job || !goodToken(id) || !readable(job) {
		return nil // no answer can bear its name: only DEAD keeps it
	}
	e := core.PublishResult{
		Job: job, ID: id, Reader: subjects.DefaultReader, Status: subjects.Rejected,
		Error: subjects.ResultError{Class: subjects.ClassData, Code: badJob, Message: reason},
	}
	if r, _ := subjects.DecodeRequest(m.Data()); r != nil && goodToken(r.Reader) {
		e.Reader = r.Reader
	}
	res := resultOf(e, m.Data())
	out := d.untilAnswered(ctx, "result", func(ctx context.Context) (uint64, error) { return d.store.CommitStray(ctx, res, e.Reader) })
	if out.answer != core.OK && out.answer != core.Superseded {
		return fmt.Errorf("answer it: %w", out.err)
	}
	return nil
}

// readable tells whether a job that is no name of ours can still stand in the
// subject of an answer: what somebody would write who did not know our names.
func readable(job string) bool {
	for i := range len(job) {
		c := job[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' && i > 0 || c == '-') {
			return false
		}
	}
	return job != "" && len(job) <= subjects.MaxToken
}
