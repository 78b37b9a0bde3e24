package policy_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/bench/picture"
	"github.com/rollbus/rollbus/dispatcher/policy"
)

// pictures are drawn by asking the policies; docs/policies.md shows them.
var pictures = map[string]func(t *testing.T) string{
	"least_requests": drawLeastRequests, "kv_tokens": drawKVTokens, "load_snapshot": drawLoadSnapshot,
	"weighted_cache": drawWeightedCache, "projected_time": drawProjectedTime, "projected_time-parts": drawParts,
	"owner_pressure": drawOwnerPressure, "sticky_trajectory": drawSticky,
}

func TestThePicturesOfThePoliciesAreWhatTheCodeDoes(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "policies.md"))
	if err != nil {
		t.Fatal(err)
	}
	for name, draw := range pictures {
		at := "pictures/policy-" + name + ".svg"
		path := filepath.Join("..", "..", "docs", filepath.FromSlash(at))
		got := draw(t)
		if *update {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != got {
			t.Errorf("%s is behind the code (%v): go test ./dispatcher/policy -run Pictures -update", path, err)
		}
		if !strings.Contains(string(page), "]("+at+")") {
			t.Errorf("docs/policies.md does not show %s", at)
		}
	}
	for _, name := range policy.Policies() {
		if pictures[name] == nil {
			t.Errorf("policy %s has no picture", name)
		}
	}
}

// filling places equal requests one by one and draws a value of each engine.
func filling(t *testing.T, name string, cs []policy.Candidate, n int, value func(policy.Candidate) float64, label func(i int) string) []picture.Line {
	f := newFleet(enforcing(t, name, nil), cs)
	lines := make([]picture.Line, len(cs))
	for k := range n + 1 {
		for i := range cs {
			lines[i].Name = label(i)
			lines[i].X, lines[i].Y = append(lines[i].X, float64(k)), append(lines[i].Y, value(cs[i]))
		}
		f.place(request())
	}
	return lines
}

// most is the largest n of 0 to limit at which the first engine is chosen, -1
// when it never is: what it wins with n it wins with fewer.
func most(t *testing.T, d *policy.Decider, limit int, of func(n int) *policy.Input) float64 {
	t.Helper()
	at := -1
	for n := range limit + 1 {
		if got, _ := decide(d, of(n)); got == "e0" {
			at = n
		}
	}
	return float64(at)
}

// loaded is two engines: e0 has n requests and holds cached tokens of the prompt,
// e1 has other requests and nothing cached.
func loaded(n, other, prompt, cached int) *policy.Input {
	cs := engines(2)
	for i, requests := range []int{n, other} {
		cs[i].Window = 400
		cs[i].ReservedRequests, cs[i].ReservedTokens, cs[i].ReservedPromptTokens = requests, int64(requests)*2560, int64(requests)*2048
	}
	cs[0].LastPicked = 1 // it loses a tie
	cs = reports(cs)
	cs[0].MatchGPU = cached
	in := input(cs, request())
	in.Request.PromptTokens = prompt
	return in
}

func drawLeastRequests(t *testing.T) string {
	cs := engines(3)
	begin := []int{0, 4, 10}
	for i := range cs {
		cs[i].ReservedRequests = begin[i]
	}
	lines := filling(t, policy.LeastRequests, cs, 40, func(c policy.Candidate) float64 { return float64(c.ReservedRequests) },
		func(i int) string { return fmt.Sprintf("engine that began with %d", begin[i]) })
	return picture.Lines("least_requests: one request after the other", picture.Axis{Title: "requests placed"}, picture.Axis{Title: "requests reserved on the engine"}, lines)
}

func drawKVTokens(t *testing.T) string {
	cs := engines(3)
	sizes := []int64{500_000, 1_000_000, 2_000_000}
	for i := range cs {
		cs[i].CapacityTokens, cs[i].Window, cs[i].Slots = sizes[i], 1000, 1000
	}
	lines := filling(t, policy.KVTokens, cs, 210, func(c policy.Candidate) float64 { return float64(c.ReservedRequests) },
		func(i int) string { return fmt.Sprintf("capacity %.1f M tokens", float64(sizes[i])/1e6) })
	return picture.Lines("kv_tokens: engines fill in proportion to their capacity", picture.Axis{Title: "requests placed"}, picture.Axis{Title: "requests reserved on the engine"}, lines)
}

func drawLoadSnapshot(t *testing.T) string {
	d := enforcing(t, policy.LoadSnapshot, nil)
	var lines []picture.Line
	for _, share := range []int{25, 50} {
		l := picture.Line{Name: fmt.Sprintf("%d %% of the prompt cached there", share)}
		for other := 0; other <= 80; other += 2 {
			l.X = append(l.X, float64(other))
			l.Y = append(l.Y, max(0, most(t, d, 160, func(n int) *policy.Input { return loaded(n, other, 4096, 4096*share/100) })))
		}
		lines = append(lines, l)
	}
	return picture.Lines("load_snapshot: up to where a holder keeps the work", picture.Axis{Title: "requests at the engine that holds nothing"},
		picture.Axis{Title: "most requests at the holder"}, lines)
}

func drawWeightedCache(t *testing.T) string {
	var lines []picture.Line
	for _, alpha := range []float64{0.3, 0.5, 0.7} {
		d := enforcing(t, policy.WeightedCache, knobs{"alpha": alpha})
		l := picture.Line{Name: fmt.Sprintf("alpha %.1f", alpha)}
		for share := 0; share <= 100; share += 4 {
			l.X = append(l.X, float64(share))
			l.Y = append(l.Y, max(0, most(t, d, 38, func(n int) *policy.Input { return loaded(n, 0, 4000, 40*share) })))
		}
		lines = append(lines, l)
	}
	return picture.Lines("weighted_cache: up to where a holder wins against an idle engine", picture.Axis{Title: "share of the prompt cached there (%)"},
		picture.Axis{Title: "most requests at the holder, of 38 slots"}, lines)
}

func drawProjectedTime(t *testing.T) string {
	var lines []picture.Line
	for _, rate := range []float64{4000, 8000, 16_000} {
		d := enforcing(t, policy.ProjectedTime, knobs{"prefill_tok_s": rate})
		l := picture.Line{Name: fmt.Sprintf("prefill %.0f tokens/s", rate)}
		for cached := 0; cached <= 32_768; cached += 1024 {
			l.X = append(l.X, float64(cached))
			l.Y = append(l.Y, max(0, most(t, d, 60, func(n int) *policy.Input { return loaded(n, 0, 32_768, cached) })))
		}
		lines = append(lines, l)
	}
	return picture.Lines("projected_time: up to where a holder wins against an idle engine", picture.Axis{Title: "tokens cached there, of a prompt of 32,768"},
		picture.Axis{Title: "most requests at the holder"}, lines)
}

func drawParts(t *testing.T) string {
	d := enforcing(t, policy.ProjectedTime, nil)
	parts := []policy.Part{policy.PartQueue, policy.PartActive, policy.PartPrefill, policy.PartBarrier}
	lines := make([]picture.Line, len(parts))
	for n := 0; n <= 200; n += 2 {
		_, rec := decide(d, loaded(n, 0, 4096, 2048))
		for _, s := range rec.Candidates {
			if s.Index != 0 {
				continue
			}
			for p, v := range s.Parts() {
				for i := range parts {
					if parts[i] == p {
						lines[i].Name = p.String()
						lines[i].X, lines[i].Y = append(lines[i].X, float64(n)), append(lines[i].Y, v)
					}
				}
			}
		}
	}
	return picture.Lines("projected_time: the addends of one engine's time", picture.Axis{Title: "requests reserved there, of 38 slots"}, picture.Axis{Title: "seconds (s)"}, lines)
}

func drawOwnerPressure(t *testing.T) string {
	d := enforcing(t, policy.OwnerPressure, nil)
	var lines []picture.Line
	for _, peer := range []int{0, 36} {
		l := picture.Line{Name: "the peer is idle"}
		if peer > 0 {
			l.Name = fmt.Sprintf("the peer has %d of 38", peer)
		}
		for n := range 77 {
			in := loaded(n, peer, 4096, 4096)
			keyed(1)(in)
			_, rec := decide(d, in)
			does, ok := map[policy.Reason]float64{policy.ReasonOwnerHold: 0, policy.ReasonSpill: 1, policy.ReasonNoSafeSpill: 2}[rec.Reason]
			if !ok {
				t.Fatalf("owner with %d requests: %s", n, rec.Reason)
			}
			l.X, l.Y = append(l.X, float64(n)), append(l.Y, does)
		}
		lines = append(lines, l)
	}
	return picture.Lines("owner_pressure: 0 the owner keeps it, 1 a peer is seeded, 2 the owner keeps it under pressure",
		picture.Axis{Title: "requests at the owner, of 38 it can run"}, picture.Axis{Title: "decision (0, 1, 2)"}, lines)
}

func drawSticky(t *testing.T) string {
	var lines []picture.Line
	for _, margin := range []float64{2, 8, 16} {
		d := enforcing(t, policy.LeastRequests, knobs{"sticky_trajectory": 1, "sticky_margin": margin})
		l := picture.Line{Name: fmt.Sprintf("sticky_margin %.0f", margin)}
		for other := range 38 {
			l.X = append(l.X, float64(other))
			l.Y = append(l.Y, most(t, d, 38, func(n int) *policy.Input {
				in := loaded(n, other, 2048, 0)
				in.Candidates[0].Sticky = true
				return in
			}))
		}
		lines = append(lines, l)
	}
	return picture.Lines("stickiness: up to where a conversation stays", picture.Axis{Title: "requests at the least loaded engine, of 38 slots"},
		picture.Axis{Title: "most requests at its engine"}, lines)
}
