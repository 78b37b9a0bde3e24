package core_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

func request(job string, n int) subjects.Facts {
	return subjects.Facts{Job: job, ID: fmt.Sprintf("%04d", n), Reader: "main", Lane: subjects.LaneNormal,
		Model: "m", PromptTokens: 100, MaxTokens: 50}
}

func fleet(w *sim.World, engines, slots int) {
	for i := range engines {
		w.AddNode(fmt.Sprintf("e%02d", i), slots, 0)
	}
}

// settle lets every dispatcher see every engine.
func settle(w *sim.World) { w.Run(50*time.Millisecond, nil) }

// lived shows what dispatcher d1 saw and did while groups came and an engine died
// and came back. first is what it saw before there was anybody to show it to.
func lived(seed uint64, see func(core.Event, time.Duration, []core.Effect)) (first core.Event) {
	w := sim.New(sim.Options{Seed: seed})
	w.AddDispatcher("d0")
	w.AddDispatcher("d1").Log = see
	fleet(w, 5, 3)
	settle(w)
	for i := range 150 {
		f := request("j", i)
		f.Group, f.PromptTokens = fmt.Sprint("g", i%7), 100+i*37%2000
		w.Bus.Submit(f)
	}
	w.After(300*time.Millisecond, w.Nodes["e02"].Kill)
	w.After(20*time.Second, w.Nodes["e02"].Start)
	w.Run(90*time.Second, w.AllAnswered)
	return core.ServerTime{UnixNano: stamp}
}

func finish(t *testing.T, w *sim.World, within time.Duration) {
	t.Helper()
	w.Run(within, w.AllAnswered)
	for _, p := range w.Problems() {
		t.Error(p)
	}
}

func perEngine(w *sim.World) map[string]int {
	n := map[string]int{}
	for _, on := range w.RanOn {
		for _, e := range on {
			n[e]++
		}
	}
	return n
}

func nodes(w *sim.World) []*sim.Node {
	var out []*sim.Node
	for _, n := range w.Nodes {
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b *sim.Node) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return out
}

// pool is a world of dispatchers d0, d1, ... that have seen engines e00, e01, ...
// of so many slots.
func pool(seed uint64, dispatchers, engines, slots int) *sim.World {
	w := sim.New(sim.Options{Seed: seed})
	for i := range dispatchers {
		w.AddDispatcher(fmt.Sprintf("d%d", i))
	}
	fleet(w, engines, slots)
	settle(w)
	return w
}

// submit accepts rollouts j.0000 to n at once.
func submit(w *sim.World, n int) {
	for i := range n {
		w.Bus.Submit(request("j", i))
	}
}

func engineAt(name, epoch string, revision uint64, state subjects.EngineState) core.EnginePut {
	return core.EnginePut{Revision: revision, Engine: subjects.Engine{Engine: name, Epoch: epoch, State: state, Slots: 4, Model: "m"}}
}

func reserved(engine, id, epoch string, bind, tokens int, revision uint64) core.ReservationPut {
	return core.ReservationPut{Revision: revision, Held: subjects.Held{Engine: engine, Job: "j", ID: id, State: subjects.StateBound,
		Bind: bind, Epoch: epoch, Tokens: tokens, LeftMS: 3_600_000}}
}

func goneAt(engine, id string, bind int, revision uint64) core.ReservationGone {
	return core.ReservationGone{Revision: revision, Released: subjects.Released{Engine: engine, Job: "j", ID: id, Bind: bind, Outcome: subjects.OutcomeAnswered}}
}

const stamp = int64(1_700_000_000_000_000_000)

// ready is a core with whole views and engines a, b, ... of 4 slots.
func ready(t *testing.T, engines int) *core.Core {
	t.Helper()
	c := core.New(core.Config{Dispatcher: "d"})
	begin(t, c, engines)
	return c
}

// begin gives a new core whole views and engines a, b, ... of 4 slots.
func begin(t *testing.T, c *core.Core, engines int) {
	t.Helper()
	c.Step(core.ServerTime{UnixNano: stamp}, 0)
	c.Step(core.Contact{Proven: true}, 0)
	for _, v := range []core.ViewKind{core.ViewReservations, core.ViewResults, core.ViewDispatchers, core.ViewCancels, core.ViewPools} {
		c.Step(core.ViewSwap{Kind: v}, 0)
	}
	s := core.ViewSwap{Kind: core.ViewEngines}
	for i := range engines {
		p := engineAt(string(rune('a'+i)), "x", uint64(i+1), subjects.EngineReady)
		p.Stored = stamp
		s.Engines = append(s.Engines, p)
	}
	c.Step(s, 0)
	if m := c.Missing(); len(m) > 0 {
		t.Fatalf("views missing: %v", m)
	}
}

func bindIn(out []core.Effect) *core.Bind {
	for _, e := range out {
		if b, ok := e.(core.Bind); ok {
			return &b
		}
	}
	return nil
}

func given(out []core.Effect) bool {
	for _, e := range out {
		if _, ok := e.(core.NakDelay); ok {
			return true
		}
	}
	return false
}

func arrival(h core.Handle) core.Fetched {
	return core.Fetched{
		Handle: h, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: uint64(h), Stored: stamp,
		Facts: subjects.Facts{Job: "j", ID: strconv.Itoa(int(h)), Lane: subjects.LaneNormal, PromptTokens: 10, MaxTokens: 10},
	}
}

func decisionIn(out []core.Effect) *core.Decision {
	for _, e := range out {
		if d, ok := e.(core.Decision); ok {
			return &d
		}
	}
	return nil
}

func nakIn(out []core.Effect) *core.NakDelay {
	for _, e := range out {
		if n, ok := e.(core.NakDelay); ok {
			return &n
		}
	}
	return nil
}

func countsIn(out []core.Effect, name, label string) (n int) {
	for _, e := range out {
		if c, ok := e.(core.Count); ok && c.Name == name && c.Label == label {
			n += c.N
		}
	}
	return n
}

// loadOf is an engine's report of its ranks.
func loadOf(engine, epoch string, seq uint64, ranks ...subjects.RankLoad) core.Load {
	n := len(ranks)
	return core.Load{Load: subjects.Load{Engine: engine, Epoch: epoch, Seq: seq, IntervalMS: 200, RanksAdvertised: &n, Source: "test", Ranks: ranks}}
}

// rank is a report of one rank of a million tokens of KV, and slots of 4.
func rank(at, running, waiting int, kv float64) subjects.RankLoad {
	slots, capacity := 4, int64(1_000_000)
	used := int64(kv * float64(capacity))
	return subjects.RankLoad{Rank: at, Running: &running, Waiting: &waiting, KVUsedTokens: &used, KVCapacityTokens: &capacity, MaxRunning: &slots}
}
