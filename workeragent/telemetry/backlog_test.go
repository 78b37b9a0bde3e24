package telemetry_test

import (
	"math"
	"testing"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

func TestABacklogIsWhatRunsHaveStillToDo(t *testing.T) {
	b := telemetry.NewBacklog()
	want := func(when string, prefill, output int64) {
		t.Helper()
		if p, o := b.Left(7); p != prefill || o != output {
			t.Errorf("%s: %d tokens to compute and %d to make, want %d and %d", when, p, o, prefill, output)
		}
	}
	want("nothing runs", 0, 0)
	b.Begin("a", 0, telemetry.Work{Revision: 3, Prompt: 1000, Cached: 400, Output: 100})
	b.Begin("b", 0, telemetry.Work{Revision: 8, Prompt: 5000, Output: 900})
	want("a later reservation is the reader's to add", 600, 100)
	b.Made("a", time.Millisecond, 10)
	want("its prompt is computed", 0, 90)
	b.Made("a", time.Second, 80)
	want("half of the output is the least that is expected", 0, 50)
	if n, tokens := b.Own(); n != 2 || tokens != 1100+5900 {
		t.Errorf("%d own runs with %d tokens reserved", n, tokens)
	}
	b.End("a", nil)
	b.End("a", nil)
	b.Made("a", time.Second, 90)
	want("it has ended", 0, 0)
	if n, _ := b.Own(); n != 1 {
		t.Errorf("%d own runs, want the other one", n)
	}
}

func TestTheYoungestRunsAreThoseThatWait(t *testing.T) {
	b := telemetry.NewBacklog()
	for i, prompt := range []int{1000, 200, 30, 4} {
		b.Begin(string(rune('a'+i)), 0, telemetry.Work{Prompt: prompt, Cached: prompt / 2})
	}
	b.Made("c", time.Second, 1)
	for n, want := range []int64{0, 2, 102, 602, 602} {
		if got := b.Waiting(n); got != want {
			t.Errorf("%d wait: %d tokens to compute, want %d", n, got, want)
		}
	}
}

func TestARunThatNobodyWasBesideTellsHowFastPromptsAreComputed(t *testing.T) {
	none, half := 0, 5000
	for _, c := range []struct {
		why    string
		prompt int
		cached *int
		also   time.Duration // another run is handed over then; 0 = none
		rate   float64
	}{
		{"alone, all to compute", 10_000, &none, 0, 20_000},
		{"alone, half of it cached", 10_000, &half, 0, 10_000},
		{"another one came before its first token", 10_000, &none, 100 * time.Millisecond, 0},
		{"another one came after it", 10_000, &none, 600 * time.Millisecond, 20_000},
		{"too short to tell", 500, &none, 0, 0},
		{"the engine does not say what was cached", 10_000, nil, 0, 0},
	} {
		b := telemetry.NewBacklog()
		b.Begin("a", 0, telemetry.Work{Prompt: c.prompt, Output: 10})
		if c.also > 0 && c.also < 500*time.Millisecond {
			b.Begin("b", c.also, telemetry.Work{Prompt: 10})
		}
		b.Made("a", 500*time.Millisecond, 1)
		if c.also > 500*time.Millisecond {
			b.Begin("b", c.also, telemetry.Work{Prompt: 10})
		}
		b.End("a", c.cached)
		got := 0.0
		if v := b.PrefillTokS(); v != nil {
			got = *v
		}
		if math.Abs(got-c.rate) > 1e-6 {
			t.Errorf("%s: %v tokens/s, want %v", c.why, got, c.rate)
		}
	}
	b := telemetry.NewBacklog()
	b.Begin("gone", 0, telemetry.Work{Prompt: 10})
	b.End("gone", nil) // cancelled before its first token: it is beside nobody any more
	b.Begin("a", time.Second, telemetry.Work{Prompt: 4000})
	b.Made("a", 2*time.Second, 1)
	b.End("a", &none)
	if v := b.PrefillTokS(); v == nil || *v != 4000 {
		t.Errorf("after a cancelled one: %v", v)
	}
}

// Equal engines with more and less to do are equally fast, and one that is three
// times as fast is.
func TestASmallBatchDoesNotMakeAnEngineSlow(t *testing.T) {
	rate := func(running int, step time.Duration) float64 {
		tr := telemetry.NewTracker(telemetry.TrackerConfig{})
		slots := 16
		var r telemetry.Reading
		for i := range 21 { // a step gives each a token, and takes twice as long with all slots busy
			at := time.Duration(i) * 200 * time.Millisecond
			steps := float64(at) / (float64(step) * (1 + float64(running)/float64(slots)))
			s := atBatch(running, slots, int64(steps*float64(running)))
			r = tr.Observe(s, at, running)
		}
		if p := r.Load.Ranks[0].DecodeTokS; p != nil {
			return *p
		}
		return 0
	}
	full := rate(16, 6*time.Millisecond)
	for _, n := range []int{4, 8, 12} {
		if got := rate(n, 6*time.Millisecond); math.Abs(got/full-1) > 0.03 {
			t.Errorf("%d of 16 slots: %.0f tokens/s, with all of them %.0f", n, got, full)
		}
	}
	if got := rate(8, 2*time.Millisecond); math.Abs(got/full-3) > 0.1 {
		t.Errorf("steps of a third: %.0f tokens/s beside %.0f", got, full)
	}
	tr := telemetry.NewTracker(telemetry.TrackerConfig{})
	tr.Observe(atBatch(8, 16, 0), 0, 8)
	if r := tr.Observe(atBatch(8, 16, 100), 200*time.Millisecond, 8); r.Load.Ranks[0].DecodeTokS != nil {
		t.Error("a rate is told after a fifth of a second: a prefill may have held the batch up")
	}
}

func atBatch(running, slots int, generated int64) telemetry.Sample {
	s := at(running, 0, generated, 0)
	s.Ranks[0].RankLoad = subjects.RankLoad{Running: &running, Waiting: s.Ranks[0].Waiting, MaxRunning: &slots}
	return s
}
