package affinity

import (
	"fmt"
	"strings"
	"testing"
)

// phaseOf is a phase of twelve requests on two engines with blocks of 16 tokens,
// placed by turns: engine e1 of the first n, e2 of the others. Each but the first
// on an engine hits 1,136 tokens, and counters agree with usage.
func phaseOf(kind string, n int, hit int) *Phase {
	p := &Phase{Kind: kind, Engines: []Counted{{Engine: "e1", Before: 1000}, {Engine: "e2"}}}
	for i := range p.Engines {
		p.Engines[i].After = p.Engines[i].Before
	}
	seen := [2]bool{}
	for i := range 12 {
		at := 0
		if i >= n {
			at = 1
		}
		cached := 0
		if seen[at] {
			cached = hit
		}
		seen[at] = true
		p.Engines[at].After += int64(cached)
		if i > 0 {
			p.Possible += int64(hit)
		}
		p.Requests = append(p.Requests, Request{Rollout: fmt.Sprint("v.", i), Engine: p.Engines[at].Engine, Cached: &cached, Policy: "projected_time", Mode: "enforce"})
	}
	return p
}

func TestThePhasesOfAnArmAreHeldAgainstWhatAffinityMeans(t *testing.T) {
	engines := []Engine{{Name: "e1", Block: 16}, {Name: "e2", Block: 16}}
	for _, c := range []struct {
		name  string
		arm   string
		phase *Phase
		spoil func(p *Phase)
		fails string // what, "" = all holds
	}{
		{"all on one engine, with affinity", affinityOn, phaseOf(Repeated, 12, 1136), nil, ""},
		{"half and half, with affinity", affinityOn, phaseOf(Repeated, 6, 1136), nil, "concentrates"},
		{"one astray, with affinity", affinityOn, phaseOf(MultiTurn, 11, 1136), nil, ""},
		{"no hits at all, with affinity", affinityOn, phaseOf(Repeated, 12, 0), nil, "concentrates"},
		{"hits that are too few, with affinity", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Possible *= 2 }, "finds"},
		{"half and half, without", affinityOff, phaseOf(Repeated, 6, 1136), nil, ""},
		{"all on one engine, without", affinityOff, phaseOf(MultiTurn, 12, 1136), nil, "scatters"},
		{"all on one engine without a hit, without", affinityOff, phaseOf(Repeated, 12, 0), nil, "scatters"},
		{"prompts that share nothing and hit", affinityOn, phaseOf(Distinct, 6, 1136), nil, "no_hits"},
		{"prompts that share nothing", affinityOff, phaseOf(Distinct, 6, 0), nil, ""},
		{"a counter one block a request above usage", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Engines[0].After += 12 * 16 }, ""},
		{"a counter a token more above usage", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Engines[0].After += 12*16 + 1 }, "usage"},
		{"a counter below usage", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Engines[0].After -= 12*16 + 1 }, "usage"},
		{"traffic at an engine that got nothing", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Engines[1].After++ }, "usage"},
		{"an engine that does not tell", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Requests[3].Cached = nil }, "usage"},
		{"a counter that fell", affinityOff, phaseOf(Repeated, 6, 1136), func(p *Phase) { p.Engines[0].After = 0 }, "usage"},
		{"a decision of another policy", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Requests[5].Policy = "least_requests" }, "settings"},
		{"a decision of the other arm", affinityOn, phaseOf(Repeated, 12, 1136), func(p *Phase) { p.Requests[5].Mode = "off" }, "settings"},
		{"no decision", affinityOn, &Phase{Kind: Distinct, Engines: []Counted{{Engine: "e1"}, {Engine: "e2"}}}, nil, "settings"},
	} {
		if c.spoil != nil {
			c.spoil(c.phase)
		}
		c.phase.judge(&Arm{Affinity: c.arm, Policy: "projected_time", Mode: "enforce"}, engines)
		var failed []string
		for _, x := range c.phase.Checks {
			if !x.OK {
				failed = append(failed, x.What)
			}
		}
		if got := strings.Join(failed, " "); !strings.Contains(got, c.fails) || c.fails == "" && got != "" {
			t.Errorf("%s: fails %q, want %q (%+v)", c.name, got, c.fails, c.phase.Checks)
		}
	}
}

func TestAnEngineWithoutACounterIsCountedByItsAnswers(t *testing.T) {
	p := phaseOf(Repeated, 12, 1136)
	p.Engines[0].Before, p.Engines[0].After = 0, 0
	p.judge(&Arm{Affinity: affinityOn, Policy: "projected_time", Mode: "enforce"}, []Engine{{Name: "e1", Block: 1, summed: true}, {Name: "e2", Block: 16}})
	for _, c := range p.Checks {
		if !c.OK {
			t.Error(c.Text)
		}
	}
	if p.Hits != 11*1136 {
		t.Errorf("%d hits, want those of the answers, %d", p.Hits, 11*1136)
	}
}

func TestHitsAreReadFromWhateverAnEngineCounts(t *testing.T) {
	for name, c := range map[string]struct {
		text   string
		n      int64
		source string
	}{
		"vLLM, two ranks": {"vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_running{engine=\"1\"} 0\n" +
			"vllm:prefix_cache_queries_total{engine=\"0\"} 100\nvllm:prefix_cache_queries_total{engine=\"1\"} 100\n" +
			"vllm:prefix_cache_hits_total{engine=\"0\"} 48\nvllm:prefix_cache_hits_total{engine=\"1\"} 16\n", 64, sourceVLLM},
		"an older vLLM":         {"vllm:num_requests_running 0\nvllm:gpu_prefix_cache_queries_total 100\nvllm:gpu_prefix_cache_hits_total 32\n", 32, sourceVLLM},
		"SGLang":                {"sglang:num_running_reqs 0\nsglang:realtime_tokens_total{mode=\"prefill_cache\"} 77\nsglang:realtime_tokens_total{mode=\"prefill_compute\"} 5\n", 77, sourceSGLang},
		"without a cache":       {"vllm:num_requests_running 0\n", 0, ""},
		"SGLang that tells not": {"sglang:num_running_reqs 0\n", 0, ""},
		"nothing":               {"", 0, ""},
	} {
		n, source, err := parseHits([]byte(c.text))
		if n != c.n || source != c.source || (err == nil) != (c.source != "") {
			t.Errorf("%s: %d from %q (%v), want %d from %q", name, n, source, err, c.n, c.source)
		}
	}
}
