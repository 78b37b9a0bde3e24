package core_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Events and effects are plain data: what a dispatcher lived through, written
// down and read back, runs again to the same effects.
func TestARecordedRunDecodesAndRunsAgainToEqualEffects(t *testing.T) {
	type line struct {
		event   []byte
		effects [][]byte
	}
	var log []line
	first := lived(21, func(ev core.Event, now time.Duration, out []core.Effect) {
		l := line{}
		var err error
		if l.event, err = core.EncodeEvent(ev, now); err != nil {
			t.Fatal(err)
		}
		for _, e := range out {
			b, err := core.EncodeEffect(e)
			if err != nil {
				t.Fatal(err)
			}
			l.effects = append(l.effects, b)
		}
		log = append(log, l)
	})
	if len(log) < 1000 {
		t.Fatalf("the run has %d events: want at least 1,000", len(log))
	}

	again := core.New(core.Config{Dispatcher: "d1", Timings: core.DefaultTimings()})
	again.Step(first, 0)
	for i, l := range log {
		ev, now, err := core.DecodeEvent(l.event)
		if err != nil {
			t.Fatalf("event %d: %v", i, err)
		}
		var got []string
		for _, e := range again.Step(ev, now) {
			b, err := core.EncodeEffect(e)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := core.DecodeEffect(b); err != nil {
				t.Fatalf("effect of event %d: %v", i, err)
			}
			got = append(got, string(b))
		}
		var want []string
		for _, b := range l.effects {
			want = append(want, string(b))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("event %d (%s) gave other effects (-recorded +again):\n%s", i, l.event, diff)
		}
	}
}

func TestForeignBytesAreRefusedWithAReason(t *testing.T) {
	for _, in := range []string{"", "{}", "null", `{"v":99,"t":"Tick","b":{}}`, `{"v":1,"t":"Nothing","b":{}}`, `{"v":1,"t":"Tick","b":[]}`} {
		if _, _, err := core.DecodeEvent([]byte(in)); !errors.Is(err, core.ErrEncoding) {
			t.Errorf("%q decodes to error %v: want ErrEncoding", in, err)
		}
	}
}

func FuzzDecodeEvent(f *testing.F) {
	f.Add([]byte(`{"v":1,"now":5,"t":"Fetched","b":{"handle":1,"facts":{"job":"j","id":"1"}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		ev, now, err := core.DecodeEvent(b)
		if err != nil {
			return
		}
		c := core.New(core.Config{Dispatcher: "d"})
		c.Step(ev, max(0, now)) // must not panic
	})
}
