package dispatcher

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// What was accepted under a job that is no name is answered and kept, by one of
// several dispatchers, and stands in nobody's way.
//
// scenario F14
func TestASubmitToNoJobIsRejectedAndKept(t *testing.T) {
	b := newBench(t)
	b.real()
	b.real()
	b.agent("e1", 2, nil)
	r := request("Math", "0001")
	r.Reader = "second"
	for range 3 {
		b.publish("rollout.p.submit.Math.normal", "Math.0001", nil, body(r))
	}
	b.publish("rollout.p.submit.Math.batch", "Math.0002", nil, []byte("no JSON"))
	b.publish("rollout.p.submit.né.normal", "né.0003", nil, []byte("{}"))
	b.publish("rollout.p.submit._ours.urgent", "", nil, []byte("{}"))
	b.submit(request("math", "0001"))
	natstest.Eventually(t, 2*within, "an empty queue", func() bool { return b.messages(b.pool.Rollouts()) == 0 })
	for subject, wants := range map[string]string{
		b.pool.Result("Math", "second", "0001"): `"status":"rejected"`,
		b.pool.Result("Math", "main", "0002"):   `"code":"bad_job"`,
	} {
		m := must(must(b.js.Stream(b.ctx(), b.pool.Results())).GetLastMsgForSubject(b.ctx(), subject))
		if text := string(m.Data); !strings.Contains(text, wants) || !strings.Contains(text, `has 'M' at byte 0`) {
			t.Errorf("%s: %s", subject, text)
		}
	}
	natstest.Eventually(t, within, "the other rollout's answer", func() bool { return b.messages(b.pool.Results()) == 3 })
	dead := must(b.js.OrderedConsumer(b.ctx(), b.pool.Dead(), jetstream.OrderedConsumerConfig{}))
	if n := dead.CachedInfo().NumPending; n != 4 {
		t.Errorf("%d entries in DEAD, want 4", n)
	}
	found := false
	for range dead.CachedInfo().NumPending {
		m := must(dead.Next())
		if string(m.Data()) == "no JSON" {
			found = strings.HasPrefix(m.Headers().Get(subjects.HdrError), "bad_job: submitted to rollout.p.submit.Math.batch")
		}
	}
	if !found {
		t.Error("its bytes are not kept with the reason")
	}
	natstest.Eventually(t, within, "no consumer left behind", func() bool {
		for name := range must(b.js.Stream(b.ctx(), b.pool.Rollouts())).ConsumerNames(b.ctx()).Name() {
			if strings.HasPrefix(name, "x1-") {
				return false
			}
		}
		return true
	})
}
