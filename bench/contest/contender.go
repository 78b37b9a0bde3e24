package contest

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/rollbus/rollbus/bench/baseline"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// Kinds of contenders.
const (
	KindOurs     = "ours"
	KindBaseline = "baseline"
	KindBound    = "bound"
	KindFar      = "far" // ours, where views are later
)

// Contender is one way to serve a case.
type Contender struct {
	Name    string
	Kind    string
	Setting string
	Seeds   int // at most so many are run; 0 = all
	Run     func(c *Case) (*Outcome, error)
}

// ours are the policies with their defaults, over the bus.
func ours(names ...string) []Contender {
	if len(names) == 0 {
		names = policy.Policies()
	}
	var out []Contender
	for _, n := range names {
		out = append(out, Contender{Name: n, Kind: KindOurs, Setting: "defaults", Run: func(c *Case) (*Outcome, error) {
			return c.Bus(subjects.Settings{Policy: n, Mode: subjects.ModeEnforce})
		}})
	}
	return out
}

func router(family string, s baseline.Setting) Contender {
	return Contender{Name: family, Kind: KindBaseline, Setting: s.Label, Run: func(c *Case) (*Outcome, error) { return c.Route(s.Make) }}
}

// Config of every bench.
type Config struct {
	Seeds int  // 10
	Quick bool // a small workload: to see that it works, not to conclude
	// Progress, when set, is told how many of the known runs are done.
	Progress func(done, total int, what string)
}

func (c Config) seeds() int {
	if c.Seeds == 0 {
		return 10
	}
	return c.Seeds
}

// pool runs simulations side by side; results are in the order asked for,
// whatever the machine.
type pool struct {
	ctx      context.Context
	progress func(done, total int, what string)
	mu       sync.Mutex
	done     int
	total    int
}

func newPool(ctx context.Context, cfg Config) *pool {
	p := &pool{ctx: ctx, progress: cfg.Progress}
	if p.progress == nil {
		p.progress = func(int, int, string) {}
	}
	return p
}

// expect announces runs that will be asked for later.
func (p *pool) expect(n int) { p.total += n }

type task struct {
	what string
	run  func() (*Outcome, error)
	use  func(*Outcome) // called in order
}

// do runs tasks on every processor and uses what comes out in order.
func (p *pool) do(tasks []task) error {
	results := make([]*Outcome, len(tasks))
	used := 0
	var failed error
	next := make(chan int)
	var wg sync.WaitGroup
	for range max(1, min(runtime.GOMAXPROCS(0), len(tasks))) {
		wg.Go(func() {
			for i := range next {
				o, err := tasks[i].run()
				p.mu.Lock()
				p.done++
				p.progress(p.done, max(p.done, p.total), tasks[i].what)
				if err != nil && failed == nil {
					failed = fmt.Errorf("%s: %w", tasks[i].what, err)
				}
				for results[i] = o; failed == nil && used < len(tasks) && results[used] != nil; used++ {
					tasks[used].use(results[used])
					results[used] = nil
				}
				p.mu.Unlock()
			}
		})
	}
	for i := range tasks {
		select {
		case next <- i:
			continue
		case <-p.ctx.Done():
		}
		break
	}
	close(next)
	wg.Wait()
	switch {
	case failed != nil:
		return failed
	case used < len(tasks):
		return context.Cause(p.ctx)
	}
	return nil
}

// Row is a contender with its figures over all seeds.
type Row struct {
	Name    string          `json:"name"`
	Kind    string          `json:"kind"`
	Setting string          `json:"setting"`
	Figures map[string]Stat `json:"figures"`

	arms    []*CanaryArm         // of a canary, by seed
	values  map[string][]float64 // by seed
	example *Outcome             // of the first seed
}

func (r *Row) add(o *Outcome) {
	if r.example == nil {
		r.example = o
	}
	if r.values == nil {
		r.values = map[string][]float64{}
	}
	if o.canary != nil {
		r.arms = append(r.arms, o.canary)
	}
	for k, v := range o.figures() {
		r.values[k] = append(r.values[k], v)
	}
}

func (r *Row) close() {
	r.Figures = map[string]Stat{}
	for k, v := range r.values {
		r.Figures[k] = stat(v)
	}
}

// measure runs each contender on the case of each seed.
func (p *pool) measure(cs []Contender, seeds int, build func(seed uint64) (*Case, error)) ([]*Row, error) {
	rows := []*Row{}
	var tasks []task
	cases, err := casesOf(seeds, 1, build)
	if err != nil {
		return nil, err
	}
	for _, c := range cs {
		row := &Row{Name: c.Name, Kind: c.Kind, Setting: c.Setting}
		rows = append(rows, row)
		for seed, k := range cases {
			if c.Seeds > 0 && seed >= c.Seeds {
				break
			}
			tasks = append(tasks, task{fmt.Sprintf("%s, seed %d", c.Name, seed+1), func() (*Outcome, error) { return c.Run(k) }, row.add})
		}
	}
	if err := p.do(tasks); err != nil {
		return nil, err
	}
	for _, r := range rows {
		r.close()
	}
	return rows, nil
}

func casesOf(n int, first uint64, build func(seed uint64) (*Case, error)) ([]*Case, error) {
	var out []*Case
	for i := range uint64(n) {
		c, err := build(first + i)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// tuning seeds choose a baseline's setting; they are not measured on.
const (
	tuningSeed  = 9_001
	tuningSeeds = 2
)

// tuned are the baselines, each in the best of its settings: least of a metric
// on the tuning seeds.
func (p *pool) tuned(metric string, seeds int, build func(seed uint64) (*Case, error)) ([]Contender, error) {
	cases, err := casesOf(min(tuningSeeds, seeds), tuningSeed, build)
	if err != nil {
		return nil, err
	}
	families := baseline.Families()
	sums := map[[2]int]float64{}
	var tasks []task
	for f, fam := range families {
		for s, set := range fam.Settings {
			for _, k := range cases {
				tasks = append(tasks, task{"choosing a setting of " + fam.Name, func() (*Outcome, error) { return k.Route(set.Make) },
					func(o *Outcome) { sums[[2]int{f, s}] += o.figures()[metric] }})
			}
		}
	}
	if err := p.do(tasks); err != nil {
		return nil, err
	}
	var out []Contender
	for f, fam := range families {
		best := 0
		for s := range fam.Settings {
			if sums[[2]int{f, s}] < sums[[2]int{f, best}] {
				best = s
			}
		}
		out = append(out, router(fam.Name, fam.Settings[best]))
	}
	return out, nil
}
