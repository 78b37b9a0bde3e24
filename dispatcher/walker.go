package dispatcher

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// The two streams that the walker reads.
const (
	queueRollouts = iota
	queueRetry
	queueKinds
)

const (
	taskExpiry  = "expiry"
	walkBatch   = 256
	walkWriters = 16
	// cancelKeep is how long a cancel is remembered: its bucket keeps it 25 h.
	cancelKeep = 25 * time.Hour
	// rewalkEvery bounds how often deadlines are gathered anew because too many
	// of them belong to messages that are gone.
	rewalkEvery = 10 * time.Minute
)

// walker answers queued work that nobody fetches: expired when its deadline is
// past, cancelled when a cancel reaches it. It runs on the live dispatcher with
// the highest hash, and needs no engine, no core and no fetch. The queue's copy
// stays: whoever fetches it sees that it is answered.
//
// Every message that has waited for WalkAge is read once, in order, at most
// Limits.WalkPerS a second, and its deadline kept. When the time has come it is
// looked for at the stream's leader and answered if it is still there. An
// answer is so late by at most WalkAge + 2 WalkEvery, plus what the rate bound
// adds after a change of walker with a long queue. The register's guard makes
// two walkers at once, and a bind that wins the race, harmless.
type walker struct {
	d *Dispatcher

	mu      sync.Mutex
	streams [queueKinds]walkStream
	cancels map[string]int64    // server time by key
	dirty   map[string]struct{} // jobs with a cancel that was not looked for yet
	strays  []string            // subjects of the last look that are no queues

	// Owned by run.
	active   bool
	rewalked time.Time
}

// walkStream is one queue stream. first, last and marks come from the looks;
// next and due belong to run.
type walkStream struct {
	first, last uint64
	marks       []mark // looks younger than WalkAge, and the youngest that is older

	next uint64 // the first sequence not read
	due  dueHeap
}

// mark is where a stream ended at some time.
type mark struct {
	at  time.Time
	seq uint64
}

func newWalker(d *Dispatcher) *walker {
	return &walker{d: d, cancels: map[string]int64{}, dirty: map[string]struct{}{}}
}

// depth takes a look at a stream.
func (w *walker) depth(kind int, info *streamInfo) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &w.streams[kind]
	first, last := info.State.FirstSeq, info.State.LastSeq
	if info.State.Messages == 0 {
		first = last + 1
	}
	if last < s.last {
		*s = walkStream{} // made anew
	}
	now := time.Now()
	s.first, s.last = first, last
	s.marks = append(s.marks, mark{now, last})
	for len(s.marks) > 1 && now.Sub(s.marks[1].at) >= w.d.cfg.Timings.WalkAge {
		s.marks = s.marks[1:]
	}
}

// limit is the last sequence that has surely waited for WalkAge; 0 = none.
func (s *walkStream) limit(age time.Duration) uint64 {
	if len(s.marks) == 0 || time.Since(s.marks[0].at) < age {
		return 0
	}
	return s.marks[0].seq
}

// run walks every WalkEvery while it is this dispatcher's task.
func (w *walker) run(ctx context.Context) error {
	t := w.d.cfg.Timings
	tick := time.NewTicker(t.WalkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if !w.d.peers.first(taskExpiry) {
			w.stand(false)
			continue
		}
		// Without the server's clock nothing can be called late.
		if !w.d.clock.recent(max(5*t.JobsPoll, t.ReadyAge)) {
			continue
		}
		w.stand(true)
		if err := w.step(ctx); err != nil && ctx.Err() == nil {
			w.d.metrics.walks.WithLabelValues("error").Inc()
			w.d.log.Debug("the expiry walk was interrupted", "err", err)
			continue
		}
		w.d.metrics.walks.WithLabelValues("ok").Inc()
	}
}

// stand begins from the start of the streams when the task becomes ours: that
// walk also looks for every cancel.
func (w *walker) stand(active bool) {
	if active == w.active {
		return
	}
	w.active = active
	w.restart()
	w.mu.Lock()
	clear(w.dirty)
	w.mu.Unlock()
	w.d.metrics.walking.Set(map[bool]float64{true: 1}[active])
}

func (w *walker) restart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.streams {
		w.streams[i].next, w.streams[i].due = 0, nil
	}
}

func (w *walker) step(ctx context.Context) error {
	t, l := w.d.cfg.Timings, w.d.cfg.Limits
	budget := max(1, int(float64(l.WalkPerS)*t.WalkEvery.Seconds()))
	w.forgetCancels()
	for kind := range w.streams {
		if err := w.expire(ctx, kind, &budget); err != nil {
			return err
		}
	}
	if err := w.lookForCancels(ctx, &budget); err != nil {
		return err
	}
	for kind := range w.streams {
		if err := w.read(ctx, kind, &budget); err != nil {
			return err
		}
	}
	return w.endStrays(ctx)
}

func (w *walker) names(kind int) (stream, filter string) {
	if kind == queueRetry {
		return w.d.pool.Retry(), w.d.pool.RetryFilter()
	}
	return w.d.pool.Rollouts(), w.d.pool.SubmitFilter()
}

// read goes on where the last read ended, up to what has waited long enough.
func (w *walker) read(ctx context.Context, kind int, budget *int) error {
	stream, filter := w.names(kind)
	for *budget > 0 {
		w.mu.Lock()
		s := &w.streams[kind]
		s.next = max(s.next, s.first, 1)
		from, limit, full := s.next, s.limit(w.d.cfg.Timings.WalkAge), len(s.due) >= w.d.cfg.Limits.WalkEntries
		w.mu.Unlock()
		if limit == 0 || from > limit {
			return nil
		}
		if full && !w.makeRoom(kind) {
			return nil
		}
		n, last, err := w.pass(ctx, stream, filter, from, limit, budget, func(m *stored, f *subjects.Facts) bool {
			w.mu.Lock()
			w.streams[kind].due.add(due{at: w.deadline(m, f), seq: m.seq})
			w.mu.Unlock()
			return w.cancelled(f, acceptedOf(m, f))
		})
		if err != nil {
			return err
		}
		w.mu.Lock()
		s.next = max(s.next, last+1)
		if n == 0 {
			s.next = max(s.next, limit+1)
		}
		w.mu.Unlock()
	}
	return nil
}

// makeRoom drops deadlines of messages that are gone.
func (w *walker) makeRoom(kind int) bool {
	most := w.d.cfg.Limits.WalkEntries
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &w.streams[kind]
	s.due.prune(s.first)
	if len(s.due) < most {
		return true
	}
	if time.Since(w.rewalked) < rewalkEvery {
		return false
	}
	w.rewalked = time.Now()
	s.next, s.due = s.first, nil
	return false // the next step begins from the start
}

// pass reads one batch from from on and answers as cancelled what hit says.
func (w *walker) pass(ctx context.Context, stream, filter string, from, limit uint64, budget *int,
	hit func(*stored, *subjects.Facts) bool,
) (n int, last uint64, err error) {
	tctx, cancel := context.WithTimeout(ctx, w.d.cfg.Timings.Attempt)
	batch, err := w.d.api.batch(tctx, stream, filter, from, min(walkBatch, *budget), w.d.cfg.Limits.WalkBytes)
	cancel()
	if err != nil {
		return 0, 0, err
	}
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(walkWriters)
	for _, m := range batch {
		if m.seq > limit {
			break // too young: it is read again later
		}
		n, last = n+1, m.seq
		*budget--
		w.d.metrics.walked.Inc()
		f, ok := w.facts(m)
		if !ok || !hit(m, f) {
			continue
		}
		group.Go(func() error {
			w.answer(gctx, m, f, subjects.Cancelled, subjects.ResultError{
				Class: subjects.ClassData, Code: "cancelled", Message: "cancelled while it was queued",
			})
			return nil
		})
	}
	return n, last, group.Wait()
}

// expire answers what is due and still there.
func (w *walker) expire(ctx context.Context, kind int, budget *int) error {
	stream, _ := w.names(kind)
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(walkWriters)
	for *budget > 0 {
		w.mu.Lock()
		s := &w.streams[kind]
		x, ok := s.due.next(w.d.clock.now())
		skip := ok && x.seq < s.first
		w.mu.Unlock()
		if !ok {
			break
		}
		if skip {
			continue // consumed long ago
		}
		*budget--
		group.Go(func() error {
			again := func() {
				w.mu.Lock()
				w.streams[kind].due.add(due{at: w.d.clock.now() + int64(w.d.cfg.Timings.WalkEvery), seq: x.seq})
				w.mu.Unlock()
			}
			tctx, cancel := context.WithTimeout(gctx, w.d.cfg.Timings.Attempt)
			m, err := w.d.api.fromLeader(tctx, stream, x.seq)
			cancel()
			if err != nil {
				again()
				return err
			}
			if m == nil {
				return nil
			}
			f, ok := w.facts(m)
			if !ok {
				return nil
			}
			if at := w.deadline(m, f); at > w.d.clock.now() {
				w.mu.Lock()
				w.streams[kind].due.add(due{at: at, seq: x.seq}) // the pool's default has grown
				w.mu.Unlock()
				return nil
			}
			if a := w.answer(gctx, m, f, subjects.Expired, subjects.ResultError{
				Class: subjects.ClassInfra, Code: "deadline", Message: "the deadline passed while it was queued",
			}); a != core.OK && a != core.Superseded {
				again()
			}
			return nil
		})
	}
	return group.Wait()
}

// facts are nil for what has no usable name: only whoever fetches it can bury it.
func (w *walker) facts(m *stored) (*subjects.Facts, bool) {
	var q core.Queue
	if job, lane, ok := w.d.pool.ParseSubmitSubject(m.subject); ok && goodToken(job) {
		q = core.Queue{Job: job, Lane: lane}
	} else if job, ok := w.d.pool.ParseRetrySubject(m.subject); ok && goodToken(job) {
		q = core.Queue{Job: job, Retry: true}
	} else {
		return nil, false
	}
	f, _ := w.d.decode(m.header, m.data, q)
	return &f, f.ID != ""
}

// deadline is the time left when the message was stored, added to that.
func (w *walker) deadline(m *stored, f *subjects.Facts) int64 {
	ms := f.LeftMS
	if ms == 0 {
		if ms = f.DeadlineMS; ms == 0 {
			ms = w.d.settings.Load().Deadline.D().Milliseconds()
		}
	}
	return m.at + ms*int64(time.Millisecond)
}

func acceptedOf(m *stored, f *subjects.Facts) int64 {
	if f.Accepted != 0 {
		return f.Accepted
	}
	return m.at
}

func (w *walker) answer(ctx context.Context, m *stored, f *subjects.Facts, status subjects.Status, why subjects.ResultError) core.Answer {
	a, _ := w.d.commit(ctx, core.PublishResult{
		Job: f.Job, ID: f.ID, Reader: f.Reader, Attempt: f.Bind, Status: status, Error: why, Group: f.Group,
	}, m.data)
	if a == core.OK {
		w.d.metrics.walkAnswers.WithLabelValues(string(status)).Inc()
	}
	return a
}
