package telemetry_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// at makes a sample of one rank.
func at(running, waiting int, generated, preempted int64) telemetry.Sample {
	return telemetry.Sample{Source: "test", Ranks: []telemetry.Rank{{
		RankLoad: subjects.RankLoad{Running: &running, Waiting: &waiting},
		Counters: telemetry.Counters{GenerationTokens: &generated, Preemptions: &preempted}}}}
}

func TestRatesComeFromCounters(t *testing.T) {
	tr := telemetry.NewTracker(telemetry.TrackerConfig{RateWindow: time.Second})
	var r telemetry.Reading
	for i := range 51 {
		r = tr.Observe(at(4, 0, int64(i)*100, 0), time.Duration(i)*200*time.Millisecond, 4)
	}
	if got := r.Load.Ranks[0].DecodeTokS; got == nil || math.Abs(*got-500) > 1 {
		t.Errorf("100 tokens each 200 ms read as %v", *got)
	}
	idle := tr.Observe(at(0, 0, 5000, 0), 20*time.Second, 0)
	if got := idle.Load.Ranks[0].DecodeTokS; got == nil || math.Abs(*got-500) > 100 {
		t.Errorf("an idle sample pulled the rate to %v", *got)
	}
}

func TestPrefillRateUsesTheEnginesOwnClock(t *testing.T) {
	sample := func(tokens, us int64) telemetry.Sample {
		s := at(1, 0, 0, 0)
		s.Ranks[0].PrefillUncachedTokens, s.Ranks[0].PrefillBusyUS = &tokens, &us
		return s
	}
	tr := telemetry.NewTracker(telemetry.TrackerConfig{})
	tr.Observe(sample(1000, 50_000), 0, 1)
	r := tr.Observe(sample(3000, 150_000), time.Second, 1)
	if got := r.Load.Ranks[0].PrefillTokS; got == nil || math.Abs(*got-20_000) > 1 {
		t.Errorf("2,000 tokens in 100 ms read as %v", got)
	}
}

func TestACounterThatFellIsARestartNotAnEvent(t *testing.T) {
	tr := telemetry.NewTracker(telemetry.TrackerConfig{})
	tr.Observe(at(4, 0, 1000, 40), 0, 4)
	if r := tr.Observe(at(4, 0, 1100, 42), time.Second, 4); r.Restarted || r.Preempted != 2 {
		t.Errorf("two preemptions: %+v", r)
	}
	r := tr.Observe(at(1, 0, 10, 1), 2*time.Second, 4)
	if !r.Restarted || r.Preempted != 1 || r.Load.Ranks[0].DecodeTokS != nil {
		t.Errorf("after the restart: %+v", r)
	}
	if r := tr.Observe(at(1, 0, 20, 1), 3*time.Second, 4); r.Restarted || r.Preempted != 0 {
		t.Errorf("the restart is reported again: %+v", r)
	}
}

func TestAnotherProcessStartIsARestart(t *testing.T) {
	tr := telemetry.NewTracker(telemetry.TrackerConfig{})
	a, b := at(0, 0, 5, 0), at(0, 0, 5, 0)
	a.StartedAt, b.StartedAt = ptr(1.7e9), ptr(1.7e9+60)
	tr.Observe(a, 0, 0)
	if r := tr.Observe(b, time.Second, 0); !r.Restarted {
		t.Error("counters that happen to be equal hid a restart")
	}
}

// scenario P7
func TestFrozenGaugesAreNotBelieved(t *testing.T) {
	tr := telemetry.NewTracker(telemetry.TrackerConfig{FrozenAfter: 2 * time.Second})
	s := at(8, 3, 1000, 0)
	s.Ranks[0].KVUsage = ptr(0.99)
	tr.Observe(s, 0, 8)
	if r := tr.Observe(s, 3*time.Second, 8); r.Frozen {
		t.Error("frozen while work of ours is in flight")
	}
	r := tr.Observe(s, 4*time.Second, 0)
	if !r.Frozen || r.Complete || r.Load.Ranks[0].Running != nil || r.Load.Ranks[0].KVUsage != nil {
		t.Errorf("gauges of an aborted batch are believed: %+v", r)
	}
	if r := tr.Observe(at(0, 0, 1001, 0), 5*time.Second, 0); r.Frozen || !r.Complete {
		t.Errorf("one step later: %+v", r)
	}
}

func TestAQueueThatNobodyServesIsWedged(t *testing.T) {
	tr := telemetry.NewTracker(telemetry.TrackerConfig{WedgedAfter: 5 * time.Second})
	tr.Observe(at(0, 7, 10, 0), 0, 7)
	if r := tr.Observe(at(0, 7, 10, 0), 4*time.Second, 7); r.Wedged {
		t.Error("wedged after 4 s")
	}
	if r := tr.Observe(at(0, 7, 10, 0), 6*time.Second, 7); !r.Wedged {
		t.Error("not wedged after 6 s")
	}
	if r := tr.Observe(at(0, 7, 10, 0), 6*time.Second, 0); r.Wedged {
		t.Error("without a run of ours at the engine its gauges may be frozen, and nobody would ever ask it again")
	}
	if r := tr.Observe(at(1, 6, 11, 0), 7*time.Second, 7); r.Wedged {
		t.Error("still wedged while it runs")
	}
}

func TestAnEngineThatRunsAndMovesNothingIsWedged(t *testing.T) {
	cfg := telemetry.TrackerConfig{WedgedAfter: time.Second, StalledAfter: 5 * time.Second}
	tr := telemetry.NewTracker(cfg)
	tr.Observe(at(3, 0, 10, 0), 0, 3)
	if r := tr.Observe(at(3, 0, 10, 0), 4*time.Second, 3); r.Wedged {
		t.Error("a prefill of 4 s is taken for a stall")
	}
	if r := tr.Observe(at(3, 0, 10, 0), 6*time.Second, 3); !r.Wedged {
		t.Error("6 s in which nothing moved are no stall")
	}
	if r := tr.Observe(at(3, 0, 11, 0), 7*time.Second, 3); r.Wedged {
		t.Error("still wedged after a token")
	}
	blind := at(3, 0, 0, 0) // request counts only: they stand still in health too
	blind.Ranks[0].GenerationTokens = nil
	tr = telemetry.NewTracker(cfg)
	tr.Observe(blind, 0, 3)
	if r := tr.Observe(blind, time.Minute, 3); r.Wedged {
		t.Error("a source without a sign of progress is taken for a stall")
	}
}

// llama.cpp counts generated tokens when a request ends: steps are progress.
func TestProgressIsSeenInWhateverCounterMoves(t *testing.T) {
	tr := telemetry.NewTracker(telemetry.TrackerConfig{WedgedAfter: time.Second})
	s := func(steps int64) telemetry.Sample { s := at(0, 4, 0, 0); s.Ranks[0].Steps = &steps; return s }
	for i := range 10 {
		if r := tr.Observe(s(int64(i)), time.Duration(i)*time.Second, 4); r.Wedged {
			t.Fatal("wedged although steps move")
		}
	}
}

func TestARankWithAProblemLosesItsGauges(t *testing.T) {
	s := at(4, 0, 10, 0)
	s.Problems = []telemetry.Problem{{Rank: 0, Field: "x", Text: "y"}}
	r := telemetry.NewTracker(telemetry.TrackerConfig{}).Observe(s, 0, 0)
	if r.Complete || r.Load.Ranks[0].Running != nil || len(r.Problems) != 1 {
		t.Errorf("got %+v", r)
	}
}

func TestCapacityIsReportedElseProfiledElseConfigured(t *testing.T) {
	one, two, three := ptr(int64(1)), ptr(int64(2)), ptr(int64(3))
	for _, c := range []struct {
		r, p, c *int64
		want    *int64
		source  string
	}{{one, two, three, one, "reported"}, {ptr(int64(0)), two, three, two, "profiled"}, {nil, nil, three, three, "configured"}, {nil, nil, nil, nil, ""}} {
		if got, source := telemetry.ResolveCapacity(c.r, c.p, c.c); got != c.want || source != c.source {
			t.Errorf("got %v from %q, want %v from %q", got, source, c.want, c.source)
		}
	}
}

func TestAProfileOutlivesTheAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "p.e1.json")
	p, err := telemetry.ReadProfile(path)
	if err != nil || !p.Equal(telemetry.Profile{}) {
		t.Fatalf("a file that is not there: %+v %v", p, err)
	}
	p = p.Merge(telemetry.Profile{Model: "m", CapacityTokens: ptr(int64(5000))}).Merge(telemetry.Profile{Model: "m", Slots: ptr(8), CapacityTokens: ptr(int64(0))})
	if err := p.Write(path); err != nil {
		t.Fatal(err)
	}
	again, err := telemetry.ReadProfile(path)
	if err != nil || again.CapacityTokens == nil || *again.CapacityTokens != 5000 || again.Slots == nil || *again.Slots != 8 || !again.Equal(p) {
		t.Errorf("read back %+v, %v", again, err)
	}
	if other := again.Merge(telemetry.Profile{Model: "n", Slots: ptr(2)}); other.CapacityTokens != nil || *other.Slots != 2 {
		t.Errorf("another model inherits %+v", other)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := telemetry.ReadProfile(path); err == nil {
		t.Error("a broken file is taken for an empty one")
	}
}
