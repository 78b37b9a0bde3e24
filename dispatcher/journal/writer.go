package journal

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Options of a Writer. Zero fields take the default.
type Options struct {
	Pool    string
	Program string      // version of the program
	Core    core.Config // the core's, as it was made. Dispatcher is required

	// Publish stores one frame; id is the same each time it is tried. It is
	// called by one goroutine and must end with ctx. Required.
	Publish func(ctx context.Context, id string, frame []byte) error

	MaxAge     time.Duration // 1s: a batch is handed over at this age, of the core's time
	BatchBytes int           // 256 KiB, before compression
	QueueBytes int           // 32 MiB of batches waiting to be published; newer ones are dropped
	FrameBytes int           // 512 KiB: larger batches are cut into parts
	Attempt    time.Duration // 5s that one publish may take
	Again      time.Duration // 500ms between tries of one frame
	GiveUp     time.Duration // 1m after which a frame that is refused counts as lost

	// CheckpointAge is the least time between two checkpoints: 2m when 0, none
	// are written when negative. CheckpointBytes bounds one, unpacked: 64 MiB. A
	// core knows more than that with some million blocks in its index.
	CheckpointAge   time.Duration
	CheckpointBytes int64
	// CheckpointExact takes one every CheckpointAge, whatever the last one took and
	// weighed: runs in virtual time.
	CheckpointExact bool

	// Start names this start of the dispatcher, random when empty, and Started is
	// its time, now when zero: runs in virtual time give their own.
	Start   string
	Started time.Time

	// SelfCheck replays samples of this journal in the background; nil = off.
	SelfCheck *SelfCheck

	Log *slog.Logger // nil = nowhere
}

func (o Options) withDefaults() Options {
	dur := func(p *time.Duration, d time.Duration) {
		if *p <= 0 {
			*p = d
		}
	}
	size := func(p *int, d int) {
		if *p <= 0 {
			*p = d
		}
	}
	dur(&o.MaxAge, time.Second)
	dur(&o.Attempt, 5*time.Second)
	dur(&o.Again, 500*time.Millisecond)
	dur(&o.GiveUp, time.Minute)
	if o.CheckpointAge == 0 {
		o.CheckpointAge = 2 * time.Minute
	}
	if o.CheckpointBytes <= 0 {
		o.CheckpointBytes = 64 << 20
	}
	size(&o.BatchBytes, 256<<10)
	size(&o.QueueBytes, 32<<20)
	size(&o.FrameBytes, 512<<10)
	if o.Start == "" {
		o.Start = strings.ToLower(rand.Text()[:12])
	}
	if o.Started.IsZero() {
		o.Started = time.Now()
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

const (
	// resetEvery is how many batches may refer to hashes of one another: after a
	// damaged one, reading goes on that much later at most.
	resetEvery = 32
	queueLen   = 1024
)

type batch struct {
	Header
	raw []byte
}

// Writer records one life of one dispatcher. It implements dispatcher.Recorder.
type Writer struct {
	opt   Options
	start string
	meter *meter

	mu     sync.Mutex // Record's goroutine and Close
	closed bool
	enc    encoder
	blocks blockIDs
	digest digest
	cur    batch
	now    time.Duration // of the last step
	began  time.Duration // of the first step in cur
	next   uint64        // number of the next event
	number uint64        // of the next batch
	fresh  int           // batches since the last reset
	lost   uint64

	pace         pacer        // of checkpoints
	packedEvents atomic.Int64 // bytes of events stored since the last checkpoint
	packedState  atomic.Int64 // bytes of the last checkpoint stored

	queue  chan batch
	queued atomic.Int64 // bytes
	stored atomic.Int64 // bytes of frames
	broken atomic.Bool  // a batch was lost: the next one must refer to none before it

	check *checker // nil = off
	ctx   context.Context
	stop  context.CancelCauseFunc
	done  chan struct{}
}

// NewWriter starts a writer. Close ends it.
func NewWriter(opt Options) (*Writer, error) {
	if opt.Publish == nil || opt.Core.Dispatcher == "" {
		return nil, errors.New("journal: a writer needs Publish and Core.Dispatcher")
	}
	opt = opt.withDefaults()
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithWindowSize(1<<20), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	w := &Writer{opt: opt, start: opt.Start, queue: make(chan batch, queueLen), done: make(chan struct{}), number: 1}
	w.meter = newMeter(w)
	w.blocks.reset()
	w.enc.blocks = &w.blocks
	w.cur.Reset = true
	w.ctx, w.stop = context.WithCancelCause(context.Background())
	if opt.SelfCheck != nil {
		w.check = newChecker(w.ctx, *opt.SelfCheck, w.meter, opt.Log)
	}
	go w.run(z)
	return w, nil
}

// Start is the random name of this start in the journal.
func (w *Writer) Start() string { return w.start }

// Stored is how many bytes of frames have been stored.
func (w *Writer) Stored() int64 { return w.stored.Load() }

// Record keeps one step. It never waits for more than memory.
func (w *Writer) Record(now time.Duration, ev core.Event, effects []core.Effect) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	if w.cur.Events == 0 {
		w.cur.First, w.cur.Now, w.began = w.next, int64(w.now), now
	}
	head := uint64(max(0, now-w.now)) << 1
	if len(effects) > 0 {
		head |= 1
	}
	e := &w.enc
	e.uint(head)
	t := reflect.TypeOf(ev)
	e.uint(uint64(eventNumber[t]))
	e.value(plans[t], reflect.ValueOf(ev))
	if len(effects) > 0 {
		w.digest.step(effects)
		e.buf = binary.LittleEndian.AppendUint32(e.buf, uint32(w.digest.sum))
		e.uint(uint64(len(effects)))
		n := 0
		for _, x := range effects {
			if _, ok := x.(core.Decision); ok {
				n++
			}
		}
		e.uint(uint64(n))
		for _, x := range effects {
			if d, ok := x.(core.Decision); ok {
				d.Candidates, d.Filtered = nil, nil
				e.value(plans[decisionType], reflect.ValueOf(d))
			}
		}
	}
	w.now = max(w.now, now)
	w.next++
	w.cur.Events++
	if len(e.buf) >= w.opt.BatchBytes || now-w.began >= w.opt.MaxAge {
		w.hand()
	}
}

// hand gives the batch to the publishing goroutine, or drops it.
func (w *Writer) hand() {
	if w.cur.Events == 0 {
		return
	}
	b := w.cur
	b.raw, b.Raw, b.Batch, b.Lost = w.enc.buf, len(w.enc.buf), w.number, w.lost
	w.number++
	w.meter.events.Add(float64(b.Events))
	w.enc.buf = make([]byte, 0, min(len(b.raw)+len(b.raw)/4, w.opt.BatchBytes+w.opt.BatchBytes/8))
	if !w.enqueue(b) {
		w.lose(&b)
		w.lost += uint64(b.Events)
	}
	w.fresh++
	w.cur = batch{}
	if w.broken.Swap(false) || w.fresh >= resetEvery || len(w.blocks.id) > maxBlocks {
		w.reset()
	}
}

// reset lets the next batch refer to none before it.
func (w *Writer) reset() {
	w.blocks.reset()
	w.cur.Reset, w.fresh = true, 0
}

// enqueue never waits.
func (w *Writer) enqueue(b batch) bool {
	if n := w.queued.Load(); n > 0 && int(n)+len(b.raw) > w.opt.QueueBytes {
		return false
	}
	select {
	case w.queue <- b:
		w.queued.Add(int64(len(b.raw)))
		return true
	default:
		return false
	}
}

func (w *Writer) lose(b *batch) {
	if !w.broken.Swap(true) {
		w.opt.Log.Warn("the journal has a gap", "dispatcher", w.opt.Core.Dispatcher, "batch", b.Batch, "events", b.Events)
	}
	w.meter.lostEvents.Add(float64(b.Events))
	w.meter.lostBatches.Inc()
}

// Close hands over what is left, marks the end and waits until all is stored or
// ctx ends. Record does nothing after it. It may be called twice.
func (w *Writer) Close(ctx context.Context) error {
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		w.hand()
		select {
		case w.queue <- batch{Header: Header{Batch: w.number, First: w.next, Lost: w.lost, End: true}}:
		default:
		}
		close(w.queue)
	}
	w.mu.Unlock()
	select {
	case <-w.done:
	case <-ctx.Done():
		w.stop(context.Cause(ctx))
		<-w.done
	}
	defer func() {
		w.stop(nil)
		if w.check != nil {
			<-w.check.done
		}
	}()
	if n := w.queued.Load(); n > 0 {
		return fmt.Errorf("journal: %d bytes could not be stored before the end: %w", n, context.Cause(w.ctx))
	}
	return nil
}

// run publishes, in order.
func (w *Writer) run(z *zstd.Encoder) {
	defer close(w.done)
	defer func() { _ = z.Close() }()
	c := w.opt.Core
	begin := Header{Begin: &Begin{
		Pool: w.opt.Pool, Program: w.opt.Program, Core: core.Version, Codec: core.CodecVersion, Started: w.opt.Started.UnixNano(),
		Timings: c.Timings, MaxInHand: c.MaxInHand, MaxAnswered: c.MaxAnswered, MaxIndex: c.MaxIndexBytes, Schema: ownSchema(),
	}}
	begun := false
	var packed []byte
	for b := range w.queue {
		// Nothing can be read without the beginning: it is tried until it stands.
		for !begun && w.ctx.Err() == nil {
			begun = w.publish(begin, nil)
		}
		if w.ctx.Err() != nil {
			return
		}
		packed = packed[:0]
		if len(b.raw) > 0 {
			packed = z.EncodeAll(b.raw, packed)
		}
		if b.Checkpoint {
			b.Begin = begin.Begin
			w.packedState.Store(int64(len(packed)))
		} else {
			w.packedEvents.Add(int64(len(packed)))
		}
		if !w.publish(b.Header, packed) && w.ctx.Err() == nil && !b.Checkpoint {
			w.lose(&b)
		}
		if w.ctx.Err() != nil {
			return
		}
		w.queued.Add(-int64(len(b.raw)))
	}
}

func (w *Writer) publish(h Header, payload []byte) bool {
	h.Dispatcher, h.Start = w.opt.Core.Dispatcher, w.start
	parts := max(1, (len(payload)+w.opt.FrameBytes-1)/w.opt.FrameBytes)
	if parts > 1 {
		h.Parts = parts
	}
	for h.Part = range parts {
		if h.Part > 0 {
			h.Begin = nil
		}
		p := payload[h.Part*w.opt.FrameBytes : min(len(payload), (h.Part+1)*w.opt.FrameBytes)]
		frame, err := appendFrame(&h, p)
		if err != nil {
			w.opt.Log.Error("journal", "err", err)
			return false
		}
		if !w.store(fmt.Sprintf("%s.%s.%d.%d", h.Dispatcher, w.start, h.Batch, h.Part), frame) {
			return false
		}
		w.meter.bytes.Add(float64(len(frame)))
		w.stored.Add(int64(len(frame)))
		if w.check != nil {
			w.check.keep(&h, frame)
		}
	}
	return true
}

func (w *Writer) store(id string, frame []byte) bool {
	again := time.NewTimer(w.opt.Again)
	defer again.Stop()
	for until := time.Now().Add(w.opt.GiveUp); ; {
		ctx, cancel := context.WithTimeout(w.ctx, w.opt.Attempt)
		err := w.opt.Publish(ctx, id, frame)
		cancel()
		if err == nil {
			return true
		}
		w.meter.refused.Inc()
		if time.Now().After(until) {
			w.opt.Log.Warn("the journal cannot be stored", "err", err)
			return false
		}
		again.Reset(w.opt.Again)
		select {
		case <-w.ctx.Done():
			return false
		case <-again.C:
		}
	}
}
