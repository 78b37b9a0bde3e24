package journal_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

// metric of a writer, by the end of its name.
func metric(t testing.TB, w *journal.Writer, name string) float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(w)
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if strings.HasSuffix(f.GetName(), name) {
			return f.Metric[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("it did not come to this: %s", what)
		}
	}
}

// lives steps a core for a while and records it; spoil may change what is
// recorded, so that it is not what was seen.
func lives(t testing.TB, w *journal.Writer, spoil func(int, core.Event) core.Event) {
	t.Helper()
	c := core.New(core.Config{Dispatcher: "d"})
	now := time.Duration(0)
	n := 0
	step := func(ev core.Event) {
		now += 20 * time.Millisecond
		effects := c.Step(ev, now)
		w.Record(now, spoil(n, ev), effects)
		if n++; w.Due(now) {
			w.Checkpoint(now, c)
		}
	}
	const stamp = int64(1_700_000_000_000_000_000)
	step(core.ServerTime{UnixNano: stamp})
	step(core.Contact{Proven: true})
	for _, v := range []core.ViewKind{core.ViewReservations, core.ViewResults, core.ViewDispatchers, core.ViewCancels, core.ViewPools} {
		step(core.ViewSwap{Kind: v})
	}
	step(core.ViewSwap{Kind: core.ViewEngines, Engines: []core.EnginePut{{Revision: 1, Stored: stamp, Engine: subjects.Engine{Engine: "e", Epoch: "x", State: subjects.EngineReady, Slots: 1 << 20, Model: "m"}}}})
	for i := range 2000 {
		step(core.Contact{Proven: true})
		h := core.Handle(i + 1)
		step(core.Fetched{Handle: h, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: uint64(h), Stored: stamp, Facts: subjects.Facts{Job: "j", ID: fmt.Sprint(i), PromptTokens: 100, MaxTokens: 100}})
		step(core.BindAnswer{Handle: h, Engine: "e", Job: "j", ID: fmt.Sprint(i), Bind: 1, Answer: core.OK, Seq: uint64(10 + i), Stored: stamp})
	}
}

func asSeen(_ int, ev core.Event) core.Event { return ev }

func TestADispatcherChecksSamplesOfItsOwnJournal(t *testing.T) {
	o := often()
	o.SelfCheck = &journal.SelfCheck{Every: time.Nanosecond, Span: 5 * time.Second, Share: 1}
	w := writer(t, &memory{}, "d", o)
	lives(t, w, asSeen)
	await(t, "samples were replayed", func() bool { return metric(t, w, "selfcheck_runs_total") >= 1 })
	closed(t, w)
	if d := metric(t, w, "selfcheck_differences_total"); d != 0 || metric(t, w, "selfcheck_decisions_total") == 0 || metric(t, w, "selfcheck_skipped_total") != 0 {
		t.Errorf("%v differences", d)
	}
}

func TestTheSelfCheckFindsWhatTheJournalDoesNotHold(t *testing.T) {
	o := often()
	o.SelfCheck = &journal.SelfCheck{Every: time.Nanosecond, Span: 5 * time.Second, Share: 1}
	w := writer(t, &memory{}, "d", o)
	lives(t, w, func(n int, ev core.Event) core.Event {
		if f, ok := ev.(core.Fetched); ok && n > 20 {
			f.Facts.MaxTokens++ // the core saw another
			return f
		}
		return ev
	})
	await(t, "a difference was counted", func() bool { return metric(t, w, "selfcheck_differences_total") > 0 })
	closed(t, w)
}

func TestASampleThatIsTooLargeIsLeftOut(t *testing.T) {
	o := often()
	o.SelfCheck = &journal.SelfCheck{Every: time.Nanosecond, Bytes: 1}
	w := writer(t, &memory{}, "d", o)
	lives(t, w, asSeen)
	closed(t, w)
	if metric(t, w, "selfcheck_skipped_total") == 0 || metric(t, w, "selfcheck_runs_total") != 0 {
		t.Error("it was not left out")
	}
}
