package policy_test

import (
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// left is a way in which a candidate is left out, and the filter that says so.
type left struct {
	name   string
	filter policy.Filter
	make   func(c *policy.Candidate, r *policy.Request)
}

func everyFilter() []left {
	state := func(s policy.State) func(*policy.Candidate, *policy.Request) {
		return func(c *policy.Candidate, _ *policy.Request) { c.State = s }
	}
	return []left{
		{"suspect", policy.FilterSuspect, state(policy.Suspect)},
		{"paused", policy.FilterPaused, state(policy.Paused)},
		{"draining", policy.FilterDraining, state(policy.Draining)},
		{"stale", policy.FilterStale, state(policy.Stale)},
		{"down", policy.FilterDown, state(policy.Down)},
		{"in a state nobody knows", policy.FilterDown, state(99)},
		{"another model", policy.FilterModel, func(c *policy.Candidate, _ *policy.Request) { c.Model = "other" }},
		{"no adapter", policy.FilterLoRA, func(c *policy.Candidate, r *policy.Request) { r.LoRA, c.LoRAs = "l", []string{"k"} }},
		{"older weights", policy.FilterWeights, func(c *policy.Candidate, r *policy.Request) {
			r.WeightMin, c.WeightVersion = ptr(int64(3)), ptr(int64(2))
		}},
		{"other weights", policy.FilterWeights, func(c *policy.Candidate, r *policy.Request) {
			r.WeightExact, c.WeightVersion = ptr(int64(3)), ptr(int64(4))
		}},
		{"unknown weights", policy.FilterWeights, func(_ *policy.Candidate, r *policy.Request) { r.WeightMin = ptr(int64(0)) }},
		{"no such rank", policy.FilterRank, func(c *policy.Candidate, r *policy.Request) { r.Rank, c.Ranks = ptr(2), 2 }},
		{"a negative rank", policy.FilterRank, func(_ *policy.Candidate, r *policy.Request) { r.Rank = ptr(-1) }},
		{"a short context", policy.FilterContext, func(c *policy.Candidate, _ *policy.Request) { c.MaxModelLen = 4095 }},
		{"a small KV pool", policy.FilterCapacity, func(c *policy.Candidate, _ *policy.Request) { c.CapacityTokens = 4095 }},
		{"ranks that are small each", policy.FilterCapacity, func(c *policy.Candidate, _ *policy.Request) { c.CapacityTokens, c.Ranks = 16000, 4 }},
		{"tried before", policy.FilterTried, func(c *policy.Candidate, r *policy.Request) { r.Tried = []string{"zz", c.Engine} }},
		{"a full window", policy.FilterWindow, func(c *policy.Candidate, _ *policy.Request) { c.ReservedRequests = c.Window }},
		{"a window full of direct clients", policy.FilterWindow, func(c *policy.Candidate, _ *policy.Request) {
			c.ReservedRequests, c.Observed = 1, &policy.Observed{KVUsageWorst: -1, ExternalRequests: c.Window - 1}
		}},
		{"no slots", policy.FilterWindow, func(c *policy.Candidate, _ *policy.Request) { c.Window = 0 }},
		{"full KV", policy.FilterKV, func(c *policy.Candidate, _ *policy.Request) {
			c.Observed = &policy.Observed{Running: 1, KVUsageWorst: 0.91}
		}},
		{"KV not yet low again", policy.FilterKV, func(c *policy.Candidate, _ *policy.Request) {
			c.KVBlocked, c.Observed = true, &policy.Observed{Running: 1, KVUsageWorst: 0.80}
		}},
		{"full KV of an unknown size", policy.FilterKV, func(c *policy.Candidate, _ *policy.Request) {
			c.CapacityTokens, c.Observed = 0, &policy.Observed{Running: 1, KVUsageWorst: 0.91}
		}},
		{"KV that is promised", policy.FilterKV, func(c *policy.Candidate, _ *policy.Request) {
			c.Observed = &policy.Observed{Running: 1, KVUsageWorst: 0.5, ComingTokens: 410_000}
		}},
		{"preempting", policy.FilterPreempting, func(c *policy.Candidate, _ *policy.Request) { c.PreemptionBlockUntil = time.Minute + 1 }},
	}
}

// What is on its way counts against KV that is known, and never against an engine
// that has nothing else to end first.
func TestKVThatIsPromisedCountsOnlyWhereItCan(t *testing.T) {
	for name, o := range map[string]policy.Observed{
		"it fits":                     {Running: 1, KVUsageWorst: 0.5, ComingTokens: 400_000},
		"nobody knows how full it is": {Running: 1, KVUsageWorst: -1, ComingTokens: 5_000_000},
		"it has nothing else to do":   {KVUsageWorst: 0.95, ComingTokens: 460_000},
	} {
		cs := engines(1)
		cs[0].Observed = &o
		if got, rec := decide(enforcing(t, policy.LeastRequests, nil), input(cs, request())); got != "e0" {
			t.Errorf("%s: %s", name, explain(input(cs, request()), rec))
		}
	}
}

func TestEveryFilterLeavesOutOneEngineAndSaysSo(t *testing.T) {
	seen := map[policy.Filter]bool{}
	for _, l := range everyFilter() {
		t.Run(l.name, func(t *testing.T) {
			cs := engines(2)
			cs[1].WeightVersion, cs[1].LoRAs, cs[1].Ranks = ptr(int64(3)), []string{"l"}, 3
			cs[1].ReservedRequests = 5 // worse, and the only one
			in := input(cs, request())
			in.Now = time.Minute
			l.make(&cs[0], &in.Request)
			if l.name == "a negative rank" {
				cs = cs[:1] // no engine has that one
				in.Candidates = cs
			}
			got, rec := decide(enforcing(t, policy.LeastRequests, nil), in)
			if want := map[bool]string{true: "e1", false: ""}[len(cs) == 2]; got != want {
				t.Fatalf("chosen %q, want %q\n%s", got, want, explain(in, rec))
			}
			if rec.Filtered(l.filter) != 1 {
				t.Fatalf("filter %s counts %d, want 1\n%s", l.filter, rec.Filtered(l.filter), explain(in, rec))
			}
			found := false
			for _, s := range rec.Candidates {
				found = found || s.Index == 0 && s.Filter == l.filter
			}
			if !found {
				t.Fatalf("the record does not say why e0 was left out\n%s", explain(in, rec))
			}
		})
		seen[l.filter] = true
	}
	for _, f := range policy.Filters() {
		if !seen[f] {
			t.Errorf("filter %s is not shown to be reachable", f)
		}
	}
}

func TestAnEngineThatDoesNotSayItsModelMayServeAny(t *testing.T) {
	cs := engines(1)
	cs[0].Model = ""
	wantEngine(t, enforcing(t, policy.LeastRequests, nil), input(cs, request()), "e0", policy.ReasonLeastRequests)
	cs[0].Model, cs[0].LoRAs = "base", []string{"m"}
	wantEngine(t, enforcing(t, policy.LeastRequests, nil), input(cs, request()), "e0", policy.ReasonLeastRequests)
}

func TestEnginesTriedAreExcludedUntilAllWereTried(t *testing.T) {
	cs := engines(3)
	cs[2].State = policy.Down
	in := input(cs, request())
	d := enforcing(t, policy.LeastRequests, nil)
	in.Request.Tried = []string{"e0"}
	wantEngine(t, d, in, "e1", policy.ReasonLeastRequests)
	in.Request.Tried = []string{"e0", "e1"}
	got, rec := decide(d, in)
	if got == "" || !rec.TriedLifted || rec.Filtered(policy.FilterTried) != 0 || rec.Eligible != 2 {
		t.Fatalf("all eligible engines were tried: chosen %q, lifted %v, want one of the two\n%s", got, rec.TriedLifted, explain(in, rec))
	}
	// A full engine is still eligible: the exclusion stays, the request waits.
	in.Request.Tried = []string{"e0"}
	cs[1].ReservedRequests = cs[1].Window
	if got, rec = decide(d, in); got != "" || rec.Outcome != policy.OutcomeNoneAdmissible {
		t.Fatalf("the engine not tried is full: chosen %q, %s, want it to wait", got, rec.Outcome)
	}
}

func TestNoneEligibleNoneAdmissibleAndTooLargeAreToldApart(t *testing.T) {
	d := enforcing(t, policy.ProjectedTime, nil)
	for _, c := range []struct {
		name    string
		spoil   func(cs []policy.Candidate, r *policy.Request)
		outcome policy.Outcome
		says    []string
	}{
		{"no engine is ready", func(cs []policy.Candidate, _ *policy.Request) { cs[0].State, cs[1].State = policy.Paused, policy.Stale },
			policy.OutcomeNoneEligible, []string{"none of 2 engines", "1 paused", "1 stale"}},
		{"all are full", func(cs []policy.Candidate, _ *policy.Request) { cs[0].ReservedRequests, cs[1].Window = 40, 0 },
			policy.OutcomeNoneAdmissible, []string{"2 of 2 engines may serve it", "2 window"}},
		{"one is full, one paused", func(cs []policy.Candidate, _ *policy.Request) {
			cs[0].ReservedRequests, cs[1].State = 40, policy.Paused
		},
			policy.OutcomeNoneAdmissible, []string{"1 of 2 engines", "1 paused", "1 window"}},
		{"larger than both", func(_ []policy.Candidate, r *policy.Request) { r.MaxTokens = 130_000 },
			policy.OutcomeTooLarge, []string{"2048 + max_tokens 130000 = 132048", "takes 131072", "context length"}},
		{"larger than the ready one alone", func(cs []policy.Candidate, _ *policy.Request) {
			cs[0].MaxModelLen, cs[1].State = 1000, policy.Suspect
		}, policy.OutcomeNoneEligible, []string{"1 context", "1 suspect"}},
		{"larger than every rank's KV", func(cs []policy.Candidate, _ *policy.Request) {
			cs[0].CapacityTokens, cs[1].CapacityTokens, cs[1].Ranks = 3000, 8000, 2
		}, policy.OutcomeTooLarge, []string{"= 4096", "e1, takes 4000", "KV capacity of a rank"}},
		{"larger than those of another model too", func(cs []policy.Candidate, r *policy.Request) {
			cs[0].Model, r.MaxTokens = "other", 1<<20
		}, policy.OutcomeTooLarge, []string{"e1, takes"}},
		{"of unknown size", func(cs []policy.Candidate, r *policy.Request) {
			cs[0].MaxModelLen, cs[0].CapacityTokens, cs[0].State, r.MaxTokens = 0, 0, policy.Paused, 1<<20
		}, policy.OutcomeNoneEligible, []string{"1 context", "1 paused"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := input(engines(2), request())
			c.spoil(in.Candidates, &in.Request)
			got, rec := decide(d, in)
			if got != "" || rec.Outcome != c.outcome || string(rec.Reason) != string(c.outcome) || rec.Basis != policy.BasisNone {
				t.Fatalf("chosen %q, %s", got, explain(in, rec))
			}
			for _, s := range c.says {
				if !strings.Contains(rec.Detail, s) {
					t.Errorf("the detail %q does not say %q", rec.Detail, s)
				}
			}
			if len(rec.Candidates) != 2 {
				t.Errorf("the record shows %d candidates, want both with their filters", len(rec.Candidates))
			}
		})
	}
	if _, rec := decide(d, input(nil, request())); rec.Outcome != policy.OutcomeNoneEligible || rec.Detail == "" {
		t.Errorf("without engines: %s %q", rec.Outcome, rec.Detail)
	}
}

func TestTheBasisIsTheEnginesOnlyWhenEveryEligibleEngineReports(t *testing.T) {
	d := enforcing(t, policy.LoadSnapshot, nil)
	cs := reports(engines(3))
	cs[0].Observed.Running, cs[0].ReservedRequests = 30, 0 // direct clients
	cs[1].Observed.Running, cs[1].ReservedRequests = 9, 9
	cs[2].Observed.Running, cs[2].ReservedRequests = 12, 12
	in := input(cs, request())
	got, rec := decide(d, in)
	if got != "e1" || rec.Basis != policy.BasisEngine {
		t.Fatalf("all report: chosen %q on %s, want e1 on the engines' reports", got, rec.Basis)
	}
	// One is silent: e0 must be judged by its reservations like everybody else.
	cs[2].Observed = nil
	if got, rec = decide(d, in); got != "e0" || rec.Basis != policy.BasisReserved {
		t.Fatalf("e2 is silent: chosen %q on %s, want e0 on reservations", got, rec.Basis)
	}
	// The silent one is not eligible: it has no say.
	cs[2].State = policy.Paused
	if got, rec = decide(d, in); got != "e1" || rec.Basis != policy.BasisEngine {
		t.Fatalf("the silent one is paused: chosen %q on %s, want e1 on the engines' reports", got, rec.Basis)
	}
}

func TestModeOffIsTheBaselineAndShadowOnlyNotesWhatThePolicyWouldDo(t *testing.T) {
	cs := reports(engines(2))
	cs[0].ReservedRequests, cs[0].Observed.Running = 1, 1
	cs[0].MatchGPU = 2048
	in := input(cs, request())
	got, rec := decide(decider(t, policy.WeightedCache, subjects.ModeOff, nil), in)
	if got != "e1" || rec.Reason != policy.ReasonLeastRequests || rec.Policy != policy.LeastRequests || rec.ShadowOutcome != "" {
		t.Fatalf("off: chosen %q by %s for %s", got, rec.Policy, rec.Reason)
	}
	got, rec = decide(decider(t, policy.WeightedCache, subjects.ModeShadow, nil), in)
	if got != "e1" || rec.Reason != policy.ReasonLeastRequests || rec.Policy != policy.LeastRequests || rec.Basis != policy.BasisReserved {
		t.Fatalf("shadow: chosen %q by %s for %s on %s", got, rec.Policy, rec.Reason, rec.Basis)
	}
	if rec.ShadowChosen != 0 || rec.ShadowPolicy != policy.WeightedCache || rec.ShadowReason != policy.ReasonBestScore ||
		rec.ShadowBasis != policy.BasisEngine || rec.Agrees() {
		t.Fatalf("shadow notes %d by %s for %s on %s, agrees %v", rec.ShadowChosen, rec.ShadowPolicy, rec.ShadowReason, rec.ShadowBasis, rec.Agrees())
	}
	got, rec = decide(enforcing(t, policy.WeightedCache, nil), in)
	if got != "e0" || rec.Policy != policy.WeightedCache {
		t.Fatalf("enforce: chosen %q by %s", got, rec.Policy)
	}
}

func TestTheRecordKeepsTheBestSixteenAndTheChosenOne(t *testing.T) {
	cs := engines(100)
	for i := range cs {
		cs[i].ReservedRequests = 20 - i/5
	}
	cs[0].State = policy.Paused
	in := input(cs, request())
	_, rec := decide(enforcing(t, policy.LeastRequests, nil), in)
	if len(rec.Candidates) != policy.MaxScored {
		t.Fatalf("%d candidates are kept, want %d", len(rec.Candidates), policy.MaxScored)
	}
	has := false
	for i, s := range rec.Candidates {
		if i > 0 && i < 15 && s.Score < rec.Candidates[i-1].Score {
			t.Errorf("candidate %d is better than the one before it", i)
		}
		has = has || s.Index == rec.Chosen
	}
	if !has || rec.Tied != 5 {
		t.Fatalf("the chosen one is among them: %v; tied %d, want 5", has, rec.Tied)
	}
	// In shadow the baseline's choice may be far down the policy's list.
	for i := range cs {
		cs[i].ReservedRequests, cs[i].ReservedTokens = 5, int64(i)
	}
	cs[99].ReservedRequests = 4
	_, rec = decide(decider(t, policy.KVTokens, subjects.ModeShadow, nil), in)
	first, last := rec.Candidates[0].Index, rec.Candidates[15].Index
	if rec.Chosen != 99 || last != 99 || rec.ShadowChosen != first || first != 1 {
		t.Fatalf("chosen %d, shadow %d; the record runs from %d to %d, want the policy's best and the chosen one", rec.Chosen, rec.ShadowChosen, first, last)
	}
	// Few admissible ones leave room for those that were left out.
	for i := range cs[:98] {
		cs[i].State = policy.Draining
	}
	_, rec = decide(enforcing(t, policy.LeastRequests, nil), in)
	if len(rec.Candidates) != policy.MaxScored || rec.Candidates[2].Filter != policy.FilterDraining || rec.Filtered(policy.FilterDraining) != 98 {
		t.Fatalf("%s", explain(in, rec))
	}
}

func TestARecordIsReusedAndForgetsTheLastDecision(t *testing.T) {
	d := decider(t, policy.ProjectedTime, subjects.ModeShadow, nil)
	var rec policy.Record
	in := input(reports(engines(3)), request())
	d.Decide(in, &rec)
	in.Candidates = engines(1)
	in.Candidates[0].State = policy.Paused
	if d.Decide(in, &rec) != -1 || rec.ShadowOutcome != "" || rec.ShadowChosen != -1 || len(rec.Candidates) != 1 || rec.Basis != policy.BasisNone {
		t.Fatalf("left over from the decision before: %+v", rec)
	}
}
