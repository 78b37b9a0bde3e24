package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// registered is the revision of a dispatcher's registration; 0 = none.
func (b *bench) registered(name string) uint64 {
	b.t.Helper()
	kv := must(b.js.KeyValue(b.ctx(), b.pool.Bucket(subjects.Dispatchers)))
	e, err := kv.Get(b.ctx(), name)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return 0
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return e.Revision()
}

func TestARegistrationIsRenewedAndTakenAwayAtTheEnd(t *testing.T) {
	b := newBench(t)
	d, _ := b.faked()
	first := b.registered(d.Name())
	if first == 0 {
		t.Fatal("not registered")
	}
	natstest.Eventually(t, within, "a renewal", func() bool { return b.registered(d.Name()) > first })
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if rev := b.registered(d.Name()); rev != 0 {
		t.Fatalf("still registered at %d", rev)
	}
}

func TestARegistrationThatAnotherHasTakenStays(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config().WithDefaults()
	cfg.Timings.Heartbeat = 3 * time.Second // no renewal of ours in between
	cfg.Timings.Core.Suspect, cfg.Timings.Core.Lost = 10*time.Second, 20*time.Second
	d, _ := b.running(cfg, f)
	b.ready(d)
	taken := must(b.store.PutDispatcher(b.ctx(), subjects.Dispatcher{Dispatcher: d.Name(), Version: "other"}))
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if rev := b.registered(d.Name()); rev != taken {
		t.Fatalf("registered at %d, want the other's at %d", rev, taken)
	}
}

// giving is a core that fetches what it is told, binds nothing, and gives all
// back on Stop, as the real one does.
func giving(f *fakeCore) func(core.Event) []core.Effect {
	return func(ev core.Event) []core.Effect {
		if _, ok := ev.(core.Stop); !ok {
			return nil
		}
		var out []core.Effect
		for _, e := range f.events {
			if got, ok := e.(core.Fetched); ok {
				out = append(out, core.NakDelay{Handle: got.Handle})
			}
		}
		return out
	}
}

func TestASoftStopGivesEverythingBackAtOnce(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	f.on(giving(f))
	const n = 40
	for i := range n {
		b.submit(request("j", fmt.Sprintf("%04d", i)))
	}
	q := core.Queue{Job: "j", Lane: subjects.LaneNormal}
	f.do(core.Fetch{Queue: q, N: n, Wait: time.Second})
	waitFor[core.Fetched](t, f, n, nil)
	f.do(core.Fetch{Queue: q, N: n, Wait: time.Minute}) // and a pull that waits
	natstest.Eventually(t, within, "a waiting pull", func() bool { return d.inflight.n() == 1 })
	began := time.Now()
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Fatalf("stopped after %v", took)
	}
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatalf("the second stop: %v", err)
	}
	if err := d.Run(b.ctx()); !errors.Is(err, ErrRunning) {
		t.Fatalf("run again: %v", err)
	}
	if len(d.hand.held) != 0 {
		t.Fatalf("%d messages are still in hand", len(d.hand.held))
	}
	// AckWait is 30 s: what another gets within the test was given back.
	_, other := b.faked()
	other.do(core.Fetch{Queue: q, N: n, Wait: time.Second})
	waitFor[core.Fetched](t, other, n, nil)
}

func TestASoftStopWaitsForTheBindInFlightAndItsAck(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	f.on(func(ev core.Event) []core.Effect {
		if a, ok := ev.(core.BindAnswer); ok && a.Answer == core.OK {
			return []core.Effect{core.Ack{Handle: a.Handle}}
		}
		return nil
	})
	entered, release := make(chan struct{}), make(chan struct{})
	real := d.bindKey
	d.bindKey = func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		close(entered)
		<-release
		return real(ctx, w)
	}
	r := request("j", "0001")
	b.submit(r)
	f.do(bindOf("e1", b.fetchOne(f, queueOf(r)), 1, 0))
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- d.Stop(b.ctx()) }()
	waitFor[core.Stop](t, f, 1, nil)
	select {
	case err := <-stopped:
		t.Fatalf("stopped with a bind in flight: %v", err)
	default:
	}
	close(release)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	// The bind is whole, and its ack left before Stop returned. When the server
	// takes an ack is its own matter: one that is lost costs a delivery that is
	// dropped as live.
	if got := b.bindings(); len(got) != 1 {
		t.Fatalf("after the stop %v is bound, want the rollout whose bind was in flight", got)
	}
	if n := counterValue(t, d, "rollbus_dispatcher_acks_total", "ack"); n != 1 {
		t.Errorf("%v acks were sent", n)
	}
}

func TestASoftStopEndsInTimeWithoutNATS(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	cfg.Timings.StopBudget = 300 * time.Millisecond
	nc := b.node.Conn(t)
	cfg = cfg.WithDefaults()
	d := must(newDispatcher(cfg, nc, f))
	ended := make(chan error, 1)
	go func() { ended <- d.Run(context.Background()) }()
	b.ready(d)
	r := request("j", "0001")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	b.node.Stop()
	f.do(bindOf("e1", got, 1, 0))
	began := time.Now()
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, ErrNotGraceful) {
		t.Fatalf("run ended with %v", err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Fatalf("stopped after %v", took)
	}
}

func TestStoppingBeforeRunningIsFine(t *testing.T) {
	b := newBench(t)
	d := must(newDispatcher(b.config().WithDefaults(), b.nc, &fakeCore{}))
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := d.Run(b.ctx()); !errors.Is(err, ErrStopped) {
		t.Fatalf("run after stop: %v", err)
	}
}

func TestTheEndOfTheContextIsASoftStop(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	f.on(giving(f))
	d := must(newDispatcher(b.config().WithDefaults(), b.node.Conn(t), f))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	b.ready(d)
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	waitFor[core.Stop](t, f, 1, nil)
	if rev := b.registered(d.Name()); rev != 0 {
		t.Fatalf("still registered at %d", rev)
	}
}

func TestAKilledDispatcherSaysNoGoodbye(t *testing.T) { // scenario F1
	b := newBench(t)
	d, f := b.faked()
	f.on(giving(f))
	r := request("j", "0001")
	b.submit(r)
	b.fetchOne(f, queueOf(r))
	d.Kill()
	d.Kill()
	if rev := b.registered(d.Name()); rev == 0 {
		t.Fatal("a killed dispatcher took its registration away")
	}
	if n := len(seen[core.Stop](f)); n != 0 {
		t.Fatalf("the core was told %d times to stop", n)
	}
	c := must(b.js.Consumer(b.ctx(), b.pool.Rollouts(), subjects.ConsumerRollouts("j", subjects.LaneNormal)))
	if n := c.CachedInfo().NumAckPending; n != 1 {
		t.Fatalf("%d messages wait for their ack", n)
	}
}

func TestAClosedConnectionEndsTheDispatcherWithItsReason(t *testing.T) {
	b := newBench(t)
	nc := b.node.Conn(t)
	d := must(newDispatcher(b.config().WithDefaults(), nc, &fakeCore{}))
	ended := make(chan error, 1)
	go func() { ended <- d.Run(context.Background()) }()
	b.ready(d)
	nc.Close()
	if err := <-ended; !errors.Is(err, ErrConnectionClosed) {
		t.Fatalf("run ended with %v", err)
	}
}

func TestAMessageThatComesAfterStopIsGivenBackUnseen(t *testing.T) {
	b := newBench(t)
	d := must(newDispatcher(b.config().WithDefaults(), b.nc, &fakeCore{}))
	f := d.owner.step.(*fakeCore)
	d.owner.take(core.Stop{})
	h := d.hand.put(b.message("x"), core.Queue{}, 0)
	d.owner.take(core.Fetched{Handle: h.handle})
	if got := seen[core.Fetched](f); len(got) != 0 {
		t.Fatalf("the core saw %+v", got)
	}
	if a, ok := d.hand.out.pop(); !ok || a.kind != "nak" || a.reply != "x" {
		t.Fatalf("answered %+v", a)
	}
}

func TestADispatcherStartedBeforeItsServerWaitsForIt(t *testing.T) {
	b := newBench(t)
	nc := b.node.Conn(t)
	b.node.Stop()
	d := must(newDispatcher(b.config().WithDefaults(), nc, &fakeCore{}))
	ended := make(chan error, 1)
	go func() { ended <- d.Run(context.Background()) }()
	natstest.Eventually(t, within, "a complaint about the streams", func() bool {
		for _, m := range d.Ready() {
			if m.What == string(partStreams) && m.Why != errNotYet.Error() {
				return true
			}
		}
		return false
	})
	b.node.Start()
	b.ready(d)
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestAForeignStreamIsRefusedAtTheStart(t *testing.T) { // scenario B1
	b := newBench(t)
	if _, err := b.js.CreateStream(b.ctx(), jetstream.StreamConfig{Name: b.pool.Rollouts(), Subjects: []string{"other"}}); err != nil {
		t.Fatal(err)
	}
	d := must(newDispatcher(b.config().WithDefaults(), b.nc, &fakeCore{}))
	if err := d.Run(b.ctx()); !errors.Is(err, subjects.ErrForeignStream) {
		t.Fatalf("run ended with %v", err)
	}
}
