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
	said   map[uint64][]uint32 // outputs by their segment
	turns  map[string]turn
	fail   context.CancelCauseFunc

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
	scale := d.arm.cfg.Scale
	start := time.Now()
	now := func() time.Duration { return time.Duration(float64(time.Since(start)) * scale) }
	pace := d.w.Pace(0)
	timer := time.NewTimer(0)
	defer timer.Stop()
	counting, rest := false, false
	for pace.Left() > 0 {
		if !counting && now() >= contest.CanaryReady {
			counting = true
			d.arm.seen.begin()
		}
		if !rest && now() >= contest.CanaryRest {
			rest = true
			d.arm.seen.start(engineNames())
		}
		for _, r := range pace.Due(now()) {
			d.turns[r.ID] = turn{at: now(), prompt: r.PromptTokens()}
			q := r.Request(workload.RequestOptions{Forced: true, Outputs: func(id uint64) []uint32 { return d.said[id] }})
			submits.Go(func() error {
				if _, err := d.client.Submit(ctx, q); err != nil {
					d.fail(fmt.Errorf("submit %s: %w", q.ID, err))
				}
				return nil
			})
		}
		if at, ok := pace.Next(); ok {
			timer.Reset(time.Duration(float64(at-now()) / scale))
		}
		select {
		case <-timer.C:
		case res := <-answers:
			r := byID[res.ID]
			if r == nil {
				return fmt.Errorf("an answer to %s, which was not asked for", res.ID)
			}
			d.said[r.OutputSegment().ID] = res.TokenIDs
			d.count(r, res, now())
			pace.Answered(now(), res.Job, res.ID)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	d.finish()
	return nil
}

func (d *driver) count(r *workload.Rollout, res *subjects.Result, now time.Duration) {
	if r.Trajectory == "" {
		return // it made the owner
	}
	a, t := d.arm.out, d.turns[r.ID]
	a.Turns++
	if res.Status.Sample() {
		a.Completed++
	}
	if p := d.arm.cfg.Progress; p != nil {
		p(a.Name, a.Turns, len(d.w.Rollouts)-1)
	}
	d.whole = append(d.whole, (now - t.at).Seconds())
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
	d.last = now
}

func (d *driver) finish() {
	a := d.arm.out
	slices.Sort(d.whole)
	slices.Sort(d.lines)
	a.WallS = (d.last - contest.CanaryReady).Seconds()
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
