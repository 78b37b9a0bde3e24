package kvstate

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// told is a session without a server, with what its handler is told.
type told struct {
	*session[delivery, delivery]
	says []string
}

func newTold(t *testing.T, own bool) *told {
	t.Helper()
	n := natstest.Server(t)
	pool, err := subjects.NewPool("p")
	must(t, err)
	s, err := Open(n.Conn(t), pool, Heartbeat(testHeartbeat))
	must(t, err)
	out := &told{}
	say := func(format string, args ...any) { out.says = append(out.says, fmt.Sprintf(format, args...)) }
	f := &follower[delivery, delivery]{s: s, sp: followSpec{fixedName: own, unproved: own}}
	f.decode = func(d delivery) (delivery, delivery, kind, error) {
		if d.deleted() {
			return d, d, kindGone, nil
		}
		return d, d, kindPut, nil
	}
	f.h = Handler[delivery, delivery]{
		Swap: func(ps, gs []delivery) {
			text := "swap"
			for _, p := range ps {
				text += " " + p.subject + "@" + strconv.FormatUint(p.seq, 10)
			}
			for _, g := range gs {
				text += " -" + g.subject + "@" + strconv.FormatUint(g.seq, 10)
			}
			say("%s", text)
		},
		Put:   func(d delivery) { say("put %s@%d", d.subject, d.seq) },
		Gone:  func(d delivery) { say("gone %s@%d", d.subject, d.seq) },
		Alive: func() { say("alive") },
	}
	p, err := newPuller(s, "S", "c", true)
	must(t, err)
	t.Cleanup(p.close)
	out.session = &session[delivery, delivery]{f: f, pull: p, began: time.Now(), items: map[string]item[delivery, delivery]{}}
	return out
}

// delivers hands the session a message as its consumer would.
func (x *told) delivers(subject string, seq, consumerSeq, pending uint64) error {
	m := nats.NewMsg(subject)
	m.Sub = x.pull.sub
	m.Reply = fmt.Sprintf("$JS.ACK.S.c.1.%d.%d.%d.%d", seq, consumerSeq, time.Now().UnixNano(), pending)
	return x.message(m)
}

func (x *told) idles(consumerSeq, seq uint64) error {
	m := nats.NewMsg(x.pull.inbox + ".1")
	m.Header = nats.Header{
		"Status": {"100"}, "Nats-Last-Consumer": {strconv.FormatUint(consumerSeq, 10)},
		"Nats-Last-Stream": {strconv.FormatUint(seq, 10)},
	}
	return x.message(m)
}

// leaderHas is the leader's word, given just now.
func (x *told) leaderHas(last uint64) error {
	return x.proven(proof{asked: time.Now(), answered: time.Now(), last: last, created: time.Unix(1, 0)})
}

// said checks and forgets.
func (x *told) said(t *testing.T, want ...string) {
	t.Helper()
	if fmt.Sprint(x.says) != fmt.Sprint(want) {
		t.Fatalf("told %q, want %q", x.says, want)
	}
	x.says = nil
}

func TestAViewIsNotCompleteBeforeTheLeaderSaysSo(t *testing.T) {
	x := newTold(t, false)
	must(t, x.delivers("a", 3, 1, 1))
	must(t, x.delivers("b", 5, 2, 0)) // all that the consumer's own server has
	x.said(t)
	must(t, x.leaderHas(7))
	x.said(t)
	must(t, x.delivers("c", 6, 3, 0))
	x.said(t)
	must(t, x.idles(3, 8)) // 7 and 8 are gone, or match nothing
	x.said(t, "swap a@3 b@5 c@6", "alive")
}

func TestAnEmptyStreamIsAViewToo(t *testing.T) {
	x := newTold(t, false)
	must(t, x.leaderHas(0))
	x.said(t)
	must(t, x.idles(0, 0))
	x.said(t, "swap", "alive")
}

func TestAnEntryOverwrittenBeforeItWasDeliveredIsWaitedFor(t *testing.T) {
	x := newTold(t, false)
	must(t, x.leaderHas(10))
	must(t, x.delivers("b", 10, 1, 2)) // a stood at 5 and was overwritten at 12
	x.said(t)
	must(t, x.delivers("c", 11, 2, 2)) // the stream never rests
	x.said(t)
	must(t, x.leaderHas(13)) // asked after 10 was reached
	must(t, x.delivers("a", 12, 3, 2))
	x.said(t)
	must(t, x.delivers("b", 13, 4, 2))
	x.said(t, "swap c@11 a@12 b@13", "alive")
	must(t, x.delivers("b", 14, 5, 2))
	x.said(t, "put b@14", "alive")
}

func TestASessionEndsOnAnyDoubt(t *testing.T) {
	for name, doubt := range map[string]func(*told) error{
		"a gap":                func(x *told) error { return x.delivers("b", 9, 3, 0) },
		"a message lost last":  func(x *told) error { return x.idles(2, 9) },
		"a consumer made anew": func(x *told) error { return x.idles(0, 9) },
		"a stream made anew": func(x *told) error {
			return x.proven(proof{asked: time.Now(), last: 3, created: time.Unix(2, 0)})
		},
		"a copy that stays behind": func(x *told) error {
			late := time.Now().Add(-silence*testHeartbeat - time.Millisecond)
			must(t, x.proven(proof{asked: late, answered: late, last: 99, created: time.Unix(1, 0)}))
			return x.idles(1, 9)
		},
		"a consumer that is gone": func(x *told) error {
			m := nats.NewMsg(x.pull.inbox + ".1")
			m.Header = nats.Header{"Status": {"409"}, "Description": {"Consumer Deleted"}}
			return x.message(m)
		},
		"nobody there": func(x *told) error {
			m := nats.NewMsg(x.pull.inbox + ".1")
			m.Header = nats.Header{"Status": {"503"}}
			return x.message(m)
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := newTold(t, false)
			must(t, x.delivers("a", 3, 1, 0))
			must(t, x.leaderHas(3))
			if err := doubt(x); err == nil {
				t.Fatal("the session goes on")
			}
		})
	}
}

func TestWithoutTheLeadersWordThereIsNoProofOfContact(t *testing.T) {
	x := newTold(t, false)
	must(t, x.delivers("a", 3, 1, 0))
	must(t, x.leaderHas(3))
	x.said(t, "swap a@3", "alive")
	x.provenT = time.Now().Add(-silence * testHeartbeat)
	must(t, x.idles(1, 3))
	must(t, x.proven(proof{err: ErrUnavailable}))
	x.said(t)
	must(t, x.delivers("a", 4, 2, 0))
	x.said(t, "put a@4")
	must(t, x.leaderHas(4))
	x.said(t, "alive")
}

func TestAnAgentsViewDoesNotGoBackBehindWhatItHasSeen(t *testing.T) {
	x := newTold(t, true)
	x.f.floor = 8
	must(t, x.delivers("a", 3, 1, 0))
	must(t, x.idles(1, 5)) // this server's copy is behind
	x.said(t)
	must(t, x.delivers("b", 9, 2, 0))
	x.said(t, "swap a@3 b@9", "alive")

	// Only a stream made anew stays behind for long.
	x = newTold(t, true)
	x.f.floor, x.began = 8, time.Now().Add(-patience*testHeartbeat-time.Millisecond)
	must(t, x.idles(0, 2))
	x.said(t, "swap", "alive")
}

// A consumer that loses a message, for real: somebody else takes it.
func TestAFollowerNoticesAMessageThatDidNotReachIt(t *testing.T) {
	t.Parallel()
	e := single(t, jetstream.MemoryStorage)
	f := e.watch(t, e.store, "thief", "").wait(t)
	names := e.consumersOf(t, "f-thief-")
	swaps, _ := f.counts()
	// Requests are served in turn: this one gets every other message.
	theft := e.nc.NewInbox()
	sub, err := e.nc.SubscribeSync(theft)
	must(t, err)
	body := `{"batch":3,"expires":20000000000}`
	must(t, e.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+e.store.reservationsStream()+"."+names[0], theft, []byte(body)))
	must(t, e.nc.Flush())
	want := []string{}
	for i := range 6 {
		id := fmt.Sprintf("r%d", i)
		want = append(want, keyOf("e", id, 1, e.bind(t, "e", id, 1)))
	}
	if _, err := sub.NextMsg(within); err != nil {
		t.Fatalf("nothing was taken: %v", err)
	}
	f.shows(t, want...)
	if n, _ := f.counts(); n <= swaps {
		t.Fatal("a message was missing and the follower did not start over")
	}
}

// scenarios B4 and F10
func TestAFollowerOnACutOffServerProvesNothing(t *testing.T) {
	t.Parallel()
	c := natstest.Cluster(t, 3, natstest.Splittable())
	e := &env{
		layout:  subjects.Layout{Replicas: 3, Budget: 128 << 20},
		cluster: c, nc: c.List[0].Conn(t, nats.ReconnectBufSize(-1), nats.IgnoreDiscoveredServers()),
	}
	e.open(t)
	stream := e.store.reservationsStream()
	c.WaitStream(stream)
	alone := c.List[2]
	if c.Leader(stream) == alone {
		c.StepDown(stream)
	}
	a := e.bind(t, "e", "a", 1)

	// A consumer in memory lives on any one server: start followers until one is there.
	there := func(s *Store, name string) (f *following) {
		natstest.Eventually(t, within, "a follower whose consumer is on the server to cut off", func() bool {
			if f != nil {
				f.stop()
			}
			f = e.watch(t, s, name, "").wait(t)
			names := e.consumersOf(t, "f-"+name+"-")
			return len(names) == 1 && alone.Running().JetStreamIsConsumerLeader("$G", stream, names[0])
		})
		return f
	}
	// One reaches its consumer and not the leader, the other the leader and not its consumer.
	f := there(e.storeOn(t, alone.Conn(t, nats.ReconnectBufSize(-1), nats.IgnoreDiscoveredServers())), "inside")
	g := there(e.store, "outside")
	f.shows(t, keyOf("e", "a", 1, a))
	c.Split(alone)
	heard := time.Now()
	natstest.Eventually(t, within, "no more proof of contact", func() bool {
		if last := f.Contact(); last.After(heard) {
			heard = last
		}
		return time.Since(heard) > 3*silence*testHeartbeat
	})
	b := e.bind(t, "e", "b", 1)
	g.shows(t, keyOf("e", "a", 1, a), keyOf("e", "b", 1, b))
	f.shows(t, keyOf("e", "a", 1, a))
	c.Join(alone)
	f.shows(t, keyOf("e", "a", 1, a), keyOf("e", "b", 1, b))
	natstest.Eventually(t, within, "proof of contact again", func() bool { return f.Contact().After(heard) })
}

// A lost connection is noticed at once, not when the consumer has been silent for long.
func TestAFollowerStartsOverAsSoonAsItIsConnectedAgain(t *testing.T) {
	t.Parallel()
	e := single(t, jetstream.MemoryStorage)
	const hb = 5 * time.Second
	s, line := e.remote(t, Heartbeat(hb))
	f := e.watch(t, s, "slow", "").wait(t)
	line.Cut()
	natstest.Eventually(t, within, "the connection lost", func() bool { return !s.nc.IsConnected() })
	a := e.bind(t, "e", "a", 1)
	began := time.Now()
	line.Heal()
	f.shows(t, keyOf("e", "a", 1, a))
	if took := time.Since(began); took > hb {
		t.Fatalf("it took %v, want less than a heartbeat", took)
	}
}
