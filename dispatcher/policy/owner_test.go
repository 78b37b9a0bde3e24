package policy_test

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// keyed gives the request an owner key; the first engines are its owners.
func keyed(owners int) func(in *policy.Input) {
	return func(in *policy.Input) {
		in.Request.OwnerKey, in.Request.Affinity, in.Request.Owners = "k", "k", owners
		for i := range in.Candidates {
			in.Candidates[i].Provable = true
			in.Candidates[i].Owner = i < owners
		}
	}
}

// hot is S2's case: one owner with 38 running and 36 waiting at a cap of 38, its
// peer idle. The agent lets what waits into its window.
func hot(change func(in *policy.Input)) *policy.Input {
	cs := engines(2)
	cs[0].Window, cs[0].ReservedRequests, cs[0].ReservedTokens = 80, 74, 74*4000
	in := input(reports(cs), request())
	keyed(1)(in)
	if change != nil {
		change(in)
	}
	return in
}

// cold takes the owner away: its engine runs the key's oldest reservation.
func cold(in *policy.Input) {
	in.Request.Owners = 0
	in.Candidates[0].Owner, in.Candidates[0].Provisional = false, true
}

func TestAFullOwnerSeedsItsIdlePeerWhereverAdmissionDrawsTheLine(t *testing.T) {
	d := enforcing(t, policy.OwnerPressure, nil)
	for name, change := range map[string]func(in *policy.Input){
		"its window takes more":   nil,
		"its window is full":      func(in *policy.Input) { in.Candidates[0].Window = 40 },
		"its KV is blocked":       func(in *policy.Input) { in.Candidates[0].KVBlocked = true },
		"it preempted":            func(in *policy.Input) { in.Candidates[0].PreemptionBlockUntil = 1 },
		"another peer is seeding": func(in *policy.Input) { in.Candidates = append(in.Candidates, seeding(in)) },
	} {
		in := hot(change)
		got, rec := decide(d, in)
		if got != "e1" || rec.Reason != policy.ReasonSpill || !rec.Seed {
			t.Errorf("%s: want a seed on e1, got %q\n%s", name, got, explain(in, rec))
		}
	}
}

func seeding(in *policy.Input) policy.Candidate {
	c := in.Candidates[1]
	c.Engine, c.Seeding = "e2", policy.SeedOther
	return c
}

func TestWithoutASafeSpillTheLeastPressuredOwnerTakesItOrItWaits(t *testing.T) {
	d := enforcing(t, policy.OwnerPressure, nil)
	seen := map[policy.NoSpill]bool{}
	for want, change := range map[policy.NoSpill]func(in *policy.Input){
		policy.NoSpillRequeued:   func(in *policy.Input) { in.Request.NoSeed = true },
		policy.NoSpillCeiling:    func(in *policy.Input) { in.Request.Owners = 4 },
		policy.NoSpillCooldown:   func(in *policy.Input) { in.Request.Cooldown = true },
		policy.NoSpillSeed:       func(in *policy.Input) { in.Request.SeedLive = true },
		policy.NoSpillTelemetry:  func(in *policy.Input) { in.Candidates[1].Observed = nil },
		policy.NoSpillHeadroom:   func(in *policy.Input) { in.Candidates[1].Seeding = policy.SeedOther },
		policy.NoSpillUnprovable: func(in *policy.Input) { in.Candidates[1].Provable = false },
	} {
		in := hot(change)
		got, rec := decide(d, in)
		if got != "e0" || rec.Reason != policy.ReasonNoSafeSpill || rec.NoSpill != want || rec.Seed {
			t.Errorf("%s: want a hold on e0, got %q, no spill for %q\n%s", want, got, rec.NoSpill, explain(in, rec))
		}
		seen[rec.NoSpill] = true
		in.Candidates[0].Window = 40
		got, rec = decide(d, in)
		if got != "" || rec.Outcome != policy.OutcomeNoneAdmissible || rec.Reason != policy.ReasonNoSafeSpill {
			t.Errorf("%s, the owner's window full: want it to wait, got %q\n%s", want, got, explain(in, rec))
		}
	}
	for _, n := range policy.NoSpills() {
		if !seen[n] {
			t.Errorf("%s is not shown to be reachable", n)
		}
	}
}

func TestAmongOwnersTheOneWithMostOfThePromptKeepsTheWorkWithinTheSlack(t *testing.T) {
	d := enforcing(t, policy.OwnerPressure, nil)
	owners := func(a, b int) *policy.Input {
		cs := engines(3)
		cs[0].ReservedRequests, cs[1].ReservedRequests = a, b
		in := input(reports(cs), request())
		keyed(2)(in)
		in.Candidates[0].MatchGPU, in.Candidates[1].MatchGPU = 2048, 1024
		return in
	}
	wantEngine(t, d, owners(13, 10), "e0", policy.ReasonOwnerHold) // 3/38 above: within 10 points
	wantEngine(t, d, owners(14, 10), "e1", policy.ReasonOwnerHold) // 4/38: beyond
	wantEngine(t, d, owners(35, 34), "e1", policy.ReasonOwnerHold) // only e1 is under the watermark
	wantEngine(t, d, owners(37, 35), "e2", policy.ReasonSpill)     // both pressured, e2 is clean
	in := owners(38, 36)                                           // both pressured, nobody clean
	in.Candidates[2].ReservedRequests, in.Candidates[2].Observed.Running = 35, 35
	wantEngine(t, d, in, "e0", policy.ReasonNoSafeSpill)
}

func TestNobodyJoinsAPendingSeed(t *testing.T) {
	d := enforcing(t, policy.OwnerPressure, nil)
	for name, change := range map[string]func(in *policy.Input){
		"with a pressured owner":      func(in *policy.Input) { in.Candidates[0].Window = 40 },
		"with the owner away":         func(in *policy.Input) { in.Candidates[0].State = policy.Paused },
		"with the owner struck off":   func(in *policy.Input) { cold(in); in.Candidates[0].Window = 40 },
		"with nobody else on the key": func(in *policy.Input) { cold(in); in.Candidates[0].Provisional, in.Candidates[0].Window = false, 0 },
	} {
		in := hot(change)
		in.Request.SeedLive, in.Candidates[1].Seeding = true, policy.SeedSame
		if got, rec := decide(d, in); got != "" {
			t.Errorf("%s: it went to %s, the target of its key's seed\n%s", name, got, explain(in, rec))
		}
	}
}

// Telemetry that says too little, too much or nonsense never makes an engine
// the target of a seed; every field of a report is spoilt in every way.
func TestASpoiltReportNeverYieldsHeadroom(t *testing.T) {
	d := enforcing(t, policy.OwnerPressure, nil)
	idle := func() *subjects.Load {
		l := whole()
		for i := range l.Ranks {
			r := &l.Ranks[i]
			r.Running, r.Waiting, r.WaitingUncachedTokens, r.KVUsedTokens = ptr(0), ptr(0), ptr(int64(0)), ptr(int64(0))
			r.KVUsage = ptr(0.0)
		}
		return l
	}
	seeds := func(l *subjects.Load, want policy.Want) bool {
		in := hot(nil)
		in.Candidates[1].Observed = nil
		if o, why := policy.Judge(l, 0, want); why == policy.WhyUsable {
			in.Candidates[1].Observed = &o
		}
		_, rec := decide(d, in)
		return rec.Seed
	}
	if !seeds(idle(), wantTwo) {
		t.Fatal("a whole report of an idle peer makes it no target")
	}
	r := func(change func(r *subjects.RankLoad)) func(*subjects.Load) {
		return func(l *subjects.Load) { change(&l.Ranks[0]) }
	}
	for name, spoil := range map[string]func(*subjects.Load){
		"another epoch":                 func(l *subjects.Load) { l.Epoch = "y" },
		"stale":                         func(l *subjects.Load) { l.AgeMS = 1001 },
		"age negative":                  func(l *subjects.Load) { l.AgeMS = -1 },
		"age NaN":                       func(l *subjects.Load) { l.AgeMS = math.NaN() },
		"interval negative":             func(l *subjects.Load) { l.IntervalMS = -1 },
		"a rank missing":                func(l *subjects.Load) { l.Ranks = l.Ranks[:1] },
		"no rank":                       func(l *subjects.Load) { l.Ranks = nil },
		"a rank twice":                  r(func(r *subjects.RankLoad) { r.Rank = 0 }),
		"a rank out of range":           r(func(r *subjects.RankLoad) { r.Rank = 7 }),
		"more ranks than advertised":    func(l *subjects.Load) { l.RanksAdvertised = ptr(1) },
		"no ranks advertised":           func(l *subjects.Load) { l.RanksAdvertised = ptr(0) },
		"running unknown":               r(func(r *subjects.RankLoad) { r.Running = nil }),
		"running negative":              r(func(r *subjects.RankLoad) { r.Running = ptr(-38) }),
		"running beyond reason":         r(func(r *subjects.RankLoad) { r.Running = ptr(1 << 40) }),
		"waiting unknown":               r(func(r *subjects.RankLoad) { r.Waiting = nil }),
		"waiting negative":              r(func(r *subjects.RankLoad) { r.Waiting = ptr(-1) }),
		"cap unknown at one rank":       r(func(r *subjects.RankLoad) { r.MaxRunning = nil }),
		"cap zero at one rank":          r(func(r *subjects.RankLoad) { r.MaxRunning = ptr(0) }),
		"cap negative":                  r(func(r *subjects.RankLoad) { r.MaxRunning = ptr(-19) }),
		"cap beyond reason":             r(func(r *subjects.RankLoad) { r.MaxRunning = ptr(1 << 40) }),
		"uncached negative":             r(func(r *subjects.RankLoad) { r.WaitingUncachedTokens = ptr(int64(-1)) }),
		"used negative":                 r(func(r *subjects.RankLoad) { r.KVUsedTokens = ptr(int64(-1)) }),
		"used more than there is":       r(func(r *subjects.RankLoad) { r.KVUsedTokens = ptr(int64(1 << 20)) }),
		"KV unknown at one rank":        r(func(r *subjects.RankLoad) { r.KVUsedTokens, r.KVUsage = nil, nil }),
		"capacity negative":             r(func(r *subjects.RankLoad) { r.KVCapacityTokens = ptr(int64(-1)) }),
		"capacity zero, nothing in use": r(func(r *subjects.RankLoad) { r.KVCapacityTokens = ptr(int64(0)) }),
		"usage negative":                r(func(r *subjects.RankLoad) { r.KVUsage = ptr(-0.5) }),
		"usage NaN":                     r(func(r *subjects.RankLoad) { r.KVUsage = ptr(math.NaN()) }),
		"usage in percent":              r(func(r *subjects.RankLoad) { r.KVUsage = ptr(42.0) }),
		"decode rate NaN":               r(func(r *subjects.RankLoad) { r.DecodeTokS = ptr(math.NaN()) }),
		"prefill rate negative":         r(func(r *subjects.RankLoad) { r.PrefillTokS = ptr(-1.0) }),
		"preemptions negative":          r(func(r *subjects.RankLoad) { r.PreemptionsTotal = ptr(int64(-1)) }),
		"counts of copies of a rank":    func(l *subjects.Load) { l.Source = "sglang:/metrics" },
		"KV unknown everywhere": func(l *subjects.Load) {
			l.Ranks[0].KVUsedTokens, l.Ranks[1].KVUsedTokens = nil, nil
			l.Ranks[0].KVUsage, l.Ranks[1].KVUsage = nil, nil
		},
		"caps unknown everywhere":        func(l *subjects.Load) { l.Ranks[0].MaxRunning, l.Ranks[1].MaxRunning = nil, nil },
		"one rank's waiting alone known": func(l *subjects.Load) { l.Ranks[0] = subjects.RankLoad{Rank: 1, Waiting: ptr(0)} },
	} {
		l := idle()
		spoil(l)
		if seeds(l, wantTwo) {
			t.Errorf("%s: the peer is seeded on it", name)
		}
	}
	if seeds(nil, wantTwo) {
		t.Error("a peer that never reported is seeded")
	}
}

// One candidate without caps takes occupancy from all of them: then only KV and
// tokens speak, and the peer with a whole report may still be added.
func TestWithoutAllCapsTheWholeFleetFallsBackToBackendPressure(t *testing.T) {
	d := enforcing(t, policy.OwnerPressure, nil)
	fleet := func(kv float64) *policy.Input {
		in := hot(nil)
		third := engine("e2")
		third.Provable, third.MatchKnown = true, true
		third.Observed = &policy.Observed{KVUsageWorst: 0.1, UsedTokens: 0, Running: 1}
		in.Candidates = append(in.Candidates, third)
		in.Candidates[0].Observed.KVUsageWorst = kv
		return in
	}
	wantEngine(t, d, fleet(0.5), "e0", policy.ReasonOwnerHold)
	in := fleet(0.895)
	in.Candidates[0].Observed.UsedTokens = 950_000
	wantEngine(t, d, in, "e1", policy.ReasonSpill) // never e2, which has no cap
}

func TestOwnersAloneAreChosenAndSeedsMadeUnderTheirConditionsAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		in.Request.OwnerKey = "k"
		in.Request.Owners = rapid.IntRange(0, 5).Draw(t, "owners")
		in.Request.SeedLive = rapid.Bool().Draw(t, "seed live")
		in.Request.Cooldown = rapid.Bool().Draw(t, "cooldown")
		for i := range in.Candidates {
			c := &in.Candidates[i]
			c.Provable = rapid.Bool().Draw(t, "provable")
			c.Owner = in.Request.Owners > 0 && rapid.IntRange(0, 2).Draw(t, "owner") == 0
			c.Seeding = policy.SeedState(rapid.IntRange(0, 2).Draw(t, "seeding"))
			c.Provisional = !c.Owner && rapid.IntRange(0, 3).Draw(t, "provisional") == 0
		}
		s, err := policy.Resolve(subjects.Settings{Policy: policy.OwnerPressure, Mode: subjects.ModeEnforce, Knobs: anyKnobs(t)})
		if err != nil {
			t.Fatal(err)
		}
		var rec policy.Record
		at := made(t, s).Decide(in, &rec)
		if at < 0 {
			if rec.Seed {
				t.Fatal("a seed without a place")
			}
			return
		}
		c := &in.Candidates[at]
		if c.Seeding == policy.SeedSame && !c.Owner && !c.Provisional {
			t.Fatalf("it joins the pending seed of its key on %s (%s)", c.Engine, rec.Reason)
		}
		if !rec.Seed {
			return
		}
		o := c.Observed
		switch {
		case in.Request.SeedLive, in.Request.Cooldown, in.Request.Owners >= s.OwnerCeiling:
			t.Fatalf("a seed with seed live %v, cooldown %v, %d owners of %d", in.Request.SeedLive, in.Request.Cooldown, in.Request.Owners, s.OwnerCeiling)
		case c.Owner, c.Seeding != policy.SeedNone, !c.Provable:
			t.Fatalf("a seed on an engine that is an owner, a target or cannot be proven: %+v", c)
		case o == nil || o.MaxRunning <= 0 || o.KVUsageWorst < 0 || rec.Basis != policy.BasisEngine:
			t.Fatalf("a seed on telemetry that is not whole: %+v, basis %s", o, rec.Basis)
		}
		for i := range in.Candidates {
			if x := &in.Candidates[i]; x.Owner && x.State == policy.Ready && x.Observed == nil && x.Model == "m" {
				t.Fatal("a seed although an eligible owner does not report")
			}
		}
	})
}
