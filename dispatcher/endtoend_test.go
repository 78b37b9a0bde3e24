package dispatcher

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// real starts a dispatcher with the real core.
func (b *bench) real() *Dispatcher {
	b.t.Helper()
	d, _ := b.running(b.config(), nil)
	b.ready(d)
	return d
}

func TestEveryRolloutIsAnsweredOnceByTwoDispatchersAndFourEngines(t *testing.T) { // scenarios P5, F13
	b := newBench(t)
	b.real()
	b.real()
	agents := make([]*standIn, 4)
	for i := range agents {
		agents[i] = b.agent(fmt.Sprintf("e%d", i+1), 4, nil)
	}
	const n = 150
	for _, job := range []string{"a", "b"} { // the same ids in both
		for i := range n {
			b.submit(request(job, fmt.Sprintf("%04d", i)))
		}
	}
	b.settled(2 * n)
	runs := 0
	for _, a := range agents {
		share := 0
		for key, k := range a.runs {
			if k != 1 {
				t.Errorf("%s ran %d times on %s", key, k, a.engine)
			}
			share += k
		}
		runs += share
		if a.most > 4+subjects.DefaultPrefetch {
			t.Errorf("%s held %d at once, it has 4 slots", a.engine, a.most)
		}
		if share < n/8 {
			t.Errorf("%s ran %d of %d", a.engine, share, 2*n)
		}
	}
	if runs != 2*n {
		t.Errorf("%d runs of %d rollouts", runs, 2*n)
	}
}

func TestADispatcherKilledBetweenBindAndAckCostsNothing(t *testing.T) { // scenarios F1, R1
	b := newBench(t)
	cfg := b.config()
	cfg.Timings.AckWait = 1500 * time.Millisecond // what it held comes back soon
	first, _ := b.running(cfg, nil)
	b.ready(first)
	bound := make(chan struct{})
	real := first.bindKey
	first.bindKey = func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		seq, err := real(ctx, w)
		if err == nil {
			close(bound)
		}
		<-ctx.Done() // it never learns of it
		return seq, err
	}
	hold := make(chan struct{})
	a := b.agent("e1", 1, func(ctx context.Context, _ kvstate.Reservation) bool {
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return false
	})
	b.submit(request("j", "0001"))
	<-bound
	first.Kill()
	if n := b.messages(b.pool.Rollouts()); n != 1 {
		t.Fatalf("%d messages in the queue: it was acked before it could be", n)
	}
	second, _ := b.running(cfg, nil)
	b.ready(second)
	natstest.Eventually(t, within, "the message acked because its rollout is live", func() bool {
		return b.messages(b.pool.Rollouts()) == 0
	})
	close(hold)
	b.settled(1)
	if n := a.ran("j.0001"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
	if res := b.result("j", "0001"); res.Status != subjects.Completed || res.Attempt != 1 {
		t.Errorf("result %+v", res)
	}
}

func TestAReturnedRolloutRunsOnAnotherEngine(t *testing.T) { // scenario R5
	b := newBench(t)
	b.real()
	var mu sync.Mutex
	refusedBy := ""
	refuse := func(store *kvstate.Store) func(context.Context, kvstate.Reservation) bool {
		return func(ctx context.Context, r kvstate.Reservation) bool {
			mu.Lock()
			defer mu.Unlock()
			if refusedBy != "" {
				return false
			}
			refusedBy = r.Engine
			if _, err := store.Return(ctx, r, "out of slots", 1); err != nil {
				t.Errorf("return: %v", err)
			}
			return true
		}
	}
	agents := []*standIn{b.agent("e1", 1, refuse(b.store)), b.agent("e2", 1, refuse(b.store))}
	b.submit(request("j", "0001"))
	b.settled(1)
	res := b.result("j", "0001")
	if res.Status != subjects.Completed || res.Attempt != 2 || res.Route.Engine == refusedBy {
		t.Fatalf("result %+v, refused by %s", res, refusedBy)
	}
	if n := agents[0].ran("j.0001") + agents[1].ran("j.0001"); n != 2 {
		t.Errorf("%d runs", n)
	}
}

func TestTheWorkOfALostEngineIsDoneByAnother(t *testing.T) { // scenarios R1, F3
	b := newBench(t)
	cfg := b.config().WithDefaults()
	cfg.Timings.Core.Suspect, cfg.Timings.Core.Lost = time.Second, 2*time.Second
	d, _ := b.running(cfg, nil)
	b.ready(d)
	started := make(chan struct{}, 1)
	dead := b.agent("e1", 1, func(ctx context.Context, _ kvstate.Reservation) bool {
		started <- struct{}{}
		<-ctx.Done()
		return true
	})
	b.submit(request("j", "0001"))
	<-started
	dead.stop()
	b.agent("e2", 1, nil)
	b.settled(1)
	if res := b.result("j", "0001"); res.Status != subjects.Completed || res.Route.Engine != "e2" || res.Attempt != 2 {
		t.Fatalf("result %+v", res)
	}
}

func TestBadSubmitsAreRejectedOnceAndKept(t *testing.T) { // scenario F14
	b := newBench(t)
	b.real()
	b.agent("e1", 2, nil)
	subject := b.pool.Submit("j", subjects.LaneNormal)
	b.publish(subject, "j.0001", nil, []byte("{"))
	b.publish(subject, "", nil, []byte("nobody's"))
	b.publish(subject, "j.0002", nil, body(request("j", "0009")))
	b.submit(request("j", "0003"))
	b.settled(3)
	for id, want := range map[string]subjects.Status{"0001": subjects.Rejected, "0002": subjects.Rejected, "0003": subjects.Completed} {
		if res := b.result("j", id); res.Status != want {
			t.Errorf("%s: %+v", id, res)
		}
	}
	if n := b.messages(b.pool.Dead()); n != 3 {
		t.Errorf("%d messages in DEAD, want 3", n)
	}
}

func TestNATSRestartsInTheMiddleAndEverythingEndsOnce(t *testing.T) { // scenario F9
	b := newBench(t)
	b.real()
	b.real()
	agents := []*standIn{b.agent("e1", 4, nil), b.agent("e2", 4, nil)}
	const n = 120
	for i := range n {
		b.submit(request("j", fmt.Sprintf("%04d", i)))
		if i == n/2 {
			b.node.Restart()
			natstest.Eventually(t, within, "NATS again", func() bool {
				_, err := b.js.AccountInfo(b.ctx())
				return err == nil
			})
		}
	}
	b.settled(n)
	runs := 0
	for _, a := range agents {
		a.mu.Lock()
		for _, k := range a.runs {
			runs += k
		}
		a.mu.Unlock()
	}
	t.Logf("%d rollouts, %d runs", n, runs)
	if runs > n+n/4 {
		t.Errorf("%d runs of %d rollouts", runs, n)
	}
}

func TestAStoppedDispatcherLeavesNothingForAckWait(t *testing.T) { // scenario F17
	b := newBench(t)
	one := b.real()
	a := b.agent("e1", 2, nil)
	const n = 200
	for i := range n {
		b.submit(request("j", fmt.Sprintf("%04d", i)))
	}
	natstest.Eventually(t, within, "some work done", func() bool { return b.messages(b.pool.Results()) > 5 })
	began := time.Now()
	if err := one.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Fatalf("stopped after %v", took)
	}
	b.real()
	b.settled(n)
	for key, k := range a.runs {
		if k != 1 {
			t.Errorf("%s ran %d times", key, k)
		}
	}
}

func TestALargeRequestRunsFromEndToEnd(t *testing.T) {
	b := newBench(t)
	b.real()
	want := strings.Repeat("z", subjects.MaxRequestBytes-4096)
	got := make(chan string, 1)
	b.agent("e1", 1, func(_ context.Context, r kvstate.Reservation) bool {
		req, err := subjects.DecodeRequest(r.Body)
		if err != nil {
			t.Errorf("the agent cannot read it: %v", err)
			got <- ""
			return false
		}
		got <- req.Prompt
		return false
	})
	r := request("j", "0001")
	r.Prompt = want
	b.submit(r)
	b.settled(1)
	if prompt := <-got; prompt != want {
		t.Fatalf("%d bytes of %d arrived", len(prompt), len(want))
	}
}

func TestAnInspectedCoreCountsItsSlots(t *testing.T) {
	b := newBench(t)
	d := b.real()
	b.agent("e1", 3, nil)
	b.agent("e2", 5, nil)
	natstest.Eventually(t, within, "8 slots", func() bool {
		n := 0
		if err := d.Inspect(b.ctx(), func(c *core.Core) { n = c.Slots() }); err != nil {
			t.Fatal(err)
		}
		return n == 8
	})
}

func TestLeadersStepDownInTheMiddleAndEverythingEndsOnce(t *testing.T) { // scenarios B4, F8
	t.Parallel()
	c := natstest.Cluster(t, 3)
	b := benchAt(t, c.List[0], c.Conn)
	cfg := b.config()
	cfg.Layout.Replicas = 3
	for range 2 {
		d, _ := b.running(cfg, nil)
		b.ready(d)
	}
	agents := []*standIn{b.agent("e1", 4, nil), b.agent("e2", 4, nil)}
	const n = 90
	for i := range n {
		b.submit(request("j", fmt.Sprintf("%04d", i)))
		switch i {
		case n / 4:
			c.StepDown(b.pool.Rollouts())
		case n / 2:
			c.StepDown(subjects.BucketStream(b.pool.Bucket(subjects.Reservations)))
		case 3 * n / 4:
			c.StepDown(b.pool.Results())
		}
	}
	b.settled(n)
	runs := 0
	for _, a := range agents {
		a.mu.Lock()
		for _, k := range a.runs {
			runs += k
		}
		a.mu.Unlock()
	}
	t.Logf("%d rollouts, %d runs", n, runs)
}

// What expired leaves nothing under an engine: the server's sequence there is 0
// again, and the next bind finds that out.
func TestAPoolWhoseMarkersExpiredBindsAgain(t *testing.T) {
	b := newBench(t)
	b.real()
	b.agent("e1", 2, nil)
	b.submit(request("j", "0001"))
	b.settled(1)
	s := must(b.js.Stream(b.ctx(), subjects.BucketStream(b.pool.Bucket(subjects.Reservations))))
	if err := s.Purge(b.ctx()); err != nil { // the markers' TTL, without waiting for it
		t.Fatal(err)
	}
	b.submit(request("j", "0002"))
	b.settled(2)
}

// scenario F11: a reader that never reads holds up nobody, and loses nothing.
func TestAReaderThatNeverReadsHoldsUpNobody(t *testing.T) {
	b := newBench(t)
	b.real()
	b.agent("e1", 4, nil)
	const n = 100
	for i := range n {
		slow := request("j", fmt.Sprintf("s%03d", i))
		slow.Reader = "slow"
		b.submit(slow)
		b.submit(request("j", fmt.Sprintf("m%03d", i)))
	}
	b.settled(2 * n)
	s := must(b.js.Stream(b.ctx(), b.pool.Results()))
	c := must(s.CreateConsumer(b.ctx(), b.pool.TrainerConsumer("j", "slow")))
	got := map[string]bool{}
	batch := must(c.Fetch(n, jetstream.FetchMaxWait(within)))
	for m := range batch.Messages() {
		got[m.Subject()] = true
	}
	if len(got) != n {
		t.Errorf("the slow reader finds %d answers when it comes at last: want %d", len(got), n)
	}
}
