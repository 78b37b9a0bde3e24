package whatif

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/recorded"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func journals(t *testing.T, frames [][]byte) []*journal.Journal {
	t.Helper()
	js, problems := journal.Split(journal.Slice(frames))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return js
}

func traffic(t *testing.T, js []*journal.Journal) *Traffic {
	t.Helper()
	x, err := Extract(js, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// virtual is a recorded run in virtual time: busy engines, prefixes in groups.
func virtual(t *testing.T, policy string, busy bool) []*journal.Journal {
	t.Helper()
	o := recorded.Options{Seed: 3, Settings: enforce(policy), Rollouts: 480, Over: 25 * time.Second, Prompt: 2048, Output: 80, Cache: true}
	if busy {
		o.Over, o.Prompt, o.Slots = 12*time.Second, 4096, 6
	}
	r, err := recorded.Make(o)
	if err != nil {
		t.Fatal(err)
	}
	return journals(t, r.Frames())
}

func enforce(policy string) subjects.Settings {
	return subjects.Settings{Policy: policy, Mode: subjects.ModeEnforce}.WithDefaults()
}

// within tells whether another seed of the model, under the recorded policy,
// gives what was recorded within the error that was stated.
func within(t *testing.T, x *Traffic, a *Answer) {
	t.Helper()
	r := &runner{t: x, q: Question{Progress: func(int, int, string) {}}, closed: a.Loop == "closed"}
	m, err := r.run(t.Context(), x.Settings.WithDefaults(), len(x.Engines), a.Speed, 77, "a seed that was not used")
	if err != nil {
		t.Fatal(err)
	}
	got := figures(m.served, len(x.Engines))
	for _, f := range a.Figures {
		if f.Recorded == nil {
			continue
		}
		if off := abs(got[f.Key] - *f.Recorded); off > f.Error+0.02*abs(*f.Recorded)+1e-3 {
			t.Errorf("%s: recorded %v, modelled %v with a seed of its own: %v off, %v was stated", f.Key, *f.Recorded, got[f.Key], off, f.Error)
		}
	}
}

func of(t *testing.T, a *Answer, key string) Figure {
	t.Helper()
	i := slices.IndexFunc(a.Figures, func(f Figure) bool { return f.Key == key })
	if i < 0 {
		t.Fatalf("no figure %s", key)
	}
	return a.Figures[i]
}

func TestTheSamePolicyReproducesWhatWasRecorded(t *testing.T) {
	for _, busy := range []bool{false, true} {
		x := traffic(t, virtual(t, "least_requests", busy))
		a, err := Run(t.Context(), x, Question{Closed: busy})
		if err != nil {
			t.Fatal(err)
		}
		within(t, x, a)
		for _, f := range a.Figures {
			if f.Proved || f.Change != 0 {
				t.Errorf("%s: the same question has another answer: %+v", f.Key, f)
			}
			if f.Key != "queue_mean_s" && f.Key != "queue_p90_s" && f.Error > 0.15*abs(*f.Recorded) {
				t.Errorf("%s: recorded %v, off by %v: the model is worth little", f.Key, *f.Recorded, f.Error)
			}
		}
	}
}

func TestMoreEnginesAndAnotherPolicyShowWhatTheyShould(t *testing.T) {
	js := virtual(t, "least_requests", false)
	x := traffic(t, js)
	s := enforce("projected_time")
	a, err := Run(t.Context(), x, Question{Settings: &s, Engines: 4})
	if err != nil {
		t.Fatal(err)
	}
	if f := of(t, a, "latency_p50_s"); f.Change >= 0 || a.OtherEngines != 8 {
		t.Errorf("twice the engines make it no quicker: %+v", f)
	}
	hits := enforce("weighted_cache")
	if a, err = Run(t.Context(), x, Question{Settings: &hits}); err != nil {
		t.Fatal(err)
	}
	if f := of(t, a, "hit_rate"); f.Verdict != "better" || !f.Proved {
		t.Errorf("a policy that looks for what is cached finds no more of it: %+v", f)
	}
	if a.Changed[0] != "policy: least_requests -> weighted_cache" || len(a.Moved) == 0 {
		t.Errorf("%v %v", a.Changed, a.Moved)
	}
	if a.Beside, err = Beside(js, s, 0, 0); err != nil {
		t.Fatal(err)
	}
	if b := a.Beside; b.Differ != 0 || b.Decisions < 480 || b.Changed == 0 || b.Changed == b.Decisions || len(b.By) == 0 || len(b.By[0].Examples) == 0 {
		t.Errorf("%+v", b)
	}
	same, err := Beside(js, x.Settings, 0, 0)
	if err != nil || same.Changed != 0 {
		t.Errorf("the same policy decides %d of %d otherwise, %v", same.Changed, same.Decisions, err)
	}
	if svg := a.Picture(); !strings.HasPrefix(svg, "<svg") || !strings.Contains(svg, "recorded: least_requests, 4 engines") {
		t.Error(svg[:80])
	}
	if b, err := json.Marshal(a); err != nil || !bytes.Contains(b, []byte(`"labels":["recorded","modelled","modelled"]`)) {
		t.Errorf("%s %v", b, err)
	}
}

func TestWhatCannotBeAskedIsRefused(t *testing.T) {
	x := traffic(t, virtual(t, "least_requests", true))
	bad := enforce("no such policy")
	for name, q := range map[string]Question{"policy": {Settings: &bad}, "no engine left": {Engines: -4}} {
		if _, err := Run(t.Context(), x, q); err == nil {
			t.Errorf("%s: answered", name)
		}
	}
	if _, err := Extract(nil, 0, 0); !errors.Is(err, ErrEmpty) {
		t.Error(err)
	}
	if _, err := Extract(virtual(t, "least_requests", true), 1, 2); !errors.Is(err, ErrEmpty) {
		t.Error(err)
	}
}

func TestTheFitFindsTheSpeedThatWasRecorded(t *testing.T) {
	x := traffic(t, virtual(t, "projected_time", true))
	r := &runner{t: x, q: Question{Progress: func(int, int, string) {}}}
	p, err := r.fit(t.Context(), x.Settings.WithDefaults())
	if err != nil {
		t.Fatal(err)
	}
	real := model.H100x8B()
	if q := float64(p.Step) / float64(real.Step); q < 0.8 || q > 1.25 {
		t.Errorf("a step of %v, it was %v", p.Step, real.Step)
	}
	if q := float64(p.PromptToken) / float64(real.PromptToken); q < 0.6 || q > 1.6 {
		t.Errorf("a prompt token of %v, it was %v", p.PromptToken, real.PromptToken)
	}
}

func TestTrafficComesBackFromAMooncakeTrace(t *testing.T) {
	x := traffic(t, virtual(t, "least_requests", true))
	var b bytes.Buffer
	if err := workload.Write(&b, x.Rows()); err != nil {
		t.Fatal(err)
	}
	w, err := workload.ReadTrace(&b, workload.TraceOptions{Name: "back", Chained: true})
	if err != nil {
		t.Fatal(err)
	}
	count := func(w workload.Workload) (n, prompt, output, chained int) {
		for i := range w.Rollouts {
			r := &w.Rollouts[i]
			prompt, output = prompt+r.PromptTokens(), output+r.Output
			if r.After != "" {
				chained++
			}
		}
		return len(w.Rollouts), prompt, output, chained
	}
	n, prompt, output, chained := count(w)
	wn, wprompt, woutput, wchained := count(x.Workload(true))
	if n != wn || prompt != wprompt || output != woutput || chained != wchained {
		t.Errorf("%d rollouts, %d and %d tokens, %d later turns; there were %d, %d, %d, %d", n, prompt, output, chained, wn, wprompt, woutput, wchained)
	}
	frames, err := Import(w, enforce("projected_time"), 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, j := range journals(t, frames) {
		rep, err := journal.Replay(j, journal.ReplayOptions{})
		if err != nil || !rep.OK() || rep.Decisions < uint64(n) {
			t.Errorf("the imported run: %+v %v", rep, err)
		}
	}
	again := traffic(t, journals(t, frames))
	if an, aprompt, aoutput, _ := count(again.Workload(true)); an != n || aprompt != prompt || aoutput != output {
		t.Errorf("imported and read again: %d rollouts, %d and %d tokens; want %d, %d, %d", an, aprompt, aoutput, n, prompt, output)
	}
}
