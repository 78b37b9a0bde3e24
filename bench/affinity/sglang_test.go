package affinity

import (
	"context"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/demo/local"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// An SGLang without metrics, or whose metrics do not tell, has no counter: its
// answers' cached_tokens are summed.
func TestSGLangIsReadByItsAnswers(t *testing.T) {
	cfg := Config{Engines: map[string]string{}, Policy: "projected_time", Job: "v", Requests: 6, PromptTokens: 1152, Settle: 50 * time.Millisecond, Seed: 2}
	var engines []local.Engine
	for _, name := range []string{"s1", "s2"} {
		f, err := fakes.SGLang(fakes.SGLangConfig{Engine: simengine.Config{TimeScale: 10}, Events: &fakes.EventsConfig{}, Metrics: name == "s2"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		a, err := engine.NewSGLang(engine.SGLangConfig{OpenAIConfig: engine.OpenAIConfig{URL: f.URL()}})
		if err != nil {
			t.Fatal(err)
		}
		cfg.Engines[name] = f.URL()
		engines = append(engines, local.Engine{Name: name, Adapter: a, URL: f.URL()})
	}
	p := start(t, subjects.Settings{SchemaVersion: subjects.SchemaVersion}, engines...)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r, err := drive(t, ctx, p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range r.Engines {
		if e.Source != sourceSummed {
			t.Errorf("the hits of %s are from %q, want %q", e.Name, e.Source, sourceSummed)
		}
	}
	for _, f := range r.Failed() {
		t.Error(f)
	}
	if t.Failed() {
		for _, arm := range r.Arms {
			for _, ph := range arm.Phases {
				for _, q := range ph.Requests {
					t.Logf("%s %s: %s on %s, %s", arm.Affinity, ph.Kind, q.Rollout, q.Engine, q.Reason)
				}
			}
		}
	}
}
