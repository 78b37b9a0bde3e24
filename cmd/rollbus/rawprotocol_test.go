package main

import (
	"encoding/json"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// What docs/submit.md says, word for word, with a plain NATS client and names
// written out: a trainer in any language does this. (The nats tool itself does it
// in natstool_test.go.)
func TestARolloutIsSubmittedAndReadWithAPlainNATSClient(t *testing.T) {
	p := startWholePool(t)
	ctx := p.ctx()
	body := []byte(`{"id":"0001","job":"math","prompt":"2+2=","sampling_params":{"max_tokens":8}}`)

	// 1. Submit; the same again is a duplicate, not a second rollout.
	for _, again := range []bool{false, true} {
		ack, err := p.js.PublishMsg(ctx, &nats.Msg{Subject: "rollout.default.submit.math.normal", Header: nats.Header{"Nats-Msg-Id": {"math.0001"}}, Data: body})
		if err != nil || ack.Duplicate != again {
			t.Fatalf("submit: %+v, %v", ack, err)
		}
	}
	if err := p.nc.Publish("rollout.default.ping", nil); err != nil {
		t.Fatal(err)
	}

	// 2, 3. A durable consumer, and the answer from it.
	durable := jetstream.ConsumerConfig{Durable: "t-math-main", FilterSubject: "rollout.default.result.math.main.>", AckPolicy: jetstream.AckExplicitPolicy}
	cons, err := p.js.CreateOrUpdateConsumer(ctx, "RESULTS_default", durable)
	if err != nil {
		t.Fatal(err)
	}
	m, err := cons.Next(jetstream.FetchMaxWait(20 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		ID, Job, Status, Text string
		Usage                 struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal(m.Data(), &r); err != nil {
		t.Fatal(err)
	}
	if m.Subject() != "rollout.default.result.math.main.0001" || r.ID != "0001" || r.Job != "math" ||
		r.Status != "completed" && r.Status != "truncated" || r.Text == "" || r.Usage.CompletionTokens < 1 {
		t.Errorf("the answer on %s: %s", m.Subject(), m.Data())
	}
	// Looked at, it is there still.
	stream, err := p.js.Stream(ctx, "RESULTS_default")
	if err != nil {
		t.Fatal(err)
	}
	if seen, err := stream.GetLastMsgForSubject(ctx, m.Subject()); err != nil || len(seen.Data) == 0 {
		t.Errorf("looked at before received: %v, %v", seen, err)
	}

	// 4. Received, then ack. Saying it twice is refused and harms nothing.
	meta, err := m.Metadata()
	if err != nil {
		t.Fatal(err)
	}
	left, err := strconv.Atoi(m.Headers().Get("Rollout-Left"))
	if err != nil {
		t.Fatal(err)
	}
	received := &nats.Msg{Subject: m.Subject(), Header: nats.Header{
		"Nats-Expected-Last-Subject-Sequence": {strconv.FormatUint(meta.Sequence.Stream, 10)},
		"Nats-TTL":                            {strconv.Itoa(left/1000+3600) + "s"},
	}}
	if _, err := p.js.PublishMsg(ctx, received); err != nil {
		t.Fatal(err)
	}
	if err := m.DoubleAck(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := p.js.PublishMsg(ctx, received); err == nil {
		t.Error("received was accepted twice")
	}
	if seen, err := stream.GetLastMsgForSubject(ctx, m.Subject()); err != nil || len(seen.Data) != 0 {
		t.Errorf("received, and still whole: %v, %v", seen, err)
	}
	if code, out, msg := call(t, p.NATS.URL(), "results", "--job", "math", "-o", "jsonl"); code != exitOK || out != "" {
		t.Errorf("our own tool after received: %d %s %s", code, out, msg)
	}

	// The next answer, of another lane, through the same consumer.
	second := &nats.Msg{Subject: "rollout.default.submit.math.batch", Header: nats.Header{"Nats-Msg-Id": {"math.0002"}},
		Data: []byte(`{"id":"0002","job":"math","prompt":"2+2=","sampling_params":{"max_tokens":8}}`)}
	if _, err := p.js.PublishMsg(ctx, second); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := cons.Next(jetstream.FetchMaxWait(20 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		_ = m.Ack()
		if len(m.Data()) == 0 {
			continue // what was received: the reader's own durable is handed it
		}
		if m.Subject() != "rollout.default.result.math.main.0002" {
			t.Errorf("an answer on %s", m.Subject())
		}
		break
	}

	// RECORD shows what was submitted, to who does not touch the queues.
	record, err := p.js.OrderedConsumer(ctx, "RECORD_default", jetstream.OrderedConsumerConfig{FilterSubjects: []string{"rollout.default.record.submit.>"}})
	if err != nil {
		t.Fatal(err)
	}
	shown, err := record.Next(jetstream.FetchMaxWait(20 * time.Second))
	if err != nil || string(shown.Data()) != string(body) {
		t.Errorf("RECORD shows %v, %v", shown, err)
	}

	// A cancel by hand, of what never came: accepted, and in nobody's way.
	if _, err := p.js.Publish(ctx, "$KV.rollbus_default_cancels.id.math.0009", []byte(`{"schema_version":1,"kind":"id","job":"math","value":"0009","reason":"not needed"}`)); err != nil {
		t.Fatal(err)
	}
	p.settled()
	if _, err := p.Store.Result(ctx, "math", subjects.DefaultReader, "0009"); err == nil || errors.Is(err, nats.ErrTimeout) {
		t.Errorf("a cancel of what never came made an answer, or the register did not answer: %v", err)
	}
}
