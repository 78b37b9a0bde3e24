package policy_test

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// anyObserved is a report as Judge would let it through.
func anyObserved(t *rapid.T) *policy.Observed {
	if rapid.IntRange(0, 9).Draw(t, "silent") == 0 {
		return nil
	}
	maybe := func(v int64, label string) int64 {
		if rapid.IntRange(0, 7).Draw(t, label+" unknown") == 0 {
			return -1
		}
		return v
	}
	o := &policy.Observed{
		Running: rapid.IntRange(0, 45).Draw(t, "running"), Waiting: rapid.IntRange(0, 60).Draw(t, "waiting"),
		WaitingUncachedTokens: maybe(rapid.Int64Range(0, 200_000).Draw(t, "uncached"), "uncached"),
		UsedTokens:            maybe(rapid.Int64Range(0, 1_200_000).Draw(t, "used"), "used"),
		KVUsageWorst:          rapid.SampledFrom([]float64{-1, 0, 0.2, 0.5, 0.74, 0.76, 0.89, 0.91, 1}).Draw(t, "kv"),
		MaxRunning:            rapid.SampledFrom([]int{0, 19, 38}).Draw(t, "max running"),
		DecodeTokS:            rapid.SampledFrom([]float64{0, 1, 900, 2000, 1e9}).Draw(t, "decode"),
		PrefillTokS:           rapid.SampledFrom([]float64{0, 1, 5000, 8000, 1e9}).Draw(t, "prefill"),
		ExternalRequests:      rapid.IntRange(0, 5).Draw(t, "external"),
		NewerRequests:         rapid.IntRange(0, 5).Draw(t, "newer"),
	}
	if rapid.IntRange(0, 3).Draw(t, "pending told") > 0 {
		o.PendingTold = true
		o.PendingPrefillTokens = rapid.Int64Range(0, 200_000).Draw(t, "pending prefill")
		o.PendingOutputTokens = rapid.Int64Range(0, 50_000).Draw(t, "pending output")
	}
	o.NewerTokens = int64(o.NewerRequests) * 700
	o.NewerPrefillTokens = int64(o.NewerRequests) * 500
	return o
}

func anyCandidate(t *rapid.T, i int) policy.Candidate {
	c := engine(fmt.Sprintf("e%d", i))
	c.State = rapid.SampledFrom([]policy.State{policy.Ready, policy.Ready, policy.Ready, policy.Ready, policy.Ready, policy.Suspect, policy.Paused, policy.Draining, policy.Stale, policy.Down}).Draw(t, "state")
	c.Model = rapid.SampledFrom([]string{"m", "m", "m", "m", "other", ""}).Draw(t, "model")
	c.MaxModelLen = rapid.SampledFrom([]int{0, 3000, 131072, 131072}).Draw(t, "context")
	c.CapacityTokens = rapid.SampledFrom([]int64{0, 100_000, 1_000_000, 1_000_000}).Draw(t, "capacity")
	c.Ranks = rapid.IntRange(0, 4).Draw(t, "ranks")
	c.Slots = rapid.SampledFrom([]int{0, 4, 38}).Draw(t, "slots")
	c.Window = c.Slots + rapid.IntRange(0, 2).Draw(t, "prefetch")
	c.ReservedRequests = rapid.IntRange(0, 42).Draw(t, "reserved")
	c.ReservedTokens = int64(c.ReservedRequests) * rapid.Int64Range(1, 9000).Draw(t, "tokens each")
	c.ReservedPromptTokens = c.ReservedTokens / int64(rapid.IntRange(1, 4).Draw(t, "prompt part"))
	if c.ReservedRequests > 0 && rapid.Bool().Draw(t, "prompts unknown") {
		c.ReservedPromptTokens = 0
	}
	c.WeightVersion = rapid.SampledFrom([]*int64{nil, ptr(int64(3)), ptr(int64(4))}).Draw(t, "weights")
	c.Observed = anyObserved(t)
	c.MatchKnown = rapid.IntRange(0, 5).Draw(t, "match known") > 0
	c.MatchApproximate = rapid.IntRange(0, 5).Draw(t, "approximate") == 0
	c.MatchGPU = 64 * rapid.IntRange(0, 40).Draw(t, "gpu")
	c.MatchCPU = 64 * rapid.IntRange(0, 10).Draw(t, "cpu")
	c.MatchSSD = 64 * rapid.IntRange(0, 10).Draw(t, "ssd")
	c.LastPicked = uint64(rapid.IntRange(0, 9).Draw(t, "last picked"))
	c.KVBlocked = rapid.Bool().Draw(t, "kv blocked")
	c.KeyInFlight = rapid.IntRange(0, 4).Draw(t, "key in flight")
	if rapid.IntRange(0, 9).Draw(t, "preempting") == 0 {
		c.PreemptionBlockUntil = 2 * time.Minute
	}
	return c
}

func anyInput(t *rapid.T) *policy.Input {
	in := &policy.Input{Now: time.Minute, Dispatcher: rapid.SampledFrom([]string{"d1", "d2"}).Draw(t, "dispatcher"), Request: request()}
	r := &in.Request
	r.PromptTokens = rapid.IntRange(0, 5000).Draw(t, "prompt")
	r.MaxTokens = rapid.IntRange(0, 5000).Draw(t, "max tokens")
	r.ExpectedTokens = rapid.IntRange(0, max(1, r.MaxTokens)).Draw(t, "expected")
	r.Affinity = rapid.SampledFrom([]string{"", "", "g1", "g2"}).Draw(t, "affinity")
	r.WeightMin = rapid.SampledFrom([]*int64{nil, nil, nil, ptr(int64(3))}).Draw(t, "weight min")
	r.Tried = rapid.SampledFrom([][]string{nil, nil, {"e0"}, {"e0", "e1", "e2"}}).Draw(t, "tried")
	r.Waited = time.Duration(rapid.IntRange(0, 3).Draw(t, "waited")) * time.Second
	r.MayWait = time.Duration(rapid.IntRange(0, 10).Draw(t, "may_wait")) * time.Second
	n := rapid.IntRange(0, 8).Draw(t, "engines")
	stick := rapid.IntRange(-3, 7).Draw(t, "sticky engine")
	for i := range n {
		c := anyCandidate(t, i)
		if c.Sticky = i == stick; c.Sticky {
			c.StickyGroup = rapid.Bool().Draw(t, "sticky by group")
		}
		in.Candidates = append(in.Candidates, c)
	}
	return in
}

func anyKnobs(t *rapid.T) knobs {
	k := knobs{}
	for _, knob := range policy.Knobs() {
		if rapid.IntRange(0, 3).Draw(t, knob.Name+" given") == 0 {
			v := rapid.Float64Range(knob.Min, knob.Max).Draw(t, knob.Name)
			if knob.Whole {
				v = math.Trunc(v)
			}
			k[knob.Name] = v
		}
	}
	delete(k, "kv_block")
	delete(k, "kv_unblock")
	if k["weight_kv"] == 0 {
		delete(k, "weight_kv")
	}
	return k
}

func anySettings(t *rapid.T, mode string) policy.Settings {
	s, err := policy.Resolve(subjects.Settings{Policy: rapid.SampledFrom(policy.Policies()).Draw(t, "policy"), Mode: mode, Knobs: anyKnobs(t)})
	if err != nil {
		t.Fatalf("the test's settings: %v", err)
	}
	return s
}

func made(t *rapid.T, s policy.Settings) *policy.Decider {
	d, err := policy.NewDecider(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestEveryCandidateIsAdmissibleOrLeftOutForAReason(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		var rec policy.Record
		at := made(t, anySettings(t, subjects.ModeEnforce)).Decide(in, &rec)
		left := 0
		for _, n := range rec.EachFilter() {
			left += n
		}
		if left+rec.Admissible != len(in.Candidates) {
			t.Fatalf("%d candidates: %d admissible and %d left out for a reason", len(in.Candidates), rec.Admissible, left)
		}
		if len(rec.Candidates) != min(policy.MaxScored, len(in.Candidates)) {
			t.Fatalf("the record shows %d of %d candidates", len(rec.Candidates), len(in.Candidates))
		}
		seen := map[int]bool{}
		for _, s := range rec.Candidates {
			if seen[s.Index] {
				t.Fatalf("the record shows candidate %d twice", s.Index)
			}
			seen[s.Index] = true
			if s.Index == at && s.Filter != policy.FilterNone {
				t.Fatalf("the chosen engine was filtered: %s", s.Filter)
			}
		}
		if (at >= 0) != (rec.Outcome == policy.OutcomePlaced) || at != rec.Chosen {
			t.Fatalf("chosen %d, recorded %d, outcome %s", at, rec.Chosen, rec.Outcome)
		}
		if !slices.Contains(policy.Reasons(), rec.Reason) || !slices.Contains(policy.Bases(), rec.Basis) || !slices.Contains(policy.Outcomes(), rec.Outcome) {
			t.Fatalf("%s, %s, %s are not all in the closed lists", rec.Reason, rec.Basis, rec.Outcome)
		}
		if rec.Reason == policy.ReasonPolicyError {
			t.Fatalf("the policy failed: %s", rec.Detail)
		}
	})
}

func TestWorkIsHeldOnlyWhenNoCandidateCanTakeIt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		s := anySettings(t, subjects.ModeEnforce)
		s.WaitMax = 0
		var rec policy.Record
		at := made(t, s).Decide(in, &rec)
		if (at < 0) != (rec.Admissible == 0) {
			t.Fatalf("%d candidates can take it and the outcome is %s", rec.Admissible, rec.Outcome)
		}
		if at < 0 {
			return
		}
		c := &in.Candidates[at]
		need := int64(in.Request.PromptTokens + in.Request.MaxTokens)
		switch {
		case c.State != policy.Ready:
			t.Fatalf("work went to an engine that is not ready")
		case c.ReservedRequests >= c.Window:
			t.Fatalf("work went beyond an engine's window: %d of %d", c.ReservedRequests, c.Window)
		case c.MaxModelLen > 0 && need > int64(c.MaxModelLen), c.CapacityTokens > 0 && need > c.CapacityTokens:
			t.Fatalf("work went to an engine that is too small for it")
		case c.PreemptionBlockUntil > in.Now:
			t.Fatalf("work went to an engine that preempts")
		case c.Observed != nil && c.Observed.KVUsageWorst > 0.9 && c.ReservedRequests+c.Observed.Running+c.Observed.Waiting > 0:
			t.Fatalf("work went to an engine whose fullest rank is at %v", c.Observed.KVUsageWorst)
		}
	})
}

func TestADecisionNeverMixesBases(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		s := anySettings(t, subjects.ModeEnforce)
		s.WaitMax = 0
		d := made(t, s)
		var rec, alone policy.Record
		d.Decide(in, &rec)
		silent := 0
		for i := range rec.Candidates {
			if rec.Candidates[i].Filter.Eligible() && in.Candidates[rec.Candidates[i].Index].Observed == nil {
				silent++
			}
		}
		if rec.Basis == policy.BasisEngine && silent > 0 {
			t.Fatalf("the engines' reports decided although %d eligible engines have none", silent)
		}
		if rec.Basis != policy.BasisReserved {
			return
		}
		// On reservations every score is what it would be if nobody reported.
		mute := *in
		mute.Candidates = slices.Clone(in.Candidates)
		for i := range mute.Candidates {
			mute.Candidates[i].Observed = nil
		}
		d.Decide(&mute, &alone)
		want := map[int]float64{}
		for _, c := range alone.Candidates {
			if c.Filter == policy.FilterNone {
				want[c.Index] = c.Score
			}
		}
		if rec.Reason == policy.ReasonPrefixMatch || rec.Reason == policy.ReasonImbalance || rec.Reason == policy.ReasonLeastLoad {
			return // its scores depend on who else is there; its loads are checked below
		}
		for _, c := range rec.Candidates {
			if w, ok := want[c.Index]; ok && c.Filter == policy.FilterNone && c.Score != w {
				t.Fatalf("on reservations engine %d scores %v; if nobody reported it would score %v", c.Index, c.Score, w)
			}
		}
	})
}

func TestAReportNeverMakesAnEngineLookEmptierThanItsReservations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		var rec policy.Record
		made(t, anySettings(t, subjects.ModeEnforce)).Decide(in, &rec)
		for _, c := range rec.Candidates {
			if r := in.Candidates[c.Index].ReservedRequests; c.Requests < float64(r) {
				t.Fatalf("engine %d has %d requests reserved and counts as %v", c.Index, r, c.Requests)
			}
		}
	})
}

func TestLosingTelemetryNeverWinsAnEngineWorkByIt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Equal engines that all report; one of them falls silent.
		n := rapid.IntRange(2, 6).Draw(t, "engines")
		cs := engines(n)
		for i := range cs {
			cs[i].ReservedRequests = rapid.IntRange(0, 30).Draw(t, "reserved")
			cs[i].ReservedTokens = int64(cs[i].ReservedRequests) * 2560
			cs[i].ReservedPromptTokens = int64(cs[i].ReservedRequests) * 2048
		}
		cs = reports(cs)
		for i := range cs {
			cs[i].Observed.Waiting += rapid.IntRange(0, 9).Draw(t, "direct clients' requests")
		}
		name := rapid.SampledFrom(policy.Policies()).Draw(t, "policy")
		d := enforcing(t, name, nil)
		silent := rapid.IntRange(0, n-1).Draw(t, "silent")
		cs[silent].Observed = nil
		var rec policy.Record
		at := d.Decide(input(cs, request()), &rec)
		least := math.MaxInt
		for i := range cs {
			least = min(least, cs[i].ReservedRequests)
		}
		if at == silent && cs[silent].ReservedRequests > least {
			t.Fatalf("%s: the silent engine won with %d reserved, another has %d", name, cs[silent].ReservedRequests, least)
		}
	})
}

func TestModeOffEqualsTheBaselineDecisionForDecision(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		base, err := policy.Resolve(subjects.Settings{Policy: policy.LeastRequests, Mode: subjects.ModeEnforce})
		if err != nil {
			t.Fatal(err)
		}
		var a, b policy.Record
		off := made(t, anySettings(t, subjects.ModeOff)).Decide(in, &a)
		want := made(t, base).Decide(in, &b)
		if off != want || a.Outcome != b.Outcome || a.Reason != b.Reason || a.Basis != b.Basis || a.Policy != b.Policy {
			t.Fatalf("off chose %d (%s, %s), the baseline %d (%s, %s)", off, a.Outcome, a.Reason, want, b.Outcome, b.Reason)
		}
	})
}

func TestShadowDecidesLikeOffChangesNothingAndNotesWhatEnforceWouldDo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		before := slices.Clone(in.Candidates)
		s := anySettings(t, subjects.ModeShadow)
		var shadow, off, enforce policy.Record
		made(t, s).Decide(in, &shadow)
		if !reflect.DeepEqual(before, in.Candidates) {
			t.Fatal("a decision wrote to its candidates")
		}
		s.Mode = subjects.ModeOff
		made(t, s).Decide(in, &off)
		s.Mode = subjects.ModeEnforce
		made(t, s).Decide(in, &enforce)
		if shadow.Chosen != off.Chosen || shadow.Outcome != off.Outcome || shadow.Reason != off.Reason {
			t.Fatalf("shadow chose %d (%s), off %d (%s)", shadow.Chosen, shadow.Reason, off.Chosen, off.Reason)
		}
		if enforce.Admissible > 0 && (shadow.ShadowChosen != enforce.Chosen || shadow.ShadowReason != enforce.Reason || shadow.ShadowOutcome != enforce.Outcome || shadow.ShadowBasis != enforce.Basis) {
			t.Fatalf("shadow notes %d (%s, %s), enforce does %d (%s, %s)", shadow.ShadowChosen, shadow.ShadowOutcome, shadow.ShadowReason, enforce.Chosen, enforce.Outcome, enforce.Reason)
		}
	})
}

func TestTheSameInputGivesTheSameDecisionWhateverCameBefore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySettings(t, rapid.SampledFrom([]string{subjects.ModeShadow, subjects.ModeEnforce}).Draw(t, "mode"))
		in, other := anyInput(t), anyInput(t)
		used, fresh := made(t, s), made(t, s)
		var a, b policy.Record
		used.Decide(other, &a)
		used.Decide(in, &a)
		fresh.Decide(in, &b)
		if d := cmp.Diff(a, b, cmp.AllowUnexported(policy.Record{}, policy.Scored{})); d != "" && (len(a.Candidates) > 0 || len(b.Candidates) > 0) {
			t.Fatalf("the same input gave two records (-after another, +first):\n%s", d)
		}
	})
}

func TestTheOrderOfCandidatesNeverChooses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		d := made(t, anySettings(t, subjects.ModeEnforce))
		var a, b policy.Record
		first := d.Decide(in, &a)
		turned := *in
		turned.Candidates = rapid.Permutation(slices.Clone(in.Candidates)).Draw(t, "order")
		second := d.Decide(&turned, &b)
		name := func(in *policy.Input, at int) string {
			if at < 0 {
				return ""
			}
			return in.Candidates[at].Engine
		}
		if name(in, first) != name(&turned, second) || a.Reason != b.Reason || a.Tied != b.Tied || name(in, a.WaitFor) != name(&turned, b.WaitFor) {
			t.Fatalf("chosen %q (%s), in another order %q (%s)", name(in, first), a.Reason, name(&turned, second), b.Reason)
		}
	})
}

func TestProjectedTimeNeverChoosesALoadOutOfProportion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		s, err := policy.Resolve(subjects.Settings{Policy: policy.ProjectedTime, Mode: subjects.ModeEnforce})
		if err != nil {
			t.Fatal(err)
		}
		var rec policy.Record
		at := made(t, s).Decide(in, &rec)
		if at < 0 {
			return
		}
		least, mine := math.Inf(1), 0.0
		for i := range rec.Candidates {
			c := &rec.Candidates[i]
			if c.Filter != policy.FilterNone {
				continue
			}
			load := 0.0
			for p, v := range c.Parts() {
				if v < 0 || math.IsNaN(v) || math.IsInf(v, 0) {
					t.Fatalf("%s is %v", p, v)
				}
				if p != policy.PartPrefill {
					load += v
				}
			}
			least = min(least, load)
			if c.Index == at {
				mine = load
			}
		}
		if mine > 3*least+5+1e-9 && mine > 1.02*least+1e-9 {
			t.Fatalf("chosen with %v s of load; the least is %v s", mine, least)
		}
	})
}

func TestNoSequenceOfPlacementsFillsAnEngineBeyondItsWindow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(policy.Policies()).Draw(t, "policy")
		cs := engines(rapid.IntRange(1, 5).Draw(t, "engines"))
		for i := range cs {
			cs[i].Slots = rapid.IntRange(1, 6).Draw(t, "slots")
			cs[i].Window = cs[i].Slots + 2
		}
		if rapid.Bool().Draw(t, "reports") {
			cs = reports(cs)
		}
		f := newFleet(enforcing(t, name, knobs{"sticky_group": 1, "sticky_trajectory": 1}), cs)
		type one struct {
			at int
			r  policy.Request
		}
		var live []one
		t.Repeat(map[string]func(*rapid.T){
			"place": func(t *rapid.T) {
				r := request()
				r.PromptTokens = rapid.IntRange(1, 4000).Draw(t, "prompt")
				r.Affinity = rapid.SampledFrom([]string{"", "g"}).Draw(t, "affinity")
				stick := rapid.IntRange(0, 9).Draw(t, "sticky")
				for i := range cs {
					cs[i].Sticky, cs[i].StickyGroup = i == stick, r.Affinity != ""
				}
				if i := f.place(r); i >= 0 {
					live = append(live, one{i, r})
				}
			},
			"retire": func(t *rapid.T) {
				if len(live) > 0 {
					k := rapid.IntRange(0, len(live)-1).Draw(t, "which")
					f.retire(live[k].at, live[k].r)
					live = slices.Delete(live, k, k+1)
				}
			},
			"": func(t *rapid.T) {
				for _, c := range cs {
					if c.ReservedRequests > c.Window || c.ReservedRequests < 0 || c.ReservedTokens < 0 {
						t.Fatalf("engine %s has %d requests, %d tokens; its window is %d", c.Engine, c.ReservedRequests, c.ReservedTokens, c.Window)
					}
				}
			},
		})
		for _, o := range live {
			f.retire(o.at, o.r)
		}
		for _, c := range cs {
			if c.ReservedRequests != 0 || c.ReservedTokens != 0 || c.ReservedPromptTokens != 0 {
				t.Fatalf("after all have retired engine %s still counts %d requests and %d tokens", c.Engine, c.ReservedRequests, c.ReservedTokens)
			}
		}
	})
}
