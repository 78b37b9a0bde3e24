package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testJob = "j"

// bus is a pool on a real server.
type bus struct {
	t    testing.TB
	node *natstest.Node
	nc   *nats.Conn // of whoever looks from outside
	js   jetstream.JetStream
	pool subjects.Pool
	kv   *kvstate.Store
}

func newBus(t testing.TB, l subjects.Layout, opts ...natstest.Option) *bus {
	t.Helper()
	node := natstest.Server(t, opts...)
	b := &bus{t: t, node: node, nc: node.Conn(t)}
	var err error
	if b.pool, err = subjects.NewPool("p"); err != nil {
		t.Fatal(err)
	}
	if b.kv, err = kvstate.Open(b.nc, b.pool); err != nil {
		t.Fatal(err)
	}
	b.js = b.kv.JS()
	if l.Budget == 0 {
		l.Budget = 256 << 20
	}
	if err := subjects.Ensure(ctxFor(t), b.js, b.pool, l); err != nil {
		t.Fatal(err)
	}
	return b
}

func ctxFor(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// client opens a client on a connection of its own.
func (b *bus) client(opts ...client.Option) *client.Client {
	b.t.Helper()
	c, err := client.Open(ctxFor(b.t), b.node.Conn(b.t), b.pool.String(), testJob, opts...)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(c.Close)
	return c
}

func request(id string) *subjects.Request {
	return &subjects.Request{ID: id, PromptTokenIDs: []uint32{1, 2, 3}, Sampling: subjects.SamplingParams{MaxTokens: 16}}
}

// answer commits an answer to a request, as an agent would.
func (b *bus) answer(r *subjects.Request, change ...func(*subjects.Result)) {
	b.t.Helper()
	res := &subjects.Result{
		SchemaVersion: subjects.SchemaVersion, ID: r.ID, Job: r.Job, Attempt: 1, Status: subjects.Completed,
		FinishReason: "stop", TokenIDs: []uint32{7, 8}, ReplyKey: r.ReplyKey, Meta: r.Meta,
	}
	for _, f := range change {
		f(res)
	}
	// Not the test's context: a test may end while the last answer is written.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := b.kv.Commit(ctx, res, subjects.Answer{Reader: r.ReaderOrDefault(), LeftMS: 60_000})
	if err != nil {
		b.t.Error(err)
	}
}

// queued reads what stands in ROLLOUTS, oldest first.
func (b *bus) queued() []*subjects.Request {
	b.t.Helper()
	s, err := b.js.Stream(ctxFor(b.t), b.pool.Rollouts())
	if err != nil {
		b.t.Fatal(err)
	}
	info := s.CachedInfo()
	var out []*subjects.Request
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq && info.State.Msgs > 0; seq++ {
		m, err := s.GetMsg(ctxFor(b.t), seq)
		if err != nil {
			continue
		}
		r, err := subjects.DecodeRequest(m.Data)
		if err != nil {
			b.t.Fatalf("what the client stored does not decode: %v", err)
		}
		out = append(out, r)
	}
	return out
}

// serve answers all that is submitted, until the test ends.
func (b *bus) serve(change ...func(*subjects.Result)) {
	b.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	b.t.Cleanup(func() { stop(); wg.Wait() })
	for _, lane := range subjects.Lanes {
		cons, err := b.js.CreateConsumer(ctxFor(b.t), b.pool.Rollouts(), b.pool.RolloutsConsumer(testJob, lane))
		if err != nil {
			b.t.Fatal(err)
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				batch, err := cons.Fetch(50, jetstream.FetchContext(ctx))
				if err != nil {
					return
				}
				for m := range batch.Messages() {
					r := new(subjects.Request)
					if err := json.Unmarshal(m.Data(), r); err != nil {
						b.t.Error(err)
						continue
					}
					b.answer(r, change...)
					_ = m.Ack()
				}
			}
		})
	}
}

// received tells whether an id stands in the register as received.
func (b *bus) received(id string) bool {
	reg, err := b.kv.Result(ctxFor(b.t), testJob, subjects.DefaultReader, id)
	return err == nil && reg.Status == "" && len(reg.Body) == 0
}

// collect reads n answers, or fails.
func collect(t testing.TB, c *client.Client, n int) map[string]int {
	t.Helper()
	got := map[string]int{}
	if n == 0 {
		return got
	}
	sum := 0
	for res, err := range c.Results(ctxFor(t)) {
		if err != nil {
			t.Fatal(err)
		}
		if sum == n { // asked for one too many, to receive the last
			t.Fatalf("%s is one too many", res.ID)
		}
		got[res.ID]++
		if sum++; sum == n {
			if err := c.Done(ctxFor(t), res); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	if sum != n {
		t.Fatalf("%d answers, want %d", sum, n)
	}
	return got
}

// none checks that no answer comes: what stands in the register after the
// probe's answer would have come before it.
func (b *bus) none(c *client.Client) {
	b.t.Helper()
	probe := request("probe")
	probe.Job = testJob
	b.answer(probe)
	for id := range collect(b.t, c, 1) {
		if id != "probe" {
			b.t.Errorf("%s was handed out again", id)
		}
	}
}

func ids(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%04d", i)
	}
	return out
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got %v, want %v", err, target)
	}
}
