package journal

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"iter"
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
	Begin      *Begin // nil = gone
	Ended      bool   // the dispatcher stopped in order: the tail is there
	frames     [][]byte
	bad        map[int]error // frames that cannot be read
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
			j = &Journal{Dispatcher: h.Dispatcher, Start: h.Start, bad: map[int]error{}}
			by[k] = j
			journals = append(journals, j)
		}
		if err != nil {
			j.bad[len(j.frames)] = err
		} else if h.Begin != nil {
			j.Begin = h.Begin
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
}

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
}

// NewReader starts at the beginning. Close frees what it holds.
func NewReader(j *Journal) (*Reader, error) {
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
	return &Reader{j: j, z: z, plans: plans}, nil
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
	if err := r.j.bad[at]; err != nil {
		r.wait = true
		return r.fail(at, err, 0)
	}
	h, payload, err := ReadFrame(r.j.frames[at])
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
	if h.Begin == nil && missing {
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
