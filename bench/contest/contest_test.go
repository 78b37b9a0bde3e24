package contest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/baseline"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small is a case that takes milliseconds.
func small(t testing.TB, seed uint64) *Case {
	t.Helper()
	w, err := workload.Agentic{Seed: seed, Tasks: 3, N: 4, Turns: workload.Fixed(4)}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	return &Case{Engines: slices.Repeat([]model.Config{{MaxRunning: 8}}, 3), Work: w, Seed: seed}
}

func quick(t *testing.T, bench func(context.Context, Config) (*Report, error)) []byte {
	t.Helper()
	r, err := bench(t.Context(), Config{Seeds: 1, Quick: true})
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOneSetOfSeedsGivesOneReport(t *testing.T) {
	for name, bench := range map[string]func(context.Context, Config) (*Report, error){"burst": Burst, "weights": Weights, "faults": Faults} {
		if a, b := quick(t, bench), quick(t, bench); !bytes.Equal(a, b) {
			t.Errorf("%s: two runs differ:\n%s\n%s", name, a, b)
		}
	}
}

func TestEverybodyAnswersEverythingOnce(t *testing.T) {
	c := small(t, 1)
	check := func(name string, o *Outcome, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		seen := map[string]bool{}
		for _, d := range o.Done {
			seen[d.Rollout.ID] = true
			if !d.Completed || d.Tokens != d.Rollout.Output || d.Cached > d.Prompt || d.Ended <= d.At || d.First < d.At {
				t.Fatalf("%s: %+v of %+v", name, d, *d.Rollout)
			}
		}
		if len(seen) != len(c.Work.Rollouts) || len(o.Done) != len(seen) || len(o.Problems) > 0 {
			t.Fatalf("%s: %d answers to %d rollouts, problems %v", name, len(o.Done), len(c.Work.Rollouts), o.Problems)
		}
		f := o.figures()
		if f["makespan_s"] <= 0 || f["hit_rate"] <= 0 || f["hit_rate"] >= 1 || f["trajectory_p90_s"] < f["trajectory_p50_s"] || f["served_p90_s"] > f["trajectory_p90_s"] {
			t.Errorf("%s: figures %v", name, f)
		}
		for k, v := range f {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				t.Errorf("%s: %s is %v", name, k, v)
			}
		}
	}
	for _, p := range ours() {
		o, err := p.Run(c)
		check(p.Name, o, err)
	}
	for _, f := range baseline.Families() {
		for _, s := range f.Settings {
			o, err := router(f.Name, s).Run(c)
			check(f.Name, o, err)
		}
	}
}

// The engines are the same under a router and under the bus: alone on one engine
// a rollout takes as long, but for the hops.
func TestARolloutAloneTakesAsLongUnderTheBusAsUnderARouter(t *testing.T) {
	w, err := workload.Reasoning{Groups: 1, NMin: 1, NMax: 1, Output: workload.Fixed(500)}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	c := &Case{Engines: []model.Config{{}}, Work: w}
	bus, err := c.Bus(subjects.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	route, err := c.Route(baseline.Families()[0].Settings[0].Make)
	if err != nil {
		t.Fatal(err)
	}
	if d := bus.Makespan - route.Makespan; d < -5*time.Millisecond || d > 20*time.Millisecond {
		t.Errorf("%v over the bus, %v by a router", bus.Makespan, route.Makespan)
	}
}

func TestBoundsOfAStepAreBelowEverySchedule(t *testing.T) {
	for seed := range uint64(3) {
		w, err := workload.Reasoning{Seed: seed, Groups: 6}.Workload()
		if err != nil {
			t.Fatal(err)
		}
		c := &Case{Engines: []model.Config{{MaxRunning: 8}, {MaxRunning: 8, Profile: model.H100x8B().Times(300)}}, Work: w, Seed: seed}
		lower, alone := bounds(c)
		for _, p := range append(ours(policy.ProjectedTime), longestFirst(), split()) {
			o, err := p.Run(c)
			if err != nil {
				t.Fatal(err)
			}
			if s := o.Makespan.Seconds(); s < lower || s < alone/3 {
				t.Errorf("%s: %.1f s, below the bound of %.1f s or a third of the longest alone, %.1f s", p.Name, s, lower, alone)
			}
		}
	}
}

func TestTheBestOfThreeSettingsIsChosenOnSeedsOfItsOwn(t *testing.T) {
	var seeds []uint64
	p := newPool(t.Context(), Config{})
	cs, err := p.tuned("makespan_s", 5, func(seed uint64) (*Case, error) {
		seeds = append(seeds, seed)
		return small(t, seed), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(seeds) != tuningSeeds || seeds[0] < 1000 || len(cs) != len(baseline.Families()) {
		t.Errorf("tuned on seeds %v, %d contenders", seeds, len(cs))
	}
	for i, f := range baseline.Families() {
		least, best := math.Inf(1), ""
		for _, s := range f.Settings {
			sum := 0.0
			for _, seed := range seeds {
				o, err := router(f.Name, s).Run(small(t, seed))
				if err != nil {
					t.Fatal(err)
				}
				sum += o.Makespan.Seconds()
			}
			if sum < least {
				least, best = sum, s.Label
			}
		}
		if cs[i].Setting != best {
			t.Errorf("%s runs with %q, the best is %q", f.Name, cs[i].Setting, best)
		}
	}
}

func TestIntervalsAreThoseOfStudent(t *testing.T) {
	if s := stat([]float64{1, 2, 3, 4}); s.Mean != 2.5 || math.Abs(s.CI95-3.182*1.290994/2) > 1e-4 || s.N != 4 {
		t.Errorf("%+v", s)
	}
	if s := stat([]float64{7}); s != (Stat{Mean: 7, N: 1}) {
		t.Errorf("one value: %+v", s)
	}
	if s := paired([]float64{2, 6}, []float64{1, 3}); s.Mean != 2 || s.CI95 != 0 {
		t.Errorf("a constant ratio: %+v", s)
	}
}

func TestAMissedTargetKeepsItsFigureAndItsReason(t *testing.T) {
	r := newReport("x", Config{}, nil)
	r.atMost("a", Stat{Mean: 2, CI95: 0.5, N: 3}, 1, "because")
	r.atLeast("b", Stat{Mean: 2}, 1, "never said")
	r.beyond("c", Stat{Mean: 1.05, CI95: 0.1}, 1, "never said")
	if m := r.Missed(); len(m) != 1 || m[0].Name != "a" || m[0].Got != 2 || m[0].CI95 != 0.5 || m[0].Why != "because" || r.Targets[1].Why != "" {
		t.Errorf("targets %+v", r.Targets)
	}
	if v := r.verdict(); v != "2 of 3 targets hold; missed: a." {
		t.Errorf("verdict %q", v)
	}
}

func TestAReportIsOnePageThatNeedsNothingElse(t *testing.T) {
	r, err := Burst(t.Context(), Config{Seeds: 1, Quick: true})
	if err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	if err := r.WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	for _, want := range []string{r.Conclusion[:40], "<svg ", "95 %", "engine", "time since the first request (s)"} {
		if !strings.Contains(text, want) && !strings.Contains(text, strings.ReplaceAll(want, "%", "&#37;")) {
			t.Errorf("%q is not on the page", want)
		}
	}
	for _, bad := range []string{"http://", "https://", "<script", "<link"} {
		if n := strings.Count(text, bad); n > 0 && bad != "http://" || bad == "http://" && n != strings.Count(text, "http://www.w3.org/2000/svg") {
			t.Errorf("the page fetches something: %q", bad)
		}
	}
	for _, p := range r.Pictures {
		if p.Sentence == "" || !strings.Contains(p.SVG, "</svg>") {
			t.Errorf("a picture without its sentence: %.60s", p.SVG)
		}
	}
}

func TestAStretchOfATraceKeepsConversationsWholeAndItsBursts(t *testing.T) {
	w, err := Trace{Name: "sample", Open: func() (io.ReadCloser, error) { return io.NopCloser(workload.Sample()), nil }}.read()
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(20) {
		s := stretch(w, 60, seed, 2)
		have := map[string]bool{}
		units := 0
		for _, r := range s.Rollouts {
			if r.After != "" && !have[r.After] {
				t.Fatalf("seed %d: turn %s without the turn before, %s", seed, r.ID, r.After)
			}
			have[r.ID] = true
			if r.After == "" {
				units++
			}
		}
		last := s.Rollouts[len(s.Rollouts)-1]
		if n := len(s.Rollouts); n < 60 || n > 80 {
			t.Errorf("seed %d: %d rollouts, want about 60", seed, n)
		}
		if rate := float64(units) / last.At.Seconds(); last.After == "" && math.Abs(rate-2) > 0.01 {
			t.Errorf("seed %d: %.3f units a second, want 2", seed, rate)
		}
	}
}

func TestAnInterruptedBenchEnds(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	_, err := Burst(ctx, Config{Seeds: 50, Quick: true, Progress: func(done, _ int, _ string) {
		if done == 2 {
			stop()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that it was cancelled", err)
	}
}
