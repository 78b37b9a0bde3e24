package demo

import (
	"context"
	"iter"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/subjects"
)

// submitsInFlight bounds the submits that await their ack.
const submitsInFlight = 128

// driver releases the rollouts of a workload as they are due. It runs on one
// goroutine, which owns everything but the channels.
type driver struct {
	w        workload.Workload
	speed    float64
	trainers map[string]*trainer
	answered chan *subjects.Result // from the trainers
	refused  chan *workload.Rollout
	outputs  map[uint64][]uint32 // what turns really said, while a later one needs it
	needed   map[uint64]bool
}

func newDriver(w workload.Workload, speed float64) *driver {
	d := &driver{
		w: w, speed: speed, trainers: map[string]*trainer{}, outputs: map[uint64][]uint32{}, needed: map[uint64]bool{},
		answered: make(chan *subjects.Result, submitsInFlight), refused: make(chan *workload.Rollout, submitsInFlight),
	}
	for i := range w.Rollouts {
		for _, s := range w.Rollouts[i].Prompt {
			d.needed[s.ID] = true
		}
	}
	return d
}

// jobs yields each job of the workload once.
func (d *driver) jobs() iter.Seq[string] {
	jobs := map[string]bool{}
	for i := range d.w.Rollouts {
		jobs[d.w.Rollouts[i].Job] = true
	}
	return maps.Keys(jobs)
}

// run submits until every rollout is answered or refused, or ctx ends.
func (d *driver) run(ctx context.Context) error {
	var submits errgroup.Group
	submits.SetLimit(submitsInFlight)
	defer func() { _ = submits.Wait() }() // they fail by the recorder
	byKey := map[string]*workload.Rollout{}
	for i := range d.w.Rollouts {
		r := &d.w.Rollouts[i]
		byKey[subjects.RolloutKey(r.Job, r.ID)] = r
	}
	start := time.Now()
	now := func() time.Duration { return time.Duration(float64(time.Since(start)) * d.speed) }
	pace := d.w.Pace(0)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for pace.Left() > 0 {
		for _, r := range pace.Due(now()) {
			t, q := d.trainers[r.Job], d.request(r)
			submits.Go(func() error {
				if !t.submit(ctx, q) {
					select {
					case d.refused <- r:
					case <-ctx.Done():
					}
				}
				return nil
			})
		}
		if at, ok := pace.Next(); ok {
			timer.Reset(time.Duration(float64(at-now()) / d.speed))
		} else {
			timer.Stop()
		}
		select {
		case <-timer.C:
		case res := <-d.answered:
			if r := byKey[subjects.RolloutKey(res.Job, res.ID)]; r != nil {
				if seg := r.OutputSegment(); d.needed[seg.ID] {
					d.outputs[seg.ID] = res.TokenIDs
				}
			}
			pace.Answered(now(), res.Job, res.ID)
		case r := <-d.refused:
			pace.Answered(now(), r.Job, r.ID)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (d *driver) request(r *workload.Rollout) *subjects.Request {
	return r.Request(workload.RequestOptions{Outputs: func(id uint64) []uint32 { return d.outputs[id] }})
}
