package journal_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
)

// often are options under which even a short run has many checkpoints.
func often() journal.Options {
	return journal.Options{CheckpointAge: 4 * time.Second, CheckpointExact: true, MaxAge: 200 * time.Millisecond}
}

func headers(t testing.TB, frames [][]byte) (out []*journal.Header) {
	t.Helper()
	for _, f := range frames {
		h, _, err := journal.ReadFrame(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, h)
	}
	return out
}

// checkpoints are the places of a journal's checkpoints among its frames.
func checkpoints(t testing.TB, frames [][]byte) (at []int) {
	t.Helper()
	for i, h := range headers(t, frames) {
		if h.Checkpoint && h.Part == 0 {
			at = append(at, i)
		}
	}
	return at
}

func replayed(t testing.TB, frames [][]byte, o journal.ReplayOptions) *journal.Report {
	t.Helper()
	rep, err := journal.Replay(only(t, frames), o)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func TestAReplayFromAnyCheckpointGivesWhatTheWholeOneGives(t *testing.T) {
	for i, frames := range recorded(t, 3, 300, 4, often())[:2] {
		at := checkpoints(t, frames)
		if len(at) < 3 {
			t.Fatalf("d%d has %d checkpoints", i, len(at))
		}
		whole := replayed(t, frames, journal.ReplayOptions{})
		if !whole.OK() || whole.Checkpoints != len(at) {
			t.Fatalf("%+v: want the state at %d checkpoints compared", whole, len(at))
		}
		for _, a := range at {
			h := headers(t, frames[a:a+1])[0]
			rep := replayed(t, frames, journal.ReplayOptions{From: h.Server + 1})
			if !rep.OK() || rep.FromEvent != h.First || rep.FromEvent+rep.Events != whole.Events {
				t.Errorf("d%d from the checkpoint before event %d: %+v, %+v", i, h.First, rep, rep.First)
			}
		}
		// The stream's limits take the beginning: the rest can be verified from there.
		tail := replayed(t, frames[at[1]:], journal.ReplayOptions{})
		if tail.Differences != 0 || tail.Incomplete == "" || tail.Events == 0 || tail.FromEvent+tail.Events != whole.Events {
			t.Errorf("d%d without its beginning: %+v", i, tail)
		}
	}
}

func TestReplayGoesOnBehindAGapAtTheNextCheckpoint(t *testing.T) {
	frames := recorded(t, 3, 300, 4, often())[0]
	whole := replayed(t, frames, journal.ReplayOptions{})
	at := checkpoints(t, frames)
	lost := at[1] - 1 // the batch before the second checkpoint
	for name, damaged := range map[string][][]byte{
		"missing": slices.Concat(frames[:lost], frames[lost+1:]),
		"damaged": slices.Concat(frames[:lost], [][]byte{append(frames[lost][:len(frames[lost])-1:len(frames[lost])-1], frames[lost][len(frames[lost])-1]^1)}, frames[lost+1:]),
	} {
		rep := replayed(t, damaged, journal.ReplayOptions{})
		h := headers(t, frames)
		if rep.Differences != 0 || rep.OK() || len(rep.Gaps) != 1 || rep.Gaps[0].Resumed == nil || *rep.Gaps[0].Resumed != h[at[1]].First ||
			rep.Events+uint64(h[lost].Events) != whole.Events {
			t.Errorf("%s: %+v", name, rep)
		}
	}
	// Without a checkpoint behind it there is nothing to go on from.
	lost = at[0] + 1
	behind := [][]byte{}
	for i, h := range headers(t, frames) {
		if i > lost && !h.Checkpoint {
			behind = append(behind, frames[i])
		}
	}
	rep := replayed(t, slices.Concat(frames[:lost], behind), journal.ReplayOptions{})
	if len(rep.Gaps) != 1 || rep.Gaps[0].Resumed != nil || rep.Unverified == 0 || rep.Unverified != rep.Gaps[0].Skipped {
		t.Errorf("%+v", rep)
	}
}

func TestACheckpointThatCannotBeReadCostsNothingWhileTheEventsAreThere(t *testing.T) {
	frames := recorded(t, 3, 300, 4, often())[0]
	at := checkpoints(t, frames)
	f := slices.Clone(frames[at[0]])
	f[len(f)-1] ^= 1
	frames[at[0]] = f
	if rep := replayed(t, frames, journal.ReplayOptions{}); !rep.OK() || rep.Checkpoints != len(at)-1 {
		t.Errorf("%+v", rep)
	}
	// A gap before it waits for the next one.
	lost := at[0] - 1
	rep := replayed(t, slices.Concat(frames[:lost], frames[lost+1:]), journal.ReplayOptions{})
	if len(rep.Gaps) != 1 || rep.Gaps[0].Resumed == nil || rep.Differences != 0 {
		t.Errorf("%+v", rep)
	}
}

func TestUntilEndsAReplayInTheMiddle(t *testing.T) {
	frames := recorded(t, 3, 300, 4, often())[0]
	h := headers(t, frames)
	at := checkpoints(t, frames)
	until := h[at[1]].Server
	seen := 0
	rep := replayed(t, frames, journal.ReplayOptions{From: h[at[0]].Server, Until: until, Step: func(s *journal.Step, _ []core.Effect) error {
		seen++
		if s.Server < h[at[0]].Server || s.Server > until {
			t.Errorf("step %d at %d is out of %d to %d", s.N, s.Server, h[at[0]].Server, until)
		}
		return nil
	}})
	if !rep.OK() || rep.TailMissing || rep.Events == 0 || seen == 0 || rep.FromEvent != h[at[0]].First || rep.FromEvent+rep.Events > h[at[1]].First+uint64(h[at[1]+1].Events) {
		t.Errorf("%d steps seen, %+v", seen, rep)
	}
	stopped := fmt.Errorf("wrapped: %w", journal.ErrStop)
	rep, err := journal.Replay(only(t, frames), journal.ReplayOptions{Step: func(*journal.Step, []core.Effect) error { return stopped }})
	if err != nil || rep.Events != 0 || !errors.Is(stopped, journal.ErrStop) {
		t.Errorf("%+v %v", rep, err)
	}
}

// large is a core whose state is too much.
type large struct{ taken int }

func (l *large) CheckpointBytes() int64 { return 1 << 40 }
func (l *large) Checkpoint() *core.Checkpoint {
	l.taken++
	return core.New(core.Config{Dispatcher: "d"}).Checkpoint()
}

func TestAStateThatIsTooLargeIsNotTaken(t *testing.T) {
	m, l := &memory{}, &large{}
	w := writer(t, m, "d", often())
	for i := range 100 {
		now := time.Duration(i) * time.Second
		w.Record(now, core.Tick{}, nil)
		if w.Due(now) {
			w.Checkpoint(now, l)
		}
	}
	closed(t, w)
	if l.taken != 0 || len(checkpoints(t, m.frames)) != 0 {
		t.Errorf("taken %d times", l.taken)
	}
}
