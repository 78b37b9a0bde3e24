package contest

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/bench/baseline"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Case is what one run serves, and with what. A case is read only: runs of
// several contenders share it.
type Case struct {
	Engines []model.Config
	Work    workload.Workload
	Seed    uint64        // of delays on the network
	Limit   time.Duration // of virtual time; 4 h
	From    time.Duration // what is released before it warms up and is not measured

	Dispatchers int  // of the bus, or routers that know nothing of each other; 1
	Told        bool // requests say how long their outputs will be
	Options     sim.Options
	// Script, when set, is called once before the first request: faults, weights.
	Script func(r *Run)
}

const (
	blockTokens = subjects.DefaultBlockTokens
	namespace   = 7 // one model, no salt: any number
	hop         = time.Millisecond
	tick        = 50 * time.Millisecond // between samples of the fleet
)

// Run is a case being run.
type Run struct {
	Case  *Case
	World *sim.World
	Nodes []*sim.Node // nil entries for a router, which has none

	engines []*sim.Engine // of a router
	pace    *workload.Pace
	jobs    map[string]*job
	out     *Outcome
	submit  func(j *job)
	nextDue time.Duration
}

// job is a rollout that was released.
type job struct {
	r      *workload.Rollout
	blocks []uint64
	at     time.Duration
	first  time.Duration
	engine int // of a router: where it went
	ended  bool
}

func (r *Run) engine(i int) *sim.Engine {
	if r.engines != nil {
		return r.engines[i]
	}
	return r.Nodes[i].Engine()
}

func newRun(c *Case) *Run {
	o := c.Options
	o.Seed = c.Seed
	r := &Run{Case: c, World: sim.New(o), jobs: map[string]*job{}, nextDue: -1}
	r.out = newOutcome(c)
	r.World.Work = func(key string) sim.Work { return r.work(r.jobs[key]) }
	return r
}

func (r *Run) work(j *job) sim.Work {
	return sim.Work{PromptTokens: j.r.PromptTokens(), OutputTokens: j.r.Output, Blocks: j.blocks,
		Output:  j.r.OutputNames(namespace, blockTokens),
		Started: func(at time.Duration) { j.first = at }}
}

// Bus runs the case over the bus, under a pool's settings.
func (c *Case) Bus(s subjects.Settings) (*Outcome, error) {
	s.BlockTokens = blockTokens
	if err := s.Validate(); err != nil {
		return nil, err
	}
	c2 := *c
	c2.Options.Settings = s
	r := newRun(&c2)
	for i := range max(1, c.Dispatchers) {
		r.World.AddDispatcher(fmt.Sprintf("d%d", i))
	}
	for i, e := range c.Engines {
		n := r.World.AddNode(fmt.Sprintf("e%03d", i), 1, 0)
		e.BlockTokens = blockTokens
		if err := n.SetModel(e); err != nil {
			return nil, err
		}
		r.Nodes = append(r.Nodes, n)
	}
	at := map[string]int{}
	for i, n := range r.Nodes {
		at[n.Name] = i
	}
	r.World.OnDecision = func(d core.Decision) { r.out.Reasons[d.Reason]++ }
	r.World.OnPut = func(p core.ReservationPut) {
		r.peak(at[p.Engine])
		if p.PredictedCached != nil && p.State == subjects.StateBound {
			r.out.predicted[p.Key()] = *p.PredictedCached
		}
	}
	r.World.OnAnswer = func(a subjects.Answer) {
		j := r.jobs[a.Key()]
		cached, tokens := 0, 0
		if a.CachedTokens != nil {
			cached = *a.CachedTokens
		}
		if a.CompletionTokens != nil {
			tokens = *a.CompletionTokens
		}
		r.ended(j, at[a.Engine], tokens, cached, a.Status)
	}
	r.submit = func(j *job) { r.World.Bus.Submit(c.facts(j)) }
	r.World.Run(time.Second, nil) // views, registrations, first reports
	if err := r.run(); err != nil {
		return r.out, err
	}
	r.World.Run(c.limit(), r.World.AllAnswered)
	r.World.Run(time.Second, nil) // what is on its way arrives
	r.out.Problems = r.World.Problems()
	for _, n := range r.World.Ran {
		r.out.again += max(0, n-1)
	}
	return r.out, nil
}

func (c *Case) facts(j *job) subjects.Facts {
	x := j.r
	f := subjects.Facts{Job: x.Job, ID: x.ID, Reader: "main", Lane: subjects.LaneNormal, Model: "m", PromptTokens: x.PromptTokens(),
		MaxTokens: cmp.Or(x.Limit, 2*x.Output), Namespace: namespace, BlockTokens: blockTokens, Blocks: j.blocks[:min(len(j.blocks), subjects.MaxHeaderBlocks)],
		Group: x.Group, Trajectory: x.Trajectory, Turn: x.Turn, Step: x.Step}
	if x.Turn > 1 {
		f.Lane = subjects.LaneContinue
	}
	if c.Told {
		f.ExpectedTokens = x.Output
	}
	return f
}

// Route runs the case through a router: it decides when a request arrives, and
// the engines queue.
func (c *Case) Route(choose func(baseline.Fleet) baseline.Router) (*Outcome, error) {
	r := newRun(c)
	var fleet baseline.Fleet
	for _, e := range c.Engines {
		e.BlockTokens = blockTokens
		m, err := r.World.NewEngine(e)
		if err != nil {
			return nil, err
		}
		r.engines = append(r.engines, m)
		fleet.Slots = append(fleet.Slots, e.WithDefaults().MaxRunning)
	}
	var routers []baseline.Router
	for range max(1, c.Dispatchers) {
		routers = append(routers, choose(fleet))
	}
	var failed error
	r.submit = func(j *job) {
		q := &baseline.Request{Session: cmp.Or(j.r.Trajectory, j.r.Group, j.r.ID), Tokens: j.r.PromptTokens(), Blocks: j.blocks}
		router := routers[0]
		if len(routers) > 1 { // clients choose a router without order
			router = routers[xxhash.Sum64String(j.r.ID+strconv.FormatUint(c.Seed, 10))%uint64(len(routers))]
		}
		j.engine = router.Route(q)
		r.World.After(hop, func() {
			defer r.peak(j.engine)
			err := r.engines[j.engine].Add(j.r.Job+"."+j.r.ID, r.work(j), func(tokens, cached int) {
				r.World.After(hop, func() {
					router.Done(q, j.engine)
					r.ended(j, j.engine, tokens, cached, subjects.Completed)
				})
			})
			failed = cmp.Or(failed, err)
		})
	}
	r.World.Run(time.Second, nil)
	if err := r.run(); err != nil {
		return r.out, err
	}
	return r.out, failed
}

// run releases the workload as its pace says, until everything is answered.
func (r *Run) run() error {
	if len(r.Case.Work.Rollouts) == 0 {
		return errors.New("a workload without a rollout")
	}
	if r.Case.Script != nil {
		r.Case.Script(r)
	}
	r.out.start = r.World.Now
	r.pace = r.Case.Work.Pace(r.World.Now)
	r.release()
	r.sample()
	if !r.World.Run(r.Case.limit(), func() bool { return r.pace.Left() == 0 }) {
		return fmt.Errorf("%d of %d rollouts unanswered after %v of virtual time", r.pace.Left(), len(r.Case.Work.Rollouts), r.Case.limit())
	}
	r.out.close(r)
	return nil
}

func (c *Case) limit() time.Duration { return cmp.Or(c.Limit, 4*time.Hour) }

func (r *Run) release() {
	for _, x := range r.pace.Due(r.World.Now) {
		j := &job{r: x, at: r.World.Now, first: -1, blocks: workload.Names(make([]uint64, 0, x.PromptTokens()/blockTokens+1), namespace, x.Prompt, blockTokens)}
		r.jobs[x.Job+"."+x.ID] = j
		r.out.open++
		r.submit(j)
	}
	if next, ok := r.pace.Next(); ok && (next != r.nextDue) {
		r.nextDue = next
		r.World.After(next-r.World.Now, r.release)
	}
}

func (r *Run) ended(j *job, engine, tokens, cached int, status subjects.Status) {
	if j.ended {
		return
	}
	j.ended = true
	r.out.open--
	key := j.r.Job + "." + j.r.ID
	if j.at-r.out.start < r.Case.From {
		r.out.owner = engine
		delete(r.out.predicted, key)
	} else {
		r.out.add(r.done(j, engine, tokens, cached, status), key)
	}
	r.pace.Answered(r.World.Now, j.r.Job, j.r.ID)
	r.release()
}

func (r *Run) done(j *job, engine, tokens, cached int, status subjects.Status) Done {
	from := r.out.start + r.Case.From
	return Done{Rollout: j.r, Engine: engine, At: j.at - from, First: j.first - from, Ended: r.World.Now - from,
		Prompt: j.r.PromptTokens(), Cached: cached, Tokens: tokens, Completed: status == subjects.Completed}
}

func (r *Run) sample() {
	if r.pace.Left() == 0 {
		return
	}
	if r.World.Now-r.out.start >= r.Case.From {
		r.out.sample(r)
	}
	r.World.After(tick, r.sample)
}
