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
		for _, slots := range []int{4, 5, 16} {
			w := sim.New(sim.Options{Seed: uint64(slots), Settings: subjects.Settings{Policy: name, Mode: subjects.ModeEnforce, Knobs: map[string]float64{"sticky_group": 1}}})
			w.AddDispatcher("d0")
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
				t.Errorf("%s: %d siblings prefill on %d engines of %d slots, want at most %d: %v", name, siblings, len(on), slots, most, on)
			}
		}
	}
}
