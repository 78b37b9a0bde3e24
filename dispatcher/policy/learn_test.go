package policy_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

func TestFusionAddsTheAverageDifferenceAndNewerReservationsExactly(t *testing.T) {
	var f policy.Fuser
	o := policy.Observed{UsedTokens: 8000, Running: 5, Waiting: 1}
	at := policy.Reserved{Requests: 4, Tokens: 10_000, PromptTokens: 6000}
	f.Sample(time.Second, &o, at)
	fused := func(all, newer policy.Reserved) policy.Observed {
		x := o
		f.Fuse(&x, all, newer)
		return x
	}
	// The first sample is believed whole: 2,000 less and 2 requests more than reserved.
	if x := fused(at, policy.Reserved{}); x.UsedTokens != 8000 || x.ExternalRequests != 2 {
		t.Errorf("at the sample: %d tokens, %d external, want 8000 and 2", x.UsedTokens, x.ExternalRequests)
	}
	newer := policy.Reserved{Requests: 2, Tokens: 3000, PromptTokens: 2000}
	x := fused(policy.Reserved{Requests: 6, Tokens: 13_000}, newer)
	if x.UsedTokens != 11_000 || x.NewerRequests != 2 || x.NewerTokens != 3000 || x.NewerPrefillTokens != 2000 {
		t.Errorf("newer reservations: %+v, want them added exactly", x)
	}
	// A retirement lowers it at once, never below what is newer than the sample.
	if x = fused(policy.Reserved{Requests: 2, Tokens: 3000}, newer); x.UsedTokens != 3000 {
		t.Errorf("all old ones retired: %d tokens, want the 3000 that are newer", x.UsedTokens)
	}
	// A later sample moves the average by three tenths.
	o2 := policy.Observed{UsedTokens: 12_000, Running: 4}
	f.Sample(1200*time.Millisecond, &o2, at)
	if x = fused(at, policy.Reserved{}); x.UsedTokens != 10_000-2000+int64(0.3*4000) {
		t.Errorf("after a second sample: %d tokens, want 9200", x.UsedTokens)
	}
	// After a long silence the average starts anew.
	f.Sample(time.Minute, &o2, at)
	if x = fused(at, policy.Reserved{}); x.UsedTokens != 12_000 || x.ExternalRequests != 0 {
		t.Errorf("after a silence: %d tokens, %d external, want 12000 and 0", x.UsedTokens, x.ExternalRequests)
	}
}

func TestARequestWhoseReservationIsGoneRunsNoMore(t *testing.T) {
	var f policy.Fuser
	o := policy.Observed{UsedTokens: -1, Running: 8, Waiting: 2}
	f.Sample(time.Second, &o, policy.Reserved{Requests: 9}) // and one that nobody reserved
	for _, c := range []struct{ reserved, newer, running, waiting int }{
		{9, 0, 8, 2}, {5, 0, 4, 2}, {7, 2, 4, 2}, {0, 0, 0, 1}, {11, 2, 8, 2},
	} {
		x := o
		f.Fuse(&x, policy.Reserved{Requests: c.reserved}, policy.Reserved{Requests: c.newer})
		if x.Running != c.running || x.Waiting != c.waiting {
			t.Errorf("%d reserved, %d of them newer: %d run and %d wait, want %d and %d", c.reserved, c.newer, x.Running, x.Waiting, c.running, c.waiting)
		}
	}
}

func TestUnknownUsageStaysUnknown(t *testing.T) {
	var f policy.Fuser
	o := policy.Observed{UsedTokens: -1, Running: 3}
	f.Sample(0, &o, policy.Reserved{Requests: 3})
	f.Fuse(&o, policy.Reserved{Requests: 3, Tokens: 500}, policy.Reserved{})
	if o.UsedTokens != -1 || o.ExternalRequests != 0 {
		t.Errorf("%+v, want unknown tokens and nobody external", o)
	}
}

func TestFusedLoadIsNeverNegativeNorBelowWhatIsNewer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var f policy.Fuser
		now := time.Duration(0)
		for range rapid.IntRange(1, 20).Draw(t, "samples") {
			now += time.Duration(rapid.IntRange(1, 12_000).Draw(t, "ms")) * time.Millisecond
			all := policy.Reserved{Requests: rapid.IntRange(0, 50).Draw(t, "requests"), Tokens: rapid.Int64Range(0, 1<<30).Draw(t, "tokens")}
			newer := policy.Reserved{Tokens: rapid.Int64Range(0, all.Tokens).Draw(t, "newer")}
			o := policy.Observed{UsedTokens: rapid.Int64Range(-1, 1<<40).Draw(t, "observed"), Running: rapid.IntRange(0, 500).Draw(t, "running")}
			f.Sample(now, &o, all)
			f.Fuse(&o, all, newer)
			if o.UsedTokens < -1 || o.UsedTokens >= 0 && o.UsedTokens < newer.Tokens || o.ExternalRequests < 0 {
				t.Fatalf("fused %+v with %d newer tokens", o, newer.Tokens)
			}
		}
	})
}

func TestRatesAreLearnedFromBusyEngines(t *testing.T) {
	var f policy.Fuser
	rate := func(decode float64, running, waiting int) float64 {
		o := policy.Observed{UsedTokens: -1, Running: running, Waiting: waiting, MaxRunning: 38, DecodeTokS: decode, PrefillTokS: 2 * decode}
		f.Sample(0, &o, policy.Reserved{})
		f.Fuse(&o, policy.Reserved{}, policy.Reserved{})
		if o.PrefillTokS != 2*o.DecodeTokS {
			t.Errorf("decode %v and prefill %v are not learned alike", o.DecodeTokS, o.PrefillTokS)
		}
		return o.DecodeTokS
	}
	if r := rate(50, 1, 0); r != 0 {
		t.Errorf("one request at 50 tok/s says nothing of what the engine can do, learned %v", r)
	}
	if r := rate(1500, 30, 0); r != 1500 {
		t.Errorf("a busy engine's first rate: learned %v", r)
	}
	if r := rate(2500, 38, 9); r != 2000 {
		t.Errorf("a higher rate: learned %v, want half the way", r)
	}
	if r := rate(60, 1, 0); r != 2000 {
		t.Errorf("nearly idle again: learned %v, want no change", r)
	}
	if r := rate(1000, 38, 0); math.Abs(r-1980) > 1e-9 {
		t.Errorf("a lower rate when busy: learned %v, want a fiftieth of the way", r)
	}
	if r := rate(0, 38, 0); math.Abs(r-1980) > 1e-9 {
		t.Errorf("no rate told: learned %v, want no change", r)
	}
}

// Ten requests ran when the sample was taken and were released while it was on
// its way: they are nobody else's, and run no more.
func TestAReleaseOnItsWayIsNoDirectClient(t *testing.T) {
	for own, external := range map[int]int{0: 10, 10: 0} {
		var f policy.Fuser
		o := policy.Observed{UsedTokens: 9000, Running: 10}
		f.Sample(0, &o, policy.Reserved{Requests: own}) // its agent says so; the reservations are gone
		f.Fuse(&o, policy.Reserved{}, policy.Reserved{})
		if o.ExternalRequests != external || o.Running != 10-own {
			t.Errorf("%d of 10 were the agent's: %d direct clients and %d running, want %d and %d", own, o.ExternalRequests, o.Running, external, 10-own)
		}
	}
}

func TestWhatIsComingIsWhatWaitsAndWhatIsNewer(t *testing.T) {
	for waiting, want := range map[int64]int64{-1: 2000, 0: 2000, 500: 2500} {
		var f policy.Fuser
		o := policy.Observed{UsedTokens: -1, WaitingUncachedTokens: waiting}
		f.Fuse(&o, policy.Reserved{Tokens: 9000}, policy.Reserved{Requests: 2, Tokens: 30_000, PromptTokens: 3000, CachedTokens: 1000})
		if o.ComingTokens != want {
			t.Errorf("%d wait: %d tokens are coming, want %d", waiting, o.ComingTokens, want)
		}
	}
}

func TestAnAgentThatFollowsItsRunsTellsOfPromptsOnlyWhatItSaw(t *testing.T) {
	var f policy.Fuser
	o := policy.Observed{UsedTokens: -1, Running: 1, MaxRunning: 38, DecodeTokS: 50, PrefillTokS: 9000, PendingTold: true}
	f.Sample(0, &o, policy.Reserved{})
	if decode, prefill := f.Rates(); decode != 0 || prefill != 9000 {
		t.Errorf("of an idle engine: learned %v and %v, want nothing of its decoding and 9000", decode, prefill)
	}
}

func TestAQueueBesideASmallBatchTellsNothing(t *testing.T) {
	for _, c := range []struct {
		kv              float64
		decode, prefill float64
	}{{0.1, 0, 0}, {0.8, 50, 9000}, {-1, 0, 0}} {
		var f policy.Fuser
		o := policy.Observed{UsedTokens: -1, KVUsageWorst: c.kv, Running: 1, Waiting: 2, MaxRunning: 38, DecodeTokS: 50, PrefillTokS: 9000}
		f.Sample(0, &o, policy.Reserved{})
		if decode, prefill := f.Rates(); decode != c.decode || prefill != c.prefill {
			t.Errorf("KV use %v: learned %v and %v, want %v and %v", c.kv, decode, prefill, c.decode, c.prefill)
		}
	}
}

func TestExpectedLengthsFallBackFromGroupToJobToPoolTo512(t *testing.T) {
	l := policy.NewLengths()
	want := func(n int, job, group string, guess, most int) {
		t.Helper()
		if got := l.Expect(job, group, guess, most); got != n {
			t.Errorf("expect %s/%s guess %d most %d: %d, want %d", job, group, guess, most, got, n)
		}
	}
	want(512, "a", "g", 0, 4096)
	want(300, "a", "g", 0, 300)
	want(512, "a", "g", 0, 0)
	want(700, "a", "g", 700, 4096)
	want(300, "a", "g", 700, 300)
	l.Learn("a", "g", 1000)
	want(1000, "a", "g", 0, 4096)
	want(1000, "a", "other", 0, 4096) // of the job
	want(1000, "b", "g", 0, 4096)     // of the pool: another job's group is another group
	l.Learn("a", "h", 2000)
	want(1000, "a", "g", 0, 4096)
	want(1200, "a", "", 0, 4096)
	l.Learn("b", "", 200)
	want(200, "b", "x", 0, 4096)
	want(1000, "c", "", 0, 4096) // 1200 and a fifth of the way to 200
	l.Learn("d", "", 0)
	want(1, "d", "", 0, 4096)
	l.Learn("d", "", -5)
	want(1, "d", "", 0, 4096)
	l.Learn("e", "", math.MaxInt)
	if got := l.Expect("e", "", 0, 0); got > 1<<22 {
		t.Errorf("one absurd report is learned as %d", got)
	}
}

func TestWhatIsLearnedIsBoundedAndDependsOnReportsAlone(t *testing.T) {
	a, b := policy.NewLengths(), policy.NewLengths()
	sa, sb := policy.NewSticky(), policy.NewSticky()
	for i := range 25_000 {
		job, id := fmt.Sprint("j", i%7), fmt.Sprint("g", i)
		a.Learn(job, id, i%3000)
		b.Learn(job, id, i%3000)
		b.Expect(job, "g0", 0, 0) // asking changes nothing
		sa.Learn(job, id, id, fmt.Sprint("e", i%9))
		sb.Learn(job, id, id, fmt.Sprint("e", i%9))
		sb.Find("j0", "g0", "g0")
	}
	for i := 0; i < 25_000; i += 97 {
		job, id := fmt.Sprint("j", i%7), fmt.Sprint("g", i)
		if x, y := a.Expect(job, id, 0, 0), b.Expect(job, id, 0, 0); x != y {
			t.Fatalf("group %s: %d and %d after the same reports", id, x, y)
		}
		x, _ := sa.Find(job, id, "")
		y, scope := sb.Find(job, id, "")
		if x != y || (scope == policy.ScopeNone) != (i < 15_000) {
			t.Fatalf("trajectory %s: %q and %q after the same events, scope %d", id, x, y, scope)
		}
	}
}

func TestATrajectoryIsFoundBeforeItsGroup(t *testing.T) {
	s := policy.NewSticky()
	s.Learn("j", "", "g", "e1")
	s.Learn("j", "t", "g", "e2")
	s.Learn("j", "", "g", "e3")
	for _, c := range []struct {
		job, trajectory, group, engine string
		scope                          policy.Scope
	}{
		{"j", "t", "g", "e2", policy.ScopeTrajectory},
		{"j", "u", "g", "e3", policy.ScopeGroup},
		{"j", "u", "", "", policy.ScopeNone},
		{"k", "t", "g", "", policy.ScopeNone},
		{"j", "", "", "", policy.ScopeNone},
	} {
		if e, scope := s.Find(c.job, c.trajectory, c.group); e != c.engine || scope != c.scope {
			t.Errorf("%+v: found %q by %d", c, e, scope)
		}
	}
}
