package bus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
)

// journals are the writers of one side's dispatchers.
type journals struct{ writers []*journal.Writer }

// recording is a recorder that counts refusals too.
type recording struct {
	refusals
	*journal.Writer
}

func (r recording) Record(now time.Duration, ev core.Event, effects []core.Effect) {
	r.refusals.Record(now, ev, effects)
	r.Writer.Record(now, ev, effects)
}

// start makes a dispatcher's recorder, as `rollbus dispatcher` does.
func (j *journals) start(x *side, cfg dispatcher.Config, nc *nats.Conn) (dispatcher.Recorder, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	w, err := journal.ForPool(js, x.pool, cfg.CoreConfig(), "bench", &journal.SelfCheck{}, nil)
	if err != nil {
		return nil, err
	}
	j.writers = append(j.writers, w)
	x.ends = append(x.ends, func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopWait)
		defer cancel()
		_ = w.Close(ctx) // nothing is read after it
	})
	return recording{refusals{&x.refused}, w}, nil
}

// Recording is what keeping journals costs. CPU is of the whole process: NATS,
// trainer, dispatchers, agents; of each side the best of its turns, since what
// else runs on a machine only adds.
type Recording struct {
	Dispatchers     int       `json:"dispatchers"`
	Engines         int       `json:"engines"`
	Rollouts        int64     `json:"rollouts"` // of the side that records
	CPU             float64   `json:"cpu_us_per_rollout"`
	PlainCPU        float64   `json:"plain_cpu_us_per_rollout"`
	Overhead        float64   `json:"overhead_fraction"`
	Rounds          []float64 `json:"overhead_by_round"` // each turn against the turn of the other side beside it
	BytesPerRollout float64   `json:"bytes_per_rollout"` // stored, of each dispatcher
	Blocks          int       `json:"blocks_per_rollout"`
}

// MeasureRecording runs the same pool with and without journals, in turns.
func MeasureRecording(ctx context.Context, cfg Config, c Case) (r Recording, err error) {
	cfg = cfg.withDefaults()
	if err := c.Validate(); err != nil {
		return r, err
	}
	dir, err := os.MkdirTemp(cfg.Dir, "rollbus-bench-journal-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	servers, err := startServers(ctx, dir, c.Replicas)
	if err != nil {
		return r, err
	}
	defer servers.stop()
	j := &journals{}
	on, err := startPool(ctx, "recording", servers, c, j)
	if err != nil {
		return r, fmt.Errorf("with journals: %w", err)
	}
	defer on.stop()
	off, err := startPool(ctx, "plain", servers, c, nil)
	if err != nil {
		return r, fmt.Errorf("without journals: %w", err)
	}
	defer off.stop()
	for _, s := range []*side{on, off} {
		if _, err := s.saturate(ctx, warm); err != nil && !errors.Is(err, errNothing) {
			return r, fmt.Errorf("warm up %s: %w", s.name, err)
		}
	}
	before, answered := j.bytes(), on.answered.Load()
	best := map[*side]float64{}
	for i := range cfg.Rounds {
		sides := []*side{on, off}
		if i%2 == 1 {
			sides = []*side{off, on} // neither is always the second
		}
		var pair [2]turn
		for _, s := range sides {
			cfg.Progress(fmt.Sprintf("%s round %d of %d", s.name, i+1, cfg.Rounds))
			got, err := s.saturate(ctx, cfg.Slice)
			if err != nil {
				return r, fmt.Errorf("%s, round %d: %w", s.name, i+1, err)
			}
			at := 0
			if s == off {
				at = 1
			}
			pair[at] = got
			if b, ok := best[s]; !ok || got.each() < b {
				best[s] = got.each()
			}
		}
		r.Rounds = append(r.Rounds, pair[0].each()/pair[1].each()-1)
	}
	r.Dispatchers, r.Engines = c.Dispatchers, c.Engines
	r.CPU, r.PlainCPU = best[on]/1000, best[off]/1000
	r.Overhead = best[on]/best[off] - 1
	if err := settle(ctx); err != nil {
		return r, err
	}
	r.Rollouts = on.answered.Load() - answered
	r.BytesPerRollout = float64(j.bytes()-before) / float64(r.Rollouts) / float64(c.Dispatchers)
	r.Blocks = (c.Payload - 230) / 6 / 64
	return r, nil
}

// each is CPU a rollout, ns.
func (t turn) each() float64 { return float64(t.cpu) / float64(max(1, t.n)) }

func (j *journals) bytes() (n int64) {
	for _, w := range j.writers {
		n += w.Stored()
	}
	return n
}

// settle waits until the batch that is open at the end of the last turn is stored.
func settle(ctx context.Context) error {
	t := time.NewTimer(1500 * time.Millisecond)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// CPUTime is what this process has used, user and system.
func CPUTime() time.Duration { return cpuTime() }
