package whatif

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// Question is what would be different. The zero value asks for the same again.
type Question struct {
	Settings *subjects.Settings // nil = as recorded
	Engines  int                // more (or less, when negative) than there were
	Closed   bool               // turns wait for the answers before them, steps for the steps
	Seeds    int                // runs of the model for each arm; 3
	// Progress is called before each run; nil = nobody looks.
	Progress func(done, total int, what string)
}

// Labels of figures.
const (
	Recorded = "recorded"
	Modelled = "modelled"
)

// Figure is one line of the answer.
type Figure struct {
	Key      string   `json:"key"`
	What     string   `json:"what"`
	Unit     string   `json:"unit"`
	Recorded *float64 `json:"recorded"`          // null = not recorded
	Same     float64  `json:"modelled_same"`     // the model under the recorded policy, settings and fleet
	Error    float64  `json:"model_error"`       // how far the model may be off: the most over all seeds, and twice what seeds differ by
	Other    float64  `json:"modelled_other"`    // the model under what was asked for
	Change   float64  `json:"change"`            // other - same
	Relative float64  `json:"relative_change"`   // of same
	Proved   bool     `json:"beyond_the_error"`  // the change is larger than the error
	Verdict  string   `json:"verdict,omitempty"` // better, worse, or that it proves nothing
	Labels   []string `json:"labels"`            // of recorded, modelled_same, modelled_other
}

// Answer of Run.
type Answer struct {
	Rollouts   int     `json:"rollouts"`
	Unfinished int     `json:"unfinished"` // left out: not whole within the span
	Unplaced   int     `json:"unplaced"`   // left out: never bound
	Span       float64 `json:"span_s"`
	Loop       string  `json:"arrivals"` // open or closed
	Seeds      int     `json:"seeds"`

	Policy       string   `json:"recorded_policy"`
	Mode         string   `json:"recorded_mode"`
	OtherPolicy  string   `json:"other_policy"`
	OtherMode    string   `json:"other_mode"`
	Changed      []string `json:"changed_settings"`
	Engines      int      `json:"recorded_engines"`
	OtherEngines int      `json:"other_engines"`

	// Speed is the engine model as it was fitted to the recorded run.
	Speed   model.Profile `json:"engine_model"`
	Figures []Figure      `json:"figures"`
	// Beside is what the other policy would have decided on the recorded state.
	Beside *Besides `json:"decisions_on_recorded_state,omitempty"`
	// Moved are the rollouts that another engine served in the model, by the
	// reason of the other policy's decision. Some move under the same policy too.
	Moved     []Moved  `json:"moved_rollouts"`
	MovedSame int      `json:"moved_under_the_same_policy"`
	Notes     []string `json:"notes,omitempty"`
}

// Moved are rollouts that another engine served, by reason.
type Moved struct {
	Reason   string `json:"reason"`
	Rollouts int    `json:"rollouts"`
	Of       int    `json:"of"` // rollouts placed for that reason
}

// Run fits the model, and answers.
func Run(ctx context.Context, t *Traffic, q Question) (*Answer, error) {
	q.Seeds = cmp.Or(q.Seeds, 3)
	if q.Progress == nil {
		q.Progress = func(int, int, string) {}
	}
	same := t.Settings.WithDefaults()
	other := same
	if q.Settings != nil {
		other = q.Settings.WithDefaults()
	}
	if _, err := policy.Resolve(other); err != nil {
		return nil, err
	}
	n := len(t.Engines) + q.Engines
	if len(t.Engines) == 0 || n < 1 {
		return nil, fmt.Errorf("a fleet of %d engines: %d are recorded, ask for at least one", n, len(t.Engines))
	}
	r := &runner{t: t, q: q, closed: q.Closed, total: fitRuns + 2*q.Seeds}
	profile, err := r.fit(ctx, same)
	if err != nil {
		return nil, err
	}
	a := &Answer{
		Rollouts: len(t.Rollouts), Unfinished: t.Unfinished, Unplaced: t.Unplaced, Loop: "open", Seeds: q.Seeds,
		Policy: same.Policy, Mode: same.Mode, OtherPolicy: other.Policy, OtherMode: other.Mode, Changed: differ(same, other),
		Engines: len(t.Engines), OtherEngines: n, Speed: profile,
	}
	if q.Closed {
		a.Loop = "closed"
	}
	recorded := t.recorded()
	a.Span = figures(recorded, len(t.Engines))["makespan_s"]
	var sames, others []*modelled
	for seed := range q.Seeds {
		s, err := r.run(ctx, same, len(t.Engines), profile, uint64(seed+1), "the recorded policy")
		if err != nil {
			return nil, err
		}
		o, err := r.run(ctx, other, n, profile, uint64(seed+1), "the other policy")
		if err != nil {
			return nil, err
		}
		sames, others = append(sames, s), append(others, o)
	}
	a.figures(figures(recorded, len(t.Engines)), hits(recorded), sames, others, len(t.Engines), n)
	a.moved(recorded, sames[0], others[0])
	if !hits(recorded) {
		a.Notes = append(a.Notes, "no engine said how many prompt tokens it found: the recorded hit rate is not known")
	}
	if rate := float64(t.Unfinished) / float64(len(t.Rollouts)+t.Unfinished); rate > 0.05 {
		a.Notes = append(a.Notes, fmt.Sprintf("%.0f %% of the rollouts are not whole within the span and were left out: the model sees less load than there was", 100*rate))
	}
	return a, nil
}

func hits(all []served) bool {
	return slices.ContainsFunc(all, func(s served) bool { return s.cached >= 0 })
}

// differ lists the settings that differ, as key: old -> new.
func differ(a, b subjects.Settings) []string {
	out := []string{}
	add := func(key string, x, y any) {
		if fmt.Sprint(x) != fmt.Sprint(y) {
			out = append(out, fmt.Sprintf("%s: %v -> %v", key, x, y))
		}
	}
	add("policy", a.Policy, b.Policy)
	add("mode", a.Mode, b.Mode)
	add("prefetch", a.Prefetch, b.Prefetch)
	keys := map[string]bool{}
	for k := range a.Knobs {
		keys[k] = true
	}
	for k := range b.Knobs {
		keys[k] = true
	}
	for _, k := range slices.Sorted(mapKeys(keys)) {
		add("knobs."+k, knob(a, k), knob(b, k))
	}
	return out
}

func mapKeys(m map[string]bool) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func knob(s subjects.Settings, k string) any {
	if v, ok := s.Knobs[k]; ok {
		return v
	}
	return "default"
}

// modelled is a run of the model.
type modelled struct {
	served  []served
	reasons map[string]string // by rollout: of the decision that placed it last
}

type runner struct {
	t           *Traffic
	q           Question
	closed      bool
	done, total int
	limit       int // rollouts; 0 = all
}

// work is the traffic, or its beginning.
func (r *runner) work() workload.Workload {
	w := r.t.Workload(r.closed)
	if r.limit > 0 && r.limit < len(w.Rollouts) {
		w.Rollouts = w.Rollouts[:r.limit]
	}
	return w
}

// fleet is the recorded fleet with the speed given, and copies of its first
// engines, or without its last ones.
func (r *runner) fleet(n int, p model.Profile) []model.Config {
	out := make([]model.Config, 0, n)
	for i := range n {
		e := r.t.Engines[i%len(r.t.Engines)]
		slots := max(1, e.Slots)
		c := model.Config{Profile: p, MaxRunning: slots, BlockTokens: subjects.DefaultBlockTokens, StepTokens: max(8192, slots)}
		if e.Capacity > 0 {
			c.KVTokens = min(max(e.Capacity, r.longest()), model.MaxKVTokens)
		}
		out = append(out, c)
	}
	return out
}

// longest is what the largest rollout needs: the model refuses what cannot fit.
func (r *runner) longest() int {
	most := 0
	for i := range r.t.Rollouts {
		s := &r.t.Rollouts[i]
		most = max(most, s.Facts.PromptTokens+s.Tokens+2*subjects.DefaultBlockTokens)
	}
	return most
}

func (r *runner) engineName(i int) string {
	if i < len(r.t.Engines) {
		return r.t.Engines[i].Engine
	}
	return fmt.Sprintf("+%d", i-len(r.t.Engines)+1)
}

func (r *runner) run(ctx context.Context, s subjects.Settings, engines int, p model.Profile, seed uint64, what string) (*modelled, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	r.q.Progress(r.done, r.total, what)
	r.done++
	m := &modelled{reasons: map[string]string{}}
	bound := map[string]time.Duration{}
	begun := time.Duration(0)
	c := &contest.Case{Engines: r.fleet(engines, p), Work: r.work(), Seed: seed, Dispatchers: r.t.Dispatchers, Limit: 30 * 24 * time.Hour}
	c.Script = func(run *contest.Run) {
		w := run.World
		begun = w.Now
		put, decided := w.OnPut, w.OnDecision
		w.OnPut = func(h core.ReservationPut) {
			if _, ok := bound[h.Key()]; !ok && h.State == subjects.StateBound {
				bound[h.Key()] = w.Now - begun
			}
			put(h)
		}
		w.OnDecision = func(d core.Decision) {
			if d.Engine != "" {
				m.reasons[d.Rollout] = d.Reason
			}
			decided(d)
		}
	}
	s.Servers = nil
	o, err := c.Bus(s)
	if err != nil {
		return nil, fmt.Errorf("the model under %s: %w", what, err)
	}
	if len(o.Problems) > 0 {
		return nil, errors.New("the model under " + what + ": " + o.Problems[0])
	}
	for i := range o.Done {
		d := &o.Done[i]
		key := d.Rollout.Job + "." + d.Rollout.ID
		v := served{key: key, at: d.At.Seconds(), bound: bound[key].Seconds(), ended: d.Ended.Seconds(), prompt: d.Prompt, cached: d.Cached,
			tokens: d.Tokens, engine: r.engineName(d.Engine), completed: d.Completed}
		if d.Rollout.Trajectory != "" {
			v.trajectory = d.Rollout.Job + "." + d.Rollout.Trajectory
		}
		m.served = append(m.served, v)
	}
	return m, nil
}

func (a *Answer) figures(recorded Figures, hit bool, sames, others []*modelled, engines, n int) {
	for _, name := range Names() {
		f := Figure{Key: name.Key, What: name.What, Unit: name.Unit, Labels: []string{Recorded, Modelled, Modelled}}
		of := func(ms []*modelled, n int) (mid, spread, off float64) {
			var v []float64
			for _, m := range ms {
				v = append(v, figures(m.served, n)[name.Key])
			}
			mid = mean(v)
			for _, x := range v {
				off = max(off, abs(x-recorded[name.Key]))
			}
			return mid, slices.Max(v) - slices.Min(v), off
		}
		var off, spread float64
		f.Same, spread, off = of(sames, engines)
		f.Error = off + 2*spread
		if name.Key != "hit_rate" || hit {
			v := recorded[name.Key]
			f.Recorded = &v
		} else {
			f.Error = 2 * spread
		}
		var otherSpread float64
		f.Other, otherSpread, _ = of(others, n)
		f.Change = f.Other - f.Same
		f.Relative = over(f.Change, f.Same)
		f.Proved = abs(f.Change) > f.Error+2*otherSpread
		switch {
		case !f.Proved:
			f.Verdict = "within the model's error"
		case (f.Change > 0) == (name.Better > 0):
			f.Verdict = "better"
		default:
			f.Verdict = "worse"
		}
		a.Figures = append(a.Figures, f)
	}
}

// moved compares by rollout which engine served it.
func (a *Answer) moved(recorded []served, same, other *modelled) {
	was := map[string]string{}
	for i := range same.served {
		was[same.served[i].key] = same.served[i].engine
	}
	for i := range recorded {
		if was[recorded[i].key] != recorded[i].engine {
			a.MovedSame++
		}
	}
	by := map[string]*Moved{}
	for i := range other.served {
		s := &other.served[i]
		why := cmp.Or(other.reasons[s.key], "unknown")
		m := by[why]
		if m == nil {
			m = &Moved{Reason: why}
			by[why] = m
		}
		m.Of++
		if was[s.key] != s.engine {
			m.Rollouts++
		}
	}
	a.Moved = []Moved{}
	for _, m := range by {
		a.Moved = append(a.Moved, *m)
	}
	slices.SortFunc(a.Moved, func(x, y Moved) int {
		return cmp.Or(cmp.Compare(y.Rollouts, x.Rollouts), cmp.Compare(x.Reason, y.Reason))
	})
}
