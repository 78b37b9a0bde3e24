package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestLookingAtManyAnswersTakesLongerThanTheTimeoutOfOne(t *testing.T) {
	const answers = 4000
	node := natstest.Server(t)
	environ := []string{"ROLLBUS_SERVER=" + node.URL(), "HOME=" + t.TempDir()}
	rollbus := func(args ...string) (string, error) {
		var out, said bytes.Buffer
		if code := run(t.Context(), args, environ, strings.NewReader(""), &out, &said); code != exitOK {
			return "", fmt.Errorf("%v: exit code %d: %s", args, code, said.String())
		}
		return out.String(), nil
	}
	if _, err := rollbus("pool", "init", "--storage", "memory"); err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect(node.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := subjects.NewPool("default")
	if err != nil {
		t.Fatal(err)
	}
	for i := range answers {
		id := fmt.Sprintf("r%d", i)
		m := nats.NewMsg(pool.Result("math", "main", id))
		m.Header.Set(subjects.HdrStatus, "ok")
		m.Header.Set(jetstream.ExpectedLastSubjSeqHeader, "0")
		m.Data = []byte("{}")
		if _, err := js.PublishMsgAsync(m); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(20 * time.Second):
		t.Fatal("the answers were not stored within 20s")
	}
	began := time.Now()
	out, err := rollbus("get", "jobs", "--timeout", "2s", "-o", "jsonl")
	if err != nil || !strings.Contains(out, fmt.Sprintf(`"unread":%d`, answers)) {
		t.Errorf("get jobs: %v: %.300s, want %d unread", err, out, answers)
	}
	out, err = rollbus("get", "rollouts", "--timeout", "2s", "-o", "jsonl")
	if n := strings.Count(out, "\n"); err != nil || n != answers {
		t.Errorf("get rollouts: %v: %d lines, want %d", err, n, answers)
	}
	t.Logf("both took %v", time.Since(began))

	// Slow to be read, it is still not late: each answer starts the wait anew.
	ctx, end := patient(t.Context(), time.Second, errors.New("silent"))
	defer end()
	n := 0
	tick := time.NewTicker(400 * time.Millisecond)
	defer tick.Stop()
	for _, err := range latest(ctx, js, pool.Results(), pool.ResultFilter("", ""), true) {
		if err != nil {
			t.Fatalf("after %d: %v", n, err)
		}
		if n++; n <= 4 {
			<-tick.C
		}
	}
	if n != answers || context.Cause(ctx) != nil {
		t.Errorf("%d answers were yielded, want %d (%v)", n, answers, context.Cause(ctx))
	}
}
