package dispatcher

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestAFetchedMessageLeavesItsQueueOnlyWhenItIsAcked(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	r := request("j", "0001")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	if got.Facts.Key() != "j.0001" || got.Facts.MaxTokens != 16 || got.Seq != 1 || got.Stored == 0 || got.Bad != nil {
		t.Fatalf("fetched %+v", got)
	}
	if done := waitFor[core.FetchDone](t, f, 1, nil); done.Delivered != 1 || done.Err != "" {
		t.Fatalf("done %+v", done)
	}
	if n := b.messages(b.pool.Rollouts()); n != 1 {
		t.Fatalf("%d messages in the queue before the ack", n)
	}
	f.do(core.Ack{Handle: got.Handle})
	natstest.Eventually(t, within, "an empty queue", func() bool { return b.messages(b.pool.Rollouts()) == 0 })
	if d.hand.get(got.Handle) != nil || d.hand.bytes != 0 {
		t.Fatal("the message is still in hand after its ack")
	}
}

func TestAMessageGivenBackComesBackAfterItsDelayUnderANewHandle(t *testing.T) { // scenario B3
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	b.submit(r)
	first := b.fetchOne(f, queueOf(r))
	const delay = 300 * time.Millisecond
	began := time.Now()
	f.do(core.NakDelay{Handle: first.Handle, Delay: delay})
	second := b.fetchOne(f, queueOf(r))
	if second.Handle == first.Handle || second.Seq != first.Seq {
		t.Fatalf("first %+v, second %+v", first, second)
	}
	if took := time.Since(began); took < delay-20*time.Millisecond {
		t.Fatalf("it came back after %v, asked for %v", took, delay)
	}
}

func TestAPullWaitsForTheFirstMessageAndThenEndsAtOnce(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	f.do(core.Fetch{Queue: queueOf(r), N: 10, Wait: 10 * time.Second})
	natstest.Eventually(t, within, "a waiting pull", func() bool {
		c, err := b.js.Consumer(b.ctx(), b.pool.Rollouts(), subjects.ConsumerRollouts("j", subjects.LaneNormal))
		return err == nil && c.CachedInfo().NumWaiting == 1
	})
	began := time.Now()
	b.submit(r)
	if done := waitFor[core.FetchDone](t, f, 1, nil); done.Delivered != 1 || done.Asked != 10 || done.Err != "" {
		t.Fatalf("done %+v", done)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Fatalf("the pull ended %v after its message", took)
	}
	if got := seen[core.Fetched](f); len(got) != 1 {
		t.Fatalf("fetched %+v", got)
	}
}

func TestAPullOfAnEmptyQueueEndsWhenItsWaitIsOver(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	for _, wait := range []time.Duration{0, 20 * time.Millisecond, 300 * time.Millisecond} {
		n := len(seen[core.FetchDone](f))
		began := time.Now()
		f.do(core.Fetch{Queue: core.Queue{Job: "j", Retry: true}, N: 5, Wait: wait})
		done := waitFor[core.FetchDone](t, f, n+1, nil)
		if took := time.Since(began); done.Err != "" || done.Delivered != 0 || took < wait/2 || took > wait+5*time.Second {
			t.Errorf("wait %v: done %+v after %v", wait, done, took)
		}
	}
}

func TestASilentlyDeletedConsumerIsMadeAnew(t *testing.T) { // scenario B4
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	b.submit(r)
	f.do(core.NakDelay{Handle: b.fetchOne(f, queueOf(r)).Handle})
	if err := b.js.DeleteConsumer(b.ctx(), b.pool.Rollouts(), subjects.ConsumerRollouts("j", subjects.LaneNormal)); err != nil {
		t.Fatal(err)
	}
	if again := b.fetchOne(f, queueOf(r)); again.Facts.Key() != "j.0001" {
		t.Fatalf("fetched %+v", again)
	}
}

// mute lets one user do everything but pull from queues: to that user their
// consumers are silent, as after a lost leader.
func mute(o *server.Options) {
	o.Users = []*server.User{
		{Username: "all", Password: "x"},
		{Username: "mute", Password: "x", Permissions: &server.Permissions{Publish: &server.SubjectPermission{
			Allow: []string{">"}, Deny: []string{"$JS.API.CONSUMER.MSG.NEXT.ROLLOUTS_p.>"},
		}}},
	}
	o.NoAuthUser = "all"
}

func TestAConsumerThatServesNobodyIsMadeAnewAndLosesNothing(t *testing.T) { // scenario B4
	b := newBench(t, natstest.Tweak(mute))
	f := &fakeCore{}
	cfg := b.config().WithDefaults()
	cfg.Timings.PullBeat, cfg.Timings.PullGrace = 10*time.Millisecond, 50*time.Millisecond
	d := must(newDispatcher(cfg, b.node.Conn(t, nats.UserInfo("mute", "x"), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})), f))
	ended := make(chan error, 1)
	go func() { ended <- d.Run(b.ctx()) }()
	b.ready(d)
	r := request("j", "0001")
	b.submit(r)

	f.on(func(ev core.Event) []core.Effect {
		if done, ok := ev.(core.FetchDone); ok {
			if !strings.Contains(done.Err, "does not answer") {
				t.Errorf("done %+v", done)
			}
			return []core.Effect{core.Fetch{Queue: done.Queue, N: 1, Wait: 100 * time.Millisecond}}
		}
		return nil
	})
	f.do(core.Fetch{Queue: queueOf(r), N: 1, Wait: 100 * time.Millisecond})
	natstest.Eventually(t, within, "a consumer made anew", func() bool {
		return counterValue(t, d, "rollbus_dispatcher_consumers_total", "remade") >= 1
	})
	if n := counterValue(t, d, "rollbus_dispatcher_consumers_total", "stepdown"); n < 1 {
		t.Error("its leader was not asked to step down first")
	}
	f.on(nil)
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	_, other := b.faked()
	if got := b.fetchOne(other, queueOf(r)); got.Facts.Key() != "j.0001" {
		t.Fatalf("fetched %+v", got)
	}
}

func TestAConsumerThatServesOthersIsNeverDeleted(t *testing.T) { // scenario B1
	b := newBench(t, natstest.Tweak(mute))
	_, busy := b.faked() // another dispatcher, which the consumer serves
	f := &fakeCore{}
	cfg := b.config().WithDefaults()
	d := must(newDispatcher(cfg, b.node.Conn(t, nats.UserInfo("mute", "x"), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})), f))
	ended := make(chan error, 1)
	go func() { ended <- d.Run(b.ctx()) }()
	b.ready(d)
	r := request("j", "0001")
	for i := range 20 { // work is always pending
		b.submit(request("j", fmt.Sprintf("%04d", i)))
	}
	busy.do(core.EnsureConsumer{Queue: queueOf(r)})
	x := d.queues.get(queueOf(r))
	for range 3 * silencesMost {
		got := b.fetchOne(busy, queueOf(r))
		busy.do(core.NakDelay{Handle: got.Handle})
		x.fellSilent(b.ctx())
	}
	for _, what := range []string{"stepdown", "remade"} {
		if n := counterValue(t, d, "rollbus_dispatcher_consumers_total", what); n != 0 {
			t.Errorf("%s %v times", what, n)
		}
	}
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	<-ended
}

func TestBodiesAreFetchedAsTheHandHasRoom(t *testing.T) { // scenario B6
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	cfg.Limits.HandBytes = 9 << 20
	d, _ := b.running(cfg, f)
	b.ready(d)
	const n, size = 7, 2 << 20
	var q core.Queue
	for i := range n {
		r := request("j", fmt.Sprintf("%04d", i))
		r.Prompt = strings.Repeat("x", size)
		q = queueOf(r)
		b.submit(r)
	}
	most := int64(0)
	f.on(func(ev core.Event) []core.Effect {
		switch e := ev.(type) {
		case core.FetchDone:
			d.hand.mu.Lock()
			most = max(most, d.hand.bytes)
			d.hand.mu.Unlock()
			var out []core.Effect
			for _, x := range f.events {
				if got, ok := x.(core.Fetched); ok {
					out = append(out, core.Ack{Handle: got.Handle})
				}
			}
			return append(out, core.Fetch{Queue: e.Queue, N: n, Wait: 50 * time.Millisecond})
		}
		return nil
	})
	f.do(core.Fetch{Queue: q, N: n, Wait: 50 * time.Millisecond})
	natstest.Eventually(t, within, "an empty queue", func() bool { return b.messages(b.pool.Rollouts()) == 0 })
	f.on(nil)
	if got := seen[core.Fetched](f); len(got) != n || most > cfg.Limits.HandBytes {
		t.Fatalf("%d fetches, %d bytes in hand at most, %d allowed", len(got), most, cfg.Limits.HandBytes)
	}
}

func TestALargestRequestTravelsWholeThroughAHandThatIsTooSmallForIt(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	cfg.Limits.HandBytes = 1 << 20
	d, _ := b.running(cfg, f)
	b.ready(d)
	r := request("j", "0001")
	r.Prompt = strings.Repeat("y", subjects.MaxRequestBytes-4096)
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	f.do(bindOf("e1", got, 1, 0))
	if a := waitFor[core.BindAnswer](t, f, 1, nil); a.Answer != core.OK {
		t.Fatalf("bind: %+v", a)
	}
	held, err := b.store.Reservation(b.ctx(), "e1", "j", "0001")
	if err != nil || !bytes.Equal(held.Body, body(r)) {
		t.Fatalf("reservation: %d bytes of %d, err %v", len(held.Body), len(body(r)), err)
	}
}

func TestADrainedHandHasSentEveryAck(t *testing.T) {
	b := newBench(t)
	h := newHand(b.nc, 1<<20, newMetrics())
	got := make(chan *nats.Msg, 2000)
	sub, err := b.nc.ChanSubscribe("acks", got)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	const n = 1000
	for range n {
		h.refuse(b.message("acks"), time.Second)
	}
	soon, cancel := context.WithTimeout(b.ctx(), 20*time.Millisecond)
	defer cancel()
	if h.drain(soon) {
		t.Fatal("drained although nobody sends")
	}
	ctx, end := context.WithCancel(b.ctx())
	ended := make(chan error, 1)
	go func() { ended <- h.run(ctx) }()
	if !h.drain(b.ctx()) {
		t.Fatal("not drained")
	}
	end()
	<-ended
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if len(got) != n {
		t.Fatalf("%d of %d were sent", len(got), n)
	}
}
