package policy_test

import (
	"testing"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// TestEveryReasonBasisAndOutcomeIsReachable shows how each comes about; filters
// have TestEveryFilterLeavesOutOneEngineAndSaysSo, a failing policy
// TestAPolicyThatFailsLeavesTheDecisionToTheBaseline.
func TestEveryReasonBasisAndOutcomeIsReachable(t *testing.T) {
	idle := func(change func(in *policy.Input)) *policy.Input {
		in := input(reports(engines(2)), request())
		if change != nil {
			change(in)
		}
		return in
	}
	held := func(in *policy.Input) { in.Candidates[0].MatchGPU = 2048 }
	reasons := map[policy.Reason]bool{policy.ReasonPolicyError: true} // shown in its own test
	bases := map[policy.Basis]bool{}
	outcomes := map[policy.Outcome]bool{}
	for _, c := range []struct {
		name   string
		k      knobs
		in     *policy.Input
		why    policy.Reason
		basis  policy.Basis
		result policy.Outcome
	}{
		{policy.LeastRequests, nil, idle(nil), policy.ReasonLeastRequests, policy.BasisReserved, policy.OutcomePlaced},
		{policy.KVTokens, nil, idle(nil), policy.ReasonLeastTokens, policy.BasisEngine, policy.OutcomePlaced},
		{policy.KVTokens, nil, idle(func(in *policy.Input) { in.Candidates[1].CapacityTokens = 0 }), policy.ReasonNoCapacity, policy.BasisEngine, policy.OutcomePlaced},
		{policy.LoadSnapshot, nil, idle(held), policy.ReasonPrefixMatch, policy.BasisEngine, policy.OutcomePlaced},
		{policy.LoadSnapshot, nil, idle(func(in *policy.Input) { held(in); in.Candidates[0].Observed.Running = 30 }), policy.ReasonImbalance, policy.BasisEngine, policy.OutcomePlaced},
		{policy.LoadSnapshot, nil, idle(nil), policy.ReasonLeastLoad, policy.BasisEngine, policy.OutcomePlaced},
		{policy.WeightedCache, nil, idle(nil), policy.ReasonBestScore, policy.BasisEngine, policy.OutcomePlaced},
		{policy.ProjectedTime, nil, idle(nil), policy.ReasonLeastTime, policy.BasisEngine, policy.OutcomePlaced},
		{policy.ProjectedTime, nil, idle(func(in *policy.Input) { held(in); in.Candidates[0].Observed.Running = 1 }), policy.ReasonPrefixCredit, policy.BasisEngine, policy.OutcomePlaced},
		{policy.ProjectedTime, nil, input(engines(2), request()), policy.ReasonNoTelemetry, policy.BasisReserved, policy.OutcomePlaced},
		{policy.ProjectedTime, nil, idle(func(in *policy.Input) {
			in.Request.PromptTokens, in.Candidates[0].MatchGPU, in.Candidates[0].Observed.Running = 99_000, 99_000, 60
		}), policy.ReasonHardEscape, policy.BasisEngine, policy.OutcomePlaced},
		{policy.ProjectedTime, knobs{"sticky_trajectory": 1}, idle(func(in *policy.Input) { in.Candidates[0].Sticky = true }), policy.ReasonSticky, policy.BasisEngine, policy.OutcomePlaced},
		{policy.ProjectedTime, knobs{"sticky_group": 1}, idle(func(in *policy.Input) {
			in.Candidates[0].Sticky, in.Candidates[0].StickyGroup = true, true
		}), policy.ReasonGroup, policy.BasisEngine, policy.OutcomePlaced},
		{policy.ProjectedTime, nil, input(nil, request()), policy.ReasonNoneEligible, policy.BasisNone, policy.OutcomeNoneEligible},
		{policy.ProjectedTime, nil, idle(func(in *policy.Input) { in.Candidates[0].Window, in.Candidates[1].Window = 0, 0 }), policy.ReasonNoneAdmissible, policy.BasisNone, policy.OutcomeNoneAdmissible},
		{policy.ProjectedTime, nil, idle(func(in *policy.Input) { in.Request.MaxTokens = 1 << 20 }), policy.ReasonTooLarge, policy.BasisNone, policy.OutcomeTooLarge},
		{policy.ProjectedTime, knobs{"wait_max": 9}, idle(func(in *policy.Input) {
			held(in)
			in.Candidates[0].Window, in.Candidates[0].Observed.DecodeTokS = 0, 5000
			in.Request.PromptTokens, in.Candidates[0].MatchGPU = 64_000, 64_000
		}), policy.ReasonWait, policy.BasisEngine, policy.OutcomeWait},
		{policy.OwnerPressure, nil, idle(nil), policy.ReasonLeastPressure, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, idle(keyed(0)), policy.ReasonFirstOwner, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, idle(keyed(1)), policy.ReasonOwnerHold, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, hot(nil), policy.ReasonSpill, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, hot(func(in *policy.Input) { in.Request.SeedLive = true }), policy.ReasonNoSafeSpill, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, hot(func(in *policy.Input) { in.Candidates[0].State = policy.Draining }), policy.ReasonOwnerUnavailable, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, idle(func(in *policy.Input) { keyed(0)(in); in.Candidates[0].Provisional = true }), policy.ReasonProvisional, policy.BasisEngine, policy.OutcomePlaced},
		{policy.OwnerPressure, nil, hot(func(in *policy.Input) { cold(in) }), policy.ReasonStray, policy.BasisEngine, policy.OutcomePlaced},
	} {
		_, rec := decide(decider(t, c.name, subjects.ModeEnforce, c.k), c.in)
		if rec.Reason != c.why || rec.Basis != c.basis || rec.Outcome != c.result {
			t.Errorf("%s: want %s on %s, %s; got %s", c.name, c.why, c.basis, c.result, explain(c.in, rec))
		}
		reasons[rec.Reason], bases[rec.Basis], outcomes[rec.Outcome] = true, true, true
	}
	for _, r := range policy.Reasons() {
		if !reasons[r] {
			t.Errorf("reason %s is not shown to be reachable", r)
		}
	}
	for _, b := range policy.Bases() {
		if !bases[b] {
			t.Errorf("basis %s is not shown to be reachable", b)
		}
	}
	for _, o := range policy.Outcomes() {
		if !outcomes[o] {
			t.Errorf("outcome %s is not shown to be reachable", o)
		}
	}
	if len(reasons) != len(policy.Reasons()) || len(bases) != len(policy.Bases()) || len(outcomes) != len(policy.Outcomes()) {
		t.Error("something is reachable that the closed lists do not have")
	}
}

func TestNamesOfTheClosedListsAreDistinctAndOutOfRangeIsSafe(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range policy.Filters() {
		if f.String() == "" || seen[f.String()] {
			t.Errorf("filter %d is called %q", f, f)
		}
		seen[f.String()] = true
		if f.Eligible() != (f >= policy.FilterWindow) {
			t.Errorf("filter %s: eligible is %v", f, f.Eligible())
		}
	}
	if !policy.FilterNone.Eligible() || policy.Filter(200).String() != "invalid" || policy.Part(200).String() != "invalid" {
		t.Error("a value beyond the list is not called invalid")
	}
	var rec policy.Record
	if rec.Filtered(policy.Filter(200)) != 0 {
		t.Error("a filter beyond the list counts")
	}
}
