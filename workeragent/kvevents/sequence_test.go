package kvevents

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// trace carries the steps of a sequencer out, as far as a story shows them.
type trace struct {
	applied, beforeClear []uint64
	requests             []uint64
	cleared              int
	degraded, trusted    bool
	partial              bool
}

func (tr *trace) take(steps []Step[int]) (ask []uint64) {
	for _, st := range steps {
		switch st.Do {
		case Apply:
			tr.applied = append(tr.applied, st.Seq)
		case Clear:
			tr.beforeClear, tr.applied = tr.applied, nil
			tr.cleared++
		case AskReplay:
			tr.requests = append(tr.requests, st.Seq)
			ask = append(ask, st.Seq)
		case Degrade:
			tr.degraded, tr.trusted = true, false
		case Trust:
			tr.degraded, tr.trusted, tr.partial = false, true, st.Partial
		}
	}
	return ask
}

type story struct {
	Name    string   `json:"name"`
	Live    []uint64 `json:"live"`
	First   bool     `json:"first_contact"`
	From    *uint64  `json:"replay_available_from"`
	Returns []uint64 `json:"replay_returns"`
	Head    uint64   `json:"head"`
	Expect  struct {
		Requests      []uint64 `json:"replay_requests"`
		Applied       []uint64 `json:"applied"`
		Cleared       *int     `json:"cleared"`
		BeforeClear   []uint64 `json:"applied_before_clear"`
		AfterClear    []uint64 `json:"applied_after_clear"`
		ClearedBefore *uint64  `json:"cleared_before_applying"`
		Partial       *bool    `json:"partial"`
		Degraded      bool     `json:"degraded"`
		TrustedTo     *uint64  `json:"trusted_through"`
	} `json:"expect"`
}

// scenarios C1, C2
func TestSequenceStories(t *testing.T) { checkStories(t, "testdata") }

func checkStories(t *testing.T, dir string) {
	t.Helper()
	stories := load[[]story](t, filepath.Join(dir, "sequences.json"))
	if len(stories) == 0 {
		t.Fatal("no stories")
	}
	for _, c := range stories {
		t.Run(c.Name, func(t *testing.T) {
			s := NewSequencer[int](SequenceConfig{Replay: c.From != nil || c.Returns != nil}, func(int) bool { return false })
			var tr trace
			answer := func(ask []uint64) {
				for _, from := range ask {
					returns := c.Returns
					if returns == nil {
						for n := max(from, *c.From); n <= c.Head; n++ {
							returns = append(returns, n)
						}
					}
					for _, n := range returns {
						tr.take(s.Replayed(0, n, 0))
					}
					tr.take(s.ReplayEnd(0))
				}
			}
			if c.First {
				ask := tr.take(s.Start())
				for _, n := range c.Live {
					tr.take(s.Live(0, n, 0))
				}
				answer(ask)
			} else {
				for _, n := range c.Live {
					answer(tr.take(s.Live(0, n, 0)))
				}
			}
			e := c.Expect
			if e.Requests != nil && !slices.Equal(e.Requests, tr.requests) {
				t.Errorf("asked for %v, want %v", tr.requests, e.Requests)
			}
			if e.Applied != nil && !slices.Equal(e.Applied, tr.applied) {
				t.Errorf("applied %v, want %v", tr.applied, e.Applied)
			}
			if e.BeforeClear != nil && (!slices.Equal(e.BeforeClear, tr.beforeClear) || !slices.Equal(e.AfterClear, tr.applied) || tr.applied[0] != *e.ClearedBefore) {
				t.Errorf("applied %v, cleared, %v", tr.beforeClear, tr.applied)
			}
			if e.Cleared != nil && *e.Cleared != tr.cleared {
				t.Errorf("cleared %d times, want %d", tr.cleared, *e.Cleared)
			}
			if e.Partial != nil && *e.Partial != tr.partial {
				t.Errorf("partial %v", tr.partial)
			}
			if e.TrustedTo != nil && tr.applied[len(tr.applied)-1] != *e.TrustedTo {
				t.Errorf("applied %v, want nothing past %d", tr.applied, *e.TrustedTo)
			}
			if e.Degraded != tr.degraded || s.Degraded() != e.Degraded {
				t.Errorf("degraded %v, want %v", tr.degraded, e.Degraded)
			}
			// 6 arrives live after the replay had it: a duplicate.
			if c.Name == "gap_then_replay" {
				if steps := s.Live(0, 6, 0); len(steps) != 0 {
					t.Errorf("a duplicate gives %v", steps)
				}
			}
		})
	}
}

func TestADegradedStreamRecoversAfterItsCoolDown(t *testing.T) {
	s := NewSequencer[int](SequenceConfig{Replay: true}, func(int) bool { return false })
	var tr trace
	tr.take(s.Live(0, 0, 0))
	tr.take(s.Live(0, 5, 0))
	tr.take(s.ReplayFailed(0))
	if !tr.degraded {
		t.Fatal("a failed replay degrades nothing")
	}
	tr.take(s.Live(time.Second, 6, 0))
	if tr.take(s.Tick(29*time.Second)) != nil {
		t.Fatal("asked again within the cool-down")
	}
	if ask := tr.take(s.Tick(30 * time.Second)); !slices.Equal(ask, []uint64{1}) {
		t.Fatalf("after the cool-down asked for %v", ask)
	}
	for n := range uint64(7) {
		tr.take(s.Replayed(0, n, 0))
	}
	tr.take(s.ReplayEnd(0))
	if tr.degraded || !slices.Equal(tr.applied, []uint64{0, 1, 2, 3, 4, 5, 6}) {
		t.Errorf("degraded %v, applied %v", tr.degraded, tr.applied)
	}
}

func TestASecondFailureBeginsAnew(t *testing.T) {
	for _, replay := range []bool{true, false} {
		s := NewSequencer[int](SequenceConfig{Replay: replay}, func(int) bool { return false })
		var tr trace
		tr.take(s.Live(0, 0, 0))
		tr.take(s.Live(0, 5, 0))
		tr.take(s.ReplayFailed(0))
		tr.take(s.Tick(time.Minute))
		tr.take(s.ReplayFailed(time.Minute))
		ask := tr.take(s.Tick(2 * time.Minute))
		if replay && !slices.Equal(ask, []uint64{0}) {
			t.Errorf("asked for %v, want everything", ask)
		}
		tr.take(s.ReplayFailed(2 * time.Minute))
		tr.take(s.Live(2*time.Minute, 9, 0))
		if tr.cleared != 1 || tr.degraded || !tr.partial || !slices.Equal(tr.applied, []uint64{9}) {
			t.Errorf("replay %v: %+v", replay, tr)
		}
	}
}

// scenario C5
func TestAClearedCacheEndsTheDegradedState(t *testing.T) {
	s := NewSequencer(SequenceConfig{}, func(b int) bool { return b == 1 })
	var tr trace
	tr.take(s.Live(0, 0, 0))
	tr.take(s.Live(0, 5, 0))
	tr.take(s.Live(0, 6, 1))
	tr.take(s.Live(0, 7, 0))
	if tr.degraded || tr.partial || !slices.Equal(tr.applied, []uint64{6, 7}) || tr.cleared != 1 {
		t.Errorf("%+v", tr)
	}
}

func TestACommandThatEmptiesTheCacheClearsAtOnce(t *testing.T) {
	s := NewSequencer[int](SequenceConfig{Replay: true}, func(int) bool { return false })
	var tr trace
	tr.take(s.Live(0, 0, 0))
	tr.take(s.Live(0, 3, 0)) // a replay is under way
	tr.take(s.Emptied())
	for n := range uint64(4) { // its answers are from before
		tr.take(s.Replayed(0, n, 0))
	}
	tr.take(s.ReplayEnd(0))
	tr.take(s.Live(0, 4, 0))
	if tr.cleared != 1 || !slices.Equal(tr.applied, []uint64{4}) || !tr.trusted {
		t.Errorf("%+v", tr)
	}
}

// A publisher that had sent nothing when the agent came: the first batches to be
// lost are a gap as any other.
func TestTheVeryFirstBatchesAreMissedToo(t *testing.T) {
	s := NewSequencer[int](SequenceConfig{Replay: true}, func(int) bool { return false })
	var tr trace
	tr.take(s.Start())
	tr.take(s.ReplayEnd(0))
	if ask := tr.take(s.Live(0, 2, 0)); !slices.Equal(ask, []uint64{0}) {
		t.Fatalf("asked for %v", ask)
	}
	for n := range uint64(3) {
		tr.take(s.Replayed(0, n, 0))
	}
	tr.take(s.ReplayEnd(0))
	if !slices.Equal(tr.applied, []uint64{0, 1, 2}) || !tr.trusted || s.Partial() {
		t.Errorf("%+v, partial %v", tr, s.Partial())
	}
}

func TestAnotherConnectionToTheSameProcessKeepsWhatIsKnown(t *testing.T) {
	s := NewSequencer[int](SequenceConfig{Replay: true}, func(int) bool { return false })
	var tr trace
	tr.take(s.Live(0, 0, 0))
	if ask := tr.take(s.Resume()); !slices.Equal(ask, []uint64{1}) {
		t.Errorf("asked for %v: what was missed may be in the ring", ask)
	}
	tr.take(s.Replayed(0, 1, 0))
	tr.take(s.ReplayEnd(0))
	if tr.cleared != 0 || !slices.Equal(tr.applied, []uint64{0, 1}) {
		t.Errorf("%+v", tr)
	}
	if tr.take(s.Start()); tr.cleared != 1 {
		t.Error("a process that may be another one kept the old one's blocks")
	}
}

// TestWhatIsAppliedIsAlwaysARun drives a lossy publisher that restarts and
// replays from a short ring, in any order of events.
func TestWhatIsAppliedIsAlwaysARun(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1))
		cfg := SequenceConfig{Replay: rapid.Bool().Draw(rt, "replay"), CoolDown: 5, MaxBuffered: 4}
		ring := rapid.IntRange(1, 12).Draw(rt, "ring")
		s := NewSequencer[int](cfg, func(b int) bool { return b%17 == 3 })
		var (
			now     time.Duration
			head    uint64 // next sequence of the publisher
			process int
			run     []uint64 // applied since the last clear
			asks    []uint64
		)
		carry := func(steps []Step[int]) {
			for _, st := range steps {
				switch st.Do {
				case Apply:
					if n := len(run); n > 0 && st.Seq != run[n-1]+1 {
						rt.Fatalf("applied %d after %d", st.Seq, run[n-1])
					}
					if st.Batch/1000 != process {
						rt.Fatalf("applied batch %d of a dead process", st.Batch)
					}
					run = append(run, st.Seq)
				case Clear:
					run = nil
				case AskReplay:
					asks = append(asks, st.Seq)
				}
			}
		}
		batch := func(n uint64) int { return process*1000 + int(n) }
		carry(s.Start())
		for range 200 {
			now++
			switch r := rnd.IntN(20); {
			case r == 0 && head > 3: // restart: the connection breaks with it
				process, head, asks = process+1, 0, nil
				carry(s.Start())
			case r == 1:
				head += uint64(rnd.IntN(3)) // sent and lost
			case r < 5 && len(asks) > 0:
				from := asks[len(asks)-1]
				asks = nil
				if rnd.IntN(4) == 0 {
					carry(s.ReplayFailed(now))
					break
				}
				start := from
				if head > uint64(ring) {
					start = max(from, head-uint64(ring))
				}
				for n := start; n < head; n++ {
					if rnd.IntN(30) != 0 {
						carry(s.Replayed(now, n, batch(n)))
					}
				}
				carry(s.ReplayEnd(now))
			case r < 8:
				carry(s.Tick(now))
			case r == 8:
				carry(s.Confirm())
			case r == 9:
				carry(s.Lost(now))
			default:
				carry(s.Live(now, head, batch(head)))
				head++
			}
		}
		// Heal: a publisher that loses nothing makes the stream whole again.
		for range 40 {
			now += 3
			carry(s.Tick(now))
			for len(asks) > 0 {
				from := asks[len(asks)-1]
				asks = nil
				for n := max(from, head-min(head, 1000)); n < head; n++ {
					carry(s.Replayed(now, n, batch(n)))
				}
				carry(s.ReplayEnd(now))
			}
			carry(s.Live(now, head, batch(head)))
			head++
		}
		if at, ok := s.Applied(); s.Degraded() || !ok || at != head-1 {
			rt.Fatalf("after healing: degraded %v, applied %d of %d", s.Degraded(), at, head-1)
		}
		if d := cmp.Diff(len(run) > 0, true); d != "" {
			rt.Fatal(fmt.Sprint("nothing applied ", d))
		}
	})
}
