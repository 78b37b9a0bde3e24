package workload

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// Pace releases the rollouts of a workload as answers come in: by their times,
// turn after turn, and, in a closed loop, step after step. It is a value
// machine: the caller brings the time.
type Pace struct {
	w       *Workload
	due     dueList
	next    map[string][]int // rollouts that wait for this one, by job.id
	steps   []int64          // still to come, in order
	byStep  map[int64][]int
	pending int // released or due in this step, unanswered
	left    int // unanswered in all
	open    map[string]bool
}

type dueItem struct {
	at time.Duration
	i  int
}

type dueList []dueItem

func (d dueList) Len() int { return len(d) }
func (d dueList) Less(i, j int) bool {
	return d[i].at < d[j].at || d[i].at == d[j].at && d[i].i < d[j].i
}
func (d dueList) Swap(i, j int) { d[i], d[j] = d[j], d[i] }
func (d *dueList) Push(x any) {
	if item, ok := x.(dueItem); ok {
		*d = append(*d, item)
	}
}

func (d *dueList) Pop() any {
	old := *d
	last := old[len(old)-1]
	*d = old[:len(old)-1]
	return last
}

// Pace starts the workload at time start.
func (w *Workload) Pace(start time.Duration) *Pace {
	p := &Pace{w: w, next: map[string][]int{}, byStep: map[int64][]int{}, open: map[string]bool{}, left: len(w.Rollouts)}
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		p.open[r.Job+"."+r.ID] = true
		step := r.Step
		if !w.Closed {
			step = 0
		}
		if r.After != "" {
			k := r.Job + "." + r.After
			p.next[k] = append(p.next[k], i)
		}
		if _, ok := p.byStep[step]; !ok {
			p.steps = append(p.steps, step)
		}
		p.byStep[step] = append(p.byStep[step], i)
	}
	slices.SortFunc(p.steps, cmp.Compare)
	p.begin(start)
	return p
}

func (p *Pace) begin(now time.Duration) {
	if len(p.steps) == 0 {
		return
	}
	step := p.steps[0]
	p.steps = p.steps[1:]
	p.pending = len(p.byStep[step])
	for _, i := range p.byStep[step] {
		if r := &p.w.Rollouts[i]; r.After == "" {
			heap.Push(&p.due, dueItem{now + r.At, i})
		}
	}
	delete(p.byStep, step)
}

// Next is when something is due; false when all that is left waits for answers.
func (p *Pace) Next() (time.Duration, bool) {
	if len(p.due) == 0 {
		return 0, false
	}
	return p.due[0].at, true
}

// Due takes what is due by now, earliest first.
func (p *Pace) Due(now time.Duration) []*Rollout {
	var out []*Rollout
	for len(p.due) > 0 && p.due[0].at <= now {
		out = append(out, &p.w.Rollouts[p.due[0].i])
		heap.Pop(&p.due)
	}
	return out
}

// Answered tells that a rollout has its terminal answer, whatever it says: the
// next turn is due after its gap. Unknown and repeated ones change nothing.
func (p *Pace) Answered(now time.Duration, job, id string) {
	key := job + "." + id
	if !p.open[key] {
		return
	}
	delete(p.open, key)
	for _, i := range p.next[key] {
		heap.Push(&p.due, dueItem{now + p.w.Rollouts[i].Gap, i})
	}
	delete(p.next, key)
	p.left--
	if p.pending--; p.pending == 0 {
		p.begin(now)
	}
}

// Left is how many are unanswered.
func (p *Pace) Left() int { return p.left }
