package journal

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"iter"
	"reflect"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// maxBatch bounds a batch unpacked: one event may be a whole view.
const maxBatch = 1 << 30

// Journal is one start of one dispatcher: its frames in order.
type Journal struct {
	Dispatcher string
	Start      string
	Begin      *Begin // nil = neither the beginning nor a checkpoint is there
	Ended      bool   // the dispatcher stopped in order: the tail is there
	frames     [][]byte
	starts     []start // where reading may start
}

// start is a place where reading may start: the beginning or a checkpoint.
type start struct {
	frame  int
	event  uint64
	now    time.Duration
	server int64 // unix ns, 0 = unknown
}

// Frames are the messages of the journal, in order.
func (j *Journal) Frames() [][]byte { return j.frames }

// Split sorts frames by journal, in order of their beginnings. What cannot be
// told apart is returned in problems; the rest can be read.
func Split(frames iter.Seq2[[]byte, error]) (journals []*Journal, problems []error) {
	by := map[[2]string]*Journal{}
	n := 0
	for f, err := range frames {
		if err != nil {
			problems = append(problems, fmt.Errorf("after %d frames: %w", n, err))
			break
		}
		h, _, err := ReadFrame(f)
		if h == nil {
			problems = append(problems, fmt.Errorf("frame %d: %w", n, err))
			n++
			continue
		}
		k := [2]string{h.Dispatcher, h.Start}
		j := by[k]
		if j == nil {
			j = &Journal{Dispatcher: h.Dispatcher, Start: h.Start}
			by[k] = j
			journals = append(journals, j)
		}
		if err == nil && h.Begin != nil && h.Part == 0 {
			j.Begin = h.Begin
			j.starts = append(j.starts, start{len(j.frames), h.First, time.Duration(h.Now), h.Server})
		}
		j.Ended = j.Ended || h.End && err == nil
		j.frames = append(j.frames, f)
		n++
	}
	slices.SortStableFunc(journals, func(a, b *Journal) int { return cmp.Compare(a.started(), b.started()) })
	return journals, problems
}

func (j *Journal) started() int64 {
	if j.Begin == nil {
		return 0
	}
	return j.Begin.Started
}

// Step is one recorded step.
type Step struct {
	N         uint64 // of the event, from 0
	Now       time.Duration
	Event     core.Event
	Effects   int // how many there were
	Digest    uint32
	Decisions []core.Decision // without candidates
	Server    int64           // the NATS server's clock as the core knew it, unix ns; 0 = unknown. Set by Replay

	core *core.Core // that replays it
}

// Around tells what the replaying core knows behind this step.
func (s *Step) Around() *core.StateAround { return s.core.Around() }

// Reader reads one journal.
type Reader struct {
	j     *Journal
	z     *zstd.Decoder
	plans *readPlans
	frame int    // next
	batch uint64 // expected next
	event uint64 // expected next
	left  int    // events left in the batch
	now   int64
	dec   decoder
	wait  bool // for a batch that refers to none before it
	raw   []byte
	gap   bool
	mark  *Mark // passed since the last call of Mark
	own   bool  // checkpoints have this program's shape
}

// NewReader starts at the beginning, or where that is gone at the first
// checkpoint. Close frees what it holds.
func NewReader(j *Journal) (*Reader, error) { return newReader(j, 0) }

// newReader starts at the nth start.
func newReader(j *Journal, n int) (*Reader, error) {
	if j.Begin == nil {
		return nil, &ReadError{Dispatcher: j.Dispatcher, Err: ErrNoBegin}
	}
	if j.Begin.Codec > core.CodecVersion {
		return nil, &ReadError{Dispatcher: j.Dispatcher, Err: fmt.Errorf("%w: events of version %d, this program reads 1 to %d", ErrVersion, j.Begin.Codec, core.CodecVersion)}
	}
	plans, err := newReadPlans(j.Begin.Schema)
	if err != nil {
		return nil, &ReadError{Dispatcher: j.Dispatcher, Err: err}
	}
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxBatch))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	r := &Reader{j: j, z: z, plans: plans, own: j.Begin.Core == core.Version && reflect.DeepEqual(j.Begin.Schema, ownSchema())}
	at := j.starts[n]
	r.frame, r.event = at.frame, at.event
	return r, nil
}

// Begins tells whether the journal starts with its dispatcher; else it can be
// read from its first checkpoint on.
func (j *Journal) Begins() bool { return len(j.starts) > 0 && j.starts[0].event == 0 }

// Reaches tells whether a replay from a time of the NATS server, unix ns, may
// start at or before it.
func (j *Journal) Reaches(from int64) bool {
	return j.Begins() || slices.ContainsFunc(j.starts, func(s start) bool { return s.server > 0 && s.server <= from })
}

// Checkpoints is how many places other than the beginning reading may start at.
func (j *Journal) Checkpoints() int {
	if j.Begins() {
		return len(j.starts) - 1
	}
	return len(j.starts)
}

// Mark is the checkpoint that the last call of Next has passed, nil when none:
// the core's state before the step that it returned.
func (r *Reader) Mark() *Mark {
	m := r.mark
	r.mark = nil
	return m
}

// Close frees the decoder.
func (r *Reader) Close() { r.z.Close() }

// Gapless tells whether every event since the start has been read.
func (r *Reader) Gapless() bool { return !r.gap }

// Next returns the next step, io.EOF at the end, or a *ReadError; after one it
// may be called again, and goes on at the next batch that can be read.
func (r *Reader) Next() (*Step, error) {
	for r.left == 0 {
		if err := r.load(); err != nil {
			return nil, err
		}
	}
	d := &r.dec
	head := d.uint()
	s := &Step{N: r.event, Event: r.plans.event(d)}
	r.now += int64(head >> 1)
	s.Now = time.Duration(r.now)
	if head&1 == 1 && d.err == nil {
		if b := d.bytes(4); b != nil {
			s.Digest = binary.LittleEndian.Uint32(b)
		}
		s.Effects = int(d.uint())
		for range d.uint() {
			s.Decisions = append(s.Decisions, core.Decision{})
			if r.decision(&s.Decisions[len(s.Decisions)-1]); d.err != nil {
				break
			}
		}
	}
	if d.err != nil {
		err := d.err
		r.left, r.wait = 0, true
		return nil, r.fail(r.frame-1, err, 0)
	}
	r.event++
	r.left--
	return s, nil
}

func (r *Reader) fail(frame int, err error, missing uint64) error {
	r.gap = true
	return &ReadError{Dispatcher: r.j.Dispatcher, Frame: frame, Event: r.event, Missing: missing, Err: err}
}

// load takes the next frame, or the parts of the next batch.
func (r *Reader) load() error {
	if r.frame >= len(r.j.frames) {
		return io.EOF
	}
	at := r.frame
	r.frame++
	h, payload, err := ReadFrame(r.j.frames[at])
	if err != nil && h != nil && h.Checkpoint {
		return nil // the events go on without it
	}
	if err != nil {
		r.wait = true
		return r.fail(at, err, 0)
	}
	if h.Batch < r.batch {
		return nil // stored twice
	}
	if h.Part != 0 {
		r.wait = true
		return nil // its first part is what was missed, and said
	}
	if h.parts() > 1 {
		payload = slices.Clone(payload)
		for part := 1; part < h.parts(); part++ {
			var next *Header
			var more []byte
			if r.frame < len(r.j.frames) {
				next, more, err = ReadFrame(r.j.frames[r.frame])
			}
			if next == nil || err != nil || next.Batch != h.Batch || next.Part != part {
				if h.Checkpoint {
					return nil
				}
				r.wait = true
				return r.fail(r.frame, fmt.Errorf("%w: batch %d has %d parts, part %d is missing", ErrCorrupt, h.Batch, h.parts(), part), 0)
			}
			payload = append(payload, more...)
			r.frame++
		}
	}
	if r.wait && !h.Reset && h.Events > 0 {
		r.batch = h.Batch + 1
		return nil // what it refers to is missing, and that was said
	}
	missing := h.First > r.event
	var gap error
	if (h.Begin == nil || h.Checkpoint) && missing {
		gap = r.fail(at, ErrGap, h.First-r.event)
		r.event = h.First
		if !h.Reset && h.Events > 0 {
			r.wait = true
			r.batch = h.Batch + 1
			return gap
		}
	}
	r.wait, r.batch = false, h.Batch+1
	if h.Reset {
		r.dec.hashes = r.dec.hashes[:0]
	}
	if h.Checkpoint {
		if raw, err := r.z.DecodeAll(payload, nil); err == nil && len(raw) == h.Raw {
			r.mark = &Mark{N: h.First, Now: time.Duration(h.Now), Server: h.Server, Frame: at,
				digest: h.Digest, state: h.State, raw: raw, plan: r.plans.checkpoint, own: r.own}
		}
	}
	if h.Events > 0 {
		if h.Raw > maxBatch {
			return r.fail(at, fmt.Errorf("%w: a batch of %d bytes, at most %d are read", ErrCorrupt, h.Raw, maxBatch), 0)
		}
		raw, err := r.z.DecodeAll(payload, r.raw[:0])
		if err == nil && len(raw) != h.Raw {
			err = fmt.Errorf("%d bytes instead of %d", len(raw), h.Raw)
		}
		if err != nil {
			r.wait = true
			return r.fail(at, fmt.Errorf("%w: batch %d: %w", ErrCorrupt, h.Batch, err), 0)
		}
		r.raw = raw
		r.dec.buf, r.dec.at, r.dec.err, r.dec.depth = raw, 0, nil, 0
		r.now, r.left, r.event = h.Now, h.Events, h.First
	}
	return gap
}
