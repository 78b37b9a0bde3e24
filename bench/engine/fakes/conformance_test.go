package fakes

import (
	"slices"
	"strings"
	"testing"
	"time"

	wire "github.com/rollbus/rollbus/workeragent/engine"
)

func conform(t *testing.T, a wire.Adapter, timeout time.Duration) map[string]wire.Check {
	t.Helper()
	out := map[string]wire.Check{}
	for _, c := range wire.Conformance(t.Context(), a, wire.ConformanceConfig{CheckTimeout: timeout}) {
		t.Logf("%-45s %-15s %7.1f ms  %s", c.Name, c.Verdict, c.MS, c.Detail)
		out[c.Name] = c
	}
	return out
}

func TestBothFakesConform(t *testing.T) {
	c := small()
	c.TimeScale, c.Ranks = 20, 2
	v, err := VLLM(VLLMConfig{Engine: c, Events: &EventsConfig{}, Sources: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, v)
	c.Ranks = 1
	s, err := SGLang(SGLangConfig{Engine: c, Events: &EventsConfig{}, Metrics: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, s)
	for kind, f := range map[string]*Fake{"sim": v, "sglang": s} {
		t.Run(kind, func(t *testing.T) {
			got := conform(t, open(t, f, wire.Options{}, kind), 10*time.Second)
			for name, c := range got {
				if c.Verdict == wire.Broken {
					t.Errorf("%s: %s", name, c.Detail)
				}
			}
			for _, must := range []string{"cache events follow the cache", "a client that leaves stops the run", "load is complete", "a salt keeps prompts apart"} {
				if got[must].Verdict != wire.Passed {
					t.Errorf("%s: %s %s", must, got[must].Verdict, got[must].Detail)
				}
			}
		})
	}
}

// A table that never fails proves nothing: engines with one thing wrong.
func TestConformanceFindsWhatIsWrong(t *testing.T) {
	c := small()
	c.TimeScale, c.KeepAbandoned = 20, true
	keeps, err := VLLM(VLLMConfig{Engine: c})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, keeps)
	c = small()
	c.TimeScale, c.Engine.NoCache = 20, true
	uncached, err := VLLM(VLLMConfig{Engine: c, Events: &EventsConfig{}, Sources: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, uncached)
	// The agent's abort by name would stop it: here nobody may.
	a, err := wire.NewOpenAI(wire.OpenAIConfig{URL: keeps.URL()})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if got := conform(t, a, 2*time.Second); got["a client that leaves stops the run"].Verdict != wire.Broken {
		t.Error("an engine that goes on after its client left conforms")
	}
	got := conform(t, open(t, uncached, wire.Options{}, "sim"), time.Second)
	for _, name := range []string{"a cached prefix is reported", "cache events follow the cache"} {
		if got[name].Verdict != wire.Broken {
			t.Errorf("%s: %s on an engine without a cache", name, got[name].Verdict)
		}
	}
}

func TestProbeNamesTheFlagForWhatIsMissing(t *testing.T) {
	full, err := SGLang(SGLangConfig{Engine: small(), Events: &EventsConfig{}, Metrics: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, full)
	bare := small()
	bare.NoControl = true
	empty, err := VLLM(VLLMConfig{Engine: bare})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, empty)
	r, err := wire.Probe(t.Context(), full.URL(), wire.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Detection.Kind != "sglang" || r.Load == nil || len(r.Sources) != 1 || r.Sources[0].Problem != "" || !r.Control {
		t.Errorf("%+v", r)
	}
	missing := func(r *wire.Report, what string) bool {
		return slices.ContainsFunc(r.Missing, func(m wire.Missing) bool { return m.What == what && m.Flag != "" && m.Effect != "" })
	}
	if !missing(r, "a replay endpoint") || missing(r, "cache events") || missing(r, "slots") {
		t.Errorf("%+v", r.Missing)
	}
	r, err = wire.Probe(t.Context(), "vllm="+empty.URL(), wire.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !missing(r, "cache events") || !missing(r, "slots") || !missing(r, "control calls") || r.Control {
		t.Errorf("%+v", r.Missing)
	}
	if r, err := wire.Probe(t.Context(), "vllm="+empty.URL(), wire.Options{Events: wire.EventsConfig{Endpoint: "tcp://127.0.0.1:1"}}); err != nil || !strings.Contains(r.Sources[0].Problem, "mute") {
		t.Errorf("an advertised port where nobody listens: %+v %v", r, err)
	}
	if _, err := wire.Probe(t.Context(), "http://127.0.0.1:1", wire.Options{}); err == nil {
		t.Error("nobody is probed with success")
	}
}
