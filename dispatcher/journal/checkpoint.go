package journal

import (
	"fmt"
	"reflect"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/dispatcher/core"
)

const (
	// checkpointShare is how many bytes of events, stored, a byte of a checkpoint
	// is paid for by: checkpoints are a ninth of a journal at most.
	checkpointShare = 8
	// checkpointPause is how many times the time that taking one took passes
	// before the next: the core's goroutine spends 0.5 % on them at most.
	checkpointPause = 200
)

// pacer says when the next checkpoint is due.
type pacer struct {
	last    time.Duration // now of the last one, or of the first event
	pause   time.Duration // least time until the next
	begun   bool
	skipped bool // the last one was too large
}

// Due tells whether it is time for a checkpoint. It is called by Record's
// goroutine, after a Record.
func (w *Writer) Due(now time.Duration) bool {
	p := &w.pace
	if !p.begun {
		p.begun, p.last = true, now
	}
	if w.opt.CheckpointAge < 0 || now-p.last < max(w.opt.CheckpointAge, p.pause) {
		return false
	}
	return w.opt.CheckpointExact || w.packedEvents.Load() >= checkpointShare*w.packedState.Load()
}

// Checkpoint keeps the core's state as it is behind the last event recorded. It
// is encoded on the caller's goroutine, and left out when it would be larger
// than Options.CheckpointBytes: that is counted.
func (w *Writer) Checkpoint(now time.Duration, of core.Source) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	w.pace.last = now
	if n := of.CheckpointBytes(); n > w.opt.CheckpointBytes {
		w.meter.skipped.Inc()
		if !w.pace.skipped {
			w.pace.skipped = true
			w.opt.Log.Warn("no checkpoint is written: the core's state is too large, and the journal can be replayed from older ones only",
				"bytes", n, "limit", w.opt.CheckpointBytes)
		}
		return
	}
	w.pace.skipped = false
	began := time.Now()
	w.hand()
	p := of.Checkpoint()
	raw := encodeState(p)
	b := batch{raw: raw, Header: Header{
		Checkpoint: true, Reset: true, First: w.next, Now: int64(w.now), Lost: w.lost, Raw: len(raw), Batch: w.number,
		Digest: w.digest.sum, State: xxhash.Sum64(raw), Server: serverAt(p, w.now),
	}}
	w.number++
	if !w.enqueue(b) {
		w.meter.skipped.Inc()
		return
	}
	w.reset()
	took := time.Since(began)
	if !w.opt.CheckpointExact {
		w.pace.pause = checkpointPause * took
	}
	w.packedEvents.Store(0)
	w.meter.checkpoints.Inc()
	w.meter.checkpointSeconds.Add(took.Seconds())
}

// serverAt is the server's clock at a core time, 0 when unknown.
func serverAt(p *core.Checkpoint, now time.Duration) int64 {
	if p.Server.Sample == 0 {
		return 0
	}
	return max(p.Server.Floor, p.Server.Sample+int64(now-p.Server.At))
}

func encodeState(p *core.Checkpoint) []byte {
	e := encoder{blocks: &blockIDs{}}
	e.blocks.reset()
	e.value(plans[checkpointType], reflect.ValueOf(p).Elem())
	return e.buf
}

// Mark is a checkpoint read: the core's state before event N.
type Mark struct {
	N      uint64
	Now    time.Duration
	Server int64 // unix ns, 0 = unknown
	Frame  int

	digest, state uint64
	raw           []byte
	plan          *readPlan
	own           bool // its shape is this program's: equal states have equal bytes
}

// Restore makes the core that the checkpoint was taken of.
func (m *Mark) Restore(cfg core.Config) (*core.Core, error) {
	p, err := m.State()
	if err != nil {
		return nil, err
	}
	return core.Restore(cfg, p)
}

// State decodes the checkpoint.
func (m *Mark) State() (*core.Checkpoint, error) {
	if m.plan == nil {
		return nil, fmt.Errorf("%w: its checkpoints are of another shape", ErrVersion)
	}
	if xxhash.Sum64(m.raw) != m.state {
		return nil, fmt.Errorf("%w: the checkpoint before event %d", ErrCorrupt, m.N)
	}
	p := new(core.Checkpoint)
	d := decoder{buf: m.raw}
	d.value(m.plan, reflect.ValueOf(p).Elem())
	if d.err != nil {
		return nil, d.err
	}
	return p, nil
}

// holds tells whether a core is in the state that the checkpoint recorded; known
// is false when that cannot be told.
func (m *Mark) holds(of core.Source) (same, known bool) {
	if !m.own {
		return false, false
	}
	return xxhash.Sum64(encodeState(of.Checkpoint())) == m.state, true
}
