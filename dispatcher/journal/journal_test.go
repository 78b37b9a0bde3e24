package journal_test

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory keeps frames.
type memory struct{ frames [][]byte }

func (m *memory) publish(_ context.Context, _ string, frame []byte) error {
	m.frames = append(m.frames, bytes.Clone(frame))
	return nil
}

func (m *memory) bytes() (n int) {
	for _, f := range m.frames {
		n += len(f)
	}
	return n
}

func writer(t testing.TB, m *memory, name string, o journal.Options) *journal.Writer {
	t.Helper()
	o.Core.Dispatcher, o.Publish, o.Pool, o.Program = name, m.publish, "p", "test"
	w, err := journal.NewWriter(o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func closed(t testing.TB, w *journal.Writer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := w.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// recorded is a run with four dispatchers, engines that die and attempts that
// come back, and the journal of each dispatcher.
func recorded(t testing.TB, seed uint64, rollouts, blocks int, o journal.Options) [][][]byte {
	t.Helper()
	s := subjects.Settings{Policy: "projected_time", Mode: "enforce"}
	w := sim.New(sim.Options{Seed: seed, Settings: s, WatchDelay: 5 * time.Millisecond, SlowWrites: 0.02})
	var writers []*journal.Writer
	var memories []*memory
	for i := range 4 {
		name := fmt.Sprintf("d%d", i)
		m := &memory{}
		jw := writer(t, m, name, o)
		writers, memories = append(writers, jw), append(memories, m)
		d := w.AddDispatcher(name)
		d.Core = core.New(core.Config{Dispatcher: name}) // its first event again, seen by the writer
		first := core.ServerTime{UnixNano: 1_700_000_000_000_000_000}
		jw.Record(0, first, d.Core.Step(first, 0))
		d.Log = func(ev core.Event, now time.Duration, out []core.Effect) {
			jw.Record(now, ev, out)
			if jw.Due(now) {
				jw.Checkpoint(now, d.Core)
			}
		}
	}
	var engines []*sim.Node
	for i := range 4 {
		engines = append(engines, w.AddNode(fmt.Sprintf("e%d", i), 8, 0))
	}
	w.Run(50*time.Millisecond, nil)
	for i := range rollouts {
		f := subjects.Facts{Job: "j", ID: fmt.Sprintf("%06d", i), Reader: "main", Lane: subjects.LaneNormal, Group: fmt.Sprint("g", i/8),
			Model: "m", PromptTokens: 64 * blocks, MaxTokens: 20 + i*5%200, MaxAttempts: 50, BlockTokens: 64}
		for b := range blocks {
			f.Blocks = append(f.Blocks, uint64(i*blocks+b+1)*0x9e3779b97f4a7c15)
		}
		w.Bus.Submit(f)
	}
	for k, n := range engines[:2] {
		at := time.Duration(100+(seed*37+uint64(k)*211)%900) * time.Millisecond
		w.After(at, n.Kill)
		w.After(at+40*time.Second, n.Start)
	}
	if !w.Run(30*time.Minute, w.AllAnswered) {
		t.Fatalf("%d of %d answered", len(w.Answers), len(w.Accepted))
	}
	var out [][][]byte
	for i, jw := range writers {
		closed(t, jw)
		out = append(out, memories[i].frames)
	}
	return out
}

func only(t testing.TB, frames [][]byte) *journal.Journal {
	t.Helper()
	js, problems := journal.Split(journal.Slice(frames))
	if len(js) != 1 || len(problems) > 0 {
		t.Fatalf("%d journals, problems %v", len(js), problems)
	}
	return js[0]
}

// scenario I10
func TestARunWithDyingEnginesReplaysWithoutADifference(t *testing.T) {
	runs := recorded(t, 3, 200, 4, journal.Options{})
	for _, procs := range []int{1, 8} {
		before := runtime.GOMAXPROCS(procs)
		for _, frames := range runs {
			rep, err := journal.Replay(only(t, frames), journal.ReplayOptions{Explain: procs == 8})
			if err != nil {
				t.Fatal(err)
			}
			if !rep.OK() || rep.Decisions == 0 || rep.TailMissing {
				t.Errorf("%d procs: %+v, first difference %+v", procs, rep, rep.First)
			}
		}
		runtime.GOMAXPROCS(before)
	}
}

func TestAPlantedChangeIsFoundAtTheFirstDecisionItAlters(t *testing.T) {
	j := only(t, recorded(t, 3, 100, 4, journal.Options{})[0])
	for name, o := range map[string]journal.ReplayOptions{
		"timing": {Config: func(c *core.Config) {
			if c.Timings == (core.Timings{}) {
				c.Timings = core.DefaultTimings()
			}
			c.Timings.Lost /= 2
		}},
		"policy": {Event: func(ev core.Event) core.Event {
			if s, ok := ev.(core.ViewSwap); ok && s.Pool != nil {
				p := *s.Pool
				p.Settings.Policy = "least_requests"
				s.Pool = &p
				return s
			}
			return ev
		}},
	} {
		rep, err := journal.Replay(j, o)
		if err != nil {
			t.Fatal(err)
		}
		if rep.Differences != 1 || rep.First == nil || rep.First.What == "" || rep.First.Type == "" {
			t.Errorf("%s: no difference found: %+v", name, rep)
			continue
		}
		t.Logf("%s: event %d (%s): %s", name, rep.First.Event, rep.First.Type, rep.First.What)
		if name != "policy" {
			continue
		}
		// The first recorded decision carries the policy's name: none before it differs.
		r, err := journal.NewReader(j)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for {
			s, err := r.Next()
			if err != nil {
				t.Fatal(err)
			}
			if len(s.Decisions) > 0 {
				if s.N != rep.First.Event {
					t.Errorf("found at event %d, the first decision stands at %d", rep.First.Event, s.N)
				}
				break
			}
		}
	}
}

func TestEveryEventComesBackAsItWas(t *testing.T) {
	zero, some := 0, int64(7)
	events := []core.Event{
		core.Tick{}, core.ServerTime{UnixNano: -5}, core.Contact{Proven: true, View: core.ViewEngines},
		core.ViewSwap{Kind: core.ViewReservations, Reservations: []core.ReservationPut{{Held: subjects.Held{Engine: "e", Job: "j", ID: "i", Rank: &zero, Tried: []string{"a", "b"}}, Revision: 9, Stored: 1 << 60}}},
		core.ViewSwap{Kind: core.ViewPools, Pool: &core.PoolPut{Settings: subjects.Settings{Policy: "kv_tokens"}.WithDefaults(), Revision: 1 << 63}},
		core.EnginePut{Engine: subjects.Engine{Engine: "e", WeightVersion: &some, Versions: map[string]string{"b": "2", "a": "1"}}},
		core.Fetched{Handle: 1, Queue: core.Queue{Job: "j", Lane: "normal"}, Facts: subjects.Facts{Job: "j", Blocks: []uint64{1, 2, 1 << 63, 2, 1}}, Bad: &core.Bad{Code: "x"}},
		core.Fetched{Handle: 2, Facts: subjects.Facts{Blocks: []uint64{1, 2, 1 << 63, 9}}},
		core.LeaderAnswer{Answered: &core.Answered{Answer: subjects.Answer{CompletionTokens: &zero}}},
		core.Cache{Engine: "e", Op: "stored", Blocks: []uint64{9, 1, 10}}, core.Load{}, core.Stop{},
	}
	m := &memory{}
	w := writer(t, m, "d", journal.Options{FrameBytes: 64}) // in many parts
	for i, ev := range events {
		w.Record(time.Duration(i)*time.Second, ev, []core.Effect{core.Decision{Rollout: "j.i", Candidates: []core.Considered{{Engine: "e"}}}})
	}
	closed(t, w)
	r, err := journal.NewReader(only(t, m.frames))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i, want := range events {
		s, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, s.Event); d != "" || s.Now != time.Duration(i)*time.Second || s.N != uint64(i) || len(s.Decisions) != 1 {
			t.Errorf("event %d at %v: %s", i, s.Now, d)
		}
	}
}

func TestBytesAndRateStayWithinTheirBounds(t *testing.T) {
	const rollouts = 2000
	for _, blocks := range []int{0, 16} {
		for i, frames := range recorded(t, 7, rollouts, blocks, journal.Options{}) {
			m := memory{frames}
			each, most := m.bytes()/rollouts, 512+10*blocks
			rep, err := journal.Replay(only(t, frames), journal.ReplayOptions{})
			if err != nil || !rep.OK() {
				t.Fatalf("%+v %v", rep, err)
			}
			t.Logf("d%d, %d blocks: %d bytes a rollout, %d events, %d decisions, %.0f decisions a second of the core", i, blocks, each, rep.Events, rep.Decisions, rep.PerSecond)
			if each > most {
				t.Errorf("d%d: %d bytes a rollout, at most %d", i, each, most)
			}
		}
	}
}
