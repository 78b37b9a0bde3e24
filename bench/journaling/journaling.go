// Package journaling measures what journals cost and how quickly they are
// replayed:
//
//   - replay: a run of the real core in virtual time (bench/recorded) with load
//     reports and cache events of every engine is replayed, and the same steps are
//     taken by a core alone, in turns; CPU of the whole process, so that garbage
//     collection counts, and the best turn of each arm;
//   - recording: the same pool on a real NATS server with and without journals,
//     in turns (bench/bus);
//   - bytes: what a rollout, and what load reports, add to a journal.
package journaling

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/bench/bus"
	"github.com/rollbus/rollbus/bench/recorded"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/dispatcher/policy"
)

// Config of a run. Zero fields take the default.
type Config struct {
	Engines  int           // 50
	Rollouts int           // 20,000 of the replay
	Rounds   int           // 5 turns of each arm
	Slice    time.Duration // 3 s of a turn on the real server
	Dir      string        // where streams go; empty = a temporary folder
	// Progress is called before each part; nil = nobody looks.
	Progress func(text string)
}

func (c Config) withDefaults() Config {
	fill := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	fill(&c.Engines, 50)
	fill(&c.Rollouts, 20_000)
	fill(&c.Rounds, 5)
	if c.Slice == 0 {
		c.Slice = 3 * time.Second
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// Result is the document of `rollbus bench journal -o json`.
type Result struct {
	Engines int `json:"engines"`

	Events      uint64  `json:"replay_events"`
	Decisions   uint64  `json:"replay_decisions"`
	PerCPU      float64 `json:"replay_decisions_per_cpu_s"` // reading, stepping, comparing
	EventsCPU   float64 `json:"replay_events_per_cpu_s"`
	ToLive      float64 `json:"replay_to_live_cpu"` // the same steps taken by a core alone = 1
	Differences int     `json:"differences"`        // of all replays

	Overhead        float64   `json:"overhead_fraction"` // CPU a rollout with journals over that without, - 1
	OverheadRounds  []float64 `json:"overhead_by_round"`
	CPUMicros       float64   `json:"cpu_us_per_rollout"`
	PlainCPUMicros  float64   `json:"plain_cpu_us_per_rollout"`
	BytesPerRollout float64   `json:"bytes_per_rollout"` // of one dispatcher on the real server, prompts of Blocks new blocks
	BlocksPer       int       `json:"blocks_per_rollout"`

	LoadBytesPerS   float64 `json:"load_bytes_per_s"` // of one dispatcher, idle, all engines reporting at 5 Hz; ticks included
	IdleBytesPerS   float64 `json:"idle_bytes_per_s"` // the same without reports
	CheckpointMS    float64 `json:"checkpoint_ms"`    // CPU of the core for one, at the end of the replayed run
	CheckpointBytes int     `json:"checkpoint_bytes"` // stored, at most
	RestoreMS       float64 `json:"checkpoint_restore_ms"`
}

// Run measures.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	cfg = cfg.withDefaults()
	r := &Result{Engines: cfg.Engines}
	if err := r.replay(ctx, cfg); err != nil {
		return r, err
	}
	if err := r.load(cfg); err != nil {
		return r, err
	}
	got, err := bus.MeasureRecording(ctx, bus.Config{Rounds: cfg.Rounds, Slice: cfg.Slice, Dir: cfg.Dir, Progress: cfg.Progress},
		bus.Case{Storage: jetstream.FileStorage, Replicas: 1, Payload: 1 << 10, Dispatchers: 1, Engines: cfg.Engines})
	if err != nil {
		return r, err
	}
	r.Overhead, r.OverheadRounds, r.CPUMicros, r.PlainCPUMicros = got.Overhead, got.Rounds, got.CPU, got.PlainCPU
	r.BytesPerRollout, r.BlocksPer = got.BytesPerRollout, got.Blocks
	return r, nil
}

// replay compares reading, stepping and comparing with stepping alone.
func (r *Result) replay(ctx context.Context, cfg Config) error {
	cfg.Progress("recording in virtual time")
	d, err := record(cfg)
	if err != nil {
		return err
	}
	journals, problems := journal.Split(journal.Slice(d.Frames))
	if len(journals) != 1 || len(problems) > 0 {
		return fmt.Errorf("the recorded run cannot be read: %w", errors.Join(problems...))
	}
	replayed, live := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	var c *core.Core
	for i := range cfg.Rounds {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		cfg.Progress(fmt.Sprintf("replay %d of %d", i+1, cfg.Rounds))
		c = nil
		var rep *journal.Report
		replayed = min(replayed, cpu(func() {
			rep, err = journal.Replay(journals[0], journal.ReplayOptions{})
		}))
		if err != nil {
			return err
		}
		if rep.Incomplete != "" {
			return errors.New(rep.Incomplete)
		}
		r.Differences += rep.Differences
		r.Events, r.Decisions = rep.Events, rep.Decisions
		steps, err := read(journals[0])
		if err != nil {
			return err
		}
		live = min(live, cpu(func() {
			c = core.New(core.Config{Dispatcher: d.Name, Timings: core.DefaultTimings()})
			for _, s := range steps {
				c.Step(s.ev, s.now)
			}
		}))
	}
	r.PerCPU, r.EventsCPU = float64(r.Decisions)/replayed.Seconds(), float64(r.Events)/replayed.Seconds()
	r.ToLive = float64(replayed) / float64(live)
	return r.checkpoint(d, c)
}

// record keeps the frames alone: a large heap would be searched for garbage in
// every turn.
func record(cfg Config) (*recorded.Dispatcher, error) {
	run, err := recorded.Make(recorded.Options{
		Seed: 1, Settings: policy.Recommended(), Engines: cfg.Engines, Slots: 16, Rollouts: cfg.Rollouts, Prompt: 1024, Output: 64, Cache: true, KVTokens: 400_000,
		Limit: 10 * time.Hour, Journal: journal.Options{CheckpointAge: 10 * time.Second},
	})
	if err != nil {
		return nil, err
	}
	return run.Dispatchers[0], nil
}

type step struct {
	ev  core.Event
	now time.Duration
}

// read is what a core alone steps.
func read(j *journal.Journal) (out []step, err error) {
	r, err := journal.NewReader(j)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for {
		s, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		out = append(out, step{s.Event, s.Now})
	}
}

// checkpoint measures one of the core as it stands in the end.
func (r *Result) checkpoint(d *recorded.Dispatcher, c *core.Core) error {
	sizes := map[uint64]int{}
	for _, f := range d.Frames {
		if h, _, err := journal.ReadFrame(f); err == nil && h.Checkpoint {
			sizes[h.Batch] += len(f)
			r.CheckpointBytes = max(r.CheckpointBytes, sizes[h.Batch])
		}
	}
	w, err := journal.NewWriter(journal.Options{Core: core.Config{Dispatcher: d.Name},
		Publish: func(context.Context, string, []byte) error { return nil }})
	if err != nil {
		return err
	}
	const times = 5
	p := c.Checkpoint()
	r.CheckpointMS = cpu(func() {
		for range times {
			w.Checkpoint(p.Now, c)
		}
	}).Seconds() * 1000 / times
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r.RestoreMS = cpu(func() {
		_, err = core.Restore(core.Config{Dispatcher: d.Name, Timings: core.DefaultTimings()}, p)
	}).Seconds() * 1000
	return errors.Join(err, w.Close(ctx))
}

// load is what engines that report add while nothing else happens.
func (r *Result) load(cfg Config) error {
	cfg.Progress("idle engines in virtual time")
	for _, arm := range []struct {
		cache bool
		to    *float64
	}{{true, &r.LoadBytesPerS}, {false, &r.IdleBytesPerS}} {
		const idle = 2 * time.Minute
		run, err := recorded.Make(recorded.Options{Seed: 2, Settings: policy.Recommended(), Engines: cfg.Engines, Rollouts: 1, Cache: arm.cache, Idle: idle})
		if err != nil {
			return err
		}
		*arm.to = float64(run.Dispatchers[0].Bytes()) / (run.LastAnswer + idle).Seconds()
	}
	return nil
}

// cpu is what f costs this process, garbage collection included.
func cpu(f func()) time.Duration {
	runtime.GC()
	began := bus.CPUTime()
	f()
	return bus.CPUTime() - began
}
