package policy_test

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// whole is a report of two ranks that says everything.
func whole() *subjects.Load {
	l := &subjects.Load{Epoch: "x", Seq: 1, IntervalMS: 200, AgeMS: 20, RanksAdvertised: ptr(2)}
	for r := range 2 {
		l.Ranks = append(l.Ranks, subjects.RankLoad{
			Rank: 1 - r, Running: ptr(3 + r), Waiting: ptr(r), WaitingUncachedTokens: ptr(int64(100 * r)),
			KVUsedTokens: ptr(int64(10_000 * (r + 1))), KVCapacityTokens: ptr(int64(100_000)), MaxRunning: ptr(19),
			DecodeTokS: ptr(500.0), PrefillTokS: ptr(3000.0), PreemptionsTotal: ptr(int64(7)),
		})
	}
	return l
}

var wantTwo = policy.Want{Epoch: "x", Ranks: 2}

func TestAWholeReportIsSummedOverItsRanks(t *testing.T) {
	o, why := policy.Judge(whole(), 0, wantTwo)
	want := policy.Observed{
		Running: 7, Waiting: 1, WaitingUncachedTokens: 100, UsedTokens: 30_000, KVUsageWorst: 0.2, MaxRunning: 38, DecodeTokS: 1000, PrefillTokS: 6000,
	}
	if why != policy.WhyUsable || o != want {
		t.Fatalf("%q %+v, want %+v", why, o, want)
	}
}

func TestWhatRunsHaveStillToDoCountsWhole(t *testing.T) {
	l := whole()
	l.PendingPrefillTokens = ptr(int64(7))
	o, why := policy.Judge(l, 0, wantTwo)
	if why != policy.WhyUsable || o.PendingTold || o.PendingPrefillTokens != 0 {
		t.Errorf("half of a pair: %q %+v", why, o)
	}
	l.PendingOutputTokens = ptr(int64(8))
	if o, _ := policy.Judge(l, 0, wantTwo); !o.PendingTold || o.PendingPrefillTokens != 100 || o.PendingOutputTokens != 8 {
		t.Errorf("both, and 100 tokens wait at the engine, direct clients' too: %+v", o)
	}
	l.PendingPrefillTokens = ptr(int64(300))
	if o, _ := policy.Judge(l, 0, wantTwo); o.PendingPrefillTokens != 300 {
		t.Errorf("what waits is part of what is the agent's: %+v", o)
	}
}

func TestEveryReasonAgainstAReport(t *testing.T) {
	inf := math.Inf(1)
	r0 := func(change func(r *subjects.RankLoad)) func(*subjects.Load) {
		return func(l *subjects.Load) { change(&l.Ranks[0]) }
	}
	seen := map[policy.Why]bool{policy.WhyMissing: true, policy.WhyStale: true}
	for _, c := range []struct {
		name  string
		why   policy.Why
		spoil func(l *subjects.Load)
	}{
		{"of another epoch", policy.WhyEpoch, func(l *subjects.Load) { l.Epoch = "y" }},
		{"one rank of two", policy.WhyRanksMissing, func(l *subjects.Load) { l.Ranks = l.Ranks[:1] }},
		{"no ranks", policy.WhyRanksMissing, func(l *subjects.Load) { l.Ranks = nil }},
		{"a rank twice", policy.WhyRanksWrong, r0(func(r *subjects.RankLoad) { r.Rank = 0 })},
		{"a rank out of range", policy.WhyRanksWrong, r0(func(r *subjects.RankLoad) { r.Rank = 2 })},
		{"a negative rank", policy.WhyRanksWrong, r0(func(r *subjects.RankLoad) { r.Rank = -1 })},
		{"more ranks than advertised", policy.WhyRanksWrong, func(l *subjects.Load) { l.RanksAdvertised = ptr(1) }},
		{"nonsense advertised", policy.WhyRanksWrong, func(l *subjects.Load) { l.RanksAdvertised = ptr(0) }},
		{"too many advertised", policy.WhyRanksWrong, func(l *subjects.Load) { l.RanksAdvertised = ptr(1 << 30) }},
		{"running unknown", policy.WhyIncomplete, r0(func(r *subjects.RankLoad) { r.Running = nil })},
		{"waiting unknown", policy.WhyIncomplete, r0(func(r *subjects.RankLoad) { r.Waiting = nil })},
		{"running negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.Running = ptr(-1) })},
		{"waiting negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.Waiting = ptr(-1) })},
		{"uncached negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.WaitingUncachedTokens = ptr(int64(-1)) })},
		{"used negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.KVUsedTokens = ptr(int64(-1)) })},
		{"capacity negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.KVCapacityTokens = ptr(int64(-1)) })},
		{"usage negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.KVUsage = ptr(-0.1) })},
		{"limit negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.MaxRunning = ptr(-1) })},
		{"preemptions negative", policy.WhyNegative, r0(func(r *subjects.RankLoad) { r.PreemptionsTotal = ptr(int64(-1)) })},
		{"pending output negative", policy.WhyNegative, func(l *subjects.Load) { l.PendingOutputTokens = ptr(int64(-1)) }},
		{"own requests negative", policy.WhyNegative, func(l *subjects.Load) { l.OwnRequests = ptr(-1) }},
		{"pending prompts beyond sense", policy.WhyInconsistent, func(l *subjects.Load) { l.PendingPrefillTokens = ptr(int64(1 << 60)) }},
		{"age negative", policy.WhyNegative, func(l *subjects.Load) { l.AgeMS = -1 }},
		{"interval negative", policy.WhyNegative, func(l *subjects.Load) { l.IntervalMS = -1 }},
		{"usage NaN", policy.WhyNotANumber, r0(func(r *subjects.RankLoad) { r.KVUsage = ptr(math.NaN()) })},
		{"rate infinite", policy.WhyNotANumber, r0(func(r *subjects.RankLoad) { r.DecodeTokS = &inf })},
		{"rate NaN", policy.WhyNotANumber, r0(func(r *subjects.RankLoad) { r.PrefillTokS = ptr(math.NaN()) })},
		{"age NaN", policy.WhyNotANumber, func(l *subjects.Load) { l.AgeMS = math.NaN() }},
		{"usage in percent", policy.WhyInconsistent, r0(func(r *subjects.RankLoad) { r.KVUsage = ptr(87.0) })},
		{"more used than there is", policy.WhyInconsistent, r0(func(r *subjects.RankLoad) { r.KVUsedTokens = ptr(int64(120_000)) })},
		{"used of one rank only", policy.WhyInconsistent, r0(func(r *subjects.RankLoad) { r.KVUsedTokens = nil })},
		{"the fraction of one rank only", policy.WhyInconsistent, func(l *subjects.Load) {
			for i := range l.Ranks {
				l.Ranks[i].KVUsedTokens, l.Ranks[i].KVCapacityTokens = nil, nil
			}
			l.Ranks[0].KVUsage = ptr(0.1)
		}},
		{"a count beyond reason", policy.WhyInconsistent, r0(func(r *subjects.RankLoad) { r.Running = ptr(1 << 40) })},
		{"tokens beyond reason", policy.WhyInconsistent, r0(func(r *subjects.RankLoad) { r.WaitingUncachedTokens = ptr(int64(1 << 60)) })},
		{"zeros before the first measurement", policy.WhyUnpublished, r0(func(r *subjects.RankLoad) {
			*r = subjects.RankLoad{Rank: 1, Running: ptr(0), Waiting: ptr(0), KVUsedTokens: ptr(int64(0)), KVCapacityTokens: ptr(int64(0)), MaxRunning: ptr(0)}
		})},
		{"zeros with no capacity and no usage", policy.WhyUnpublished, r0(func(r *subjects.RankLoad) {
			*r = subjects.RankLoad{Rank: 1, Running: ptr(0), Waiting: ptr(0), KVUsage: ptr(0.0), MaxRunning: ptr(0)}
		})},
	} {
		l := whole()
		c.spoil(l)
		if o, why := policy.Judge(l, 0, wantTwo); why != c.why || o != (policy.Observed{}) {
			t.Errorf("%s: %q %+v, want %q and nothing of it", c.name, why, o, c.why)
		}
		seen[c.why] = true
	}
	if _, why := policy.Judge(nil, 0, wantTwo); why != policy.WhyMissing {
		t.Errorf("no report at all: %q", why)
	}
	if _, why := policy.Judge(whole(), -1, wantTwo); why != policy.WhyMissing {
		t.Errorf("never received: %q", why)
	}
	for _, w := range policy.Whys() {
		if !seen[w] {
			t.Errorf("reason %s is not shown to be reachable", w)
		}
	}
}

func TestWhatIsUnknownInAReportIsUnknownNotZero(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(l *subjects.Load)
		check func(o policy.Observed) bool
	}{
		{"an idle engine is idle", func(l *subjects.Load) {
			for i := range l.Ranks {
				r := &l.Ranks[i]
				r.Running, r.Waiting, r.KVUsedTokens, r.WaitingUncachedTokens = ptr(0), ptr(0), ptr(int64(0)), ptr(int64(0))
			}
		}, func(o policy.Observed) bool { return o.Running == 0 && o.KVUsageWorst == 0 && o.UsedTokens == 0 }},
		{"uncached tokens of one rank", func(l *subjects.Load) { l.Ranks[1].WaitingUncachedTokens = nil }, func(o policy.Observed) bool { return o.WaitingUncachedTokens == -1 }},
		{"limit of one rank", func(l *subjects.Load) { l.Ranks[1].MaxRunning = nil }, func(o policy.Observed) bool { return o.MaxRunning == 0 }},
		{"rates of one rank", func(l *subjects.Load) { l.Ranks[0].DecodeTokS, l.Ranks[1].PrefillTokS = nil, ptr(0.0) }, func(o policy.Observed) bool { return o.DecodeTokS == 0 && o.PrefillTokS == 0 }},
		{"KV only as a fraction", func(l *subjects.Load) {
			for i := range l.Ranks {
				l.Ranks[i].KVUsedTokens, l.Ranks[i].KVCapacityTokens, l.Ranks[i].KVUsage = nil, nil, ptr(0.3+float64(i)/10)
			}
		}, func(o policy.Observed) bool { return o.UsedTokens == -1 && o.KVUsageWorst == 0.4 }},
		{"a fraction and a capacity", func(l *subjects.Load) {
			for i := range l.Ranks {
				l.Ranks[i].KVUsedTokens, l.Ranks[i].KVUsage = nil, ptr(0.25)
			}
		}, func(o policy.Observed) bool { return o.UsedTokens == 50_000 && o.KVUsageWorst == 0.25 }},
		{"no KV figures", func(l *subjects.Load) {
			for i := range l.Ranks {
				l.Ranks[i].KVUsedTokens, l.Ranks[i].KVCapacityTokens = nil, nil
			}
		}, func(o policy.Observed) bool { return o.UsedTokens == -1 && o.KVUsageWorst == -1 && o.Running == 7 }},
		{"a rounding above full", func(l *subjects.Load) { l.Ranks[0].KVUsage = ptr(1.004) }, func(o policy.Observed) bool { return o.KVUsageWorst == 1 }},
		{"ranks not advertised but configured", func(l *subjects.Load) { l.RanksAdvertised = nil }, func(o policy.Observed) bool { return !o.RanksAssumed && o.Running == 7 }},
	} {
		l := whole()
		c.spoil(l)
		if o, why := policy.Judge(l, 0, wantTwo); why != policy.WhyUsable || !c.check(o) {
			t.Errorf("%s: %q %+v", c.name, why, o)
		}
	}
	l := whole()
	l.RanksAdvertised = nil
	if o, why := policy.Judge(l, 0, policy.Want{Epoch: "x"}); why != policy.WhyUsable || !o.RanksAssumed {
		t.Errorf("neither advertised nor configured: %q, assumed %v; want those seen, shown as assumed", why, o.RanksAssumed)
	}
	// What is advertised stands above what is configured.
	l.RanksAdvertised = ptr(3)
	if _, why := policy.Judge(l, 0, wantTwo); why != policy.WhyRanksMissing {
		t.Errorf("three are advertised and two report: %q", why)
	}
}

func TestAReportIsFreshForThreeIntervalsAndAtLeastASecond(t *testing.T) {
	for _, c := range []struct {
		interval int
		sample   float64 // age when published, ms
		received time.Duration
		stale    bool
	}{
		{200, 0, 999 * time.Millisecond, false},
		{200, 0, time.Second, true},
		{200, 500, 499 * time.Millisecond, false},
		{200, 500, 500 * time.Millisecond, true},
		{2000, 0, 5999 * time.Millisecond, false},
		{2000, 0, 6 * time.Second, true},
		{0, 0, 999 * time.Millisecond, false},
		{0, 0, time.Second, true},
		{1 << 30, 0, 59 * time.Second, false}, // a source cannot make itself fresh for ever
		{1 << 30, 0, time.Minute, true},
		{200, 1e300, 0, true},
	} {
		l := whole()
		l.IntervalMS, l.AgeMS = c.interval, c.sample
		if _, why := policy.Judge(l, c.received, wantTwo); (why == policy.WhyStale) != c.stale {
			t.Errorf("interval %d ms, sampled %v ms before it was sent, received %v ago: %q", c.interval, c.sample, c.received, why)
		}
	}
}

func TestWhateverIsTakenFromAReportItNeverLooksEmptier(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := whole()
		for i := range l.Ranks {
			l.Ranks[i].KVUsedTokens = ptr(rapid.Int64Range(0, 100_000).Draw(t, "used"))
			l.Ranks[i].Running = ptr(rapid.IntRange(0, 40).Draw(t, "running"))
		}
		full, why := policy.Judge(l, 0, wantTwo)
		if why != policy.WhyUsable {
			t.Fatalf("the whole report is refused: %s", why)
		}
		for range rapid.IntRange(1, 4).Draw(t, "losses") {
			if len(l.Ranks) == 0 {
				break
			}
			i := rapid.IntRange(0, len(l.Ranks)-1).Draw(t, "rank")
			r := &l.Ranks[i]
			switch rapid.IntRange(0, 8).Draw(t, "what") {
			case 0:
				l.Ranks = append(l.Ranks[:i:i], l.Ranks[i+1:]...)
			case 1:
				r.Running = nil
			case 2:
				r.Waiting = nil
			case 3:
				r.KVUsedTokens = nil
			case 4:
				r.KVCapacityTokens = nil
			case 5:
				r.WaitingUncachedTokens = nil
			case 6:
				r.MaxRunning = nil
			case 7:
				r.DecodeTokS = nil
			case 8:
				l.RanksAdvertised = nil
			}
		}
		o, why := policy.Judge(l, 0, wantTwo)
		if why != policy.WhyUsable {
			return
		}
		if o.Running != full.Running || o.Waiting != full.Waiting ||
			o.UsedTokens >= 0 && o.UsedTokens != full.UsedTokens || o.KVUsageWorst >= 0 && o.KVUsageWorst != full.KVUsageWorst ||
			o.WaitingUncachedTokens >= 0 && o.WaitingUncachedTokens != full.WaitingUncachedTokens || o.MaxRunning > full.MaxRunning {
			t.Fatalf("a report that lost something reads %+v, the whole one %+v", o, full)
		}
	})
}
