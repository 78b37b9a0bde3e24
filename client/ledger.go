package client

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Pauses of the last ledger.
const (
	lookAgain   = 2 * time.Second  // nowhere counts when seen twice, this far apart: it may have moved between two looks
	lookLater   = 10 * time.Second // NATS did not answer
	blindLooks  = 5                // looks without an answer from queue or reservations before the register alone decides
	retryLooks  = 3                // looks that find nothing but other work of this job in RETRY
	ledgerSleep = time.Minute      // at most, between two sweeps
)

// entry is one rollout from its submit to its answer. Fields below the handle
// are written before the publish, those below mu by whoever holds ledger.mu.
type entry struct {
	handle   Handle
	lane     subjects.Lane
	deadline time.Duration
	header   nats.Header
	body     []byte // nil in the ledger beyond LedgerBytes
	replyKey string

	// under ledger.mu
	due     time.Time // on this process's monotonic clock; zero before NATS has it
	kept    int       // bytes of the body that count
	missed  int       // looks in a row that found it nowhere
	blind   int       // looks in a row that could not see
	retries int       // looks in a row that found work of this job in RETRY
	again   bool      // submitted once more
	earlier *entry    // of the same id, stored: it stands if this one is refused
}

// ledger keeps what was submitted until it is answered.
type ledger struct {
	c *Client

	mu      sync.Mutex
	entries map[string]*entry // by id
	bytes   int64
	started bool
	nudge   chan struct{} // one token: an earlier due
	earlier time.Time     // the earliest due the sweeper knows of
}

func newLedger(c *Client) *ledger {
	return &ledger{c: c, entries: map[string]*entry{}, nudge: make(chan struct{}, 1)}
}

// Unanswered is the number of rollouts that this client submitted and has not
// seen answered.
func (c *Client) Unanswered() int {
	c.ledger.mu.Lock()
	defer c.ledger.mu.Unlock()
	return len(c.ledger.entries)
}

// add takes an entry in before it is sent: the answer may be faster than the
// acknowledgement.
func (l *ledger) add(e *entry) error {
	if !l.c.opt.ledger {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.entries[e.handle.ID]; old != nil {
		// The same id again: the earlier request stands, if it was stored.
		l.bytes -= int64(old.kept)
		e.again = old.again
		if !old.due.IsZero() {
			e.earlier, old.earlier = old, nil
		}
	} else if len(l.entries) >= l.c.opt.maxUnanswered {
		return fmt.Errorf("submit rollout %s: %w", e.handle.Key(), &BackpressureError{
			RetryAfter: l.c.full.next(), Cause: fmt.Sprintf("%d rollouts of this client are unanswered", len(l.entries)),
		})
	}
	if l.bytes+int64(len(e.body)) <= l.c.opt.ledgerBytes {
		e.kept = len(e.body)
		l.bytes += int64(e.kept)
	}
	l.entries[e.handle.ID] = e
	return nil
}

// stored notes the acknowledgement: from here on the client vouches for it.
func (l *ledger) stored(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.entries[e.handle.ID] != e {
		return // answered already, or without a ledger
	}
	if e.kept == 0 {
		e.body = nil
	}
	e.earlier = nil
	e.due = time.Now().Add(e.deadline + l.c.opt.grace)
	if !l.started {
		l.started = true
		l.c.wg.Go(l.sweep)
	}
	if l.earlier.IsZero() || e.due.Before(l.earlier) {
		select {
		case l.nudge <- struct{}{}:
		default:
		}
	}
}

// drop takes an entry out that was not accepted.
func (l *ledger) drop(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.entries[e.handle.ID] != e {
		return
	}
	l.remove(e)
	if old := e.earlier; old != nil {
		l.entries[old.handle.ID] = old
		l.bytes += int64(old.kept)
	}
}

func (l *ledger) remove(e *entry) {
	delete(l.entries, e.handle.ID)
	l.bytes -= int64(e.kept)
}

// answered ends an entry; key is the reply key its answer must carry.
func (l *ledger) answered(id string) (key string, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[id]
	if e == nil {
		return "", false
	}
	l.remove(e)
	return e.replyKey, true
}

func (l *ledger) has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries[id] != nil
}

// sweep looks for what is overdue, one rollout at a time, until Close.
func (l *ledger) sweep() {
	for {
		l.mu.Lock()
		now := time.Now()
		next := now.Add(ledgerSleep)
		var late []*entry
		for _, e := range l.entries {
			switch {
			case e.due.IsZero():
			case !e.due.After(now):
				late = append(late, e)
			case e.due.Before(next):
				next = e.due
			}
		}
		l.earlier = next
		l.mu.Unlock()
		for _, e := range late {
			if l.c.ctx.Err() != nil {
				return
			}
			l.look(e)
		}
		if len(late) > 0 {
			continue
		}
		t := time.NewTimer(time.Until(next))
		select {
		case <-t.C:
		case <-l.nudge:
			t.Stop()
		case <-l.c.ctx.Done():
			t.Stop()
			return
		}
	}
}

// look decides about one overdue rollout.
func (l *ledger) look(e *entry) {
	c := l.c
	l.mu.Lock()
	h := e.handle
	live := l.entries[h.ID] == e
	l.mu.Unlock()
	if !live {
		return
	}
	where, err := c.find(c.ctx, h)
	if err != nil {
		l.later(e, lookLater)
		return
	}
	l.mu.Lock()
	missed := false
	switch where {
	case inRegister:
		// Its reader's durable has it, and whoever waits for it finds it there.
		l.remove(e)
	case inQueue, onEngine:
		e.missed, e.blind, e.retries = 0, 0, 0
		e.due = time.Now().Add(c.opt.grace)
	case inRetry:
		e.retries++
		e.due = time.Now().Add(c.opt.grace)
		missed = e.retries >= retryLooks
	case notToBeAsked:
		e.blind++
		e.due = time.Now().Add(lookLater)
		missed = e.blind >= blindLooks
	default:
		e.missed++
		e.due = time.Now().Add(lookAgain)
		missed = e.missed >= 2
	}
	l.mu.Unlock()
	if missed {
		l.missing(e)
	}
}

func (l *ledger) later(e *entry, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.due = time.Now().Add(d)
}

// missing submits a rollout once more, or gives it up.
func (l *ledger) missing(e *entry) {
	c := l.c
	if e.body != nil && !e.again {
		ack, err := c.publish(c.ctx, e)
		if err != nil {
			l.later(e, lookLater)
			return
		}
		c.opt.log.Warn("a rollout was lost and is submitted once more", "rollout", e.handle.Key(), "seq", ack.Sequence)
		l.mu.Lock()
		e.again = true
		e.missed, e.blind, e.retries = 0, 0, 0
		e.handle.Seq = ack.Sequence
		e.due = time.Now().Add(e.deadline + c.opt.grace)
		l.mu.Unlock()
		_ = c.nc.Publish(c.pool.Ping(), nil)
		return
	}
	l.mu.Lock()
	lost := &LostError{Job: e.handle.Job, ID: e.handle.ID, Again: e.again}
	l.remove(e)
	l.mu.Unlock()
	c.opt.log.Error("a rollout was lost", "rollout", e.handle.Key(), "again", lost.Again)
	it := &item{lost: lost, at: time.Now()}
	it.reg = kvstate.Registered{Answer: subjects.Answer{Job: lost.Job, ID: lost.ID, Reader: c.opt.reader}}
	c.inbox.put(it)
}

// api asks the JetStream API.
func (c *Client) api(ctx context.Context, call string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	m, err := c.nc.RequestWithContext(ctx, "$JS.API."+call, body)
	if err != nil {
		return fmt.Errorf("%w: %w", kvstate.ErrUnavailable, err)
	}
	return json.Unmarshal(m.Data, answer)
}
