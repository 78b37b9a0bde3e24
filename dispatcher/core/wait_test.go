package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// fullHolder is a core whose engine a holds the chain and is full, while b is
// idle and cold: there the prompt takes 1.3 s. One of a's requests ends, by
// estimate, each 0.2 s.
func fullHolder(t *testing.T, waitMax float64) *warm {
	w, _ := newWarm(t)
	w.step(core.PoolPut{Revision: 2, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce,
		Knobs: map[string]float64{"wait_max": waitMax, "prefill_tok_s": 1000}}})
	w.snapshot("a", 5, chain)
	w.snapshot("b", 0, nil)
	for i := range 6 {
		p := reserved("a", fmt.Sprint("r", i), "x", 1, 5, uint64(100+i))
		p.Stored = stamp + int64(w.now)
		w.step(p)
	}
	w.report()
	return w
}

// submit hands over a request for the chain, or for an unknown prompt.
func (w *warm) submit(blocks []uint64, change func(*core.Fetched)) []core.Effect {
	w.next++
	f := core.Fetched{Handle: w.next, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: uint64(w.next), Stored: stamp + int64(w.now),
		Facts: subjects.Facts{Job: "j", ID: fmt.Sprint("n", w.next), Lane: subjects.LaneNormal, PromptTokens: 64 * len(chain), MaxTokens: 400, Blocks: blocks}}
	if change != nil {
		change(&f)
	}
	return w.step(f)
}

// after lets time pass in ticks, with reports, until something is bound; nil and
// the whole span when nothing is.
func (w *warm) after(span time.Duration) (*core.Bind, time.Duration) {
	start := w.now
	for w.now-start < span {
		w.now += 50 * time.Millisecond
		w.step(core.Contact{Proven: true})
		if b := bindIn(w.step(core.Tick{})); b != nil {
			return b, w.now - start
		}
	}
	return nil, span
}

func TestNobodyWaitsForAnEngineUnlessThePoolSaysSo(t *testing.T) {
	if b := bindIn(fullHolder(t, 0).submit(chain, nil)); b == nil || b.Held.Engine != "b" {
		t.Errorf("with wait_max 0: %+v, want it bound to b at once", b)
	}
}

func TestARequestWaitsForTheFullHolderUntilItHasRoom(t *testing.T) {
	w := fullHolder(t, 5)
	d := decisionIn(w.submit(chain, nil))
	if d == nil || d.Reason != "wait_for_prefix" || d.WaitFor != "a" || d.WaitMS != 200 || d.Engine != "" {
		t.Fatalf("decision %+v: want a wait of 200 ms for a", d)
	}
	// Whoever has no reason to wait is bound meanwhile.
	if b := bindIn(w.submit(nil, nil)); b == nil || b.Held.Engine != "b" {
		t.Fatalf("a request without that prefix: %+v, want it bound to b", b)
	}
	w.now += 100 * time.Millisecond
	b := bindIn(w.step(goneAt("a", "r0", 1, 200)))
	if b == nil || b.Held.Engine != "a" || b.Held.ID != "n1" {
		t.Fatalf("when a has room: %+v, want the request that waited bound there", b)
	}
}

func TestAWaitEndsByItsTimeAndByWhateverMakesItPointless(t *testing.T) {
	for name, end := range map[string]struct {
		do   func(w *warm) []core.Effect
		most time.Duration
	}{
		"time is over": {func(*warm) []core.Effect { return nil }, 250 * time.Millisecond},
		"the cache is empty": {func(w *warm) []core.Effect {
			return w.step(core.Cache{Engine: "a", Epoch: "x", Seq: 9, Op: "removed", Tier: "gpu"})
		}, 0},
		"the engine is gone":  {func(w *warm) []core.Effect { return w.step(core.EngineGone{Engine: "a", Revision: 99}) }, 0},
		"the engine is stale": {func(w *warm) []core.Effect { return w.step(engineAt("a", "x", 99, subjects.EngineStale)) }, 0},
	} {
		w := fullHolder(t, 5)
		if b := bindIn(w.submit(chain, nil)); b != nil {
			t.Fatalf("bound at once: %+v", b)
		}
		b, took := bindIn(end.do(w)), time.Duration(0)
		if b == nil {
			b, took = w.after(time.Second)
		}
		if b == nil || b.Held.Engine != "b" || took > end.most {
			t.Errorf("%s: %+v after %v, want it bound to b within %v", name, b, took, end.most)
		}
	}
}

func TestNoWaitGoesBeyondWhatIsLeft(t *testing.T) {
	old := func(age time.Duration) func(*core.Fetched) {
		return func(f *core.Fetched) { f.Facts.Accepted = f.Stored - int64(age) }
	}
	for name, c := range map[string]struct {
		change func(*core.Fetched)
		waits  bool
	}{
		"fresh":                             {nil, true},
		"accepted 4.7 s ago":                {old(4700 * time.Millisecond), true},
		"accepted 4.9 s ago, wait_max 5 s":  {old(4900 * time.Millisecond), false},
		"accepted an hour ago":              {old(time.Hour), false},
		"half of its deadline is 0.3 s":     {func(f *core.Fetched) { f.Facts.DeadlineMS = 600 }, true},
		"half of its deadline is too short": {func(f *core.Fetched) { f.Facts.DeadlineMS = 390 }, false},
	} {
		w := fullHolder(t, 5)
		if b := bindIn(w.submit(chain, c.change)); (b == nil) != c.waits {
			t.Errorf("%s: waits %v, want %v", name, b == nil, c.waits)
		}
	}
}

// A hand full of requests that wait for one engine leaves the others their work.
func TestWaitingRequestsHoldUpNobody(t *testing.T) {
	w := fullHolder(t, 5)
	waits := 0
	submit := func(n int) {
		for range n {
			if d := decisionIn(w.submit(chain, nil)); d != nil && d.WaitFor == "a" {
				waits++
			}
		}
	}
	submit(6)
	w.now += 50 * time.Millisecond
	q := core.Queue{Job: "j", Lane: subjects.LaneNormal}
	w.step(core.Jobs{Queues: []core.QueueDepth{{Queue: q, Messages: 1000}}})
	asked := 0
	for _, e := range w.step(core.FetchDone{Queue: q, Asked: 16, Delivered: 16}) {
		if f, ok := e.(core.Fetch); ok {
			asked += f.N
		}
	}
	if room := w.c.Headroom(); waits < 5 || asked < room-(6-waits) {
		t.Errorf("with room for %d and %d of 6 requests waiting for a, %d are fetched: what waits for a must not count", room, waits, asked)
	}
	submit(24) // more than may miss in one pass
	if waits > 25 {
		t.Errorf("%d of 30 requests wait for a, where one ends each 0.2 s, with wait_max 5 s: want at most 25", waits)
	}
	if b := bindIn(w.submit(nil, nil)); b == nil && w.c.Headroom() > 0 {
		t.Errorf("a request without a prefix is not bound although there is room for %d", w.c.Headroom())
	}
	// Cancelled while it waits.
	answered := 0
	for _, e := range w.step(core.CancelPut{Cancel: subjects.Cancel{Kind: subjects.CancelJob, Job: "j"}, Stored: stamp + int64(time.Hour)}) {
		if r, ok := e.(core.PublishResult); ok && r.Status == subjects.Cancelled {
			answered++
		}
	}
	if answered < waits {
		t.Errorf("%d of %d waiting requests were answered as cancelled", answered, waits)
	}
}

// Any history of arrivals, releases, answers and time: no request waits longer
// than wait_max, and the same events, written down, give the same effects again.
func TestNoHistoryMakesAWaitLongerThanItsBound(t *testing.T) {
	const most = 2
	rapid.Check(t, func(rt *rapid.T) {
		w := fullHolder(t, most)
		busy := map[string]core.Bind{}
		step := func(ev core.Event) {
			for _, e := range w.step(ev) {
				switch e := e.(type) {
				case core.Bind:
					busy[e.Held.Engine] = e
				case core.Decision:
					if e.WaitMS > most*1000 {
						rt.Fatalf("a decision asks for a wait of %d ms with wait_max %d s", e.WaitMS, most)
					}
				}
			}
		}
		tick := func(span time.Duration) {
			w.now += span
			step(core.Contact{Proven: true})
			step(core.Tick{})
		}
		seq, held := uint64(1000), 6
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			seq++
			switch rapid.SampledFrom([]string{"arrive", "arrive", "release", "tick", "answer", "report"}).Draw(rt, "what") {
			case "arrive":
				for _, e := range w.submit(chain, nil) {
					if b, ok := e.(core.Bind); ok {
						busy[b.Held.Engine] = b
					}
				}
			case "release":
				if held > 0 {
					held--
					step(goneAt("a", fmt.Sprint("r", held), 1, seq))
				}
			case "tick":
				tick(time.Duration(rapid.IntRange(1, 900).Draw(rt, "ms")) * time.Millisecond)
			case "answer":
				for _, e := range []string{"a", "b"} {
					if b, ok := busy[e]; ok {
						delete(busy, e)
						seq++
						step(core.BindAnswer{Handle: b.Handle, Engine: e, Job: "j", ID: b.Held.ID, Bind: b.Held.Bind, Answer: core.OK, Seq: seq, Stored: stamp + int64(w.now)})
					}
				}
			case "report":
				w.report()
			}
		}
		waited := w.c.Holding()
		tick(most*time.Second + 50*time.Millisecond)
		if n := w.c.Holding(); n > 0 {
			rt.Fatalf("%d of %d requests still wait for an engine after wait_max", n, waited)
		}
		again := ready(t, 0)
		for i, l := range w.log {
			ev, now, err := core.DecodeEvent(l.event)
			if err != nil {
				rt.Fatal(err)
			}
			if diff := cmp.Diff(l.effects, written(rt, again.Step(ev, now))); diff != "" {
				rt.Fatalf("event %d (%s) gave other effects when run again (-first +again):\n%s", i, l.event, diff)
			}
		}
	})
}

func written(t interface{ Fatal(...any) }, out []core.Effect) []string {
	var lines []string
	for _, e := range out {
		b, err := core.EncodeEffect(e)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(b))
	}
	return lines
}
