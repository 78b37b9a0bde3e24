package client_test

import (
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// inBubble runs a story of minutes in fake time against a real server.
func inBubble(t *testing.T, story func(t *testing.T, b *bus)) {
	t.Helper()
	inBubbleWith(t, story)
}

func inBubbleWith(t *testing.T, story func(t *testing.T, b *bus), opts ...natstest.Option) {
	t.Helper()
	dir := t.TempDir()
	// The NATS library keeps timers in a pool, and one of a bubble must not be
	// used outside of it: two collections empty a pool.
	emptyPools := func() { runtime.GC(); runtime.GC() }
	emptyPools()
	defer emptyPools()
	synctest.Test(t, func(t *testing.T) {
		story(t, newBus(t, subjects.Layout{}, append(opts, natstest.InProcess(), natstest.Dir(dir))...))
	})
}

func pass(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	<-timer.C
}

// disk loses everything that stands in ROLLOUTS, as a power failure may.
func (b *bus) lose() {
	b.t.Helper()
	s, err := b.js.Stream(ctxFor(b.t), b.pool.Rollouts())
	must(b.t, err)
	must(b.t, s.Purge(ctxFor(b.t)))
}

func short(id string) *subjects.Request {
	r := request(id)
	r.Deadline = subjects.Duration(5 * time.Minute)
	return r
}

const overdue = 7*time.Minute + 30*time.Second // deadline, grace and the looks

// scenario B10
func TestAnAcceptedRolloutThatADiskLostIsSubmittedOnceMore(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client()
		h, err := c.Submit(ctxFor(t), short("0001"))
		must(t, err)
		b.lose()
		pass(t, 7*time.Minute-time.Second)
		if len(b.queued()) != 0 {
			t.Error("it was submitted again before its deadline and two minutes had passed")
		}
		pass(t, overdue-7*time.Minute)
		q := b.queued()
		if len(q) != 1 || q[0].ID != "0001" {
			t.Fatalf("%d stand in the queue", len(q))
		}
		b.answer(q[0])
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		res, err := c.Wait(ctx, h)
		must(t, err)
		must(t, c.Done(ctx, res))
		if c.Unanswered() != 0 {
			t.Errorf("%d unanswered", c.Unanswered())
		}
		c.Close()
	})
}

// scenario B10
func TestARolloutThatIsLostTwiceIsReportedLost(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client()
		h, err := c.Submit(ctxFor(t), short("0001"))
		must(t, err)
		_, err = c.Submit(ctxFor(t), short("0002"))
		must(t, err)
		waited := make(chan error, 1)
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		go func() { _, err := c.Wait(ctx, h); waited <- err }()
		b.lose()
		pass(t, overdue)
		if len(b.queued()) != 2 {
			t.Errorf("%d were submitted once more", len(b.queued()))
		}
		b.lose()
		pass(t, overdue)
		if len(b.queued()) != 0 {
			t.Error("a third submit")
		}
		err = <-waited
		want(t, err, client.ErrLost)
		if lost, ok := errors.AsType[*client.LostError](err); !ok || lost.ID != "0001" || !lost.Again {
			t.Errorf("%v", err)
		}
		for res, err := range c.Results(ctx) {
			want(t, err, client.ErrLost)
			if res.ID != "0002" {
				t.Errorf("%s is reported", res.ID)
			}
			break
		}
		if c.Unanswered() != 0 {
			t.Errorf("%d unanswered", c.Unanswered())
		}
		c.Close()
	})
}

func TestWhatIsStillSomewhereIsNotSubmittedAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client()
		for _, id := range []string{"queued", "bound", "answered", "received"} {
			_, err := c.Submit(ctxFor(t), short(id))
			must(t, err)
		}
		// As dispatchers and agents leave them: out of the queue and elsewhere.
		s, err := b.js.Stream(ctxFor(t), b.pool.Rollouts())
		must(t, err)
		all := b.queued()
		must(t, s.Purge(ctxFor(t)))
		_, err = c.Submit(ctxFor(t), short("queued2"))
		must(t, err)
		ctx := ctxFor(t)
		_, err = b.kv.Bind(ctx, kvstate.Bind{
			Held: subjects.Held{Engine: "e1", Job: testJob, ID: "bound", State: subjects.StateBound, Bind: 1, LeftMS: 300_000, Lane: subjects.LaneNormal},
			TTL:  25 * time.Hour, Body: []byte("{}"),
		})
		must(t, err)
		for _, r := range all {
			switch r.ID {
			case "received":
				b.answer(r)
				reg, err := b.kv.Result(ctx, testJob, "main", "received")
				must(t, err)
				must(t, b.kv.Received(ctx, reg))
			case "answered":
				b.answer(r)
			}
		}
		pass(t, overdue)
		counts := map[string]int{}
		for _, r := range b.queued() {
			counts[r.ID]++
		}
		// "queued" was taken away by the purge: it alone was lost.
		if counts["queued"] != 1 || counts["queued2"] != 1 || len(counts) != 2 {
			t.Errorf("in the queue: %v", counts)
		}
		if n := c.Unanswered(); n != 3 { // queued, queued2, bound
			t.Errorf("%d unanswered", n)
		}
		c.Close()
	})
}

func TestALookWaitsForNATSInsteadOfCallingThingsLost(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client()
		_, err := c.Submit(ctxFor(t), short("0001"))
		must(t, err)
		// As when a disk is full: the server is there, JetStream is not. (A
		// reconnect would take a timer of the bubble out of it, through a pool
		// of the NATS library.)
		srv := b.node.Running()
		config := *srv.JetStreamConfig()
		config.StoreDir = filepath.Dir(config.StoreDir) // the server adds its own directory again
		must(t, srv.DisableJetStream())
		pass(t, 30*time.Minute)
		if c.Unanswered() != 1 {
			t.Error("it was given up while NATS was away")
		}
		must(t, srv.EnableJetStream(&config))
		pass(t, time.Minute)
		if n := len(b.queued()); n != 1 || c.Unanswered() != 1 {
			t.Errorf("%d in the queue, %d unanswered", n, c.Unanswered())
		}
		c.Close()
	})
}

func TestWhatIsTooLargeForTheLedgerIsReportedInsteadOfSentAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client(client.LedgerBytes(0))
		_, err := c.Submit(ctxFor(t), short("0001"))
		must(t, err)
		b.lose()
		pass(t, overdue)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, err := range c.Results(ctx) {
			if lost, ok := errors.AsType[*client.LostError](err); !ok || lost.Again {
				t.Errorf("%v", err)
			}
			break
		}
		if len(b.queued()) != 0 {
			t.Error("it was submitted again")
		}
		c.Close()
	})
}

func TestWithoutALedgerNothingIsKept(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client(client.WithoutLedger())
		_, err := c.Submit(ctxFor(t), short("0001"))
		must(t, err)
		if c.Unanswered() != 0 {
			t.Error("it is kept")
		}
		b.lose()
		pass(t, overdue)
		if len(b.queued()) != 0 {
			t.Error("it was submitted again")
		}
		c.Close()
	})
}

// An answer that user code holds for long is not delivered to it twice.
func TestALongLookAtAnAnswerIsNotDisturbed(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		c := b.client()
		for _, id := range []string{"0001", "0002"} {
			_, err := c.Submit(ctxFor(t), short(id))
			must(t, err)
		}
		for _, r := range b.queued() {
			b.answer(r)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
		defer cancel()
		seen := map[string]int{}
		for res, err := range c.Results(ctx) {
			must(t, err)
			seen[res.ID]++
			pass(t, 5*time.Minute)
		}
		if seen["0001"] != 1 || seen["0002"] != 1 || len(seen) != 2 {
			t.Errorf("%v", seen)
		}
		cons, err := b.js.Consumer(ctxFor(t), b.pool.Results(), subjects.ConsumerTrainer(testJob, "main"))
		must(t, err)
		if i := cons.CachedInfo(); i.Delivered.Consumer != 4 { // two answers, two receipts
			t.Errorf("%d deliveries", i.Delivered.Consumer)
		}
		c.Close()
	})
}
