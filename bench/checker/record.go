package checker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// Recorder follows one pool and keeps what it sees until Finish. It never puts
// a consumer on a WorkQueue stream: accepted submits come from whoever submits
// (Accepted, Refused, Unknown), copies of queued requests from the streams'
// republished subjects. All methods are safe for concurrent use.
//
// Memory: a few hundred bytes a message; no prompt or output is kept.
type Recorder struct {
	nc   *nats.Conn
	js   jetstream.JetStream
	pool subjects.Pool

	subs    []*nats.Subscription
	feeds   []*feed
	watches sync.WaitGroup // of Watch

	mu           sync.Mutex
	ends         []context.CancelFunc // of what Watch began
	submits      []Submit
	accepted     map[string]bool
	refusals     int
	received     int
	open         int              // accepted and not answered
	stored       map[uint64]int64 // ROLLOUTS sequence -> server time
	reservations map[uint64]Reservation
	results      map[uint64]Result
	answered     map[string]bool
	live         map[string]bool   // reservation keys
	newest       map[string]uint64 // last revision seen of each
	others       map[uint64]bool   // revisions of the bucket that are no reservations
	seeds        map[uint64]Seed   // those of them that are seeds
	owned        map[uint64]Owned
	attempts     []Attempt
	retries      []Retry
	dead         []Dead
	seen         []Seen
	bounds       []Bound
	unreadable   []string
	slots        map[string]int
	prefetch     int
	changed      chan struct{} // closed and replaced at every change
}

// feed is one ordered consumer and how far it has come.
type feed struct {
	stream string
	cons   jetstream.Consumer
	run    jetstream.ConsumeContext

	mu   sync.Mutex
	last uint64
}

// recordPending bounds what core subscriptions buffer: 1 M messages, 512 MiB.
// Beyond it copies are dropped, which costs figures and no verdict.
const (
	recordPendingMsgs  = 1 << 20
	recordPendingBytes = 512 << 20
)

// feedBeat is how often an idle consumer speaks. Two missed ones begin it anew:
// what is overwritten while a consumer is gone, with its server, only Watch sees.
const feedBeat = 500 * time.Millisecond

// Record starts to follow a pool whose streams exist. It returns when every
// consumer is in place, so that whatever is submitted afterwards is seen.
// Finish or Close ends it; ctx bounds only the start.
func Record(ctx context.Context, nc *nats.Conn, pool subjects.Pool) (*Recorder, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("record pool %s: %w", pool, err)
	}
	r := &Recorder{
		nc: nc, js: js, pool: pool,
		accepted: map[string]bool{}, stored: map[uint64]int64{}, reservations: map[uint64]Reservation{},
		results: map[uint64]Result{}, answered: map[string]bool{}, live: map[string]bool{}, newest: map[string]uint64{},
		others: map[uint64]bool{}, seeds: map[uint64]Seed{}, owned: map[uint64]Owned{}, slots: map[string]int{},
		prefetch: subjects.DefaultPrefetch, changed: make(chan struct{}),
	}
	if err := r.start(ctx); err != nil {
		r.Close()
		return nil, fmt.Errorf("record pool %s: %w", pool, err)
	}
	return r, nil
}

func (r *Recorder) start(ctx context.Context) error {
	for subject, handle := range map[string]nats.MsgHandler{
		r.pool.ResultFilter("", ""):  r.onAttempt,
		r.pool.RecordPrefix() + ".>": r.onCopy,
	} {
		sub, err := r.nc.Subscribe(subject, handle)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", subject, err)
		}
		r.subs = append(r.subs, sub)
		if err := sub.SetPendingLimits(recordPendingMsgs, recordPendingBytes); err != nil {
			return fmt.Errorf("subscribe to %s: %w", subject, err)
		}
	}
	// The subscriptions must be in place before anything is submitted.
	if err := r.flush(ctx); err != nil {
		return err
	}
	bucket := func(kind string) string { return subjects.BucketStream(r.pool.Bucket(kind)) }
	for _, f := range []struct {
		stream  string
		headers bool
		handle  func(jetstream.Msg, *jetstream.MsgMetadata)
	}{
		{bucket(subjects.Reservations), true, r.onReservation},
		{r.pool.Results(), true, r.onResult},
		{r.pool.Dead(), true, r.onDead},
		{bucket(subjects.Engines), false, r.onEngine},
		{bucket(subjects.Owners), false, r.onOwners},
	} {
		if err := r.follow(ctx, f.stream, f.headers, f.handle); err != nil {
			return fmt.Errorf("follow stream %s: %w", f.stream, err)
		}
	}
	return nil
}

// flushWait bounds a round trip to the server, which needs a deadline.
const flushWait = 10 * time.Second

func (r *Recorder) flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flushWait)
	defer cancel()
	if err := r.nc.FlushWithContext(ctx); err != nil {
		return fmt.Errorf("reach NATS: %w", err)
	}
	return nil
}

func (r *Recorder) follow(ctx context.Context, stream string, headersOnly bool, handle func(jetstream.Msg, *jetstream.MsgMetadata)) error {
	cons, err := r.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{HeadersOnly: headersOnly})
	if err != nil {
		return err
	}
	f := &feed{stream: stream, cons: cons}
	f.run, err = cons.Consume(func(m jetstream.Msg) {
		meta, err := m.Metadata()
		if err != nil {
			return // not from a stream
		}
		handle(m, meta)
		f.mu.Lock()
		f.last = meta.Sequence.Stream
		f.mu.Unlock()
	}, jetstream.PullMaxMessages(4096), jetstream.PullHeartbeat(feedBeat))
	if err != nil {
		return err
	}
	r.feeds = append(r.feeds, f)
	return nil
}

// note runs change under the lock and wakes whoever waits.
func (r *Recorder) note(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	close(r.changed)
	r.changed = make(chan struct{})
}

// Accepted records an acknowledged submit; seq is the ack's sequence in ROLLOUTS.
func (r *Recorder) Accepted(job, id string, seq uint64) {
	r.note(func() {
		r.submits = append(r.submits, Submit{Job: job, ID: id, Outcome: Accepted, Seq: seq})
		if key := subjects.RolloutKey(job, id); !r.accepted[key] {
			r.accepted[key] = true
			if !r.answered[key] {
				r.open++
			}
		}
	})
}

// Refused records a submit that a typed error ended: nothing was stored.
func (r *Recorder) Refused(job, id string, err error) {
	r.note(func() {
		r.submits = append(r.submits, Submit{Job: job, ID: id, Outcome: Refused, Err: err.Error()})
		r.refusals++
	})
}

// Unknown records a submit that nothing answered: it may have been stored.
func (r *Recorder) Unknown(job, id string, err error) {
	r.note(func() { r.submits = append(r.submits, Submit{Job: job, ID: id, Outcome: Unknown, Err: err.Error()}) })
}

// Prefetch says how many requests the pool's settings bind to an engine beyond
// its slots; subjects.DefaultPrefetch until told.
func (r *Recorder) Prefetch(n int) { r.note(func() { r.prefetch = n }) }

// Handed records that user code was handed an answer.
func (r *Recorder) Handed(job, id string) {
	r.note(func() { r.seen = append(r.seen, Seen{Job: job, ID: id}) })
}

// Received records that the reader had the received mark acknowledged.
func (r *Recorder) Received(job, id string) {
	r.note(func() {
		r.seen = append(r.seen, Seen{Job: job, ID: id, Received: true})
		r.received++
	})
}

// Measure records a measured quantity and the most it may be.
func (r *Recorder) Measure(b Bound) { r.note(func() { r.bounds = append(r.bounds, b) }) }

func (r *Recorder) onReservation(m jetstream.Msg, meta *jetstream.MsgMetadata) {
	rev := meta.Sequence.Stream
	if key, ok := r.pool.ParseSeedSubject(m.Subject()); ok {
		r.onSeed(key, m, meta)
		return
	}
	engine, job, id, ok := r.pool.ParseReservationSubject(m.Subject())
	if !ok || engine[0] == '_' {
		r.note(func() { r.others[rev] = true })
		return
	}
	rec, err := readReservation(r.pool, engine, job, id, m.Headers())
	if err != nil {
		r.note(func() {
			if r.others[rev] {
				return
			}
			r.others[rev] = true
			r.unreadable = append(r.unreadable, fmt.Sprintf("reservation %s at revision %d: %v", m.Subject(), rev, err))
		})
		return
	}
	rec.Revision, rec.Stored = rev, meta.Timestamp.UnixNano()
	r.note(func() {
		if _, dup := r.reservations[rev]; dup {
			return
		}
		r.reservations[rev] = rec
		key := engine + "." + subjects.RolloutKey(job, id)
		// Of several that read the same stream one may be behind.
		if rev < r.newest[key] {
			return
		}
		if r.newest[key] = rev; rec.Held != nil {
			r.live[key] = true
		} else {
			delete(r.live, key)
		}
	})
}

func (r *Recorder) onSeed(key string, m jetstream.Msg, meta *jetstream.MsgMetadata) {
	rev := meta.Sequence.Stream
	s, err := readSeed(r.pool, key, m.Headers())
	s.Revision, s.Stored = rev, meta.Timestamp.UnixNano()
	r.note(func() {
		if r.others[rev] {
			return
		}
		if r.others[rev] = true; err != nil {
			r.unreadable = append(r.unreadable, fmt.Sprintf("seed %s at revision %d: %v", m.Subject(), rev, err))
			return
		}
		r.seeds[rev] = s
	})
}

func (r *Recorder) onOwners(m jetstream.Msg, meta *jetstream.MsgMetadata) {
	var o subjects.Ownership
	if json.Unmarshal(m.Data(), &o) != nil { // a marker
		return
	}
	rev := meta.Sequence.Stream
	r.note(func() { r.owned[rev] = Owned{Revision: rev, Key: o.Key, Owners: o.Owners} })
}

func (r *Recorder) onResult(m jetstream.Msg, meta *jetstream.MsgMetadata) {
	r.result(m.Subject(), m.Headers(), meta.Sequence.Stream, meta.Timestamp.UnixNano())
}

// result keeps one stored message of the register, from the stream or from its copy.
func (r *Recorder) result(subject string, h nats.Header, rev uint64, stored int64) {
	job, reader, id, ok := r.pool.ParseResultSubject(subject)
	if !ok {
		return
	}
	rec, err := readResult(job, reader, id, h)
	r.note(func() {
		if _, dup := r.results[rev]; dup {
			return
		}
		if err != nil {
			r.unreadable = append(r.unreadable, fmt.Sprintf("result %s at revision %d: %v", subject, rev, err))
		}
		rec.Revision, rec.Stored = rev, stored
		r.results[rev] = rec
		if key := rec.Key(); !r.answered[key] {
			r.answered[key] = true
			if r.accepted[key] {
				r.open--
			}
		}
	})
}

func (r *Recorder) onAttempt(m *nats.Msg) {
	job, reader, id, ok := r.pool.ParseResultSubject(m.Subject)
	if !ok {
		return
	}
	if a, err := subjects.AnswerFromHeader(job, reader, id, m.Header); err == nil && a.Status != "" {
		r.note(func() { r.attempts = append(r.attempts, Attempt{a}) })
	}
}

// onCopy takes what streams republish after storing it.
func (r *Recorder) onCopy(m *nats.Msg) {
	subject, rev, stored, ok := readCopy(m.Header)
	if !ok {
		return
	}
	switch m.Header.Get(jetstream.StreamHeader) {
	case r.pool.Rollouts():
		r.note(func() { r.stored[rev] = stored })
	case r.pool.Retry():
		job, id, bind, ok := readMsgID(m.Header.Get(subjects.HdrMsgID))
		if ok {
			r.note(func() { r.retries = append(r.retries, Retry{Job: job, ID: id, Bind: bind}) })
		}
	case r.pool.Results():
		r.result(subject, m.Header, rev, stored)
	}
}

func (r *Recorder) onDead(m jetstream.Msg, _ *jetstream.MsgMetadata) {
	d := readDead(m.Subject(), m.Headers())
	r.note(func() { r.dead = append(r.dead, d) })
}

func (r *Recorder) onEngine(m jetstream.Msg, _ *jetstream.MsgMetadata) {
	var e subjects.Engine
	if len(m.Data()) == 0 || json.Unmarshal(m.Data(), &e) != nil || e.Engine == "" {
		return
	}
	r.note(func() { r.slots[e.Engine] = max(r.slots[e.Engine], e.Slots) })
}

// Answered tells whether an answer of a rollout has been seen in the register. A
// reader that waits for it before it receives leaves no answer unseen.
func (r *Recorder) Answered(job, id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.answered[subjects.RolloutKey(job, id)]
}

// Counts are where a recording stands.
type Counts struct {
	Submitted int // accepted rollouts, each once
	Refused   int
	Open      int // accepted rollouts without an answer
	Answered  int // rollouts with an answer, accepted ones or not
	Received  int // answers that readers had marked received
	Held      int // reservations now
}

// Counts tells where the recording stands, for progress.
func (r *Recorder) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts()
}

func (r *Recorder) counts() Counts {
	return Counts{Submitted: len(r.accepted), Refused: r.refusals, Open: r.open, Answered: len(r.answered), Received: r.received, Held: len(r.live)}
}

// Await blocks until done holds of what was recorded so far, or ctx ends.
func (r *Recorder) Await(ctx context.Context, done func(Counts) bool) error {
	for {
		r.mu.Lock()
		c, changed := r.counts(), r.changed
		r.mu.Unlock()
		if done(c) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: of %d rollouts submitted %d are unanswered, %d reservations are held", context.Cause(ctx), c.Submitted, c.Open, c.Held)
		}
	}
}

// AllReceived holds when every answer was marked received by its reader.
func AllReceived(c Counts) bool { return c.Received >= c.Answered }

// AllAnswered holds when every accepted rollout has an answer and no reservation is left.
func AllAnswered(c Counts) bool { return c.Open == 0 && c.Held == 0 }

// pollEvery is how often Finish asks the server whether the recording has caught up.
const pollEvery = 20 * time.Millisecond

// Finish waits until the recording has caught up with the streams, takes what
// is left in the bucket, ends the recording and returns the history as ended.
// When ctx runs out first, the history so far comes with the error.
func (r *Recorder) Finish(ctx context.Context) (History, error) {
	defer r.Close()
	r.seedsEnd(ctx)
	err := r.catchUp(ctx)
	left, lerr := r.left(ctx)
	for again := time.NewTicker(pollEvery); lerr != nil && ctx.Err() == nil; left, lerr = r.left(ctx) {
		select { // a server has just come back
		case <-again.C:
		case <-ctx.Done():
		}
	}
	h := r.History()
	h.Ended, h.Left = err == nil && lerr == nil, left
	return h, errors.Join(err, lerr)
}

func (r *Recorder) catchUp(ctx context.Context) error {
	if err := r.flush(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for _, f := range r.feeds {
		for !f.caughtUp(ctx) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return fmt.Errorf("catch up with stream %s: %w", f.stream, context.Cause(ctx))
			}
		}
	}
	return nil
}

// caughtUp: nothing is pending at the server, and what it delivered was handled.
func (f *feed) caughtUp(ctx context.Context) bool {
	info, err := f.cons.Info(ctx)
	if err != nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return info.NumPending == 0 && f.last >= info.Delivered.Stream
}

// left lists the reservation keys in the bucket now.
func (r *Recorder) left(ctx context.Context) ([]string, error) {
	stream := subjects.BucketStream(r.pool.Bucket(subjects.Reservations))
	cons, err := r.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
		HeadersOnly: true, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy,
	})
	if err != nil {
		return nil, fmt.Errorf("list what is left in %s: %w", stream, err)
	}
	pending := cons.CachedInfo().NumPending
	var left []string
	for pending > 0 {
		m, err := cons.Next(jetstream.FetchContext(ctx))
		if err != nil {
			return left, fmt.Errorf("list what is left in %s: %w", stream, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return left, fmt.Errorf("list what is left in %s: %w", stream, err)
		}
		pending = meta.NumPending
		engine, job, id, ok := r.pool.ParseReservationSubject(m.Subject())
		if ok && engine[0] != '_' && m.Headers().Get(subjects.HdrKVOperation) == "" {
			left = append(left, engine+"."+subjects.RolloutKey(job, id))
		}
	}
	return left, nil
}

// Close ends the recording. It may be called more than once.
func (r *Recorder) Close() {
	r.mu.Lock()
	for _, end := range r.ends {
		end()
	}
	r.mu.Unlock()
	r.watches.Wait()
	for _, s := range r.subs {
		_ = s.Unsubscribe() // gone already when the connection is closed
	}
	for _, f := range r.feeds {
		f.run.Stop()
		<-f.run.Closed()
	}
}
