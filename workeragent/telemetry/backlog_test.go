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
	if n := b.Own(); n != 2 {
		t.Errorf("%d own runs", n)
	}
	b.End("a", 0, nil)
	b.End("a", 0, nil)
	b.Made("a", time.Second, 90)
	want("it has ended", 0, 0)
	if n := b.Own(); n != 1 {
		t.Errorf("%d own runs, want the other one", n)
	}
}

func TestAPromptOfManySamplesIsComputedOnce(t *testing.T) {
	held := func(group string, turn int) *subjects.Held {
		return &subjects.Held{Job: "j", Group: group, Turn: turn, PromptTokens: 1000, Tokens: 1100}
	}
	b := telemetry.NewBacklog()
	for i, h := range []*subjects.Held{held("g", 0), held("g", 1), held("h", 0), held("", 0), held("", 0), held("g", 2), held("g", 2)} {
		b.Begin(string(rune('a'+i)), 0, telemetry.WorkOf(h, 1))
	}
	if p, o := b.Left(1); p != 6000 || o != 700 {
		t.Errorf("%d tokens to compute and %d to make: want two groups, two requests and two later turns", p, o)
	}
	if p := b.Waiting(7, 1); p != 6000 {
		t.Errorf("all wait: %d tokens", p)
	}
	long := held("g", 0)
	long.PromptTokens = 1500
	b.Begin("z", 0, telemetry.WorkOf(long, 1))
	for range 20 { // whatever comes first
		if p, _ := b.Left(1); p != 6500 {
			t.Fatalf("%d tokens to compute: want the most that a sibling has", p)
		}
	}
}

func TestTheYoungestRunsAreThoseThatWait(t *testing.T) {
	b := telemetry.NewBacklog()
	for i, prompt := range []int{1000, 200, 30, 4} {
		b.Begin(string(rune('a'+i)), 0, telemetry.Work{Revision: uint64(i), Prompt: prompt, Cached: prompt / 2})
	}
	b.Made("c", time.Second, 1)
	for n, want := range []int64{0, 2, 102, 602, 602} {
		if got := b.Waiting(n, 9); got != want {
			t.Errorf("%d wait: %d tokens to compute, want %d", n, got, want)
		}
	}
	if got := b.Waiting(2, 2); got != 100 {
		t.Errorf("of two that wait one is newer: %d tokens, want 100", got)
	}
}

func TestARunThatNothingWasInTheWayOfTellsHowFastPromptsAreComputed(t *testing.T) {
	none, half := 0, 5000
	rate := func(b *telemetry.Backlog) float64 {
		if v := b.PrefillTokS(); v != nil {
			return *v
		}
		return 0
	}
	for _, c := range []struct {
		why    string
		prompt int
		cached *int
		also   time.Duration // another run is handed over then; 0 = none
		busy   bool
		rate   float64
	}{
		{"alone, all to compute", 10_000, &none, 0, false, 20_000},
		{"alone, half of it cached", 10_000, &half, 0, false, 10_000},
		{"another one came before its first token", 10_000, &none, 100 * time.Millisecond, false, 0},
		{"another one came after it", 10_000, &none, 600 * time.Millisecond, false, 20_000},
		{"no slot was free, or there was a queue", 10_000, &none, 0, true, 0},
		{"too short to tell", 500, &none, 0, false, 0},
		{"the engine does not say what was cached", 10_000, nil, 0, false, 0},
	} {
		b := telemetry.NewBacklog()
		b.Begin("a", 0, telemetry.Work{Prompt: 7, Output: 10, Free: !c.busy}) // an estimate; the engine counts
		if c.also > 0 && c.also < 500*time.Millisecond {
			b.Begin("b", c.also, telemetry.Work{Prompt: 10})
		}
		b.Made("a", 500*time.Millisecond, 1)
		if c.also > 500*time.Millisecond {
			b.Begin("b", c.also, telemetry.Work{Prompt: 10})
		}
		b.End("a", c.prompt, c.cached)
		if got := rate(b); math.Abs(got-c.rate) > 1e-6 {
			t.Errorf("%s: %v tokens/s, want %v", c.why, got, c.rate)
		}
	}
	b := telemetry.NewBacklog()
	run := func(took time.Duration) {
		b.Begin("a", time.Second, telemetry.Work{Prompt: 4000, Free: true})
		b.Made("a", time.Second+took, 1)
		b.End("a", 0, &none)
	}
	b.Begin("gone", 0, telemetry.Work{Prompt: 10})
	b.End("gone", 0, nil) // cancelled before its first token: it is beside nobody any more
	run(time.Second)
	if got := rate(b); got != 4000 {
		t.Errorf("after a cancelled one: %v", got)
	}
	for range 15 {
		run(200 * time.Millisecond)
	}
	run(time.Minute) // something that nobody saw was in the way
	if got := rate(b); got != 20_000 {
		t.Errorf("one that took a minute among many: %v tokens/s", got)
	}
	for range 16 {
		run(time.Second)
	}
	if got := rate(b); got != 4000 {
		t.Errorf("it has become slow for good: %v tokens/s", got)
	}
	b.Restarted()
	if b.PrefillTokS() != nil {
		t.Error("another engine has the rate of the one before")
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

// Slots that the KV can never fill promise nothing.
func TestAFullBatchIsWhatSlotsAndKVHold(t *testing.T) {
	for _, c := range []struct {
		n, kv, want float64
		slots       int
	}{
		{8, 0, 1500, 16},       // twice as many: 1.5 times as much
		{16, 0, 1000, 16},      // it is full
		{60, 0.96, 1020, 2048}, // 62.5 fit
		{20, 1, 1000, 2048},
		{0, 0.5, 1000, 16},
	} {
		if got := telemetry.FullBatch(1000, c.n, c.slots, c.kv); math.Abs(got-c.want) > 1 {
			t.Errorf("%v of %d slots, KV %v: %v, want %v", c.n, c.slots, c.kv, got, c.want)
		}
	}
}

func atBatch(running, slots int, generated int64) telemetry.Sample {
	s := at(running, 0, generated, 0)
	s.Ranks[0].RankLoad = subjects.RankLoad{Running: &running, Waiting: s.Ranks[0].Waiting, MaxRunning: &slots}
	return s
}
