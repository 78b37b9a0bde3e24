package kvevents

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects/blockhash"
	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// publisher is an engine's event side: PUB and ROUTER, a ring, old or new
// framing of replays.
type publisher struct {
	t         testing.TB
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	pubAddr   string
	replay    string
	newFrames bool

	mu       sync.Mutex
	subs     []*zmq.Conn
	ring     [][]byte // by sequence
	from     int      // first sequence still in the ring
	requests []uint64
}

func publish(t testing.TB, pubAddr, replayAddr string) *publisher {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &publisher{t: t, cancel: cancel}
	listen := func(addr string, typ zmq.Type, serve func(*zmq.Conn)) string {
		var l *zmq.Listener
		eventually(t, "listen on "+addr, func() (ok bool) {
			var err error
			l, err = zmq.Listen(ctx, addr, zmq.Options{Type: typ})
			return err == nil
		})
		p.wg.Go(func() {
			for {
				c, err := l.Accept(ctx)
				if err != nil {
					return
				}
				context.AfterFunc(ctx, func() { _ = c.Close() })
				p.wg.Go(func() { serve(c) })
			}
		})
		return "tcp://" + l.Addr().String()
	}
	p.pubAddr = listen(pubAddr, zmq.PUB, func(c *zmq.Conn) {
		if _, err := c.Recv(); err != nil { // the subscription
			return
		}
		p.mu.Lock()
		p.subs = append(p.subs, c)
		p.mu.Unlock()
		_, _ = c.Recv() // until it ends
		p.mu.Lock()
		p.subs = slices.DeleteFunc(p.subs, func(o *zmq.Conn) bool { return o == c })
		p.mu.Unlock()
	})
	if replayAddr != "" {
		p.replay = listen(replayAddr, zmq.ROUTER, p.answer)
	}
	t.Cleanup(p.stop)
	return p
}

func (p *publisher) stop() { p.cancel(); p.wg.Wait() }

// drop breaks the connections of the subscribers, not the process.
func (p *publisher) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.subs {
		_ = c.Close()
	}
}

func (p *publisher) answer(c *zmq.Conn) {
	defer c.Close()
	for {
		f, err := c.Recv()
		if err != nil || len(f) != 2 {
			return
		}
		from := binary.BigEndian.Uint64(f[1])
		p.mu.Lock()
		p.requests = append(p.requests, from)
		ring, first := p.ring, p.from
		p.mu.Unlock()
		var out []byte
		for n := max(int(from), first); n < len(ring); n++ {
			if p.newFrames {
				out = zmq.Encode(out, nil, []byte("kv"), number8(uint64(n)), ring[n])
			} else {
				out = zmq.Encode(out, nil, number8(uint64(n)), ring[n])
			}
			if len(out) > 1<<20 {
				if c.Write(out) != nil {
					return
				}
				out = out[:0]
			}
		}
		end := [][]byte{nil, slices.Repeat([]byte{0xff}, 8), nil}
		if p.newFrames {
			end = append([][]byte{nil}, end...)
		}
		if c.Write(zmq.Encode(out, end...)) != nil {
			return
		}
	}
}

func number8(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func (p *publisher) subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.subs)
}

// send publishes the next batch; lose keeps it from the subscribers.
func (p *publisher) send(lose bool, rank int, events ...Event) {
	p.sendRaw(lose, encode(rank, events...))
}

func (p *publisher) sendRaw(lose bool, payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := uint64(len(p.ring))
	p.ring = append(p.ring, payload)
	for _, c := range p.subs {
		if !lose {
			_ = c.Send([]byte("kv"), number8(n), payload)
		}
	}
}

func encode(rank int, events ...Event) []byte {
	var w Encoder
	w.Begin(1.7e9, len(events))
	for i := range events {
		w.Event(&events[i])
	}
	return slices.Clone(w.End(rank))
}

// within bounds every wait of these tests.
const within = 20 * time.Second

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	natstest.Eventually(t, within, what, ok)
}

// follow runs a feed with quick times.
func follow(t testing.TB, cfg Config) (*Feed, *mirror) {
	t.Helper()
	m := newMirror(t)
	cfg.Epoch, cfg.Publish, cfg.Index.Model = "e", m.take, "m"
	cfg.Tick, cfg.BackoffMin, cfg.BackoffMax = 2*time.Millisecond, 2*time.Millisecond, 20*time.Millisecond
	if cfg.CoolDown == 0 {
		cfg.CoolDown = 30 * time.Millisecond
	}
	if cfg.Confirm == 0 {
		cfg.Confirm = time.Hour
	}
	f, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		f.view.mu.Lock()
		f.view.flush()
		f.view.mu.Unlock()
		if err := m.same(f.View()); err != nil {
			t.Error(err)
		}
	})
	return f, m
}

// chained are one-block events of a prompt: hash i+1 after hash i.
func chained(from, to int) []Event {
	var out []Event
	for i := from; i < to; i++ {
		out = append(out, stored(GPU, uint64(i), 64, seq(i*64, 64), uint64(i)+1))
	}
	return out
}

func prompt(blocks int) []uint64 {
	return blockhash.Chain(nil, blockhash.Namespace("m", "", ""), seq(0, blocks*64), 64)
}

func (f *Feed) matches(blocks, want int) func() bool {
	return func() bool { n, _ := f.View().Match(prompt(blocks)); return n == want && f.View().Len() == want }
}

const anyPort = "tcp://127.0.0.1:0"

func TestAnAgentThatComesLaterLearnsTheCacheByReplay(t *testing.T) {
	for _, newFrames := range []bool{false, true} {
		p := publish(t, anyPort, anyPort)
		p.newFrames = newFrames
		for i := range 20 {
			p.send(false, 0, chained(i, i+1)...)
		}
		f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}})
		eventually(t, "replayed blocks", f.matches(30, 20))
		eventually(t, "subscribed", func() bool { return p.subscribers() == 1 })
		p.send(false, 0, chained(20, 25)...)
		eventually(t, "live blocks", f.matches(30, 25))
		if s := f.Status()[0]; s.Partial || !s.Trusted || !f.Exact() || s.BlockSize != 64 {
			t.Errorf("%+v", s)
		}
	}
}

func TestAGapIsReplayedAndNothingIsAppliedTwice(t *testing.T) {
	p := publish(t, anyPort, anyPort)
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(false, 0, chained(0, 1)...)
	p.send(true, 0, chained(1, 2)...)
	p.send(true, 0, chained(2, 3)...)
	p.send(false, 0, chained(3, 4)...)
	eventually(t, "the gap filled", f.matches(5, 4))
	if s := f.Status()[0]; s.Batches != 4 || s.Replays != 2 {
		t.Errorf("%+v", s)
	}
}

func TestWhatWasSentBeforeTheSubscriptionArrivedIsFoundThoughTheEngineIsIdle(t *testing.T) {
	p := publish(t, anyPort, anyPort)
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}, Confirm: 100 * time.Millisecond})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(true, 0, chained(0, 3)...)
	eventually(t, "the lost batch", f.matches(5, 3))
	if s := f.Status()[0]; s.Partial || s.Replays != 2 {
		t.Errorf("%+v", s)
	}
}

func TestWithoutAReplayEndpointAGapEndsTheCredit(t *testing.T) {
	p := publish(t, anyPort, "")
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr}}, CoolDown: time.Hour})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(false, 0, chained(0, 1)...)
	eventually(t, "first block", f.matches(5, 1))
	p.send(true, 0, chained(1, 2)...)
	p.send(false, 0, chained(2, 3)...)
	eventually(t, "degraded", func() bool { return f.View().Len() == 0 && !f.Exact() })
	p.send(false, 0, Event{Kind: Cleared})
	p.send(false, 0, chained(0, 2)...)
	eventually(t, "after the engine cleared", f.matches(5, 2))
}

// scenario C2
func TestARestartedEngineLosesItsBlocks(t *testing.T) {
	for _, replay := range []bool{true, false} {
		at := ""
		if replay {
			at = anyPort
		}
		p := publish(t, anyPort, at)
		f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}})
		eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
		p.send(false, 0, chained(0, 9)...)
		eventually(t, "first life", f.matches(9, 9))
		p.stop()
		q := publish(t, p.pubAddr, p.replay)
		q.send(false, 0, stored(GPU, 0, 64, seq(7000, 64), 99)) // perhaps before it is heard
		eventually(t, "subscribed again", func() bool { return q.subscribers() == 1 })
		q.send(false, 0, stored(GPU, 0, 64, seq(8000, 64), 100))
		eventually(t, "second life", func() bool {
			n, _ := f.View().Match(prompt(1))
			return n == 0 && f.View().Len() > 0 && f.Exact()
		})
	}
}

func TestALostConnectionToTheSameProcessKeepsTheView(t *testing.T) {
	p := publish(t, anyPort, anyPort)
	same := func(context.Context) (string, error) { return "started at 5", nil }
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}, Identity: same})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(false, 0, chained(0, 3)...)
	eventually(t, "stored", f.matches(9, 3))
	before := f.Status()[0].Index.Stored
	p.drop()
	p.send(true, 0, chained(3, 5)...) // nobody hears it
	eventually(t, "what was missed", f.matches(9, 5))
	if got := f.Status()[0].Index.Stored; got != before+2 {
		t.Errorf("%d stores applied, want only the two missed", got-before)
	}
}

// scenario C12
func TestAnotherRanksPortIsRefused(t *testing.T) {
	p := publish(t, anyPort, anyPort)
	f, _ := follow(t, Config{Sources: []Source{{Rank: 1, Endpoint: p.pubAddr, Replay: p.replay}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 })
	p.send(false, 0, chained(0, 3)...)
	eventually(t, "refused", func() bool { return f.Status()[0].Refused })
	p.send(false, 1, chained(0, 3)...)
	eventually(t, "alarm", func() bool { return f.Alarms()["rank_mismatch/1"] > 0 })
	if f.Exact() || f.View().Len() != 0 {
		t.Errorf("merged: %d blocks", f.View().Len())
	}
	for _, twice := range [][]Source{{{Rank: 0, Endpoint: "tcp://a:1"}, {Rank: 1, Endpoint: "tcp://a:1"}}, {{Rank: 0, Endpoint: "tcp://a:1"}, {Rank: 0, Endpoint: "tcp://a:2"}}, nil} {
		if _, err := New(Config{Sources: twice}); err == nil {
			t.Errorf("accepted %+v", twice)
		}
	}
}

// scenario C12
func TestASecondPublisherOnABoundPortIsNotHeard(t *testing.T) {
	path := "ipc://" + t.TempDir() + "/kv"
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: path, Bind: true}}})
	dial := func() (c *zmq.Conn) {
		eventually(t, "dial", func() bool {
			var err error
			c, err = zmq.Dial(t.Context(), path, zmq.Options{Type: zmq.PUB})
			return err == nil
		})
		return c
	}
	first := dial()
	defer first.Close()
	if _, err := first.Recv(); err != nil {
		t.Fatal(err)
	}
	_ = first.Send([]byte(""), number8(0), encode(0, chained(0, 2)...))
	eventually(t, "the first one's blocks", f.matches(5, 2))
	second := dial()
	defer second.Close()
	_ = second.Send([]byte(""), number8(0), encode(0, stored(GPU, 0, 64, seq(9000, 64), 77)))
	eventually(t, "alarm", func() bool { return f.Alarms()["two_publishers/0"] == 1 })
	_ = first.Send([]byte(""), number8(1), encode(0, chained(2, 3)...))
	eventually(t, "the first one goes on", f.matches(5, 3))
	first.Close()
	eventually(t, "disconnected", func() bool { return !f.Status()[0].Connected })
	third := dial()
	defer third.Close()
	_ = third.Send([]byte(""), number8(0), encode(0, chained(0, 1)...))
	eventually(t, "a new one is heard, the old one's blocks are gone", f.matches(5, 1))
}

// scenario C10
func TestABrokenEventIsResynced(t *testing.T) {
	p := publish(t, anyPort, anyPort)
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(false, 0, chained(0, 2)...)
	eventually(t, "stored", f.matches(5, 2))
	p.sendRaw(false, unhex(t, "93cb41da3054981000009291ac426c6f636b52656d6f76656491b0416c6c426c6f636b73436c656172656400")) // one broken, one cleared
	eventually(t, "siblings applied, untrusted", func() bool { s := f.Status()[0]; return s.Index.Cleared == 1 && s.Broken == 1 })
	eventually(t, "trusted again", f.Exact)
	p.send(false, 0, chained(0, 3)...)
	eventually(t, "what came since", f.matches(5, 3))
	if f.Alarms()["broken_event/0"] == 0 {
		t.Error("no alarm")
	}
}

// scenario C4
func TestUnknownParentsInAWholeStreamAreResynced(t *testing.T) {
	p := publish(t, anyPort, anyPort)
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(false, 0, stored(GPU, 500, 64, seq(0, 64), 501))
	eventually(t, "parked", func() bool { return f.Status()[0].Index.Parked == 1 })
	f.view.mu.Lock()
	f.start = f.start.Add(-6 * time.Second) // it waits for six seconds now
	f.view.mu.Unlock()
	eventually(t, "resynced", func() bool { return f.Alarms()["unknown_parents/0"] > 0 && f.Status()[0].Replays > 1 && f.Exact() })
	if f.View().Len() != 0 {
		t.Error("a block without its parent is credited")
	}
}

// scenario C5
func TestACommandThatEmptiesTheCacheNeedsNoEvent(t *testing.T) {
	p := publish(t, anyPort, "")
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	p.send(false, 0, chained(0, 3)...)
	eventually(t, "stored", f.matches(5, 3))
	f.Emptied()
	if f.View().Len() != 0 {
		t.Error("blocks are left")
	}
	f.SetEpoch("e2")
	p.send(false, 0, chained(0, 1)...)
	eventually(t, "next life", f.matches(5, 1))
	if epoch, _ := f.View().Seq(); epoch != "e2" {
		t.Errorf("epoch %q", epoch)
	}
}

// scenario C9: whoever is not there holds up nobody.
func TestAPortWhereNobodyPublishesIsAlarmedAndHoldsUpNobody(t *testing.T) {
	p := publish(t, anyPort, "")
	f, _ := follow(t, Config{Sources: []Source{{Endpoint: p.pubAddr}, {Rank: 1, Endpoint: "tcp://127.0.0.1:1"}}, MuteAfter: 20 * time.Millisecond})
	eventually(t, "the first rank is followed", func() bool { return p.subscribers() == 1 })
	p.send(false, 0, chained(0, 4)...)
	eventually(t, "its blocks count", f.matches(4, 4))
	eventually(t, "the second one's port is told to be mute", func() bool { return f.Alarms()["mute/1"] > 0 })
	if f.Exact() || f.Alarms()["mute/0"] != 0 {
		t.Errorf("exact %v, alarms %v", f.Exact(), f.Alarms())
	}
}

func TestRanksAreUnited(t *testing.T) {
	p, q := publish(t, anyPort, ""), publish(t, anyPort, "")
	f, _ := follow(t, Config{Sources: []Source{{Rank: 0, Endpoint: p.pubAddr}, {Rank: 1, Endpoint: q.pubAddr}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && q.subscribers() == 1 && f.Exact() })
	p.send(false, 0, chained(0, 3)...)
	q.send(false, 1, chained(0, 5)...)
	eventually(t, "both", f.matches(9, 5))
	q.send(false, 1, Event{Kind: Cleared})
	eventually(t, "rank 0's stay", f.matches(9, 3))
	p.send(false, 0, removed(GPU, 3))
	eventually(t, "removed by the last holder", f.matches(9, 2))
}

// 600,000 events in small batches, faster than they are decoded: memory stays
// in its bounds, the gap is found, the view is right again.
func TestABurstIsSurvived(t *testing.T) {
	const events, perBatch, size = 600_000, 4, 1 << 20
	p := publish(t, anyPort, anyPort)
	f, _ := follow(t, Config{RingMessages: 2000, RingBytes: size, HeldBatches: 500, CoolDown: 20 * time.Millisecond,
		Index:   IndexConfig{MaxNodes: 50_000, MaxParked: 100_000},
		Sources: []Source{{Endpoint: p.pubAddr, Replay: p.replay}}})
	eventually(t, "subscribed", func() bool { return p.subscribers() == 1 && f.Exact() })
	var burst []byte
	n := 0
	for i := range events / perBatch {
		var batch []Event
		for j := range perBatch / 2 { // a block comes, an old one goes
			h := uint64(i*perBatch/2 + j + 1)
			batch = append(batch, stored(GPU, 0, 64, seq(int(h)*64, 64), h))
			if h > 1000 {
				batch = append(batch, removed(GPU, h-1000))
			} else {
				batch = append(batch, removed(GPU, 1<<40))
			}
		}
		payload := encode(0, batch...)
		p.ring = append(p.ring, payload)
		burst = zmq.Encode(burst, []byte("kv"), number8(uint64(i)), payload)
		n += len(batch)
	}
	if n != events {
		t.Fatal(n)
	}
	p.mu.Lock()
	p.from = len(p.ring) - 10_000 // the ring's default length
	sub := p.subs[0]
	p.mu.Unlock()
	for len(burst) > 0 {
		k := min(len(burst), 1<<18)
		if err := sub.Write(burst[:k]); err != nil {
			t.Fatal(err)
		}
		burst = burst[k:]
	}
	eventually(t, "the view of the last 1,000 blocks", func() bool {
		s := f.Status()[0]
		return s.Trusted && s.Applied == uint64(events/perBatch-1) && f.View().Len() >= 1000
	})
	s := f.Status()[0]
	if s.Dropped == 0 || s.Replays < 2 {
		t.Errorf("the burst fitted into the ring, nothing was tried: %+v", s)
	}
	if s.RingPeak > size || f.View().Len() > 11_000 {
		t.Errorf("ring %d bytes, %d blocks", s.RingPeak, f.View().Len())
	}
	t.Logf("dropped %d messages, %d replays, %d blocks held", s.Dropped, s.Replays, f.View().Len())
	last := stored(GPU, 0, 64, seq(5, 64), 1<<50)
	p.send(false, 0, last)
	eventually(t, "the stream goes on", func() bool {
		n, _ := f.View().Match(blockhash.Chain(nil, blockhash.Namespace("m", "", ""), last.Tokens, 64))
		return n == 1
	})
}

// scenario C6
func TestTheAuditNoticesAMappingThatNeverMatches(t *testing.T) {
	cached, none := 64, 0
	for name, c := range map[string]struct {
		runs []AuditedRun // repeated
		want []AlarmKind
	}{
		"no prompt is ever found":        {[]AuditedRun{{PromptBlocks: 4, Held: 100, Cached: &cached}}, []AlarmKind{AlarmNoMatch}},
		"that needs no report":           {[]AuditedRun{{PromptBlocks: 4, Held: 100}}, []AlarmKind{AlarmNoMatch}},
		"matches are never confirmed":    {[]AuditedRun{{PromptBlocks: 4, Predicted: 2, Held: 100, Cached: &none}}, []AlarmKind{AlarmFalseHits}},
		"siblings that come at once":     {[]AuditedRun{{PromptBlocks: 4, Appeared: 4, Held: 100, Cached: &cached}}, nil},
		"some match":                     {[]AuditedRun{{PromptBlocks: 4, Held: 9}, {PromptBlocks: 4, Predicted: 1, Held: 9, Cached: &cached}}, nil},
		"short prompts say nothing":      {[]AuditedRun{{Held: 100, Cached: &none}}, nil},
		"an empty view says nothing":     {[]AuditedRun{{PromptBlocks: 4, Cached: &cached}}, nil},
		"an engine that does not report": {[]AuditedRun{{PromptBlocks: 4, Predicted: 2, Held: 100}}, nil},
	} {
		var got []AlarmKind
		a := NewAudit(func(k AlarmKind, _ string) { got = append(got, k) })
		for i := range auditRuns {
			a.Run(c.runs[i%len(c.runs)])
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: alarms %v, want %v", name, got, c.want)
		}
	}
	// What begins after a good while is noticed too.
	var got []AlarmKind
	a := NewAudit(func(k AlarmKind, _ string) { got = append(got, k) })
	for i := range 4 * auditRuns {
		r := AuditedRun{PromptBlocks: 4, Held: 100}
		if i < 3*auditRuns {
			r.Appeared = 4
		}
		a.Run(r)
	}
	if !slices.Equal(got, []AlarmKind{AlarmNoMatch}) {
		t.Errorf("later: alarms %v", got)
	}
}

func TestTheApproximateViewExpiresAndIsBounded(t *testing.T) {
	m := newMirror(t)
	v := NewView("e", m.take)
	a := NewApproximate(v, time.Minute, 8)
	a.Ran(0, 1, prompt(6))
	if n, _ := v.Match(prompt(6)); n != 6 {
		t.Errorf("%d of 6 blocks", n)
	}
	other := blockhash.Chain(nil, 7, seq(0, 4*64), 64)
	a.Ran(30*time.Second, 1, other)
	if n, _ := v.Match(prompt(6)); v.Len() != 8 || n != 4 {
		t.Errorf("%d blocks of 8, %d of the older prompt: its end has to go first", v.Len(), n)
	}
	a.Expire(time.Minute)
	if n, _ := v.Match(other); n != 4 || v.Len() != 4 {
		t.Errorf("%d blocks held after the first prompt's expiry, %d of the second", v.Len(), n)
	}
	a.Emptied()
	if v.Len() != 0 {
		t.Error("blocks are left")
	}
	if err := m.same(v); err != nil {
		t.Error(err)
	}
}
