package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// tellEvery is how often --wait tells what is missing.
const tellEvery = 10 * time.Second

// missing are the rollouts whose answers have not come.
type missing struct {
	mu   sync.Mutex
	left map[string]client.Handle
}

func (m *missing) take(key string) (was bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, was = m.left[key]
	delete(m.left, key)
	return was
}

// first is the missing one that was stored first, and how many there are.
func (m *missing) first() (h client.Handle, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, one := range m.left {
		if h.ID == "" || one.Seq < h.Seq {
			h = one
		}
	}
	return h, len(m.left)
}

// await prints the answers of what was submitted as they come, for at most so
// long (0 = without end), and says no unless all of them are samples.
func (s *submission) await(most time.Duration) error {
	want := &missing{left: map[string]client.Handle{}}
	var filters []string
	for _, h := range s.sent {
		want.left[h.Key()] = h
		if f := s.pool.ResultFilter(h.Job, h.Reader); !slices.Contains(filters, f) {
			filters = append(filters, f)
		}
	}
	ctx, cancel := s.a.ctx, context.CancelFunc(func() {})
	if most > 0 {
		ctx, cancel = context.WithTimeout(ctx, most)
	}
	defer cancel()
	defer s.tell(ctx, want)()
	r := &reading{a: s.a, pool: s.pool, store: s.store, out: s.a.printer(), stream: true, receive: true}
	bad := 0
	for m, err := range following(ctx, s.js, s.pool.Results(), filters, func() bool { return true }) {
		if err != nil && ctx.Err() != nil {
			break
		}
		if err != nil {
			return s.a.noPool(err)
		}
		job, _, id, ok := s.pool.ParseResultSubject(m.Subject())
		if !ok || !want.take(subjects.RolloutKey(job, id)) {
			continue
		}
		if err := s.takeOne(r, m); err != nil {
			return err
		}
		var head struct {
			Status subjects.Status `json:"status"`
		}
		if len(m.Data()) > 0 && (json.Unmarshal(m.Data(), &head) != nil || !head.Status.Sample()) {
			bad++
		}
		if _, n := want.first(); n == 0 {
			break
		}
	}
	h, n := want.first()
	switch {
	case n > 0 && s.a.ctx.Err() == nil:
		return coded(exitUnavailable, "%d of %d answered within %v (--for); %s: the rest comes all the same, read it with `rollbus results --job %s`",
			len(s.sent)-n, len(s.sent), most, s.stands(h), h.Job)
	case n > 0:
		return fmt.Errorf("%w with %d answers missing: they come all the same, read them with `rollbus results`", errInterrupted, n)
	case bad > 0:
		return coded(exitNo, "%d of %d rollouts ended without a sample", bad, len(s.sent))
	}
	return nil
}

// takeOne prints an answer and marks it, which --for does not cut short.
func (s *submission) takeOne(r *reading, m jetstream.Msg) error {
	ctx, cancel := s.a.within()
	defer cancel()
	_, err := r.take(ctx, m)
	return err
}

// tell says now and then what is missing, until it is stopped.
func (s *submission) tell(ctx context.Context, want *missing) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	began := time.Now()
	var telling sync.WaitGroup
	telling.Go(func() {
		tick := time.NewTicker(tellEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if h, n := want.first(); n > 0 {
				s.a.say("%d of %d answered after %v; %s", len(s.sent)-n, len(s.sent), time.Since(began).Round(time.Second), s.stands(h))
			}
		}
	})
	return func() {
		cancel()
		telling.Wait()
	}
}

// stands tells where a rollout is, as far as a quick look tells.
func (s *submission) stands(h client.Handle) string {
	ctx, cancel := context.WithTimeout(s.a.ctx, min(s.a.opts.Timeout, 2*time.Second))
	defer cancel()
	l := &look{ctx: ctx, a: s.a, pool: s.pool, s: s.store, js: s.js}
	if q, err := l.js.Stream(ctx, s.pool.Rollouts()); err == nil {
		if m, err := q.GetMsg(ctx, h.Seq); err == nil && strings.HasPrefix(m.Header.Get(subjects.HdrMsgID), h.Key()) {
			if engines, err := l.engines(); err == nil && len(engines) == 0 {
				return h.Key() + " is queued, and the pool has no engine"
			}
			return h.Key() + " is queued"
		}
	}
	held, err := l.reservations("")
	for _, r := range held {
		if r.Job == h.Job && r.ID == h.ID {
			return fmt.Sprintf("%s is %s on engine %s", h.Key(), r.State, r.Engine)
		}
	}
	if err != nil {
		return "where " + h.Key() + " is could not be told: " + err.Error()
	}
	return h.Key() + " is no longer in the queue"
}
