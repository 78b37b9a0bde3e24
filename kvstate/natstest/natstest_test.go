package natstest_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/kvstate/natstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func stream(tb testing.TB, nc *nats.Conn, replicas int) jetstream.JetStream {
	tb.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(tb.Context(), 10*time.Second)
	defer cancel()
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Replicas: replicas}); err != nil {
		tb.Fatal(err)
	}
	return js
}

// lastSeq publishes until it is acknowledged: a server may be on its way.
func lastSeq(tb testing.TB, js jetstream.JetStream) uint64 {
	tb.Helper()
	var seq uint64
	natstest.Eventually(tb, 20*time.Second, "an acknowledged publish", func() bool {
		ctx, cancel := context.WithTimeout(tb.Context(), time.Second)
		defer cancel()
		ack, err := js.Publish(ctx, "s", []byte("x"))
		if err != nil {
			return false
		}
		seq = ack.Sequence
		return true
	})
	return seq
}

func TestARestartedServerKeepsItsDataAndItsClients(t *testing.T) {
	n := natstest.Server(t)
	js := stream(t, n.Conn(t), 1)
	before := lastSeq(t, js)
	n.Restart()
	if after := lastSeq(t, js); after <= before {
		t.Fatalf("sequence %d after the restart, %d before", after, before)
	}
}

func TestAClusterSurvivesAStepDownAndTheStopOfEachNode(t *testing.T) {
	c := natstest.Cluster(t, 3)
	js := stream(t, c.Conn(t), 3)
	last := lastSeq(t, js)
	old := c.Leader("S")
	c.StepDown("S")
	if c.Leader("S") == old {
		t.Fatal("the old leader still leads")
	}
	for _, n := range c.List {
		n.Stop()
		if seq := lastSeq(t, js); seq <= last {
			t.Fatalf("with %s down: sequence %d after %d", n.Name(), seq, last)
		}
		n.Start()
		c.WaitReady()
		c.WaitStream("S")
	}
}

func TestAServerRunsInsideABubble(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		n := natstest.Server(t, natstest.InProcess(), natstest.Dir(dir))
		js := stream(t, n.Conn(t), 1)
		if seq := lastSeq(t, js); seq != 1 {
			t.Fatalf("sequence %d, want 1", seq)
		}
		began := time.Now()
		time.AfterFunc(time.Hour, func() {})
		wait := time.NewTimer(time.Hour)
		<-wait.C
		if time.Since(began) != time.Hour {
			t.Fatal("the bubble's clock does not run in fake time")
		}
	})
}

func TestALineLosesRepliesAndHoldsTraffic(t *testing.T) {
	n := natstest.Server(t)
	line := natstest.Link(t, n)
	js := stream(t, line.Conn(t), 1)
	direct, err := jetstream.New(n.Conn(t))
	if err != nil {
		t.Fatal(err)
	}
	count := func() uint64 {
		s, err := direct.Stream(t.Context(), "S")
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.Msgs
	}
	publish := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := js.Publish(ctx, "s", nil)
		return err
	}
	line.LoseReplies()
	if err := publish(); err == nil {
		t.Fatal("an acknowledgement came through")
	}
	if got := count(); got != 1 {
		t.Fatalf("%d messages stored with the replies lost, want 1", got)
	}
	line.Hold()
	line.Heal()
	lastSeq(t, js)
	before := count()
	line.Hold()
	if err := publish(); err == nil || count() != before {
		t.Fatalf("error %v, %d messages while held, want one of either", err, count())
	}
	line.Heal()
	natstest.Eventually(t, 5*time.Second, "what was held is stored", func() bool { return count() == before+1 })
	line.Cut()
	if err := publish(); err == nil {
		t.Fatal("published through a cut line")
	}
	line.Heal()
	lastSeq(t, js)
}

func TestASplitServerFollowsAgainWhenItJoins(t *testing.T) {
	c := natstest.Cluster(t, 3, natstest.Splittable())
	js := stream(t, c.List[1].Conn(t, nats.IgnoreDiscoveredServers()), 3)
	lastSeq(t, js)
	c.WaitStream("S")
	alone := c.List[0]
	if c.Leader("S") == alone {
		c.StepDown("S")
	}
	c.Split(alone)
	last := lastSeq(t, js)
	cut, err := jetstream.New(alone.Conn(t, nats.IgnoreDiscoveredServers()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if ack, err := cut.Publish(ctx, "s", nil); err == nil {
		t.Fatalf("published at %d through a server that is cut off", ack.Sequence)
	}
	c.Join(alone)
	if seq := lastSeq(t, cut); seq <= last {
		t.Fatalf("sequence %d after joining, %d before", seq, last)
	}
	c.WaitReady()
	c.WaitStream("S")
}
