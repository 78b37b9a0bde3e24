// Package recorded makes journals: runs of real decision cores in virtual time
// (bench/sim), each dispatcher with a journal writer that keeps its frames in
// memory. One seed gives one run, byte for byte.
//
// The corpus of journals that `make test` replays is made here, and so are the
// figures of `rollbus bench journal`.
package recorded

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

// Options of a run. Zero fields take the default.
type Options struct {
	Seed        uint64
	Settings    subjects.Settings
	Dispatchers int // 1
	Engines     int // 4
	Slots       int // 8 of each engine
	Rollouts    int // 100, submitted over Over
	Over        time.Duration
	Prompt      int           // 512 tokens; the first half is that of the rollout's group of eight
	Output      int           // 100 tokens on average
	KVTokens    int           // 60,000 of each engine, with Cache
	Cache       bool          // engines run the engine model: load reports, cache events, prefixes that are found
	Faults      bool          // engines die, are cut off and come back; attempts come back; writes are slow
	Syncs       bool          // weight syncs: engines pause and come back with the next version
	Cancels     bool          // a group and a trajectory are cancelled on the way
	Idle        time.Duration // goes on so long after the last answer; 1s, so that all hear of it
	Limit       time.Duration // 30 min of virtual time
	Journal     journal.Options
}

func (o Options) withDefaults() Options {
	fill := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	fill(&o.Dispatchers, 1)
	fill(&o.Engines, 4)
	fill(&o.Slots, 8)
	fill(&o.Rollouts, 100)
	fill(&o.Prompt, 512)
	fill(&o.Output, 100)
	fill(&o.KVTokens, 60_000)
	if o.Idle == 0 {
		o.Idle = time.Second
	}
	if o.Limit == 0 {
		o.Limit = 30 * time.Minute
	}
	if o.Journal.CheckpointAge == 0 {
		o.Journal.CheckpointAge = -1
	}
	return o
}

// Dispatcher is what one of them recorded.
type Dispatcher struct {
	Name   string
	Frames [][]byte
}

// Bytes of the frames.
func (d *Dispatcher) Bytes() (n int) {
	for _, f := range d.Frames {
		n += len(f)
	}
	return n
}

// Run is a run that is over.
type Run struct {
	World       *sim.World
	Dispatchers []*Dispatcher
	Blocks      int // distinct block hashes in the prompts
	LastAnswer  time.Duration
}

// Frames of all dispatchers, one after the other.
func (r *Run) Frames() (out [][]byte) {
	for _, d := range r.Dispatchers {
		out = append(out, d.Frames...)
	}
	return out
}

// serverStart is the NATS server's clock when a World begins.
const serverStart = 1_700_000_000_000_000_000

const block = subjects.DefaultBlockTokens

// Make runs it.
func Make(o Options) (*Run, error) {
	o = o.withDefaults()
	so := sim.Options{Seed: o.Seed, Settings: o.Settings, WatchDelay: 5 * time.Millisecond}
	if o.Faults {
		so.SlowWrites = 0.02
	}
	r := &Run{World: sim.New(so)}
	r.World.Work = func(key string) sim.Work {
		f := r.World.Accepted[key]
		return sim.Work{PromptTokens: f.PromptTokens, OutputTokens: f.MaxTokens, Blocks: f.Blocks}
	}
	var writers []*journal.Writer
	for i := range o.Dispatchers {
		w, err := r.dispatcher(fmt.Sprintf("d%d", i+1), o.Journal)
		if err != nil {
			return nil, err
		}
		writers = append(writers, w)
	}
	nodes, err := r.engines(o)
	if err != nil {
		return nil, err
	}
	r.World.Run(500*time.Millisecond, nil)
	r.submit(o)
	if o.Faults {
		r.faults(o, nodes)
	}
	if o.Syncs {
		r.syncs(nodes)
	}
	if !r.World.Run(o.Limit, func() bool { return len(r.World.Accepted) == o.Rollouts && r.World.AllAnswered() }) {
		return nil, fmt.Errorf("recorded: %d of %d rollouts are answered after %v", len(r.World.Answers), len(r.World.Accepted), o.Limit)
	}
	r.LastAnswer = r.World.Now
	r.World.Run(o.Idle, nil)
	var errs []error
	for _, w := range writers {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		errs = append(errs, w.Close(ctx))
		cancel()
	}
	return r, errors.Join(errs...)
}

// dispatcher starts one whose every step is recorded, the first one too.
func (r *Run) dispatcher(name string, jo journal.Options) (*journal.Writer, error) {
	rec := &Dispatcher{Name: name}
	r.Dispatchers = append(r.Dispatchers, rec)
	cfg := core.Config{Dispatcher: name, Timings: core.DefaultTimings()}
	jo.Pool, jo.Program, jo.Core = "recorded", "recorded", cfg
	jo.CheckpointExact = true
	jo.Start, jo.Started = "virtual-"+name, time.Unix(0, serverStart+int64(r.World.Now))
	jo.Publish = func(_ context.Context, _ string, frame []byte) error {
		rec.Frames = append(rec.Frames, bytes.Clone(frame))
		return nil
	}
	w, err := journal.NewWriter(jo)
	if err != nil {
		return nil, err
	}
	d := r.World.AddDispatcher(name)
	log := func(ev core.Event, now time.Duration, out []core.Effect) {
		w.Record(now, ev, out)
		if w.Due(now) {
			w.Checkpoint(now, d.Core)
		}
	}
	d.Core = core.New(cfg) // its first event again, seen by the writer
	first := core.ServerTime{UnixNano: serverStart + int64(r.World.Now)}
	log(first, 0, d.Core.Step(first, 0))
	d.Log = log
	return w, nil
}

func (r *Run) engines(o Options) ([]*sim.Node, error) {
	var nodes []*sim.Node
	for i := range o.Engines {
		n := r.World.AddNode(fmt.Sprintf("e%02d", i+1), o.Slots, 0)
		if o.Cache {
			if err := n.SetModel(model.Config{BlockTokens: block, MaxRunning: o.Slots, KVTokens: o.KVTokens}); err != nil {
				return nil, err
			}
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// submit spreads the rollouts: groups of eight share half of their prompts, every
// third group is a trajectory of turns.
func (r *Run) submit(o Options) {
	seen := map[uint64]bool{}
	for i := range o.Rollouts {
		group := i / 8
		f := subjects.Facts{
			Job: []string{"train", "train", "eval"}[group%3], ID: fmt.Sprintf("%05d", i), Reader: "main", Lane: subjects.LaneNormal,
			Group: fmt.Sprint("g", group), Model: "m", PromptTokens: o.Prompt, MaxTokens: 1 + o.Output/2 + i*37%o.Output,
			MaxAttempts: 50, BlockTokens: block, Namespace: 1,
		}
		if group%3 == 2 {
			f.Trajectory, f.Turn = f.Group+"t", i%8+1
			if f.Turn > 1 {
				f.Lane = subjects.LaneContinue
			}
		}
		for b := range o.Prompt / block {
			h := uint64(group)<<20 + uint64(b)
			if b >= o.Prompt/block/2 {
				h += uint64(i%8+1) << 12
			}
			f.Blocks = append(f.Blocks, (h+1)*0x9e3779b97f4a7c15)
		}
		for _, b := range f.Blocks {
			seen[b] = true
		}
		at := time.Duration(0)
		if o.Rollouts > 1 {
			at = o.Over * time.Duration(i) / time.Duration(o.Rollouts)
		}
		r.World.After(at, func() { r.World.Bus.Submit(f) })
		if o.Cancels && i == o.Rollouts/2 {
			r.World.After(at+50*time.Millisecond, func() {
				r.World.Bus.Cancel(subjects.Cancel{Kind: subjects.CancelGroup, Job: f.Job, Value: f.Group})
			})
		}
	}
	r.Blocks = len(seen)
}

func (r *Run) faults(o Options, nodes []*sim.Node) {
	for k, n := range nodes[:max(1, len(nodes)/2)] {
		at := o.Over/4 + time.Duration(100+(o.Seed*37+uint64(k)*211)%900)*time.Millisecond
		if k%2 == 0 {
			r.World.After(at, n.Kill)
			r.World.After(at+40*time.Second, n.Start)
		} else {
			r.World.After(at, n.Cut)
			r.World.After(at+35*time.Second, n.Heal)
		}
	}
	for i := range 20 {
		r.World.After(time.Duration(i)*300*time.Millisecond, func() {
			n := nodes[i%len(nodes)]
			if running := n.Running(); len(running) > 0 {
				n.Return(running[i%len(running)], "failed", 1)
			}
		})
	}
}

// syncs has every engine pause and come back with the next version, twice.
func (r *Run) syncs(nodes []*sim.Node) {
	for v := range int64(2) {
		at := time.Duration(3+12*v) * time.Second
		for _, n := range nodes {
			r.World.After(at, func() { n.Reg.State = subjects.EnginePaused })
			r.World.After(at+6*time.Second, func() {
				version := v + 1
				n.Reg.State, n.Reg.WeightVersion = subjects.EngineReady, &version
			})
		}
	}
}

// Bundle writes all journals of a run as one file.
func (r *Run) Bundle(m journal.Manifest) ([]byte, error) {
	var b bytes.Buffer
	_, err := journal.WriteBundle(&b, m, journal.Slice(slices.Clone(r.Frames())))
	return b.Bytes(), err
}
