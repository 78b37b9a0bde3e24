package subjects_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// startNATS runs an embedded server on a random port for one test.
func startNATS(t *testing.T) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(),
		MaxPayload: subjects.MaxPayload, NoLog: true, NoSigs: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the embedded NATS server did not start")
	}
	nc := connect(t, s.ClientURL())
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

func connect(t *testing.T, url string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func pool(t *testing.T, name string) subjects.Pool {
	t.Helper()
	p, err := subjects.NewPool(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestEnsureMakesEverythingOnceAndChangesNothingLater(t *testing.T) {
	_, js := startNATS(t)
	ctx := testContext(t)
	p := pool(t, "p")
	l := subjects.Layout{Budget: 256 << 20, Record: true}
	if err := subjects.Ensure(ctx, js, p, l); err != nil {
		t.Fatal(err)
	}
	before := map[string]time.Time{}
	for _, c := range p.Streams(l) {
		s, err := js.Stream(ctx, c.Name)
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		info := s.CachedInfo()
		before[c.Name] = info.Created
		if info.Config.AllowRollup || info.Config.SubjectDeleteMarkerTTL != 0 {
			t.Errorf("%s allows rollup: a one-key credential could wipe it", c.Name)
		}
		if info.Config.MaxConsumers < 1000 {
			t.Errorf("%s allows %d consumers", c.Name, info.Config.MaxConsumers)
		}
	}
	// Other sizes and ages: the streams stay as they are.
	if err := subjects.Ensure(ctx, js, p, subjects.Layout{Budget: 128 << 20, LivenessTTL: 3 * time.Second}); err != nil {
		t.Fatal(err)
	}
	for name, at := range before {
		s, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if !s.CachedInfo().Created.Equal(at) {
			t.Errorf("%s was made anew", name)
		}
	}
	if s, _ := js.Stream(ctx, subjects.BucketStream(p.Bucket(subjects.Engines))); s.CachedInfo().Config.MaxAge != 15*time.Second {
		t.Errorf("the liveness TTL of an existing bucket was changed to %v", s.CachedInfo().Config.MaxAge)
	}
	if _, err := js.KeyValue(ctx, p.Bucket(subjects.Reservations)); err != nil {
		t.Errorf("js.KeyValue does not bind: %v", err)
	}
}

func TestManyProcessesEnsureAtTheSameInstant(t *testing.T) {
	nc, _ := startNATS(t)
	ctx := testContext(t)
	p := pool(t, "race")
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		js, err := jetstream.New(connect(t, nc.ConnectedUrl()))
		if err != nil {
			t.Fatal(err)
		}
		// Half of them with other sizes: whoever comes first decides.
		l := subjects.Layout{Budget: int64(128+128*(i%2)) << 20}
		wg.Go(func() { errs[i] = subjects.Ensure(ctx, js, p, l) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestEnsureRefusesAForeignStreamByName(t *testing.T) {
	_, js := startNATS(t)
	ctx := testContext(t)
	p := pool(t, "p")
	// What a well-meaning tool makes: it allows rollup.
	if _, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: p.Bucket(subjects.Reservations)}); err != nil {
		t.Fatal(err)
	}
	err := subjects.Ensure(ctx, js, p, subjects.Layout{Budget: 128 << 20})
	if !errors.Is(err, subjects.ErrForeignStream) {
		t.Fatalf("got %v, want ErrForeignStream", err)
	}
	for _, want := range []string{"KV_rollbus_p_reservations", "allow_rollup_hdrs", "allow_msg_ttl"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
}

func TestTheRegisterTakesOneAnswerAndItsReceipt(t *testing.T) {
	nc, js := startNATS(t)
	ctx := testContext(t)
	p := pool(t, "p")
	if err := subjects.Ensure(ctx, js, p, subjects.Layout{Budget: 128 << 20}); err != nil {
		t.Fatal(err)
	}
	subj := p.Result("j", "main", "0001")
	first, err := js.Publish(ctx, subj, []byte(`{}`), jetstream.WithExpectLastSequencePerSubject(0))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, subj, []byte(`{}`), jetstream.WithExpectLastSequencePerSubject(0)); !wrongSequence(err) {
		t.Errorf("a second answer: got %v, want a refusal", err)
	}
	if _, err := js.Publish(ctx, subj, nil, jetstream.WithExpectLastSequencePerSubject(first.Sequence), jetstream.WithMsgTTL(time.Hour)); err != nil {
		t.Errorf("received: %v", err)
	}
	if _, err := js.Publish(ctx, subj, []byte(`{}`), jetstream.WithExpectLastSequencePerSubject(first.Sequence)); !wrongSequence(err) {
		t.Errorf("an answer after received: got %v, want a refusal", err)
	}
	if s, err := js.Stream(ctx, p.Results()); err != nil || s.CachedInfo().State.Msgs != 1 {
		t.Errorf("the register holds more than one message of a rollout: %v", err)
	}
	m := nats.NewMsg(subj)
	m.Header.Set("Nats-Rollup", "all")
	if _, err := js.PublishMsg(ctx, m); err == nil {
		t.Error("the register was rolled up")
	}
	_ = nc
}

func wrongSequence(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence
}

func TestEveryConsumerOfTheWireIsTakenAsItIs(t *testing.T) {
	_, js := startNATS(t)
	ctx := testContext(t)
	p := pool(t, "p")
	if err := subjects.Ensure(ctx, js, p, subjects.Layout{Budget: 128 << 20}); err != nil {
		t.Fatal(err)
	}
	res := subjects.BucketStream(p.Bucket(subjects.Reservations))
	for _, c := range []struct {
		stream string
		config jetstream.ConsumerConfig
	}{
		{p.Rollouts(), p.RolloutsConsumer("j", subjects.LaneNormal)},
		{p.Rollouts(), p.RolloutsConsumer("j", subjects.LaneBatch)},
		{p.Retry(), p.RetryConsumer("j")},
		{p.Results(), p.TrainerConsumer("j", "main")},
		{res, p.AgentConsumer("e1")},
		{res, subjects.FollowerConsumer("f-d1-reservations-1", subjects.BucketSubject(p.Bucket(subjects.Reservations), ">"), true)},
		{p.Results(), subjects.FollowerConsumer("f-d1-results-1", p.ResultFilter("", ""), true)},
	} {
		// Twice: whoever comes second finds it.
		for range 2 {
			got, err := js.CreateConsumer(ctx, c.stream, c.config)
			if err != nil {
				t.Fatalf("%s on %s: %v", c.config.Durable+c.config.Name, c.stream, err)
			}
			info := got.CachedInfo()
			if info.Config.MaxAckPending != c.config.MaxAckPending && c.config.MaxAckPending != 0 || info.Config.FilterSubject != c.config.FilterSubject {
				t.Errorf("%s on %s became %+v", info.Name, c.stream, info.Config)
			}
		}
	}
}

func TestSubmitRetryAndResultAreRecordedButNotTheirReceipt(t *testing.T) {
	_, js := startNATS(t)
	ctx := testContext(t)
	p := pool(t, "p")
	if err := subjects.Ensure(ctx, js, p, subjects.Layout{Budget: 128 << 20, Record: true}); err != nil {
		t.Fatal(err)
	}
	publish := func(subject string, body string, opts ...jetstream.PublishOpt) uint64 {
		t.Helper()
		ack, err := js.Publish(ctx, subject, []byte(body), opts...)
		if err != nil {
			t.Fatal(err)
		}
		return ack.Sequence
	}
	publish(p.Submit("j", subjects.LaneNormal), "submit", jetstream.WithMsgID("j.1"))
	publish(p.RetrySubject("j"), "retry", jetstream.WithMsgID("j.1#2"))
	seq := publish(p.Result("j", "main", "1"), "result", jetstream.WithExpectLastSequencePerSubject(0))
	publish(p.Result("j", "main", "1"), "", jetstream.WithExpectLastSequencePerSubject(seq), jetstream.WithMsgTTL(time.Hour))
	// The server republishes in order from one stream: what comes after the
	// receipt on the same stream is the proof that it was passed over.
	publish(p.Result("j", "main", "2"), "after", jetstream.WithExpectLastSequencePerSubject(0))

	cons, err := js.OrderedConsumer(ctx, p.Record(), jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for range 4 {
		m, err := cons.Next(jetstream.FetchContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		got[m.Subject()] += string(m.Data())
	}
	base := p.RecordPrefix()
	for subject, want := range map[string]string{
		base + ".submit.j.normal": "submit", base + ".retry.j": "retry", base + ".result.j.main.1": "result", base + ".result.j.main.2": "after",
	} {
		if got[subject] != want {
			t.Errorf("%s holds %q, want %q", subject, got[subject], want)
		}
	}
}

// Servers that are offline come back, and those that are missing are added:
// what has no place yet is waited for, and the end says what NATS said.
func TestEnsureWaitsForAPlaceUntilItsDeadline(t *testing.T) {
	js, err := jetstream.New(natstest.Cluster(t, 3).Conn(t))
	if err != nil {
		t.Fatal(err)
	}
	layout := subjects.Layout{Replicas: 5, Storage: jetstream.MemoryStorage, Budget: 128 << 20}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err = subjects.Ensure(ctx, js, pool(t, "p"), layout)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no suitable peers") {
		t.Errorf("five copies on three servers: %v", err)
	}
}
