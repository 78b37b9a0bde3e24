package whatif

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

// Rows are the traffic as a Mooncake trace: arrivals as recorded, prompts as
// blocks of 512 tokens that are equal where the recorded ones are. Turns are
// counted from the first one that is in the span; one that did not wait for the
// answer before it is no turn there, since readers would have it wait.
func (t *Traffic) Rows() []workload.Row {
	w := t.Workload(false)
	gaps := map[[2]string]map[int]int64{} // of a turn, ms
	answered := map[[2]string]int64{}
	turns := map[[2]string]int{}
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		if r.Trajectory == "" {
			r.Turn = 0
			continue
		}
		k := [2]string{r.Job, r.Trajectory}
		if t.Rollouts[i].Submitted < answered[k] {
			r.Trajectory, r.Turn = "", 0
			continue
		}
		turns[k]++
		r.Turn = turns[k]
		if gaps[k] == nil {
			gaps[k] = map[int]int64{}
		}
		if r.Turn > 1 {
			gaps[k][r.Turn] = max(0, t.Rollouts[i].Submitted-answered[k]) / 1e6
		}
		answered[k] = t.Rollouts[i].Answered
	}
	rows := w.ToRows(0)
	for i := range rows {
		rows[i].GapMS = gaps[[2]string{rows[i].Job, rows[i].Trajectory}][rows[i].Turn]
	}
	return rows
}

// Import runs a workload in virtual time, on engines of the model's default
// speed, and returns the frames of its dispatcher's journal: what it holds of
// answers is modelled.
func Import(w workload.Workload, s subjects.Settings, engines int) ([][]byte, error) {
	if engines < 1 {
		return nil, errors.New("give at least one engine")
	}
	c := &contest.Case{Work: w, Seed: 1, Limit: 30 * 24 * time.Hour}
	for range engines {
		c.Engines = append(c.Engines, model.Config{BlockTokens: subjects.DefaultBlockTokens})
	}
	var frames [][]byte
	var writers []*journal.Writer
	var failed error
	var world *sim.World
	c.Script = func(run *contest.Run) {
		world = run.World
		for name, d := range run.World.Cores {
			jw, err := attach(name, d, func(f []byte) { frames = append(frames, bytes.Clone(f)) })
			failed = errors.Join(failed, err)
			if err == nil {
				writers = append(writers, jw)
			}
		}
	}
	o, err := c.Bus(s)
	if world != nil {
		world.Run(time.Second, nil) // the last answers reach the dispatcher
	}
	for _, jw := range writers {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		err = errors.Join(err, jw.Close(ctx))
		cancel()
	}
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	if len(o.Problems) > 0 {
		return nil, errors.New(o.Problems[0])
	}
	return frames, nil
}

// attach begins a journal in the middle of a core's life: with a checkpoint.
func attach(name string, d *sim.Dispatcher, keep func([]byte)) (*journal.Writer, error) {
	w, err := journal.NewWriter(journal.Options{
		Pool: "imported", Program: "modelled", Core: core.Config{Dispatcher: name, Timings: core.DefaultTimings()}, Start: "modelled",
		Publish: func(_ context.Context, _ string, frame []byte) error { keep(frame); return nil },
	})
	if err != nil {
		return nil, err
	}
	w.Checkpoint(d.Core.Checkpoint().Now, d.Core)
	d.Log = func(ev core.Event, now time.Duration, out []core.Effect) {
		w.Record(now, ev, out)
		if w.Due(now) {
			w.Checkpoint(now, d.Core)
		}
	}
	return w, nil
}
