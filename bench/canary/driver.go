package canary

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// driver releases the workload. One goroutine owns it.
type driver struct {
	arm    *arm
	client *client.Client
	w      workload.Workload
	said   map[uint64][]uint32      // outputs by their segment
	turns  map[string]time.Duration // when they were released, by id
	fail   context.CancelCauseFunc

	start    time.Time
	held     time.Duration // how long the releases stood still
	from     time.Duration // of what is measured
	counting bool
	rest     bool // is released

	whole  []float64
	lines  []string
	shares map[string]int
	cached int
	tokens int
	last   time.Duration
}

// submitsAtOnce bounds the submits that await their ack.
const submitsAtOnce = 16

func (d *driver) run(ctx context.Context, answers <-chan *subjects.Result) error {
	var submits errgroup.Group
	submits.SetLimit(submitsAtOnce)
	defer func() { _ = submits.Wait() }() // they tell fail
	byID := map[string]*workload.Rollout{}
	for i := range d.w.Rollouts {
		byID[d.w.Rollouts[i].ID] = &d.w.Rollouts[i]
	}
	d.shares = map[string]int{}
	d.start = time.Now()
	pace := d.w.Pace(0)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for pace.Left() > 0 {
		for _, r := range pace.Due(d.paced()) {
			d.turns[r.ID] = d.now()
			q := r.Request(workload.RequestOptions{Forced: true, Outputs: func(id uint64) []uint32 { return d.said[id] }})
			submits.Go(func() error {
				if _, err := d.client.Submit(ctx, q); err != nil {
					d.fail(fmt.Errorf("submit %s: %w", q.ID, err))
				}
				return nil
			})
		}
		if at, ok := pace.Next(); ok {
			timer.Reset(max(look, time.Duration(float64(at-d.paced())/d.arm.cfg.Scale)))
		}
		select {
		case <-timer.C:
		case res := <-answers:
			r := byID[res.ID]
			if r == nil {
				return fmt.Errorf("an answer to %s, which was not asked for", res.ID)
			}
			d.said[r.OutputSegment().ID] = res.TokenIDs
			d.count(r, res)
			pace.Answered(d.paced(), res.Job, res.ID)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	d.finish()
	return nil
}

const (
	look     = 5 * time.Millisecond // between looks at whether something is due
	holdMost = 30 * time.Second     // that the rest waits for the first ones to run
)

// now is the time of the modelled engines since the start.
func (d *driver) now() time.Duration {
	return time.Duration(float64(time.Since(d.start)) * d.arm.cfg.Scale)
}

// paced is the time that releases go by: it stands still before the rest is
// released until all of the first ones run, since this machine may be slow to
// bring them there. What is measured goes by now.
func (d *driver) paced() time.Duration {
	t := d.now() - d.held
	if t >= contest.CanaryReady && !d.counting {
		d.counting, d.from = true, d.now()
		d.arm.seen.begin()
	}
	if t < contest.CanaryRest || d.rest {
		return t
	}
	if d.arm.seen.total() < contest.CanaryFirst && d.held < time.Duration(float64(holdMost)*d.arm.cfg.Scale) {
		t = contest.CanaryRest - time.Millisecond
		d.held = d.now() - t
		return t
	}
	d.rest = true
	d.arm.seen.start(engineNames())
	return t
}

func (d *driver) count(r *workload.Rollout, res *subjects.Result) {
	if r.Trajectory == "" {
		return // it made the owner
	}
	a := d.arm.out
	a.Turns++
	if res.Status.Sample() {
		a.Completed++
	}
	if p := d.arm.cfg.Progress; p != nil {
		p(a.Name, a.Turns, len(d.w.Rollouts)-1)
	}
	d.whole = append(d.whole, (d.now() - d.turns[r.ID]).Seconds())
	d.lines = append(d.lines, fmt.Sprintf("%s %s", r.ID, contest.CanaryDigest(res.TokenIDs)))
	if res.Usage != nil {
		a.PromptTokens += res.Usage.PromptTokens
		d.tokens += res.Usage.CompletionTokens
		if res.Usage.CachedTokens != nil {
			d.cached += *res.Usage.CachedTokens
		}
		d.shares[res.Route.Engine] += res.Usage.CompletionTokens
	}
	if at := d.arm.seen.seededAt(res.Key()); !at.IsZero() && a.SeedS == 0 {
		a.SeedS = time.Since(at).Seconds() * d.arm.cfg.Scale
	}
	d.last = d.now()
}

func (d *driver) finish() {
	a := d.arm.out
	slices.Sort(d.whole)
	slices.Sort(d.lines)
	a.WallS = (d.last - d.from).Seconds()
	a.TokS = float64(d.tokens) / a.WallS
	a.P50S, a.P95S = d.whole[len(d.whole)/2], d.whole[len(d.whole)*95/100]
	a.OutputSHA256 = contest.CanaryDigest(d.lines)
	if a.PromptTokens > 0 {
		a.CachedFraction = float64(d.cached) / float64(a.PromptTokens)
	}
	for _, e := range engineNames() {
		a.Shares[e] = float64(d.shares[e]) / float64(max(1, d.tokens))
		if a.Shares[e]*engines >= 0.1 {
			a.Active++
		}
	}
}
