package dispatcher

import (
	"context"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

func (w *walker) swapCancels(vs []kvstate.Value[subjects.Cancel]) {
	w.mu.Lock()
	clear(w.cancels)
	w.mu.Unlock()
	for _, v := range vs {
		w.putCancel(v)
	}
}

func (w *walker) putCancel(v kvstate.Value[subjects.Cancel]) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancels[v.V.Key()] = nanos(v.Stored)
	if goodToken(v.V.Job) {
		w.dirty[v.V.Job] = struct{}{}
	}
}

func (w *walker) goneCancel(key string) {
	w.mu.Lock()
	delete(w.cancels, key)
	w.mu.Unlock()
}

// cancelled tells whether a cancel reaches work accepted at that server time.
func (w *walker) cancelled(f *subjects.Facts, accepted int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.cancels) == 0 {
		return false
	}
	hit := func(kind, value string) bool {
		if value == "" && kind != subjects.CancelJob {
			return false
		}
		at, ok := w.cancels[subjects.Cancel{Kind: kind, Job: f.Job, Value: value}.Key()]
		return ok && accepted <= at
	}
	return hit(subjects.CancelID, f.ID) || hit(subjects.CancelGroup, f.Group) ||
		hit(subjects.CancelTrajectory, f.Trajectory) || hit(subjects.CancelJob, "")
}

func (w *walker) forgetCancels() {
	now := w.d.clock.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	for k, at := range w.cancels {
		if now-at > int64(cancelKeep) {
			delete(w.cancels, k)
		}
	}
}

// lookForCancels walks the queued work of jobs that have a new cancel.
func (w *walker) lookForCancels(ctx context.Context, budget *int) error {
	w.mu.Lock()
	jobs := make([]string, 0, len(w.dirty))
	for j := range w.dirty {
		jobs = append(jobs, j)
	}
	w.mu.Unlock()
	for _, job := range jobs {
		w.mu.Lock()
		delete(w.dirty, job)
		w.mu.Unlock()
		for kind, filter := range [queueKinds]string{w.d.pool.Submit(job, ">"), w.d.pool.RetrySubject(job)} {
			if err := w.lookForJob(ctx, kind, filter, budget); err != nil {
				w.mu.Lock()
				w.dirty[job] = struct{}{}
				w.mu.Unlock()
				return err
			}
		}
	}
	return nil
}

// lookForJob reads everything that is queued under filter. It may overdraw the
// budget of this step: a cancel is not left half done.
func (w *walker) lookForJob(ctx context.Context, kind int, filter string, budget *int) error {
	stream, _ := w.names(kind)
	w.mu.Lock()
	from, limit := max(w.streams[kind].first, 1), w.streams[kind].last
	w.mu.Unlock()
	for from <= limit {
		if *budget <= 0 {
			pace := newPause(w.d.cfg.Timings.WalkEvery, w.d.cfg.Timings.WalkEvery)
			if !pace.wait(ctx) {
				return context.Cause(ctx)
			}
			*budget = max(1, int(float64(w.d.cfg.Limits.WalkPerS)*w.d.cfg.Timings.WalkEvery.Seconds()/2))
		}
		n, last, err := w.pass(ctx, stream, filter, from, limit, budget, func(m *stored, f *subjects.Facts) bool {
			return w.cancelled(f, acceptedOf(m, f))
		})
		if err != nil || n == 0 {
			return err
		}
		from = last + 1
	}
	return nil
}
