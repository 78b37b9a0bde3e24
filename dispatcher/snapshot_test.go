package dispatcher

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

func TestCacheEventsReachTheCoreInOrder(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	for i := range 3 {
		data := kvevents.AppendChange(nil, &kvevents.Change{
			Epoch: "ep", Seq: uint64(i + 1), Namespace: 7, Kind: kvevents.Stored, Tier: kvevents.CPU, Blocks: []uint64{1, 2, uint64(i)},
			Parent: uint64(40 + i), HasParent: true,
		})
		if err := b.nc.Publish(b.pool.Cache("e1"), data); err != nil {
			t.Fatal(err)
		}
		if err := b.nc.Publish(b.pool.Cache("e1"), data[:i+5]); err != nil {
			t.Fatal(err)
		}
	}
	waitFor[core.Cache](t, f, 3, nil)
	for i, c := range seen[core.Cache](f) {
		if c.Engine != "e1" || c.Epoch != "ep" || c.Seq != uint64(i+1) || c.Namespace != 7 || c.Op != "stored" || c.Tier != "cpu" ||
			!slices.Equal(c.Blocks, []uint64{1, 2, uint64(i)}) || !c.HasParent || c.Parent != uint64(40+i) {
			t.Errorf("event %d: %+v", i, c)
		}
	}
	if n := counterValue(t, d, "rollbus_dispatcher_malformed_total", "cache"); n != 3 {
		t.Errorf("%v malformed events, want 3", n)
	}
}

// answering is an agent that answers snapshot requests with these parts.
func (b *bench) answering(engine string, parts ...kvevents.Part) {
	b.t.Helper()
	sub, err := b.nc.Subscribe(b.pool.Snapshot(engine), func(m *nats.Msg) {
		for i := range parts {
			_ = m.Respond(kvevents.AppendPart(nil, &parts[i]))
		}
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = sub.Unsubscribe() })
	if err := b.nc.Flush(); err != nil {
		b.t.Fatal(err)
	}
}

func phases(f *fakeCore) []string {
	var out []string
	for _, s := range seen[core.Snapshot](f) {
		out = append(out, fmt.Sprintf("%s %s %d %s %v", s.Phase, s.Epoch, s.AsOf, s.Tier, s.Blocks))
	}
	return out
}

func TestASnapshotComesInPartsBetweenBeginAndEnd(t *testing.T) { // scenario C1
	b := newBench(t)
	_, f := b.faked()
	b.answering("e1",
		kvevents.Part{Epoch: "ep", AsOf: 9, Number: 0, Tier: kvevents.GPU, Blocks: []uint64{1, 2}},
		kvevents.Part{Epoch: "ep", AsOf: 9, Number: 1, Tier: kvevents.SSD, Blocks: []uint64{3}, Last: true},
	)
	f.do(core.AskSnapshot{Engine: "e1", Epoch: "ep"})
	waitFor(t, f, 1, func(s core.Snapshot) bool { return s.Phase == "end" })
	want := []string{"begin ep 9  []", "part ep 9 gpu [1 2]", "part ep 9 ssd [3]", "end ep 9  []"}
	if got := phases(f); !slices.Equal(got, want) {
		t.Fatalf("got %q", got)
	}
}

func TestASnapshotThatIsNotWholeFails(t *testing.T) { // scenarios C1, C9
	one := func(n uint32, change func(*kvevents.Part)) kvevents.Part {
		p := kvevents.Part{Epoch: "ep", AsOf: 9, Number: n, Blocks: []uint64{1}}
		if change != nil {
			change(&p)
		}
		return p
	}
	last := func(p *kvevents.Part) { p.Last = true }
	for name, parts := range map[string][]kvevents.Part{
		"a gap":          {one(0, nil), one(2, last)},
		"no first part":  {one(1, last)},
		"another epoch":  {one(0, func(p *kvevents.Part) { p.Epoch, p.Last = "old", true })},
		"two snapshots":  {one(0, nil), one(1, func(p *kvevents.Part) { p.AsOf, p.Last = 10, true })},
		"no last part":   {one(0, nil), one(1, nil)},
		"nobody answers": nil,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			f := &fakeCore{}
			cfg := b.config()
			cfg.Timings.SnapshotIdle = 100 * time.Millisecond
			d, _ := b.running(cfg, f)
			b.ready(d)
			if parts != nil {
				b.answering("e1", parts...)
			}
			f.do(core.AskSnapshot{Engine: "e1", Epoch: "ep"})
			s := waitFor(t, f, 1, func(s core.Snapshot) bool { return s.Phase == "failed" || s.Phase == "end" })
			if s.Phase != "failed" || s.Engine != "e1" || s.Epoch != "ep" {
				t.Fatalf("it ended as %+v", s)
			}
		})
	}
}

func TestAskingAgainEndsTheOlderSnapshotWithoutAWord(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	asked := make(chan *nats.Msg, 2)
	sub, err := b.nc.ChanSubscribe(b.pool.Snapshot("e1"), asked)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	f.do(core.AskSnapshot{Engine: "e1", Epoch: "ep"})
	<-asked
	f.do(core.AskSnapshot{Engine: "e1", Epoch: "ep"})
	second := <-asked
	if err := second.Respond(kvevents.AppendPart(nil, &kvevents.Part{Epoch: "ep", AsOf: 1, Last: true})); err != nil {
		t.Fatal(err)
	}
	waitFor(t, f, 1, func(s core.Snapshot) bool { return s.Phase == "end" })
	if got := phases(f); !slices.Equal(got, []string{"begin ep 1  []", "end ep 1  []"}) {
		t.Fatalf("got %q", got)
	}
	natstest.Eventually(t, within, "nothing remembered of either", func() bool {
		d.snapshots.mu.Lock()
		defer d.snapshots.mu.Unlock()
		return len(d.snapshots.end) == 0 && len(d.snapshots.n) == 0
	})
}
