package dispatcher

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func swapsOf(f *fakeCore) map[core.ViewKind]int {
	out := map[core.ViewKind]int{}
	for _, s := range seen[core.ViewSwap](f) {
		out[s.Kind]++
	}
	return out
}

func engine(name string) subjects.Engine {
	return subjects.Engine{
		SchemaVersion: subjects.SchemaVersion, Engine: name, Agent: "a", Epoch: "ep", Kind: "sim", Model: "m",
		State: subjects.EngineReady, Slots: 4, Ranks: 1, BlockTokens: 64, Events: "none",
	}
}

func TestEveryViewComesWholeFirstAndThenChangeByChange(t *testing.T) {
	b := newBench(t)
	if err := subjects.Ensure(b.ctx(), b.js, b.pool, b.config().Layout); err != nil {
		t.Fatal(err)
	}
	must(b.store.PutEngine(b.ctx(), engine("e1")))
	must(b.store.PutSettings(b.ctx(), subjects.Settings{MaxAttempts: 7}, 0))
	must(b.store.Commit(b.ctx(), &subjects.Result{Job: "j", ID: "0009", Status: subjects.Completed}, subjects.Answer{Bind: 1}))
	if err := b.store.PutCancel(b.ctx(), subjects.Cancel{Kind: subjects.CancelID, Job: "j", Value: "0008"}); err != nil {
		t.Fatal(err)
	}
	d, f := b.faked()
	first := map[core.ViewKind]core.ViewSwap{}
	for _, s := range seen[core.ViewSwap](f) {
		if _, ok := first[s.Kind]; !ok {
			first[s.Kind] = s
		}
	}
	if s := first[core.ViewEngines]; len(s.Engines) != 1 || s.Engines[0].Engine.Engine != "e1" || s.Engines[0].Stored == 0 {
		t.Errorf("engines: %+v", s)
	}
	if s := first[core.ViewPools]; s.Pool == nil || s.Pool.Settings.MaxAttempts != 7 || s.Pool.Revision == 0 {
		t.Errorf("pools: %+v", s)
	}
	if s := first[core.ViewResults]; len(s.Answered) != 1 || s.Answered[0].Key() != "j.0009" {
		t.Errorf("results: %+v", s)
	}
	if s := first[core.ViewCancels]; len(s.Cancels) != 1 || s.Cancels[0].Value != "0008" {
		t.Errorf("cancels: %+v", s)
	}

	_, bound := b.bound(f, request("j", "0001"))
	put := waitFor(t, f, 1, func(p core.ReservationPut) bool { return p.Revision == bound.Seq })
	if put.Key() != "j.0001" || put.Engine != "e1" || put.TTLMS != (25*time.Hour).Milliseconds() || put.Stored == 0 {
		t.Errorf("put %+v", put)
	}
	must(b.store.Release(b.ctx(), subjects.Released{Engine: "e1", Job: "j", ID: "0001", Outcome: subjects.OutcomeAnswered, Bind: 1}, bound.Seq))
	if gone := waitFor[core.ReservationGone](t, f, 1, nil); gone.Outcome != subjects.OutcomeAnswered || gone.Revision <= bound.Seq {
		t.Errorf("gone %+v", gone)
	}
	rev := must(b.store.PutEngine(b.ctx(), engine("e2")))
	waitFor(t, f, 1, func(p core.EnginePut) bool { return p.Engine.Engine == "e2" })
	if err := b.store.DeleteEngine(b.ctx(), "e2", rev); err != nil {
		t.Fatal(err)
	}
	waitFor(t, f, 1, func(p core.EngineGone) bool { return p.Engine == "e2" && p.Revision > rev })
	must(b.store.PutSettings(b.ctx(), subjects.Settings{BlockTokens: 16}, first[core.ViewPools].Pool.Revision))
	waitFor(t, f, 1, func(p core.PoolPut) bool { return p.Settings.BlockTokens == 16 })
	if n := d.settings.Load().BlockTokens; n != 16 {
		t.Errorf("blocks of %d tokens are used", n)
	}
	waitFor(t, f, 2, func(p core.DispatcherPut) bool { return p.Dispatcher == d.Name() }) // a renewal
	for _, v := range needed {
		waitFor(t, f, 3, func(c core.Contact) bool { return c.Proven && c.View == v })
	}
}

func TestContactIsMergedToTenASecond(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config().WithDefaults()
	cfg.Timings.ContactEvery, cfg.Timings.Core.ContactFresh = 200*time.Millisecond, 2*time.Second
	d, _ := b.running(cfg, f)
	b.ready(d)
	contacts := func() int {
		n := 0
		for _, c := range seen[core.Contact](f) {
			if c.View == core.ViewEngines {
				n++
			}
		}
		return n
	}
	before, began := contacts(), time.Now()
	for i := range 200 {
		must(b.store.PutEngine(b.ctx(), engine(fmt.Sprintf("e%d", i))))
	}
	waitFor[core.EnginePut](t, f, 200, nil)
	if got, most := contacts()-before, int(time.Since(began)/cfg.Timings.ContactEvery)+2; got > most {
		t.Fatalf("%d contacts, at most %d expected", got, most)
	}
}

func TestAServerRestartEndsContactAndBringsFreshViews(t *testing.T) { // scenario B5
	b := newBench(t)
	d, f := b.faked()
	_, bound := b.bound(f, request("j", "0001"))
	before := swapsOf(f)
	b.node.Stop()
	waitFor(t, f, 1, func(c core.Contact) bool { return !c.Proven })
	natstest.Eventually(t, within, "a dispatcher that is not ready", func() bool {
		return slices.ContainsFunc(d.Ready(), func(m Missing) bool { return m.What == string(partConnection) })
	})
	b.node.Start()
	natstest.Eventually(t, within, "a fresh swap of every view", func() bool {
		now := swapsOf(f)
		for _, v := range needed {
			if now[v] <= before[v] {
				return false
			}
		}
		return true
	})
	waitFor(t, f, 1, func(s core.ViewSwap) bool {
		return s.Kind == core.ViewReservations && len(s.Reservations) == 1 && s.Reservations[0].Revision == bound.Seq
	})
	b.ready(d)
	// And it works: what waits is fetched.
	r := request("j", "0002")
	b.submit(r)
	if got := b.fetchOne(f, queueOf(r)); got.Facts.Key() != "j.0002" {
		t.Fatalf("fetched %+v", got)
	}
}

func TestTheCoreCanAskForFreshViews(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	before := swapsOf(f)
	f.do(core.Rebuild{Why: "paused"})
	natstest.Eventually(t, within, "a fresh swap of every view", func() bool {
		now := swapsOf(f)
		for _, v := range needed {
			if now[v] != before[v]+1 {
				return false
			}
		}
		return true
	})
	b.ready(d)
	if n := counterValue(t, d, "rollbus_dispatcher_follower_restarts_total", "asked"); n != float64(len(needed)+1) { // and that of owners
		t.Errorf("%v followers restarted, want %d", n, len(needed)+1)
	}
}

func TestQueuesAreLookedAtEverySecondAndAtOnceOnAPing(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config().WithDefaults()
	cfg.Timings.JobsPoll = time.Hour
	d, _ := b.running(cfg, f)
	b.ready(d)
	if first := waitFor[core.Jobs](t, f, 1, nil); len(first.Queues) != 0 {
		t.Fatalf("first look: %+v", first)
	}
	urgent := -1
	for _, r := range []*subjects.Request{request("b", "0001"), request("a", "0001"), request("a", "0002"), {
		Job: "a", ID: "0003", Prompt: "x", Priority: &urgent, Sampling: subjects.SamplingParams{MaxTokens: 1},
	}} {
		b.submit(r)
	}
	b.publish("rollout.p.submit.A.normal", "a.0009", nil, []byte("{}"))
	b.publish(b.pool.RetrySubject("b"), "b.0007#2", nil, []byte("{}"))
	if err := b.nc.Publish(b.pool.Ping(), nil); err != nil {
		t.Fatal(err)
	}
	look := waitFor[core.Jobs](t, f, 2, nil)
	want := []core.QueueDepth{
		{Queue: core.Queue{Job: "a", Lane: subjects.LaneNormal}, Messages: 2},
		{Queue: core.Queue{Job: "a", Lane: subjects.LaneUrgent}, Messages: 1},
		{Queue: core.Queue{Job: "b", Retry: true}, Messages: 1},
		{Queue: core.Queue{Job: "b", Lane: subjects.LaneNormal}, Messages: 1},
	}
	if !slices.Equal(look.Queues, want) {
		t.Fatalf("look: %+v", look.Queues)
	}
	natstest.Eventually(t, within, "the stray counted and ended", func() bool { return counterValue(t, d, "rollbus_dispatcher_strays_total", "") == 1 })
	if s := waitFor[core.ServerTime](t, f, 2, nil); time.Since(time.Unix(0, s.UnixNano)).Abs() > time.Minute {
		t.Errorf("the server's clock says %v", time.Unix(0, s.UnixNano))
	}
}

func TestLoadsReachTheCoreAndWhatIsNoLoadDoesNot(t *testing.T) { // scenario F14
	b := newBench(t)
	d, f := b.faked()
	send := func(subject string, data []byte) {
		t.Helper()
		if err := b.nc.Publish(subject, data); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []string{"", "{", `{"engine":"e2"}`, `{"engine":"e1","seq":-1}`, `[]`, `{"engine":"e1","ranks":"none"}`} {
		send(b.pool.Load("e1"), []byte(bad))
	}
	send(b.pool.Load("e1"), make([]byte, maxLoadBytes+1))
	send(b.pool.Load("_x"), []byte(`{"engine":"_x"}`))
	send(b.pool.Load("e1"), must(json.Marshal(subjects.Load{Engine: "e1", Epoch: "ep", Seq: 3})))
	if l := waitFor[core.Load](t, f, 1, nil); l.Seq != 3 || l.Engine != "e1" {
		t.Fatalf("load %+v", l)
	}
	if n := counterValue(t, d, "rollbus_dispatcher_malformed_total", "load"); n != 8 {
		t.Errorf("%v malformed loads, want 8", n)
	}
}

func TestARingKeepsTheNewest(t *testing.T) {
	r := newRing[int](3)
	dropped := 0
	for i := range 10 {
		if r.put(i) {
			dropped++
		}
	}
	for want := 7; want < 10; want++ {
		if got, ok := r.take(t.Context()); !ok || got != want {
			t.Fatalf("took %d, want %d", got, want)
		}
	}
	if dropped != 7 {
		t.Fatalf("%d dropped, want 7", dropped)
	}
}

func TestAFloodOfTelemetryDropsTheOldestAndStopsNothing(t *testing.T) { // scenarios F15, I11
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	cfg.Limits.Telemetry, cfg.Limits.Events = 16, 4
	d, _ := b.running(cfg, f)
	b.ready(d)
	release, blocked := make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(release) })
	t.Cleanup(goOn)
	f.on(func(ev core.Event) []core.Effect {
		if l, ok := ev.(core.Load); ok && l.Seq == 1 {
			close(blocked)
			<-release
		}
		return nil
	})
	const n = 500
	for i := range n {
		if i == 1 {
			<-blocked // the core stands still from here on
		}
		if err := b.nc.Publish(b.pool.Load("e1"), fmt.Appendf(nil, `{"engine":"e1","seq":%d}`, i+1)); err != nil {
			t.Fatal(err)
		}
	}
	natstest.Eventually(t, within, "dropped loads", func() bool {
		return counterValue(t, d, "rollbus_dispatcher_dropped_total", "telemetry") > n/2
	})
	goOn()
	waitFor(t, f, 1, func(l core.Load) bool { return l.Seq == n })
}
