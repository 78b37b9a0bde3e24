package core_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// bindsIn are the binds among effects.
func bindsIn(out []core.Effect) (bs []core.Bind) {
	for _, e := range out {
		if b, ok := e.(core.Bind); ok {
			bs = append(bs, b)
		}
	}
	return bs
}

// peered is a core of that name among dispatchers, in front of idle engines.
func peered(name string, engines int, dispatchers ...string) *core.Core {
	c := core.New(core.Config{Dispatcher: name})
	c.Step(core.ServerTime{UnixNano: stamp}, 0)
	c.Step(core.Contact{Proven: true}, 0)
	for _, v := range []core.ViewKind{core.ViewReservations, core.ViewResults, core.ViewCancels, core.ViewPools} {
		c.Step(core.ViewSwap{Kind: v}, 0)
	}
	peers := core.ViewSwap{Kind: core.ViewDispatchers}
	for _, d := range dispatchers {
		peers.Dispatchers = append(peers.Dispatchers, core.DispatcherPut{Dispatcher: d, Revision: 1, Stored: stamp})
	}
	c.Step(peers, 0)
	s := core.ViewSwap{Kind: core.ViewEngines}
	for i := range engines {
		p := engineAt("e"+strconv.Itoa(100+i), "x", uint64(i+1), subjects.EngineReady)
		p.Stored = stamp
		s.Engines = append(s.Engines, p)
	}
	c.Step(s, 0)
	return c
}

func answer(b core.Bind, a core.Answer, seq uint64) core.BindAnswer {
	return core.BindAnswer{Handle: b.Handle, Engine: b.Held.Engine, Job: b.Held.Job, ID: b.Held.ID, Bind: b.Held.Bind,
		Answer: a, Seq: seq, Actual: seq, Stored: stamp}
}

func TestCrowdedDispatchersChooseDifferentEngines(t *testing.T) {
	names := []string{"d0", "d1", "d2", "d3"}
	const before = 4 // with so few in hand others are hardly met
	by := map[string]string{}
	for _, d := range names {
		c := peered(d, 40, names...)
		for h := range core.Handle(10) {
			for _, b := range bindsIn(c.Step(arrival(h+1), time.Second)) {
				if h < before {
					continue
				}
				if other := by[b.Held.Engine]; other != "" {
					t.Errorf("engine %s is bound by %s and by %s at once: 40 engines, 40 binds", b.Held.Engine, d, other)
				}
				by[b.Held.Engine] = d
			}
		}
	}
	if len(by) != 6*len(names) {
		t.Errorf("%d engines were chosen, want 24", len(by))
	}
}

// One of four dispatchers gets all there is: its preference is worth one
// rollout and no more.
func TestPreferringItsShareNeverCostsMoreThanOneRollout(t *testing.T) {
	const engines, rollouts = 40, 120
	c := peered("d1", engines, "d0", "d1", "d2", "d3")
	got := map[string]int{}
	var seq uint64
	var open []core.Bind
	for h := range core.Handle(rollouts) {
		open = append(open, bindsIn(c.Step(arrival(h+1), time.Second))...)
	}
	for len(open) > 0 {
		b := open[0]
		seq++
		got[b.Held.Engine]++
		open = append(open[1:], bindsIn(c.Step(answer(b, core.OK, seq), time.Second))...)
	}
	n := 0
	for e, k := range got {
		n += k
		if k < 2 || k > 4 {
			t.Errorf("engine %s got %d of %d rollouts over %d engines: want 3 +- 1", e, k, rollouts, engines)
		}
	}
	if n != rollouts || len(got) != engines {
		t.Errorf("%d rollouts are bound on %d engines, want %d on %d", n, len(got), rollouts, engines)
	}
}

func TestRefusalsNarrowWhatIsInFlightAndSuccessWidensItAgain(t *testing.T) {
	const engines = 20
	c := peered("d", engines, "d")
	var open []core.Bind
	var handle core.Handle
	more := func(n int) {
		for range n {
			handle++
			open = append(open, bindsIn(c.Step(arrival(handle), time.Second))...)
		}
	}
	more(2 * engines)
	if len(open) != engines {
		t.Fatalf("%d binds in flight without a refusal, want one at each of %d engines", len(open), engines)
	}
	seq := uint64(1000)
	put := func(b core.Bind) { // what moved the sequence
		seq++
		r := core.ReservationPut{Held: subjects.Held{Engine: b.Held.Engine, Job: "o", ID: strconv.FormatUint(seq, 10),
			State: subjects.StateExternal, Bind: 1, LeftMS: 60_000}, Revision: seq, Stored: stamp, TTLMS: 60_000}
		open = append(open, bindsIn(c.Step(answer(b, core.Conflict, seq), time.Second))...)
		open = append(open, bindsIn(c.Step(r, time.Second))...)
		open = append(open, bindsIn(c.Step(core.ReservationGone{Revision: seq + 1, Stored: stamp,
			Released: subjects.Released{Engine: b.Held.Engine, Job: "o", ID: r.ID, Bind: 1}}, time.Second))...)
		seq++
	}
	for range 100 {
		b := open[0]
		open = open[1:]
		put(b)
	}
	if len(open) > 4 {
		t.Errorf("%d binds in flight after 100 refusals in a row, want 4 at most", len(open))
	}
	most := 0
	for range 2000 {
		if len(open) == 0 {
			break
		}
		b := open[0]
		open = open[1:]
		seq++
		open = append(open, bindsIn(c.Step(answer(b, core.OK, seq), time.Second))...)
		seq++
		open = append(open, bindsIn(c.Step(core.ReservationGone{Revision: seq, Stored: stamp,
			Released: subjects.Released{Engine: b.Held.Engine, Job: "j", ID: b.Held.ID, Bind: b.Held.Bind}}, time.Second))...)
		more(1)
		most = max(most, len(open))
	}
	if most != engines {
		t.Errorf("%d binds in flight at most after 2,000 that stood, want one at each of %d engines", most, engines)
	}
}
