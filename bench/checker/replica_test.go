package checker_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// Each key is overwritten a fifth of a second later, while servers of a
// cluster go away, one after the other. A recording that reads one copy only misses some of it.
//
// scenario F8
func TestNothingIsOverwrittenUnseenWhileServersGoAway(t *testing.T) {
	const (
		keys = 50
		gap  = 4 * time.Millisecond
	)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cluster := natstest.Cluster(t, 3)
	layout := subjects.Layout{Replicas: 3, Storage: jetstream.MemoryStorage, Budget: 256 << 20}
	b := newBusOn(ctx, t, cluster.Conn(t), layout)
	var each []*nats.Conn
	for _, n := range cluster.List {
		each = append(each, n.Conn(t, nats.IgnoreDiscoveredServers()))
	}
	if err := b.rec.Watch(ctx, each...); err != nil {
		t.Fatal(err)
	}

	writing, stop := context.WithCancel(ctx)
	var acked atomic.Int64
	var writer sync.WaitGroup
	writer.Go(func() {
		tick := time.NewTicker(gap)
		defer tick.Stop()
		for n := 0; writing.Err() == nil; n++ {
			h := subjects.Held{State: subjects.StateBound, Bind: n + 1, Epoch: "x", Tokens: 10, LeftMS: 1000}
			m := &nats.Msg{Subject: b.pool.ReservationSubject("e1", "j", fmt.Sprint(n%keys)), Header: h.Header()}
			once, done := context.WithTimeout(writing, 300*time.Millisecond)
			if _, err := b.js.PublishMsg(once, m, jetstream.WithRetryAttempts(0)); err == nil {
				acked.Add(1)
			}
			done()
			<-tick.C
		}
	})
	defer writer.Wait()
	defer stop()
	more := func() {
		t.Helper()
		least := acked.Load() + keys
		natstest.Eventually(t, 30*time.Second, "more writes", func() bool { return acked.Load() >= least })
	}
	for _, n := range cluster.List[:2] {
		more()
		n.Stop()
		natstest.Eventually(t, 30*time.Second, "a leader without "+n.Name(), func() bool {
			return cluster.Leader(subjects.BucketStream(b.pool.Bucket(subjects.Reservations))) != nil
		})
		more()
		n.Start()
		cluster.WaitReady()
		for _, s := range b.pool.Streams(layout) {
			cluster.WaitStream(s.Name)
		}
	}
	stop()
	writer.Wait()
	n := int(acked.Load())
	h, err := b.rec.Finish(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d acknowledged writes of %d keys, %d seen", n, keys, len(h.Reservations))
	if h.UnseenReservations != 0 || len(h.Reservations) < n {
		t.Errorf("%d writes acknowledged, %d seen, %d missed", n, len(h.Reservations), h.UnseenReservations)
	}
}
