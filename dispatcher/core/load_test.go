package core_test

import (
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// told is a core with engines a and b whose reports a test writes.
type told struct {
	t   *testing.T
	c   *core.Core
	now time.Duration
	seq uint64
	n   core.Handle
}

func newTold(t *testing.T, knobs map[string]float64) *told {
	w := &told{t: t, c: ready(t, 2), now: time.Second}
	w.c.Step(core.PoolPut{Revision: 1, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce, Knobs: knobs}}, w.now)
	return w
}

// preempting is a report of one rank, with its preemptions since it began.
func preempting(at, running int, kv float64, preempted int64) subjects.RankLoad {
	r := rank(at, running, 0, kv)
	r.PreemptionsTotal = &preempted
	return r
}

func (w *told) report(engine string, ranks ...subjects.RankLoad) {
	w.seq++
	w.c.Step(loadOf(engine, "x", w.seq, ranks...), w.now)
}

// pass lets time pass, with contact and without reports.
func (w *told) pass(d time.Duration) {
	for end := w.now + d; w.now < end; {
		w.now += 50 * time.Millisecond
		w.c.Step(core.Contact{Proven: true}, w.now)
		w.c.Step(core.Tick{}, w.now)
	}
}

// places are the engines that the next requests get, each one answered and gone
// at once; "" = kept in hand.
func (w *told) places(n int) map[string]int {
	w.t.Helper()
	got := map[string]int{}
	for range n {
		w.n++
		f := arrival(w.n)
		f.Stored = stamp + int64(w.now)
		b := bindIn(w.c.Step(f, w.now))
		if b == nil {
			got[""]++
			w.c.Step(core.CancelPut{Cancel: subjects.Cancel{Kind: subjects.CancelID, Job: "j", Value: f.Facts.ID}, Stored: f.Stored + 1}, w.now)
			continue
		}
		got[b.Held.Engine]++
		seq := 1000 * uint64(w.n)
		w.c.Step(core.BindAnswer{Handle: w.n, Engine: b.Held.Engine, Job: "j", ID: b.Held.ID, Bind: b.Held.Bind, Answer: core.OK, Seq: seq, Stored: f.Stored}, w.now)
		w.c.Step(goneAt(b.Held.Engine, b.Held.ID, b.Held.Bind, seq+1), w.now)
	}
	return got
}

// The first engine to come below the mark is not given all that waits: what was
// bound there since its report counts against its KV, a cached prefix excepted.
func TestWhatIsBoundSinceAReportFillsAnEnginesKV(t *testing.T) {
	w := newTold(t, map[string]float64{"escape_floor": 3600})
	capacity := int64(10_000)
	for i, name := range []string{"a", "b"} {
		p := engineAt(name, "x", uint64(50+i), subjects.EngineReady)
		p.CapacityTokens = &capacity
		w.c.Step(p, w.now)
	}
	bound := func(n int) (got []string) {
		for range n {
			w.n++
			f := arrival(w.n)
			f.Stored, f.Facts.PromptTokens = stamp+int64(w.now), 1500
			b := bindIn(w.c.Step(f, w.now))
			if b == nil {
				got = append(got, "")
				continue
			}
			got = append(got, b.Held.Engine)
			w.c.Step(core.BindAnswer{Handle: w.n, Engine: b.Held.Engine, Job: "j", ID: b.Held.ID, Bind: b.Held.Bind, Answer: core.OK, Seq: 1000 * uint64(w.n), Stored: f.Stored}, w.now)
		}
		return got
	}
	w.report("a", rank(0, 1, 0, 0.7))
	w.report("b", rank(0, 1, 0, 0.99))
	// 2,000 tokens are left below the mark: after two of 1,500 they are gone.
	if got := bound(3); !slices.Equal(got, []string{"a", "a", ""}) {
		t.Errorf("three requests went to %q", got)
	}
}

// scenario P7: an engine that falls silent is unknown, not full and not idle: its
// reservations decide, and dispatch goes on until its reports come back.
func TestSilentEnginesStillGetWorkByTheirReservations(t *testing.T) {
	w := newTold(t, nil)
	w.report("a", preempting(0, 4, 0.99, 0)) // blocked by its KV
	w.report("b", preempting(0, 0, 0.1, 0))
	if got := w.places(4); got["b"] != 4 {
		t.Fatalf("with a's KV full, 4 requests went %v: want all to b", got)
	}
	w.pass(2 * time.Second) // both reports are stale
	if got := w.places(8); got["a"] != 4 || got["b"] != 4 {
		t.Errorf("with both silent, 8 requests went %v: want 4 each, by reservations", got)
	}
	w.report("b", preempting(0, 0, 0.1, 0))
	if got := w.places(8); got["a"] != 4 || got["b"] != 4 {
		t.Errorf("with a silent, 8 requests went %v: want 4 each, one engine's report decides nothing", got)
	}
}

// scenario P8: whatever set a mark, one healthy report clears it.
func TestAKVMarkEndsWithTheFirstHealthyReport(t *testing.T) {
	w := newTold(t, nil)
	all := func(kv float64) map[string]int {
		w.report("a", preempting(0, 3, kv, 0))
		w.report("b", preempting(0, 3, 0.95, 0))
		return w.places(2)
	}
	for _, s := range []struct {
		kv   float64
		want string
	}{{0.89, "a"}, {0.91, ""}, {0.8, ""}, {0.76, ""}, {0.74, "a"}, {0.9, "a"}, {0.95, ""}, {0.1, "a"}} {
		if got := all(s.kv); got[s.want] != 2 {
			t.Fatalf("at a KV use of %v (b's is 0.95), 2 requests went %v: want %q", s.kv, got, s.want)
		}
	}
}

// scenarios P8, P17: a preemption is an event: it blocks for its time, whoever
// reports what meanwhile, and the sum that it left does not block.
func TestRisingPreemptionsBlockForTheirTimeAndNoLonger(t *testing.T) {
	w := newTold(t, map[string]float64{"sticky_trajectory": 1})
	block := core.DefaultTimings().PreemptionBlock
	both := func(preempted int64) {
		w.report("a", preempting(0, 1, 0.2, preempted))
		w.report("b", preempting(0, 1, 0.2, 900))
	}
	both(500)
	both(500)
	if got := w.places(8); got["a"] == 0 {
		t.Fatalf("an engine that preempted long ago gets nothing: %v", got)
	}
	both(501)
	if got := w.places(8); got["b"] != 8 {
		t.Errorf("after one more preemption 8 requests went %v: want all to b", got)
	}
	w.pass(block - 500*time.Millisecond)
	both(501)
	if got := w.places(4); got["b"] != 4 {
		t.Errorf("half a second before the block ends 4 requests went %v: want all to b", got)
	}
	w.pass(500 * time.Millisecond)
	both(501)
	if got := w.places(8); got["a"] == 0 {
		t.Errorf("after %v an engine that preempts no more still gets nothing: %v", block, got)
	}
	both(3) // its counter began anew
	if got := w.places(8); got["a"] == 0 {
		t.Errorf("a counter that fell is taken for preemptions: %v", got)
	}
}

// scenario P14: one full rank blocks its engine although the mean is low; a rank
// that does not report leaves no picture at all.
func TestTheFullestRankDecidesAdmission(t *testing.T) {
	w := newTold(t, nil)
	w.report("a", preempting(0, 1, 0.95, 0), preempting(1, 1, 0.1, 0), preempting(2, 1, 0.1, 0), preempting(3, 1, 0.1, 0))
	w.report("b", preempting(0, 4, 0.5, 0))
	if got := w.places(4); got["b"] != 4 {
		t.Errorf("with one of a's ranks full, 4 requests went %v: want all to b", got)
	}
}
