package checker_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bus is a pool on a real server, written to by hand as dispatchers, agents
// and trainers do.
type bus struct {
	t    *testing.T
	ctx  context.Context
	js   jetstream.JetStream
	nc   *nats.Conn
	pool subjects.Pool
	rec  *checker.Recorder
}

func newBus(t *testing.T) *bus {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return newBusOn(ctx, t, natstest.Server(t).Conn(t), subjects.Layout{Budget: 256 << 20})
}

func newBusOn(ctx context.Context, t *testing.T, nc *nats.Conn, layout subjects.Layout) *bus {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := subjects.NewPool("p")
	if err != nil {
		t.Fatal(err)
	}
	if err := subjects.Ensure(ctx, js, pool, layout); err != nil {
		t.Fatal(err)
	}
	rec, err := checker.Record(ctx, nc, pool)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rec.Close)
	return &bus{t: t, ctx: ctx, js: js, nc: nc, pool: pool, rec: rec}
}

func (b *bus) publish(subject, msgID string, h nats.Header, expect uint64, filter string) uint64 {
	b.t.Helper()
	m := &nats.Msg{Subject: subject, Header: nats.Header{}, Data: []byte("{}")}
	for k, v := range h {
		m.Header[k] = v
	}
	if msgID != "" {
		m.Header.Set(subjects.HdrMsgID, msgID)
	}
	if filter != "" {
		m.Header.Set(subjects.HdrExpectLastSeq, fmt.Sprint(expect))
		m.Header.Set(subjects.HdrExpectLastSubj, filter)
	}
	ack, err := b.js.PublishMsg(b.ctx, m)
	if err != nil {
		b.t.Fatalf("publish %s: %v", subject, err)
	}
	return ack.Sequence
}

func (b *bus) submit(id string) {
	b.rec.Accepted("j", id, b.publish(b.pool.Submit("j", subjects.LaneNormal), "j."+id, nil, 0, ""))
}

func (b *bus) bind(id string, n int, after uint64) uint64 {
	h := subjects.Held{State: subjects.StateBound, Bind: n, Epoch: "x", Tokens: 10, LeftMS: 1000}
	return b.publish(b.pool.ReservationSubject("e1", "j", id), fmt.Sprintf("j.%s#%d", id, n), h.Header(), after, b.pool.EngineGuard("e1"))
}

func (b *bus) release(id string, n int, rev uint64) uint64 {
	subject := b.pool.ReservationSubject("e1", "j", id)
	g := subjects.Released{Outcome: subjects.OutcomeAnswered, Bind: n, Epoch: "x", Tokens: 10}
	return b.publish(subject, "", g.Header(), rev, subject)
}

func (b *bus) answer(id string, n int) uint64 {
	subject := b.pool.Result("j", "main", id)
	a := subjects.Answer{Status: subjects.Completed, Bind: n, Epoch: "x", Engine: "e1", CompletionTokens: new(5)}
	return b.publish(subject, "", a.Header(), 0, subject)
}

func (b *bus) finish() checker.History {
	b.t.Helper()
	h, err := b.rec.Finish(b.ctx)
	if err != nil {
		b.t.Fatalf("finish: %v", err)
	}
	return h
}

func TestARecordingOfACleanRunHasItsFiguresAndNoViolation(t *testing.T) {
	b := newBus(t)
	var last uint64
	const n = 50
	for i := range n {
		id := fmt.Sprintf("%04d", i)
		b.submit(id)
		rev := b.bind(id, 1, last)
		res := b.answer(id, 1)
		last = b.release(id, 1, rev)
		b.rec.Handed("j", id)
		if i%2 == 0 {
			subject := b.pool.Result("j", "main", id)
			b.publish(subject, "", nil, res, subject)
			b.rec.Received("j", id)
		}
	}
	if err := b.rec.Await(b.ctx, checker.AllAnswered); err != nil {
		t.Fatal(err)
	}
	h := b.finish()
	if v := checker.Check(h); len(v) != 0 {
		t.Fatalf("a clean run has violations: %v", v)
	}
	f := checker.Figure(h)
	if f.Submitted != n || f.Completed != n || f.Lost != 0 || f.Duplicated != 0 || f.Binds != n || f.CompletionTokens != 5*n {
		t.Errorf("figures do not add up: %+v", f)
	}
	if f.DispatchP50 <= 0 || f.DispatchP99 > time.Minute {
		t.Errorf("dispatch p50 %v, p99 %v: want times between the stream's stamps", f.DispatchP50, f.DispatchP99)
	}
	if h.UnseenResults != 0 || h.UnseenReservations != 0 {
		t.Errorf("%d results and %d reservations unseen although copies and guards name them", h.UnseenResults, h.UnseenReservations)
	}
}

func TestARecordingOfABrokenRunIsBlamed(t *testing.T) {
	b := newBus(t)
	b.submit("lost")
	b.submit("twice")
	b.submit("stuck")
	rev := b.bind("twice", 1, 0)
	b.answer("twice", 1)
	rev = b.release("twice", 1, rev)
	b.bind("stuck", 1, rev)
	b.answer("stuck", 1)
	// A writer that forgot the guard replaces the answer.
	again := subjects.Answer{Status: subjects.Failed, Bind: 2, Epoch: "x", Engine: "e1"}
	b.publish(b.pool.Result("j", "main", "twice"), "", again.Header(), 0, "")
	h := b.finish()
	found := checker.Check(h)
	for _, want := range []string{
		"rollout j.lost was accepted at sequence 1 of ROLLOUTS_p and never answered",
		"the answer of rollout j.twice at revision 1 (completed, bind 1) was replaced at revision 3 (failed, bind 2)",
		"rollout j.twice was written in the register at revision 3 without a guard",
		"rollout j.stuck still holds 10 tokens on e1 at the end: bind 1 at revision 3",
	} {
		ok := false
		for _, v := range found {
			ok = ok || strings.Contains(v.Text, want)
		}
		if !ok {
			t.Errorf("nothing says %q; found %v", want, found)
		}
	}
	if f := checker.Figure(h); f.Lost != 1 || f.Duplicated != 1 {
		t.Errorf("lost %d, duplicated %d: want 1 and 1", f.Lost, f.Duplicated)
	}
}

func TestAwaitEndsWithItsContextAndSaysWhatIsMissing(t *testing.T) {
	b := newBus(t)
	b.submit("open")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := b.rec.Await(ctx, checker.AllAnswered)
	if err == nil || !strings.Contains(err.Error(), "of 1 rollouts submitted 1 are unanswered") {
		t.Errorf("got %v", err)
	}
}
