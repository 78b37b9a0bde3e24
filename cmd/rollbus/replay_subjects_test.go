package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// recordedPool is a pool with RECORD on and three messages in it, the last one
// half a second of their stream's time behind the first.
func recordedPool(t *testing.T) (*natstest.Node, *nats.Conn) {
	t.Helper()
	node := natstest.Server(t)
	nc := node.Conn(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := subjects.NewPool("default")
	if err != nil {
		t.Fatal(err)
	}
	if err := subjects.Ensure(t.Context(), js, pool, subjects.Layout{Replicas: 1, Record: true}); err != nil {
		t.Fatal(err)
	}
	m := nats.NewMsg(pool.Submit("train", subjects.LaneNormal))
	m.Data = []byte(`{"id":"0001"}`)
	m.Header.Set("Nats-Msg-Id", "train.0001")
	m.Header.Set("Rollout-Prompt-Tokens", "7")
	if _, err := js.PublishMsg(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{pool.Load("e1"), pool.Decision()} {
		timer := time.NewTimer(300 * time.Millisecond) // so that there is a pace to keep
		<-timer.C
		if _, err := js.Publish(t.Context(), s, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	return node, nc
}

func TestARecordingIsPublishedAgainElsewhereAtItsPace(t *testing.T) {
	node, nc := recordedPool(t)
	sub, err := nc.SubscribeSync("test.math.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	code, out, msg := call(t, node.URL(), "replay", "--subjects", "--to", "test.math", "--speed", "2", "-o", "json")
	if code != 0 {
		t.Fatalf("exit %d: %s", code, msg)
	}
	if d := time.Since(began); d < 250*time.Millisecond {
		t.Errorf("0.6 s of recording at twice the speed took %v", d)
	}
	var r republished
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.Messages != 3 || r.Kinds["submit"] != 1 || r.Kinds["load"] != 1 {
		t.Errorf("%v: %s", err, out)
	}
	for _, want := range []string{"test.math.submit.train.normal", "test.math.load.e1", "test.math.decision"} {
		m, err := sub.NextMsg(15 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if m.Subject != want || !strings.HasPrefix(m.Header.Get(headerReplayedSubject), "rollout.default.") || m.Header.Get("Nats-Msg-Id") != "" {
			t.Errorf("%s with %v, want %s without a message id", m.Subject, m.Header, want)
		}
		if want == "test.math.submit.train.normal" && (m.Header.Get("Rollout-Prompt-Tokens") != "7" || string(m.Data) != `{"id":"0001"}`) {
			t.Errorf("%v %s", m.Header, m.Data)
		}
	}
	code, out, _ = call(t, node.URL(), "replay", "--subjects", "--to", "test.math", "--speed", "0", "--from", r.Last.Format(time.RFC3339Nano), "-o", "json")
	if r = (republished{}); code != 0 || json.Unmarshal([]byte(out), &r) != nil || r.Messages != 1 || r.Kinds["decision"] != 1 {
		t.Errorf("from the last message on: exit %d: %s", code, out)
	}
	if code, _, _ := call(t, node.URL(), "replay", "--subjects", "--to", "test.math", "--until", "1h"); code != exitNotFound {
		t.Errorf("an empty span: exit %d", code)
	}
}

func TestARecordingIsNeverPublishedOntoLiveSubjects(t *testing.T) {
	for _, to := range []string{"", "rollout", "rollout.default.submit", "rollout.other", "$KV.rollbus_default_reservations", "$JS.API", "_INBOX.x", "a..b", "a.*", "a.>", "a b", "."} {
		if code, _, _ := call(t, "nats://127.0.0.1:1", "replay", "--subjects", "--to", to, "--timeout", "1s"); code != exitUsage {
			t.Errorf("--to %q: exit %d", to, code)
		}
	}
}
