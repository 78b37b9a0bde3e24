package journal_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
)

func bundle(t *testing.T, frames [][]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := journal.WriteBundle(&b, journal.Manifest{}, journal.Slice(frames)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// ticks is a journal of n ticks in many batches.
func ticks(t *testing.T, n int) [][]byte {
	t.Helper()
	m := &memory{}
	w := writer(t, m, "d", journal.Options{BatchBytes: 64})
	for i := range n {
		w.Record(time.Duration(i)*time.Millisecond, core.Tick{}, nil)
	}
	closed(t, w)
	return m.frames
}

func TestADamagedFrameIsNamedAndReadingGoesOnBehindIt(t *testing.T) {
	frames := ticks(t, 5000)
	at := len(frames) / 2
	frames[at][len(frames[at])-1] ^= 1
	j := only(t, frames)
	rep, err := journal.Replay(j, journal.ReplayOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if rep.OK() || rep.Events == 0 || rep.Unverified == 0 || !strings.Contains(rep.Incomplete, "damaged") || rep.Events+rep.Unverified >= 5000 {
		t.Errorf("%+v", rep)
	}
}

func TestAMissingFrameIsAGapWithItsSize(t *testing.T) {
	frames := ticks(t, 5000)
	at := len(frames) / 2
	h, _, err := journal.ReadFrame(frames[at])
	if err != nil {
		t.Fatal(err)
	}
	r, err := journal.NewReader(only(t, append(frames[:at:at], frames[at+1:]...)))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		_, err := r.Next()
		if e, ok := errors.AsType[*journal.ReadError](err); ok {
			if !errors.Is(err, journal.ErrGap) || e.Missing != uint64(h.Events) || e.Event != h.First+e.Missing && e.Event != h.First || r.Gapless() {
				t.Errorf("%v: missing %d, want %d from %d", err, e.Missing, h.Events, h.First)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestForeignFutureAndCutOffFilesAreToldApart(t *testing.T) {
	whole := bundle(t, ticks(t, 500))
	read := func(b []byte) error {
		_, frames, err := journal.ReadBundle(bytes.NewReader(b))
		if err != nil {
			return err
		}
		for _, err := range frames {
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := read(whole); err != nil {
		t.Fatal(err)
	}
	future := bytes.Replace(whole, []byte("bundle 1\n"), []byte("bundle 2\n"), 1)
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{
		"foreign": {[]byte("{}\n"), journal.ErrForeign}, "empty": {nil, journal.ErrForeign}, "future": {future, journal.ErrVersion},
		"cut": {whole[:len(whole)/2], journal.ErrCorrupt}, "no digest": {whole[:len(whole)-3], journal.ErrCorrupt},
		"longer": {append(bytes.Clone(whole), 1), journal.ErrCorrupt},
	} {
		if err := read(c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Cut anywhere, changed anywhere: an error or less of it, never more and never a panic.
	for n := 0; n < len(whole); n += 97 {
		if read(whole[:n]) == nil {
			t.Errorf("cut at %d: no error", n)
		}
		b := bytes.Clone(whole)
		b[n] ^= 0x40
		_, frames, err := journal.ReadBundle(bytes.NewReader(b))
		if err != nil {
			continue
		}
		js, _ := journal.Split(frames)
		for _, j := range js {
			_, _ = journal.Replay(j, journal.ReplayOptions{}) // must return
		}
	}
}

func TestAFrameOfALaterVersionSaysSo(t *testing.T) {
	frames := ticks(t, 10)
	f := bytes.Clone(frames[0])
	f[3] = 9
	if _, _, err := journal.ReadFrame(f); !errors.Is(err, journal.ErrVersion) {
		t.Error(err)
	}
	if _, problems := journal.Split(journal.Slice([][]byte{f, []byte("x")})); len(problems) != 2 || !errors.Is(problems[1], journal.ErrForeign) {
		t.Error(problems)
	}
	if _, err := journal.Replay(only(t, frames[1:]), journal.ReplayOptions{}); !errors.Is(err, journal.ErrNoBegin) {
		t.Error(err)
	}
}

func TestAWriterThatCannotStoreDropsAndNeverWaits(t *testing.T) {
	m := &memory{}
	open := make(chan struct{})
	w, err := journal.NewWriter(journal.Options{
		Core: core.Config{Dispatcher: "d"}, BatchBytes: 256, QueueBytes: 1024,
		Publish: func(ctx context.Context, id string, f []byte) error {
			select {
			case <-open:
				return m.publish(ctx, id, f)
			case <-ctx.Done():
				return ctx.Err()
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	const n = 20000
	for i := range n { // returns although nothing is stored
		w.Record(time.Duration(i), core.Tick{}, nil)
	}
	close(open)
	closed(t, w)
	r, err := journal.NewReader(only(t, m.frames))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var read, missing uint64
	for {
		_, err := r.Next()
		if e, ok := errors.AsType[*journal.ReadError](err); ok {
			missing += e.Missing
			continue
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		read++
	}
	if read == 0 || missing == 0 || read+missing != n {
		t.Errorf("%d read and %d said to be missing of %d", read, missing, n)
	}
}

func BenchmarkRecord(b *testing.B) {
	m := &memory{}
	w := writer(b, m, "d", journal.Options{})
	frames := recorded(b, 3, 200, 4, journal.Options{})
	r, err := journal.NewReader(only(b, frames[0]))
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	var events []core.Event
	for {
		s, err := r.Next()
		if err != nil {
			break
		}
		events = append(events, s.Event)
	}
	i := 0
	effects := []core.Effect{core.Bind{Handle: 1}, core.Decision{Rollout: "j.1", Engine: "e1"}}
	for b.Loop() {
		w.Record(time.Duration(i)*time.Millisecond, events[i%len(events)], effects[:i%3])
		i++
	}
	closed(b, w)
}
