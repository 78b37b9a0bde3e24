package policy_test

import (
	"math"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// hotFleet is S3's case: 51 engines, one owner of the hot prefix with 109
// waiting and 38 running, one half loaded, 49 idle. The owner's window is wide,
// so that the score decides and not admission.
func hotFleet() []policy.Candidate {
	cs := engines(51)
	for i := range cs {
		cs[i].Window = 400
	}
	load := func(i, running, waiting int) {
		n := running + waiting
		cs[i].ReservedRequests, cs[i].ReservedTokens, cs[i].ReservedPromptTokens = n, int64(n*2560), int64(n*2048)
	}
	load(17, 38, 109)
	load(30, 19, 0)
	cs = reports(cs)
	for i := range cs {
		cs[i].Observed.WaitingUncachedTokens = 0
	}
	cs[17].MatchGPU = 2048
	return cs
}

func TestNewWorkOfAHotPrefixGoesToIdlePeers(t *testing.T) {
	d := enforcing(t, policy.ProjectedTime, nil)
	f := newFleet(d, hotFleet())
	seen := map[int]int{}
	for range 49 {
		i := f.place(request())
		if i == 17 || i == 30 {
			t.Fatalf("work went to engine %d: %s", i, f.rec.Reason)
		}
		seen[i]++
	}
	if len(seen) != 49 {
		t.Errorf("49 requests of the hot prefix went to %d of the 49 idle engines: %v", len(seen), seen)
	}
}

func TestAffinityWinsExactlyWhileItsSavingExceedsTheLoad(t *testing.T) {
	d := enforcing(t, policy.ProjectedTime, knobs{"escape_ratio": 1000, "escape_floor": 3600, "barrier": 0, "tie_ratio": 0})
	for running := range 80 {
		cs := reports(engines(2))
		cs[0].MatchGPU = 8192
		cs[0].Observed.Running = running
		in := input(cs, request())
		in.Request.PromptTokens = 8192
		// 8,192 tokens at 8,000/s cost 1.024 s; a running request 256 tokens at 2,000/s = 0.128 s: 8 of them.
		want := "e0"
		if float64(running)*0.128 > 1.024 {
			want = "e1"
		}
		got, rec := decide(d, in)
		if running != 8 && got != want { // at 8 they are equal
			t.Fatalf("%d running at the holder: chosen %q, want %q\n%s", running, got, want, explain(in, rec))
		}
		if running > 0 && running < 8 && rec.Reason != policy.ReasonPrefixCredit {
			t.Fatalf("%d running at the holder: reason %s, want prefix_credit", running, rec.Reason)
		}
	}
}

func TestIdenticalSimultaneousRequestsSpreadEvenIfOneEngineHoldsTheirPrefix(t *testing.T) {
	cs := reports(engines(8))
	cs[3].MatchGPU = 2048
	f := newFleet(enforcing(t, policy.ProjectedTime, nil), cs)
	counts := make([]int, 8)
	for range 64 {
		counts[f.place(request())]++
	}
	least, most := spread(counts)
	if least < 7 || most > 10 {
		t.Errorf("64 identical requests: %v", counts)
	}
}

func TestRunningWorkCountsWithoutAnythingWaiting(t *testing.T) {
	cs := reports(engines(2))
	cs[0].Observed.Running, cs[1].Observed.Running = 20, 10
	wantEngine(t, enforcing(t, policy.ProjectedTime, nil), input(cs, request()), "e1", policy.ReasonLeastTime)
	wantEngine(t, enforcing(t, policy.ProjectedTime, knobs{"active_share": 0}), input(cs[:1], request()), "e0", policy.ReasonLeastTime)
	_, rec := decide(enforcing(t, policy.ProjectedTime, nil), input(cs, request()))
	for p, v := range rec.Candidates[1].Parts() {
		if p == policy.PartActive && math.Abs(v-20*512*0.5/2000) > 1e-9 {
			t.Errorf("20 running requests of 512 tokens count as %v s", v)
		}
	}
}

func TestTheFormulaInNumbers(t *testing.T) {
	cs := engines(1)
	c := &cs[0]
	c.ReservedRequests, c.ReservedTokens, c.ReservedPromptTokens = 12, 12*1000, 12*600 // 400 output each
	c.MatchKnown, c.MatchGPU, c.MatchCPU, c.MatchSSD = true, 512, 256, 128
	c.Observed = &policy.Observed{
		Running: 6, Waiting: 2, WaitingUncachedTokens: 800, UsedTokens: 300_000, KVUsageWorst: 0.2, MaxRunning: 38,
		DecodeTokS: 1000, PrefillTokS: 4000, NewerRequests: 3, NewerTokens: 3000, NewerPrefillTokens: 1800, NewerCachedTokens: 1000,
	}
	in := input(cs, request())
	_, rec := decide(enforcing(t, policy.ProjectedTime, nil), in)
	k := (300_000 + 2048 + 512) / 1e6
	want := map[policy.Part]float64{
		// 2 waiting and 1 that the engine has not seen, 400 each, 1,200 newer output; 800 to
		// prefill, and of 1,800 newer ones those that were not placed for a prefix.
		policy.PartQueue:  (3*400+1200)/1000.0 + (800+1800-1000)/4000.0,
		policy.PartActive: 6 * 400 * 0.5 / 1000,
		// 12 requests there lose half of the time that it takes.
		policy.PartPrefill: (2048 - (512 + 0.75*256 + 0.25*128)) / 4000 * (1 + 0.5*12),
		policy.PartBarrier: 0.15 * k / (1 - k),
	}
	sum := 0.0
	for p, v := range rec.Candidates[0].Parts() {
		if math.Abs(v-want[p]) > 1e-9 {
			t.Errorf("%s is %v, want %v", p, v, want[p])
		}
		sum += v
	}
	if math.Abs(sum-rec.Candidates[0].Score) > 1e-9 {
		t.Errorf("the parts make %v, the score is %v", sum, rec.Candidates[0].Score)
	}
	// The same on reservations alone: 12 of 38 slots, all of it runs, nothing is credited.
	c.Observed = nil
	_, rec = decide(enforcing(t, policy.ProjectedTime, nil), in)
	k = (12_000 + 2048 + 512) / 1e6
	want = map[policy.Part]float64{
		policy.PartQueue: 0, policy.PartActive: 12 * 400 * 0.5 / 2000, policy.PartPrefill: 2048 / 8000.0, policy.PartBarrier: 0.15 * k / (1 - k),
	}
	for p, v := range rec.Candidates[0].Parts() {
		if math.Abs(v-want[p]) > 1e-9 {
			t.Errorf("on reservations %s is %v, want %v", p, v, want[p])
		}
	}
}

func TestAnEngineThatWasNeverBusyIsAsGoodAsItsPeers(t *testing.T) {
	cs := reports(engines(3))
	for i, rate := range []float64{600, 1000, 0} {
		cs[i].Observed.DecodeTokS, cs[i].Observed.PrefillTokS = rate, 4*rate
		cs[i].Observed.Running = 4
	}
	_, rec := decide(enforcing(t, policy.ProjectedTime, nil), input(cs, request()))
	for _, c := range rec.Candidates {
		if c.Index == 2 && (c.DecodeTokS != 800 || c.PrefillTokS != 3200 || c.DecodeFrom != policy.RatePeers || c.PrefillFrom != policy.RatePeers) {
			t.Errorf("an engine without rates counts with %v (%s) and %v (%s), want its peers' 800 and 3200", c.DecodeTokS, c.DecodeFrom, c.PrefillTokS, c.PrefillFrom)
		}
	}
}

func TestRatesThatDifferByLittleAreTakenForEqual(t *testing.T) {
	cs := reports(engines(4))
	for i, rate := range []float64{800, 1000, 1100, 1100} { // the mean is 1,000
		cs[i].Observed.DecodeTokS, cs[i].Observed.PrefillTokS = rate, 4000
	}
	cs[0].Observed.PrefillTokS = 1000 // of 3,250 on average
	_, rec := decide(enforcing(t, policy.ProjectedTime, nil), input(cs, request()))
	for _, c := range rec.Candidates {
		if want := map[bool]float64{true: 1000, false: 3250}[c.Index == 0]; c.DecodeTokS != 1000 || c.PrefillTokS != want {
			t.Errorf("engine %d counts with %v and %v tokens/s, want 1000 and %v", c.Index, c.DecodeTokS, c.PrefillTokS, want)
		}
	}
}

func TestTheBarrierIsSteepNearFullAndFiniteAtFull(t *testing.T) {
	barrier := func(used int64) float64 {
		cs := reports(engines(1))
		cs[0].Observed.UsedTokens = used
		_, rec := decide(enforcing(t, policy.ProjectedTime, nil), input(cs, request()))
		for p, v := range rec.Candidates[0].Parts() {
			if p == policy.PartBarrier {
				return v
			}
		}
		return -1
	}
	low, half, high, over := barrier(0), barrier(500_000-2560), barrier(950_000), barrier(5_000_000)
	if low > 0.001 || math.Abs(half-0.15) > 1e-9 || high < 2.5 || math.Abs(over-0.15*0.999/0.001) > 1e-6 {
		t.Errorf("barrier empty %v, half %v, nearly full %v, beyond full %v s", low, half, high, over)
	}
}

func TestAHardEscapeTakesTheLeastLoadedWhenTheWinnersLoadIsOutOfProportion(t *testing.T) {
	base := func() *policy.Input {
		cs := reports(engines(3))
		cs[0].MatchGPU = 100_000
		cs[0].Observed.Running, cs[1].Observed.Running, cs[2].Observed.Running = 38, 5, 4
		in := input(cs, request())
		in.Request.PromptTokens = 100_000 // 12.5 s of prefill against 4.9 s of load
		return in
	}
	// The holder has 38 x 0.128 = 4.86 s of load and the barrier; the least has 0.51 s and 0.02 s.
	wantEngine(t, enforcing(t, policy.ProjectedTime, knobs{"escape_floor": 1}), base(), "e2", policy.ReasonHardEscape)
	wantEngine(t, enforcing(t, policy.ProjectedTime, knobs{"escape_floor": 1, "escape_ratio": 10}), base(), "e0", policy.ReasonPrefixCredit)
	wantEngine(t, enforcing(t, policy.ProjectedTime, nil), base(), "e0", policy.ReasonPrefixCredit)
}

// What agents tell of their own runs takes the place of guesses.
func TestWhatRunsHaveStillToDoCountsWhenAllTellIt(t *testing.T) {
	parts := func(change func(cs []policy.Candidate)) (queue, active float64) {
		cs := engines(2)
		cs[0].ReservedRequests, cs[0].ReservedTokens, cs[0].ReservedPromptTokens = 4, 4*1000, 4*600
		for i := range cs {
			cs[i].Observed = &policy.Observed{WaitingUncachedTokens: -1, UsedTokens: 0, MaxRunning: 38, DecodeTokS: 1000, PrefillTokS: 4000, PendingTold: true}
		}
		o := cs[0].Observed
		o.Running, o.PendingPrefillTokens, o.PendingOutputTokens = 3, 500, 700
		o.NewerRequests, o.NewerTokens, o.NewerPrefillTokens, o.NewerCachedTokens = 1, 1000, 600, 200
		change(cs)
		_, rec := decide(enforcing(t, policy.ProjectedTime, nil), input(cs, request()))
		for _, c := range rec.Candidates {
			if c.Index == 0 {
				for p, v := range c.Parts() {
					switch p {
					case policy.PartQueue:
						queue = v
					case policy.PartActive:
						active = v
					}
				}
			}
		}
		return queue, active
	}
	near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
	if q, a := parts(func([]policy.Candidate) {}); !near(q, (500+600-200)/4000.0) || !near(a, (700+400)*0.5/1000) {
		t.Errorf("all tell: queue %v and active %v s", q, a)
	}
	if q, a := parts(func(cs []policy.Candidate) { cs[0].Observed.ExternalRequests = 2 }); !near(q, 900/4000.0) || !near(a, (1100+2*400)*0.5/1000) {
		t.Errorf("two of somebody else: queue %v and active %v s, want an output for each", q, a)
	}
	if q, _ := parts(func(cs []policy.Candidate) { cs[0].Slots = 3 }); !near(q, 900/4000.0+2*400/1000.0) {
		t.Errorf("the second to wait for a slot: queue %v s, want two outputs' time more", q)
	}
	// Nobody's word is taken when one says nothing: 3 that run, by active_share.
	if q, a := parts(func(cs []policy.Candidate) { cs[1].Observed.PendingTold = false }); !near(q, 400/1000.0+400/4000.0) || !near(a, 3*400*0.5/1000) {
		t.Errorf("one does not tell: queue %v and active %v s", q, a)
	}
}

// Recomputing a prefix costs those that run there too: a holder keeps it although
// it is no sooner free, unless an idle engine can compute it in nobody's way.
func TestAPrefillCostsThoseThatRunThere(t *testing.T) {
	base := func(peer int) *policy.Input {
		cs := reports(engines(2))
		for i, n := range []int{10, peer} {
			cs[i].ReservedRequests, cs[i].ReservedTokens, cs[i].ReservedPromptTokens = n, int64(n*1000), int64(n*500)
			cs[i].Observed.Running, cs[i].Observed.WaitingUncachedTokens = n, 0
		}
		cs[0].MatchGPU = 2048
		in := input(cs, request())
		in.Request.PromptTokens = 2048 // 0.256 s
		return in
	}
	// 0.125 s a running request: 6 of them are 0.5 s less than 10, and 0.256 s are
	// 1.024 s with half of theirs; 1 is 1.125 s less, and 0.384 s with its half.
	wantEngine(t, enforcing(t, policy.ProjectedTime, nil), base(6), "e0", policy.ReasonPrefixCredit)
	wantEngine(t, enforcing(t, policy.ProjectedTime, nil), base(1), "e1", policy.ReasonLeastTime)
	wantEngine(t, enforcing(t, policy.ProjectedTime, knobs{"interference": 0}), base(6), "e1", policy.ReasonLeastTime)
}

func TestEveryFallbackOfProjectedTime(t *testing.T) {
	base := func() *policy.Input {
		cs := reports(engines(3))
		for i := range cs {
			cs[i].Observed.WaitingUncachedTokens, cs[i].Observed.Running = 0, 2
		}
		cs[0].MatchGPU, cs[1].ReservedRequests, cs[2].ReservedRequests = 2048, 3, 1
		cs[0].LastPicked = 9 // it loses a tie
		cs[1].ReservedTokens, cs[2].ReservedTokens = 3000, 1000
		cs[0].ReservedRequests, cs[0].ReservedTokens = 2, 2000
		return input(cs, request())
	}
	d := enforcing(t, policy.ProjectedTime, nil)
	for _, c := range []struct {
		name   string
		spoil  func(in *policy.Input)
		engine string
		why    policy.Reason
		basis  policy.Basis
	}{
		{"all is known", func(*policy.Input) {}, "e0", policy.ReasonLeastTime, policy.BasisEngine},
		{"one engine's telemetry is out", func(in *policy.Input) { in.Candidates[1].Observed = nil }, "e2", policy.ReasonNoTelemetry, policy.BasisReserved},
		{"no telemetry at all", func(in *policy.Input) {
			for i := range in.Candidates {
				in.Candidates[i].Observed = nil
			}
		}, "e2", policy.ReasonNoTelemetry, policy.BasisReserved},
		{"the holder's cache view is not whole", func(in *policy.Input) { in.Candidates[0].MatchKnown = false }, "", policy.ReasonLeastTime, policy.BasisEngine},
		{"the holder's cache view is an estimate", func(in *policy.Input) { in.Candidates[0].MatchApproximate = true }, "", policy.ReasonLeastTime, policy.BasisEngine},
		{"one capacity is unknown", func(in *policy.Input) { in.Candidates[1].CapacityTokens = 0 }, "e0", policy.ReasonLeastTime, policy.BasisEngine},
		{"one engine does not tell its used tokens", func(in *policy.Input) { in.Candidates[1].Observed.UsedTokens = -1 }, "e0", policy.ReasonLeastTime, policy.BasisEngine},
		{"one engine does not tell its KV usage", func(in *policy.Input) { in.Candidates[2].Observed.KVUsageWorst = -1 }, "e0", policy.ReasonLeastTime, policy.BasisEngine},
		{"one engine does not tell what waits uncached", func(in *policy.Input) { in.Candidates[1].Observed.WaitingUncachedTokens = -1 }, "e0", policy.ReasonLeastTime, policy.BasisEngine},
	} {
		in := base()
		c.spoil(in)
		got, rec := decide(d, in)
		if c.engine != "" && got != c.engine || c.engine == "" && got == "e0" || rec.Reason != c.why || rec.Basis != c.basis {
			t.Errorf("%s: chosen %q, %s", c.name, got, explain(in, rec))
		}
	}
	in := base()
	in.Candidates[0].MatchApproximate = true
	wantEngine(t, enforcing(t, policy.ProjectedTime, knobs{"approximate_credit": 1}), in, "e0", policy.ReasonLeastTime)
}

func TestAQuantityThatOneEngineLacksCountsForNone(t *testing.T) {
	part := func(in *policy.Input, p policy.Part) []float64 {
		_, rec := decide(enforcing(t, policy.ProjectedTime, nil), in)
		out := make([]float64, len(in.Candidates))
		for i := range rec.Candidates {
			for q, v := range rec.Candidates[i].Parts() {
				if q == p {
					out[rec.Candidates[i].Index] = v
				}
			}
		}
		return out
	}
	cs := reports(engines(2))
	cs[0].Observed.UsedTokens = 900_000
	cs[1].CapacityTokens = 0
	if b := part(input(cs, request()), policy.PartBarrier); b[0] != 0 || b[1] != 0 {
		t.Errorf("one capacity is unknown and the barriers are %v", b)
	}
	cs = reports(engines(2))
	cs[0].Observed.WaitingUncachedTokens, cs[0].Observed.Waiting = 80_000, 1
	cs[1].Observed.WaitingUncachedTokens = -1
	if q := part(input(cs, request()), policy.PartQueue); math.Abs(q[0]-512.0/2000) > 1e-9 {
		t.Errorf("uncached tokens of one engine count alone: queues are %v", q)
	}
}

func TestReportedRatesAreHeldWithinBoundsOfProfileAndDefault(t *testing.T) {
	prefill := func(own, profile float64) float64 {
		cs := reports(engines(1))
		cs[0].Observed.PrefillTokS, cs[0].ProfilePrefillTokS = own, profile
		in := input(cs, request())
		in.Request.PromptTokens = 8000
		_, rec := decide(enforcing(t, policy.ProjectedTime, nil), in)
		for p, v := range rec.Candidates[0].Parts() {
			if p == policy.PartPrefill {
				return 8000 / v
			}
		}
		return 0
	}
	for _, c := range []struct{ own, profile, want float64 }{
		{0, 0, 8000}, {5000, 0, 5000}, {1, 0, 800}, {1e9, 0, 80_000}, {0, 100, 100}, {5000, 100, 1000}, {1, 100, 10},
		{math.NaN(), math.NaN(), 8000}, {-5, -5, 8000}, {math.Inf(1), 0, 80_000},
	} {
		if got := prefill(c.own, c.profile); math.Abs(got-c.want) > 1e-6*c.want {
			t.Errorf("reported %v, profile %v: counts as %v tokens/s, want %v", c.own, c.profile, got, c.want)
		}
	}
}

func TestWaitingForTheHolderIsOffByDefaultBoundedAndOnlyWhenItPays(t *testing.T) {
	base := func() *policy.Input {
		cs := reports(engines(2))
		cs[0].MatchGPU, cs[0].Slots, cs[0].Window = 32_000, 4, 4
		cs[0].ReservedRequests, cs[0].Observed.Running = 4, 4
		in := input(cs, request())
		in.Request.PromptTokens = 32_000 // 4 s of prefill elsewhere; a slot is free in 0.256 s
		in.Request.MayWait = time.Minute
		return in
	}
	wantEngine(t, enforcing(t, policy.ProjectedTime, nil), base(), "e1", policy.ReasonLeastTime)
	d := enforcing(t, policy.ProjectedTime, knobs{"wait_max": 5})
	got, rec := decide(d, base())
	if got != "" || rec.Outcome != policy.OutcomeWait || rec.Reason != policy.ReasonWait || rec.WaitFor != 0 || rec.WaitSpan != 256*time.Millisecond {
		t.Fatalf("chosen %q, wait for %d up to %v, %s", got, rec.WaitFor, rec.WaitSpan, rec.Reason)
	}
	for name, spoil := range map[string]func(in *policy.Input){
		"it has waited long enough":       func(in *policy.Input) { in.Request.Waited = 5 * time.Second },
		"less is left than it would take": func(in *policy.Input) { in.Request.Waited = 4900 * time.Millisecond },
		"it may not wait so long now":     func(in *policy.Input) { in.Request.MayWait = 255 * time.Millisecond },
		"it may not wait at all":          func(in *policy.Input) { in.Request.MayWait = 0 },
		"too many wait for it already":    func(in *policy.Input) { in.Candidates[0].Awaited = 19 },
		"recomputing is quicker":          func(in *policy.Input) { in.Request.PromptTokens = 1000 },
		"the holder is paused":            func(in *policy.Input) { in.Candidates[0].State = policy.Paused },
		"the holder preempts": func(in *policy.Input) {
			in.Candidates[0].ReservedRequests, in.Candidates[0].PreemptionBlockUntil = 0, 1
		},
		"the holder's cache is not known":  func(in *policy.Input) { in.Candidates[0].MatchKnown = false },
		"telemetry is incomplete":          func(in *policy.Input) { in.Candidates[1].Observed = nil },
		"the holder is far out of balance": func(in *policy.Input) { in.Candidates[0].Observed.Waiting = 40 },
	} {
		in := base()
		spoil(in)
		if got, rec := decide(d, in); got != "e1" {
			t.Errorf("%s: chosen %q, %s", name, got, rec.Reason)
		}
	}
	_, rec = decide(decider(t, policy.ProjectedTime, subjects.ModeShadow, knobs{"wait_max": 5}), base())
	if rec.Chosen != 1 || rec.Outcome != policy.OutcomePlaced || rec.ShadowOutcome != policy.OutcomeWait || rec.ShadowChosen != -1 {
		t.Errorf("in shadow nobody waits: chosen %d %s, shadow %d %s", rec.Chosen, rec.Outcome, rec.ShadowChosen, rec.ShadowOutcome)
	}
}
