package policy_test

import (
	"math"
	"testing"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

func TestTokensOverCapacityDecideAndRequestsForAllWhenOneCapacityIsUnknown(t *testing.T) {
	d := enforcing(t, policy.KVTokens, nil)
	cs := engines(3)
	for i, c := range []struct {
		requests int
		tokens   int64
		capacity int64
	}{{1, 30_000, 100_000}, {6, 60_000, 400_000}, {3, 90_000, 200_000}} {
		cs[i].ReservedRequests, cs[i].ReservedTokens, cs[i].CapacityTokens = c.requests, c.tokens, c.capacity
	}
	wantEngine(t, d, input(cs, request()), "e1", policy.ReasonLeastTokens)
	// An engine of unknown capacity is neither starved nor preferred.
	cs[1].CapacityTokens = 0
	wantEngine(t, d, input(cs, request()), "e0", policy.ReasonNoCapacity)
	cs[1].ReservedRequests = 0
	wantEngine(t, d, input(cs, request()), "e1", policy.ReasonNoCapacity)
	// Not eligible: it has no say.
	cs[1].State = policy.Paused
	wantEngine(t, d, input(cs, request()), "e0", policy.ReasonLeastTokens)
}

func TestTokensAreFusedOnlyWhenEveryEngineTellsThem(t *testing.T) {
	cs := reports(engines(2))
	cs[0].ReservedTokens, cs[0].Observed.UsedTokens = 1000, 50_000 // direct clients
	cs[1].ReservedTokens, cs[1].Observed.UsedTokens = 5000, 4000
	d := enforcing(t, policy.KVTokens, nil)
	wantEngine(t, d, input(cs, request()), "e1", policy.ReasonLeastTokens)
	cs[1].Observed.UsedTokens = -1
	wantEngine(t, d, input(cs, request()), "e0", policy.ReasonLeastTokens)
}

func TestLoadSnapshotTakesTheLeastLoadedOfThoseThatHoldMost(t *testing.T) {
	d := enforcing(t, policy.LoadSnapshot, nil)
	base := func() *policy.Input {
		cs := reports(engines(4))
		for i, n := range []int{9, 5, 7, 0} {
			cs[i].Observed.Running = n
		}
		cs[0].MatchGPU, cs[1].MatchGPU, cs[1].MatchCPU, cs[2].MatchGPU = 1536, 1024, 512, 1024
		return input(cs, request())
	}
	wantEngine(t, d, base(), "e1", policy.ReasonPrefixMatch) // as long a prefix as e0's, less load
	in := base()
	in.Candidates[1].MatchCPU = 0
	wantEngine(t, d, in, "e0", policy.ReasonPrefixMatch) // the longest alone
	wantEngine(t, enforcing(t, policy.LoadSnapshot, knobs{"match_threshold": 0.76}), base(), "e3", policy.ReasonLeastLoad)
	// A holder out of balance is left out; the next best match remains.
	in = base()
	in.Candidates[1].MatchCPU, in.Candidates[0].Observed.Running = 0, 30
	wantEngine(t, d, in, "e1", policy.ReasonPrefixMatch)
	// All of them out of balance.
	for i := range 3 {
		in.Candidates[i].Observed.Running = 17 + i
	}
	wantEngine(t, d, in, "e3", policy.ReasonImbalance)
	// Both conditions are needed: 17 above the least, but not 1.5 times it.
	in.Candidates[3].Observed.Running = 100
	for i := range 3 {
		in.Candidates[i].Observed.Running = 117 + i
		in.Candidates[i].Window = 400
	}
	in.Candidates[3].Window = 400
	wantEngine(t, d, in, "e0", policy.ReasonPrefixMatch)
}

func TestARepeatedTierNeverMatchesMoreThanThePrompt(t *testing.T) {
	cs := reports(engines(2))
	cs[0].MatchGPU, cs[0].MatchCPU = 4096, 4096
	cs[1].MatchGPU = 2048
	_, rec := decide(enforcing(t, policy.LoadSnapshot, nil), input(cs, request()))
	if rec.Tied != 2 {
		t.Errorf("an engine that holds beyond the prompt is not tied with one that holds all of it")
	}
}

func TestWeightedCacheInNumbers(t *testing.T) {
	cs := reports(engines(2))
	c := &cs[0]
	c.MatchGPU, c.MatchCPU, c.MatchSSD = 1024, 512, 256
	c.Observed.KVUsageWorst, c.Observed.Running, c.Observed.Waiting = 0.4, 15, 4
	in := input(cs, request())
	_, rec := decide(enforcing(t, policy.WeightedCache, nil), in)
	score := map[int]float64{}
	for _, s := range rec.Candidates {
		score[s.Index] = s.Score
	}
	cache := (0.7*1024 + 0.2*512 + 0.1*256) / 2048
	load := 0.5*(1-0.4) + 0.5*(1-19.0/38)
	if want := 1 - (0.7*cache + 0.3*load); math.Abs(score[0]-want) > 1e-9 {
		t.Errorf("score %v, want 1 - S = %v", score[0], want)
	}
	if want := 1 - 0.3; math.Abs(score[1]-want) > 1e-9 {
		t.Errorf("score of an idle engine %v, want %v", score[1], want)
	}
	// alpha 0 is load alone, alpha 1 is cache alone.
	wantEngine(t, enforcing(t, policy.WeightedCache, knobs{"alpha": 0}), in, "e1", policy.ReasonBestScore)
	wantEngine(t, enforcing(t, policy.WeightedCache, knobs{"alpha": 1}), in, "e0", policy.ReasonBestScore)
}

func TestEveryFallbackOfWeightedCache(t *testing.T) {
	parts := func(in *policy.Input, k knobs) map[policy.Part]float64 {
		_, rec := decide(enforcing(t, policy.WeightedCache, k), in)
		out := map[policy.Part]float64{}
		for _, s := range rec.Candidates {
			if s.Index == 0 {
				for p, v := range s.Parts() {
					out[p] = v
				}
			}
		}
		return out
	}
	loaded := func() *policy.Input {
		cs := reports(engines(2))
		for i := range cs {
			cs[i].ReservedRequests, cs[i].ReservedTokens = 19, 250_000
		}
		reports(cs)
		return input(cs, request())
	}
	for _, c := range []struct {
		name  string
		spoil func(in *policy.Input)
		k     knobs
		part  policy.Part
		want  float64
	}{
		{"KV usage of the fullest rank", func(in *policy.Input) { in.Candidates[0].Observed.KVUsageWorst = 0.6 }, nil, policy.PartKVFree, 0.4},
		{"tokens over capacity when one does not tell KV usage", func(in *policy.Input) { in.Candidates[1].Observed.KVUsageWorst = -1 }, nil, policy.PartKVFree, 0.75},
		{"reserved tokens when one is silent", func(in *policy.Input) { in.Candidates[1].Observed = nil }, nil, policy.PartKVFree, 0.75},
		{"slots of the registration when one does not tell its limit", func(in *policy.Input) {
			in.Candidates[1].Observed.MaxRunning, in.Candidates[0].Observed.MaxRunning = 0, 190
		}, nil, policy.PartSlotFree, 0.5},
		{"1/(1+n) when slots are unknown", func(in *policy.Input) {
			in.Candidates[1].Observed.MaxRunning, in.Candidates[1].Slots = 0, 0
		}, nil, policy.PartSlotFree, 0.05},
		{"no cache credit for a view that is not whole", func(in *policy.Input) {
			in.Candidates[0].MatchKnown, in.Candidates[0].MatchGPU = false, 2048
		}, nil, policy.PartCache, 0},
		{"slots stand in when only KV has a weight and nobody knows it", func(in *policy.Input) {
			in.Candidates[1].Observed.KVUsageWorst, in.Candidates[1].CapacityTokens = -1, 0
		}, knobs{"weight_slots": 0}, policy.PartSlotFree, 0.5},
	} {
		in := loaded()
		c.spoil(in)
		if got, has := parts(in, c.k)[c.part]; !has || math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %s is %v (there: %v), want %v", c.name, c.part, got, has, c.want)
		}
	}
	in := loaded()
	in.Candidates[1].CapacityTokens, in.Candidates[1].Observed.KVUsageWorst = 0, -1
	if _, has := parts(in, nil)[policy.PartKVFree]; has {
		t.Error("free KV counts although one engine's is unknown")
	}
}

func TestAnEmptyPromptIsNoMatch(t *testing.T) {
	for _, name := range policy.Policies() {
		cs := reports(engines(2))
		cs[0].ReservedRequests, cs[0].Observed.Running = 3, 3
		in := input(cs, request())
		in.Request.PromptTokens, in.Request.ExpectedTokens, in.Request.MaxTokens = 0, 0, 0
		if got, rec := decide(enforcing(t, name, nil), in); got == "" || rec.Reason == policy.ReasonPolicyError {
			t.Errorf("%s: an empty prompt gives %s", name, rec.Reason)
		}
	}
}
