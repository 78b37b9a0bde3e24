package policy_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// cacheAware are the policies that look at prefixes.
var cacheAware = []string{policy.LoadSnapshot, policy.WeightedCache, policy.ProjectedTime}

// scenario P1
func TestANovelPromptGoesToTheIdleEngineNotToTheSmallCache(t *testing.T) {
	for _, name := range policy.Policies() {
		cs := reports(engines(2))
		cs[0].Window, cs[1].Window = 200, 200
		cs[0].Observed.Waiting, cs[0].Observed.UsedTokens = 100, 256_000
		cs[0].ReservedRequests, cs[0].ReservedTokens = 100, 256_000
		cs[1].Observed.UsedTokens, cs[1].Observed.KVUsageWorst = 0, 0.3 // a big cache, all of it evictable
		if got, rec := decide(enforcing(t, name, nil), input(cs, request())); got != "e1" {
			t.Errorf("%s: a novel prompt went to the engine with 100 waiting: %s", name, rec.Reason)
		}
	}
}

// scenario P2
func TestArrivalsOneByOneGoRoundEqualEngines(t *testing.T) {
	for _, name := range policy.Policies() {
		for _, n := range []int{2, 7, 16} {
			f := newFleet(enforcing(t, name, nil), reports(engines(n)))
			counts := make([]int, n)
			for range 20*n + n/2 {
				r := request()
				i := f.place(r)
				counts[i]++
				f.retire(i, r) // it ends before the next one comes
			}
			if least, most := spread(counts); most-least > 1 {
				t.Errorf("%s: sequential arrivals over %d equal engines: %v", name, n, counts)
			}
		}
	}
}

// scenario P2
func TestAffinitiesSpreadOverEqualEnginesAndEachMeetsAtOne(t *testing.T) {
	const n, keys = 8, 2000
	cs := engines(n)
	for _, name := range policy.Policies() {
		counts := make([]int, n)
		d := enforcing(t, name, nil)
		for k := range keys {
			in := input(cs, request())
			in.Request.Affinity = fmt.Sprint("group-", k)
			var at [3]string
			for i := range at {
				in.Dispatcher = fmt.Sprint("d", i)
				cs[k%n].LastPicked = uint64(i * k) // differs by dispatcher, and must not matter
				at[i], _ = decide(d, in)
			}
			if at[0] != at[1] || at[1] != at[2] {
				t.Fatalf("%s: one affinity meets at %v, want one engine whoever decides", name, at)
			}
			counts[slices.IndexFunc(cs, func(c policy.Candidate) bool { return c.Engine == at[0] })]++
		}
		if least, most := spread(counts); float64(most) > 1.3*float64(least) {
			t.Errorf("%s: %d affinities over %d equal engines: %v", name, keys, n, counts)
		}
	}
}

// scenario P2
func TestMeasuredRatesThatDifferByNoiseDoNotChoose(t *testing.T) {
	cs := reports(engines(4))
	for i := range cs {
		cs[i].Observed.DecodeTokS, cs[i].Observed.PrefillTokS = 2000+float64(i), 8000+5*float64(i)
	}
	f := newFleet(enforcing(t, policy.ProjectedTime, nil), cs)
	counts := make([]int, 4)
	for range 400 {
		i := f.place(request())
		counts[i]++
		f.retire(i, request())
	}
	if least, most := spread(counts); most-least > 1 {
		t.Errorf("engines that differ by a thousandth get %v", counts)
	}
}

// scenario P3
func TestAHolderNearTheLeastLoadWinsWhateverTheImbalanceElsewhere(t *testing.T) {
	for _, name := range cacheAware {
		cs := reports(engines(4))
		for i, n := range []int{3, 1, 37, 0} { // e2 is far out of balance
			cs[i].ReservedRequests, cs[i].Observed.Running = n, n
		}
		cs[0].MatchGPU, cs[2].MatchGPU = 1984, 1984
		in := input(cs, request())
		in.Request.PromptTokens, in.Request.MaxTokens = 8192, 512
		cs[0].MatchGPU, cs[2].MatchGPU = 8128, 8128
		if got, rec := decide(enforcing(t, name, nil), in); got != "e0" {
			t.Errorf("%s: the holder with 3 requests lost to %q\n%s", name, got, explain(in, rec))
		}
	}
}

// scenario P4
func TestABacklogOfTokensWorthMoreThanTheCacheSavingLoses(t *testing.T) {
	cs := reports(engines(2))
	// Four requests each: by count they are equal.
	for i := range cs {
		cs[i].ReservedRequests, cs[i].Observed.Running, cs[i].Observed.Waiting = 4, 2, 2
		cs[i].Observed.WaitingUncachedTokens = 500
	}
	cs[0].MatchGPU = 2048
	d := enforcing(t, policy.ProjectedTime, nil)
	wantEngine(t, d, input(cs, request()), "e0", policy.ReasonLeastTime)
	cs[0].Observed.WaitingUncachedTokens = 40_000 // 5 s of prefill before ours
	wantEngine(t, d, input(cs, request()), "e1", policy.ReasonLeastTime)
	// kv_tokens sees it as tokens.
	cs[0].Observed.UsedTokens, cs[1].Observed.UsedTokens = 90_000, 10_000
	wantEngine(t, enforcing(t, policy.KVTokens, nil), input(cs, request()), "e1", policy.ReasonLeastTokens)
}

// scenario P5
func TestABurstOfEqualRequestsSpreadsEvenly(t *testing.T) {
	for _, name := range policy.Policies() {
		for _, withReports := range []bool{false, true} {
			for _, dispatchers := range []int{1, 4} {
				cs := engines(8)
				if withReports {
					cs = reports(cs)
				}
				f := newFleet(enforcing(t, name, nil), cs)
				picked := make([][8]uint64, dispatchers) // each knows its own picks alone
				counts := make([]int, 8)
				for n := range 64 {
					d := n % dispatchers
					f.in.Dispatcher = fmt.Sprint("d", d)
					for i := range cs {
						cs[i].LastPicked = picked[d][i]
					}
					i := f.place(request())
					picked[d][i] = uint64(n + 1)
					counts[i]++
				}
				if least, most := spread(counts); least < 7 || most > 9 {
					t.Errorf("%s, reports %v, %d dispatchers: 64 equal requests over 8 engines: %v", name, withReports, dispatchers, counts)
				}
			}
		}
	}
}

// scenario P7
func TestSilentEnginesAreUnknownNotSaturatedAndNotIdle(t *testing.T) {
	for _, name := range policy.Policies() {
		cs := engines(4) // no reports at all
		for i := range cs {
			cs[i].KVBlocked = true // a mark from before the silence
		}
		f := newFleet(enforcing(t, name, nil), cs)
		for n := range 4 * 40 {
			if f.place(request()) < 0 {
				t.Fatalf("%s: request %d was held although reservations leave room: %s", name, n, f.rec.Detail)
			}
		}
		if f.place(request()) >= 0 {
			t.Errorf("%s: placed beyond every window", name)
		}
	}
}

// scenario P8
func TestAKVMarkIsClearedByTheFirstHealthySampleAndDiesWithItsTelemetry(t *testing.T) {
	s := settings(t, policy.ProjectedTime, subjects.ModeEnforce, nil)
	blocked := false
	for _, step := range []struct {
		usage float64
		want  bool
	}{{0.5, false}, {0.9, false}, {0.91, true}, {0.80, true}, {0.75, true}, {0.749, false}, {0.9, false}, {0.99, true}, {-1, false}, {0.8, false}} {
		if blocked = s.KVGate(blocked, step.usage); blocked != step.want {
			t.Fatalf("after a sample of %v the mark is %v, want %v", step.usage, blocked, step.want)
		}
	}
	cs := engines(1)
	in := input(cs, request())
	in.Now, cs[0].PreemptionBlockUntil = time.Minute, time.Minute
	wantEngine(t, enforcing(t, policy.ProjectedTime, nil), in, "e0", policy.ReasonNoTelemetry) // a preemption's time is over
}

// scenario P8
func TestAnEngineWithoutAnyWorkIsNeverHeldForItsKV(t *testing.T) {
	cs := reports(engines(1))
	cs[0].Observed.KVUsageWorst, cs[0].KVBlocked = 0.97, true
	wantEngine(t, enforcing(t, policy.KVTokens, nil), input(cs, request()), "e0", policy.ReasonLeastTokens)
}

// scenario P11
func TestOnlyEligibleEnginesEnterAStatistic(t *testing.T) {
	// Down and empty: as the least loaded it would put everybody out of balance.
	for _, name := range cacheAware {
		cs := reports(engines(3))
		cs[0].State = policy.Down
		for i := 1; i < 3; i++ {
			cs[i].ReservedRequests, cs[i].Observed.Running = 20, 20
		}
		cs[1].MatchGPU, cs[1].ReservedRequests, cs[1].Observed.Running = 2048, 22, 22
		in := input(cs, request())
		if got, rec := decide(enforcing(t, name, knobs{"balance_abs": 8}), in); got != "e1" || rec.Reason == policy.ReasonHardEscape {
			t.Errorf("%s: the holder lost to %q because of a dead engine\n%s", name, got, explain(in, rec))
		}
	}
}

// scenario P12
func TestWithoutReuseEveryEngineGetsItsShare(t *testing.T) {
	type running struct {
		ends int
		at   int
		r    policy.Request
	}
	for _, name := range policy.Policies() {
		for seed := range uint64(5) {
			rng := rand.New(rand.NewPCG(seed, 12))
			f := newFleet(enforcing(t, name, nil), reports(engines(8)))
			counts := make([]int, 8)
			var now []running
			for n := range 1000 {
				// One comes every 12 tokens of time and lasts as long as its output: about 70 run.
				now = slices.DeleteFunc(now, func(x running) bool {
					if x.ends <= 12*n {
						f.retire(x.at, x.r)
						return true
					}
					return false
				})
				r := request()
				r.PromptTokens, r.ExpectedTokens = 200+rng.IntN(4000), 50+rng.IntN(1500)
				i := f.place(r)
				counts[i]++
				now = append(now, running{12*n + r.ExpectedTokens, i, r})
			}
			if least, most := spread(counts); float64(most) > 1.3*float64(least) {
				t.Errorf("%s, seed %d: 1,000 requests without reuse: %v", name, seed, counts)
			}
		}
	}
}

// scenario P13
func TestASlowEngineThatCompletesLittleDoesNotLookIdle(t *testing.T) {
	for _, name := range policy.Policies() {
		cs := reports(engines(2))
		cs[0].ReservedRequests, cs[0].ReservedTokens, cs[0].ReservedPromptTokens = 12, 30_000, 20_000
		cs[1].ReservedRequests, cs[1].ReservedTokens, cs[1].ReservedPromptTokens = 8, 20_000, 14_000
		reports(cs)
		cs[0].Observed.DecodeTokS = 200 // a tenth of the other: few completions
		cs[1].Observed.DecodeTokS = 2000
		if got, rec := decide(enforcing(t, name, nil), input(cs, request())); got != "e1" {
			t.Errorf("%s: the slow engine got more: %s", name, rec.Reason)
		}
	}
}

// scenario P14
func TestASaturatedRankIsNotHiddenByTheMean(t *testing.T) {
	rank := func(n int, used int64) subjects.RankLoad {
		return subjects.RankLoad{Rank: n, Running: ptr(5), Waiting: ptr(0), KVUsedTokens: ptr(used), KVCapacityTokens: ptr(int64(100_000)), MaxRunning: ptr(19)}
	}
	l := subjects.Load{Epoch: "x", IntervalMS: 200, RanksAdvertised: ptr(2), Ranks: []subjects.RankLoad{rank(0, 1000), rank(1, 95_000)}}
	o, why := policy.Judge(&l, 0, policy.Want{Epoch: "x", Ranks: 2})
	if why != policy.WhyUsable || o.Running != 10 || o.MaxRunning != 38 || o.UsedTokens != 96_000 || o.KVUsageWorst != 0.95 {
		t.Fatalf("%q %+v: want counts summed and the worst rank kept", why, o)
	}
	cs := reports(engines(2))
	cs[0].Observed, cs[1].ReservedRequests = &o, 20
	in := input(cs, request())
	if got, rec := decide(enforcing(t, policy.ProjectedTime, nil), in); got != "e1" || rec.Filtered(policy.FilterKV) != 1 {
		t.Fatalf("the engine with the full rank was chosen\n%s", explain(in, rec))
	}
}

// scenario P15
func TestEnginesOfThreeTimesTheSizeFinishTogether(t *testing.T) {
	for _, name := range []string{policy.KVTokens, policy.ProjectedTime} {
		for _, withReports := range []bool{false, true} {
			cs := engines(4)
			for i := range cs {
				cs[i].Window = 1000
				cs[i].CapacityTokens, cs[i].ProfileDecodeTokS, cs[i].ProfilePrefillTokS = 4_000_000, 1000, 4000
				if i%2 == 1 {
					cs[i].Slots = 3 * cs[i].Slots
					cs[i].CapacityTokens, cs[i].ProfileDecodeTokS, cs[i].ProfilePrefillTokS = 12_000_000, 3000, 12000
				}
			}
			if withReports {
				cs = reports(cs)
			}
			rng := rand.New(rand.NewPCG(1, 15))
			f := newFleet(enforcing(t, name, nil), cs)
			for range 400 {
				r := request()
				r.PromptTokens, r.ExpectedTokens = 200+rng.IntN(2000), 100+rng.IntN(2000)
				f.place(r)
			}
			var ends [4]float64
			for i, c := range cs {
				ends[i] = float64(c.ReservedTokens-c.ReservedPromptTokens)/c.ProfileDecodeTokS + float64(c.ReservedPromptTokens)/c.ProfilePrefillTokS
			}
			if slices.Max(ends[:]) > 1.1*slices.Min(ends[:]) {
				t.Errorf("%s, reports %v: engines of 1x and 3x end after %.1f s", name, withReports, ends)
			}
		}
	}
}

// scenario P16
func TestATrajectoryStaysWithinTheMarginAndMovesBeyondIt(t *testing.T) {
	for _, name := range policy.Policies() {
		d := enforcing(t, name, knobs{"sticky_trajectory": 1, "sticky_margin": 4})
		for least := range 3 {
			for over := range 7 {
				cs := engines(3)
				for i := range cs {
					cs[i].ReservedRequests = least
				}
				cs[1].ReservedRequests, cs[1].Sticky = least+over, true
				got, rec := decide(d, input(cs, request()))
				if stays := over <= 4; (got == "e1") != (stays || over == 0) || stays && rec.Reason != policy.ReasonSticky {
					t.Errorf("%s: %d above a least of %d: chosen %q (%s)", name, over, least, got, rec.Reason)
				}
			}
		}
	}
}

// scenario P16
func TestMigrationsAreBoundedByTheNumberOfSessions(t *testing.T) {
	const sessions, turns = 40, 25
	for _, name := range policy.Policies() {
		rng := rand.New(rand.NewPCG(1, 16))
		cs := reports(engines(4))
		f := newFleet(enforcing(t, name, knobs{"sticky_trajectory": 1}), cs)
		type session struct {
			turn, at int
			r        policy.Request
			runs     bool
		}
		all := make([]session, sessions)
		moves := 0
		// Each session has at most one turn in flight; turns begin and end in any order.
		for left := sessions * turns; left > 0; {
			s := &all[rng.IntN(sessions)]
			switch {
			case s.runs:
				f.retire(s.at, s.r)
				s.runs = false
				left--
			case s.turn < turns:
				s.r = request()
				s.r.PromptTokens += 256 * s.turn
				for i := range cs {
					cs[i].Sticky, cs[i].MatchGPU = s.turn > 0 && i == s.at, 0
					if cs[i].Sticky {
						cs[i].MatchGPU = s.r.PromptTokens - 256
					}
				}
				i := f.place(s.r)
				if s.turn > 0 && i != s.at {
					moves++
				}
				s.at, s.runs = i, true
				s.turn++
			}
		}
		if moves > sessions {
			t.Errorf("%s: %d sessions of %d turns moved %d times", name, sessions, turns, moves)
		}
	}
}

// scenario P17
func TestASaturatedStickyEngineIsLeft(t *testing.T) {
	d := enforcing(t, policy.WeightedCache, knobs{"sticky_trajectory": 1, "sticky_margin": 100})
	base := func() *policy.Input {
		cs := reports(engines(2))
		cs[0].Sticky, cs[0].MatchGPU = true, 2048
		return input(cs, request())
	}
	wantEngine(t, d, base(), "e0", policy.ReasonSticky)
	for name, spoil := range map[string]func(c *policy.Candidate){
		"KV above the threshold":    func(c *policy.Candidate) { c.Observed.KVUsageWorst, c.Observed.Running = 0.901, 3 },
		"slots above the threshold": func(c *policy.Candidate) { c.Observed.Running, c.ReservedRequests = 35, 35 },
		"a full window":             func(c *policy.Candidate) { c.ReservedRequests = c.Window },
		"rising preemptions":        func(c *policy.Candidate) { c.PreemptionBlockUntil = time.Second },
		"paused":                    func(c *policy.Candidate) { c.State = policy.Paused },
	} {
		in := base()
		spoil(&in.Candidates[0])
		if _, rec := decide(d, in); rec.Reason == policy.ReasonSticky {
			t.Errorf("%s: the trajectory stayed all the same", name)
		}
		if name == "slots above the threshold" || name == "KV above the threshold" {
			continue // left to the score, which may still prefer it for its cache
		}
		if got, _ := decide(d, in); got != "e1" {
			t.Errorf("%s: chosen %q, want the other engine", name, got)
		}
	}
}

// scenario P18
func TestAStickyCapCountsTheKeysOwnRequests(t *testing.T) {
	d := enforcing(t, policy.LeastRequests, knobs{"sticky_trajectory": 1, "sticky_margin": 100, "sticky_cap": 4})
	cs := engines(2)
	cs[0].Sticky, cs[0].ReservedRequests, cs[0].KeyInFlight = true, 20, 3
	wantEngine(t, d, input(cs, request()), "e0", policy.ReasonSticky)
	cs[0].ReservedRequests, cs[0].KeyInFlight = 5, 4
	wantEngine(t, d, input(cs, request()), "e1", policy.ReasonLeastRequests)
}

// scenario P20
func TestSiblingsOfAGroupStayTogetherUpToTheSlots(t *testing.T) {
	for _, name := range policy.Policies() {
		for _, slots := range []int{4, 5, 16, 64} {
			for _, withReports := range []bool{false, true} {
				cs := engines(8)
				for i := range cs {
					cs[i].Slots, cs[i].Window = slots, slots+2
				}
				if withReports {
					cs = reports(cs)
				}
				f := newFleet(enforcing(t, name, knobs{"sticky_group": 1}), cs)
				group := policy.NewSticky()
				prefills, counts := 0, make([]int, 8)
				for range 16 {
					last, scope := group.Find("j", "", "g")
					for i := range cs {
						cs[i].Sticky = scope == policy.ScopeGroup && cs[i].Engine == last
						cs[i].StickyGroup = cs[i].Sticky
					}
					r := request()
					r.Affinity = "g"
					i := f.place(r)
					if counts[i]++; counts[i] == 1 {
						prefills++
					}
					if counts[i] > slots {
						t.Fatalf("%s: engine %d has %d siblings and %d slots", name, i, counts[i], slots)
					}
					group.Learn("j", "", "g", cs[i].Engine)
				}
				if most := (16 + slots - 1) / slots; prefills > most {
					t.Errorf("%s, reports %v: 16 siblings on engines of %d slots prefill %d times, want at most %d: %v", name, withReports, slots, prefills, most, counts)
				}
			}
		}
	}
}

// scenario P22
func TestARequestLargerThanAnyEngineIsRefusedAtOnceNamingBothSizes(t *testing.T) {
	cs := engines(2)
	cs[0].CapacityTokens, cs[1].CapacityTokens = 30_000, 20_000
	in := input(cs, request())
	in.Request.MaxTokens = 30_000
	_, rec := decide(enforcing(t, policy.ProjectedTime, nil), in)
	if want := "prompt 2048 + max_tokens 30000 = 32048 tokens; the largest engine, e0, takes 30000 (KV capacity of a rank): ask for fewer tokens"; rec.Outcome != policy.OutcomeTooLarge || rec.Detail != want {
		t.Fatalf("%s: %q, want %q", rec.Outcome, rec.Detail, want)
	}
}

// scenario P23
func TestARankIsCheckedAgainstTheEngineBeforeItIsChosen(t *testing.T) {
	cs := engines(2)
	cs[0].Ranks, cs[1].Ranks, cs[1].ReservedRequests = 2, 4, 9
	in := input(cs, request())
	in.Request.Rank = ptr(3)
	wantEngine(t, enforcing(t, policy.KVTokens, nil), in, "e1", policy.ReasonLeastTokens)
	in.Request.Rank = ptr(4)
	if got, rec := decide(enforcing(t, policy.KVTokens, nil), in); got != "" || rec.Filtered(policy.FilterRank) != 2 {
		t.Fatalf("rank 4 of 4 was placed on %q", got)
	}
}
