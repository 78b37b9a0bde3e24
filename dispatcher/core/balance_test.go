package core_test

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// ends is a heap of the instants at which slots are free.
type ends []time.Duration

func (e ends) Len() int           { return len(e) }
func (e ends) Less(i, j int) bool { return e[i] < e[j] }
func (e ends) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *ends) Push(x any)        { *e = append(*e, x.(time.Duration)) }
func (e *ends) Pop() any          { last := (*e)[len(*e)-1]; *e = (*e)[:len(*e)-1]; return last }

// longestFirst is when the last of some work ends if whoever places it knew every
// length beforehand and took the longest first.
func longestFirst(lengths []time.Duration, slots int) time.Duration {
	sorted := slices.Clone(lengths)
	slices.SortFunc(sorted, func(a, b time.Duration) int { return int(b - a) })
	free := make(ends, slots)
	for _, d := range sorted {
		free[0] += d
		heap.Fix(&free, 0)
	}
	return slices.Max(free)
}

// scenario P21: lengths are not known, and differ by a lot; binding late comes
// within a tenth of one who knows them all.
func TestLateBindingEndsNearlyAsSoonAsKnowingEveryLength(t *testing.T) {
	const n, engines, slots = 2000, 4, 2
	for seed := range uint64(3) {
		rng := rand.New(rand.NewPCG(seed, 21))
		lengths := make([]time.Duration, n)
		for i := range lengths {
			lengths[i] = time.Duration(math.Exp(rng.NormFloat64()) * float64(100*time.Millisecond)) // lognormal, sigma 1
		}
		w := sim.New(sim.Options{Seed: seed})
		w.AddDispatcher("d0")
		w.AddDispatcher("d1")
		fleet(w, engines, slots)
		for _, node := range w.Nodes {
			node.Takes = func(h subjects.Held) time.Duration {
				var i int
				if _, err := fmt.Sscanf(h.ID, "%d", &i); err != nil {
					t.Error(err)
				}
				return lengths[i]
			}
		}
		settle(w)
		began := w.Now
		for i := range n {
			w.Bus.Submit(request("j", i))
		}
		finish(t, w, time.Hour)
		took, bound := w.Now-began, longestFirst(lengths, engines*slots)
		if took > bound+bound/10 {
			t.Errorf("seed %d: took %v, longest first would take %v: want at most a tenth more", seed, took, bound)
		}
	}
}

// scenario P20: siblings of a group that come at once are computed on as few
// engines as their slots allow, and none of those is given more than its slots.
func TestSiblingsOfAGroupMeetOnAsFewEnginesAsHoldThem(t *testing.T) {
	const siblings = 16
	for _, name := range policy.Policies() {
		for at := range 6 {
			slots, dispatchers := []int{4, 5, 16}[at/2], []int{1, 4}[at%2]
			w := sim.New(sim.Options{Seed: uint64(slots), Settings: subjects.Settings{Policy: name, Mode: subjects.ModeEnforce, Knobs: map[string]float64{"sticky_group": 1}}})
			for d := range dispatchers {
				w.AddDispatcher(fmt.Sprint("d", d))
			}
			fleet(w, 8, slots)
			for _, n := range w.Nodes {
				n.Takes = func(subjects.Held) time.Duration { return time.Minute }
			}
			settle(w)
			for i := range siblings {
				f := request("j", i)
				f.Group = "g"
				w.Bus.Submit(f)
			}
			w.Run(2*time.Second, nil)
			on := perEngine(w)
			for e, n := range on {
				if n > slots {
					t.Errorf("%s: engine %s has %d siblings and %d slots", name, e, n, slots)
				}
			}
			if most := (siblings + slots - 1) / slots; len(on) > most {
				t.Errorf("%s, %d dispatchers: %d siblings prefill on %d engines of %d slots, want at most %d: %v", name, dispatchers, siblings, len(on), slots, most, on)
			}
		}
	}
}

// scenario P2
func TestArrivalsOneByOneGoRoundEqualEngines(t *testing.T) {
	w := pool(2, 1, 8, 4)
	for i := range 80 {
		w.Bus.Submit(request("j", i))
		w.Run(10*time.Second, w.AllAnswered)
	}
	finish(t, w, time.Second)
	n := perEngine(w)
	for e := range w.Nodes {
		if n[e] < 9 || n[e] > 11 {
			t.Errorf("engine %s got %d of 80 requests that came one by one: want 10 +- 1", e, n[e])
		}
	}
}

// scenario P5
func TestABurstOfEqualRequestsSpreadsEvenly(t *testing.T) {
	for _, dispatchers := range []int{1, 4} {
		w := pool(3, dispatchers, 8, 16)
		submit(w, 64)
		w.Run(300*time.Millisecond, nil)
		n := perEngine(w)
		for e := range w.Nodes {
			if n[e] < 7 || n[e] > 9 {
				t.Errorf("%d dispatchers: engine %s got %d of 64 simultaneous requests over 8 engines: want 8 +- 1", dispatchers, e, n[e])
			}
		}
		finish(t, w, time.Minute)
	}
}

// scenario P21: late binding keeps every engine busy while work waits.
func TestWhileWorkWaitsNoEngineIsIdle(t *testing.T) {
	w := sim.New(sim.Options{Seed: 14})
	w.AddDispatcher("d0")
	w.AddDispatcher("d1")
	fleet(w, 4, 2)
	for i, n := range nodes(w) {
		n.Takes = func(h subjects.Held) time.Duration {
			return time.Duration(1+i) * time.Duration(1+len(h.ID)*int(h.ID[3]-'0')) * 20 * time.Millisecond
		}
	}
	settle(w)
	submit(w, 200)
	w.Run(500*time.Millisecond, nil)
	idle := 0
	for len(w.Bus.Queued()) > 10 {
		w.Run(50*time.Millisecond, nil)
		for _, n := range w.Nodes {
			if len(n.Running()) < 2 {
				idle++
			}
		}
	}
	if idle > 0 {
		t.Errorf("engines had a free slot at %d samples while more than 10 rollouts waited", idle)
	}
	finish(t, w, time.Minute)
}

// Engines that register in the same instant are all counted, by every dispatcher.
func TestEnginesThatRegisterTogetherAreAllCountedWithinASecond(t *testing.T) {
	w := sim.New(sim.Options{Seed: 18})
	for i := range 4 {
		w.AddDispatcher(fmt.Sprintf("d%d", i))
	}
	w.Run(time.Second, nil)
	want := 0
	for i := range 60 {
		w.AddNode(fmt.Sprintf("e%02d", i), 1+i%7, 0)
		want += 1 + i%7
	}
	w.Run(time.Second, nil)
	for name, d := range w.Cores {
		if got := d.Core.Slots(); got != want {
			t.Errorf("dispatcher %s counts %d slots a second after they registered: want %d", name, got, want)
		}
	}
}

// Markers live a minute. When the last one under an engine has expired, the
// server's sequence there falls back, to zero if nothing stands: what was seen
// is then no guard any more, and the answer says what is.
func TestAFleetThatWasIdleForMinutesBindsAtOnce(t *testing.T) {
	for _, idle := range []time.Duration{30 * time.Second, 61 * time.Second, 10 * time.Minute} {
		w := pool(20, 2, 2, 4)
		submit(w, 8)
		finish(t, w, time.Minute)
		w.Run(idle, nil)
		w.Bus.Submit(request("j", 100))
		before := w.Now
		w.Run(time.Minute, w.AllAnswered)
		if took := w.Now - before; took > 3*time.Second {
			t.Errorf("after %s of idleness one rollout took %s", idle, took)
		}
	}
}
