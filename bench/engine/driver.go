package engine

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
)

// driver owns the engine models of one life and lets them run in real time.
// Everything below its channel is touched by its goroutine alone.
type driver struct {
	cfg   Config
	ctx   context.Context // of the life
	start time.Time
	cmds  chan func()

	ranks   []*model.Model
	frozen  frozen // reasons why no step is made
	holding bool   // paused or asleep: new requests wait outside the models
	held    []*Stream
	jobs    map[string]*Stream
	left    map[string]*Stream // aborted, until the step in flight has told its stored blocks
	flushed time.Time          // last round of deltas
	deltas  int                // jobs that want deltas
	nth     uint64
	done    map[string]int64 // ended requests by finish reason
	batch   []KVEvent
}

type frozen uint8

const (
	frozenPause frozen = 1 << iota
	frozenWedge
)

// tick is the shortest wait between two rounds: at a high time scale many
// changes fall into one.
const tick = 500 * time.Microsecond

// maxLeft bounds driver.left; a wedged engine makes no step that would empty it.
const maxLeft = 4096

// deltasPerSecond bounds the writes of all streams together.
const deltasPerSecond = 5000

func newDriver(ctx context.Context, c Config) (*driver, error) {
	d := &driver{cfg: c, ctx: ctx, start: time.Now(), cmds: make(chan func(), 256),
		jobs: map[string]*Stream{}, left: map[string]*Stream{}, done: map[string]int64{}}
	ec := c.Engine
	ec.CacheEvents = c.OnKV != nil
	for range c.Ranks {
		m, err := model.New(ec)
		if err != nil {
			return nil, err
		}
		d.ranks = append(d.ranks, m)
	}
	return d, nil
}

// now is modelled time.
func (d *driver) now() time.Duration {
	return time.Duration(float64(time.Since(d.start)) * d.cfg.TimeScale)
}

// do runs f on the driver's goroutine and waits for it.
func (d *driver) do(f func()) error {
	ran := make(chan struct{})
	if err := d.send(func() { f(); close(ran) }); err != nil {
		return err
	}
	select {
	case <-ran:
		return nil
	case <-d.ctx.Done():
		return ErrDown
	}
}

func (d *driver) send(f func()) error {
	select {
	case d.cmds <- f:
		return nil
	case <-d.ctx.Done():
		return ErrDown
	}
}

func (d *driver) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		d.advance()
		timer.Reset(d.wait())
		select {
		case <-d.ctx.Done():
			return
		case f := <-d.cmds:
			f()
			for range len(d.cmds) {
				(<-d.cmds)()
			}
		case <-timer.C:
		}
	}
}

// wait until something is due.
func (d *driver) wait() time.Duration {
	wait := time.Minute
	now := d.now()
	for _, m := range d.ranks {
		if at, ok := m.Next(); ok {
			wait = min(wait, time.Duration(float64(at-now)/d.cfg.TimeScale))
		}
	}
	if d.deltas > 0 {
		wait = min(wait, d.round()-time.Since(d.flushed))
	}
	return max(wait, tick)
}

func (d *driver) round() time.Duration {
	return max(d.cfg.StreamInterval, time.Duration(d.deltas)*time.Second/deltasPerSecond)
}

func (d *driver) advance() {
	now := d.now()
	for i, m := range d.ranks {
		d.handle(i, m.Advance(now))
	}
	for id, j := range d.left {
		if d.ranks[j.rank].Stats().Steps > j.leftAt {
			delete(d.left, id)
		}
	}
	if d.deltas > 0 && time.Since(d.flushed) >= d.round() {
		d.flushed = time.Now()
		for id, j := range d.jobs {
			if !j.gen.Stream || j.rank < 0 {
				continue
			}
			if n, ok := d.ranks[j.rank].Generated(id); ok && int64(n) > j.tokens.Load() {
				j.tokens.Store(int64(n))
				j.wake()
			}
		}
	}
}

func (d *driver) handle(rank int, events []model.Event) {
	for _, e := range events {
		switch e.Kind {
		case model.Started:
			if j := d.jobs[e.ID]; j != nil && j.cached.Load() < 0 {
				j.cached.Store(int64(e.Tokens))
			}
		case model.FirstToken:
			if j := d.jobs[e.ID]; j != nil && j.gen.Stream {
				j.tokens.Store(1)
				j.wake()
			}
		case model.Finished:
			if j := d.jobs[e.ID]; j != nil {
				d.end(j, End{Reason: j.plan.reason, Stop: j.plan.stop, Tokens: e.Tokens})
			}
		case model.Stored, model.Removed, model.Cleared:
			d.kv(rank, e)
		}
	}
	d.tellKV(rank)
}

// submit adds a job, on the driver's goroutine.
func (d *driver) submit(j *Stream) error {
	waiting := len(d.held)
	room := len(d.ranks) * d.cfg.Engine.MaxRunning
	for _, m := range d.ranks {
		r, w := m.Counts()
		waiting += r + w
	}
	if waiting >= room+d.cfg.MaxQueued {
		return ErrQueueFull
	}
	d.nth++
	j.id = strconv.FormatUint(d.nth, 10)
	if d.holding {
		d.held = append(d.held, j)
	} else if err := d.add(j); err != nil {
		return err
	}
	d.jobs[j.id] = j
	if j.gen.Stream {
		d.deltas++
	}
	return nil
}

func (d *driver) add(j *Stream) error {
	rank, best := 0, -1
	for i, m := range d.ranks {
		r, w := m.Counts()
		if score := 4*w + r; best < 0 || score < best {
			rank, best = i, score
		}
	}
	if j.gen.Rank != nil {
		rank = *j.gen.Rank
	}
	req := model.Request{ID: j.id, PromptTokens: len(j.gen.Prompt), OutputTokens: j.plan.tokens,
		Blocks: j.blocks, Output: j.names.name}
	if err := d.ranks[rank].Add(d.now(), req); err != nil {
		return err
	}
	j.rank = rank
	return nil
}

// abort ends a job early.
func (d *driver) abort(j *Stream, reason string) {
	if d.jobs[j.id] != j {
		return
	}
	n := 0
	if j.rank >= 0 {
		n, _ = d.ranks[j.rank].Abort(d.now(), j.id)
		if d.cfg.OnKV != nil && len(d.left) < maxLeft {
			d.left[j.id], j.leftAt = j, d.ranks[j.rank].Stats().Steps
		}
	} else {
		d.held = slices.DeleteFunc(d.held, func(x *Stream) bool { return x == j })
	}
	d.end(j, End{Reason: reason, Tokens: n})
}

func (d *driver) end(j *Stream, e End) {
	delete(d.jobs, j.id)
	if j.gen.Stream {
		d.deltas--
	}
	d.done[e.Reason]++
	e.Cached = int(max(0, j.cached.Load()))
	e.Rank = max(0, j.rank)
	j.ended.Store(&e)
	j.tokens.Store(int64(e.Tokens))
	j.wake()
}

// abortAll ends every job, or those that match.
func (d *driver) abortAll(match func(*Stream) bool) {
	for _, id := range slices.Sorted(maps.Keys(d.jobs)) {
		if j := d.jobs[id]; match == nil || match(j) {
			d.abort(j, ReasonAbort)
		}
	}
}

func (d *driver) setFrozen(why frozen, on bool) {
	if on {
		d.frozen |= why
	} else {
		d.frozen &^= why
	}
	for _, m := range d.ranks {
		m.Freeze(d.now(), d.frozen != 0)
	}
}

// hold keeps new requests outside of the models, or lets them in.
func (d *driver) hold(on bool) {
	d.holding = on
	if on {
		return
	}
	held := d.held
	d.held = nil
	for _, j := range held {
		if err := d.add(j); err != nil {
			d.end(j, End{Reason: ReasonError})
		}
	}
}

func (d *driver) flush() {
	for _, m := range d.ranks {
		m.Flush(d.now())
	}
}

// Stream is one generation in progress.
type Stream struct {
	gen    *Generation
	plan   plan
	blocks []uint64
	names  *namer
	seq    sequence // the reader's own
	mean   int
	drv    *driver
	read   int

	id     string                 // within the life
	api    atomic.Pointer[string] // as the API names it
	rank   int                    // -1 = held
	leftAt int64                  // steps of its rank when it was aborted
	tokens atomic.Int64
	cached atomic.Int64 // -1 = not started
	ended  atomic.Pointer[End]
	notify chan struct{}
}

// name is how the API knows it.
func (j *Stream) name() string {
	if p := j.api.Load(); p != nil {
		return *p
	}
	return ""
}

func (j *Stream) wake() {
	select {
	case j.notify <- struct{}{}:
	default:
	}
}
