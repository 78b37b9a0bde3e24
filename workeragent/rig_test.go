package workeragent

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// within bounds every wait of these tests.
const within = 20 * time.Second

// rig is NATS with one pool; the test plays the dispatcher.
type rig struct {
	t     *testing.T
	node  *natstest.Node
	nc    *nats.Conn
	store *kvstate.Store
	pool  subjects.Pool
}

func newRig(t *testing.T, change ...func(*subjects.Layout)) *rig {
	t.Helper()
	t.Parallel()
	r := &rig{t: t, node: natstest.Server(t)}
	r.nc = r.node.Conn(t, nats.ReconnectBufSize(-1))
	var err error
	if r.pool, err = subjects.NewPool("p"); err != nil {
		t.Fatal(err)
	}
	if r.store, err = kvstate.Open(r.nc, r.pool, kvstate.Heartbeat(50*time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	l := subjects.Layout{Budget: 128 << 20, LivenessTTL: time.Second}
	for _, f := range change {
		f(&l)
	}
	if err := subjects.Ensure(r.ctx(), r.store.JS(), r.pool, l); err != nil {
		t.Fatal(err)
	}
	return r
}

// with is the rig for a subtest.
func (r *rig) with(t *testing.T) *rig {
	c := *r
	c.t = t
	return &c
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	r.t.Cleanup(cancel)
	return ctx
}

func (r *rig) eventually(what string, cond func() bool) {
	r.t.Helper()
	natstest.Eventually(r.t, within, what, cond)
}

// quick are timings that let a test end soon.
func quick() Timings {
	return Timings{
		Heartbeat: 100 * time.Millisecond, LoadEvery: 20 * time.Millisecond,
		Probe: 50 * time.Millisecond, ProbeDown: 20 * time.Millisecond, ProbeTimeout: time.Second, DownAfter: 300 * time.Millisecond,
		ProgressTimeout: 20 * time.Second, Watch: 10 * time.Millisecond, AbortTimeout: time.Second,
		BackoffMin: 30 * time.Millisecond, BackoffMax: 100 * time.Millisecond,
		StoreTimeout: 300 * time.Millisecond, StoreHeartbeat: 30 * time.Millisecond,
		RepeatMin: 10 * time.Millisecond, RepeatMax: 50 * time.Millisecond,
		ReadyAge: time.Second, DrainTimeout: 10 * time.Second, HandBack: 3 * time.Second,
	}
}

// agentRun is an agent that serves.
type agentRun struct {
	*Agent
	kill func() // ends Run's context
	done chan error
}

// agent starts an agent for engine e1 at that URL and waits until it serves.
func (r *rig) agent(url string, change ...func(*Config)) *agentRun {
	r.t.Helper()
	return r.serving(r.launch(r.node.Conn(r.t, nats.ReconnectBufSize(-1)), url, change...))
}

// along is agent with a connection over a line.
func (r *rig) along(l *line, url string, change ...func(*Config)) *agentRun {
	r.t.Helper()
	return r.serving(r.launch(l.conn(r), url, change...))
}

func (r *rig) serving(a *agentRun) *agentRun {
	r.t.Helper()
	r.eventually("the engine is registered as ready", func() bool {
		e, ok := r.engine("e1")
		return ok && e.State == subjects.EngineReady && e.Epoch == a.units[0].epochText()
	})
	return a
}

func (u *unit) epochText() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.epoch.String()
}

// moved waits until output of a run has come to the agent.
func (a *agentRun) moved(r *rig, id string) {
	r.t.Helper()
	r.eventually("output of "+id+" has come", func() bool {
		u := a.units[0]
		u.mu.Lock()
		defer u.mu.Unlock()
		x := u.runs["j."+id]
		return x != nil && !x.moved.IsZero()
	})
}

func (r *rig) launch(nc *nats.Conn, url string, change ...func(*Config)) *agentRun {
	r.t.Helper()
	ad, err := engine.NewOpenAI(engine.OpenAIConfig{URL: url})
	if err != nil {
		r.t.Fatal(err)
	}
	cfg := Config{Pool: "p", Timings: quick(), Engines: []EngineConfig{{Name: "e1", Adapter: ad, Slots: 4}}}
	if os.Getenv("ROLLBUS_TEST_LOG") != "" {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for _, f := range change {
		f(&cfg)
	}
	a, err := New(cfg, nc)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, kill := context.WithCancel(context.Background())
	out := &agentRun{Agent: a, kill: kill, done: make(chan error, 1)}
	go func() { out.done <- a.Run(ctx) }()
	r.t.Cleanup(func() {
		kill()
		select {
		case <-a.done:
		case <-time.After(within):
			r.t.Error("the agent did not end")
		}
	})
	return out
}

// end waits for Run.
func (a *agentRun) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-a.done:
		return err
	case <-time.After(within):
		t.Fatal("Run did not end")
		return nil
	}
}

func (r *rig) engine(name string) (subjects.Engine, bool) {
	kv, err := r.store.JS().KeyValue(r.ctx(), r.pool.Bucket(subjects.Engines))
	if err != nil {
		return subjects.Engine{}, false
	}
	v, err := kv.Get(r.ctx(), name)
	if err != nil {
		return subjects.Engine{}, false
	}
	var e subjects.Engine
	if err := json.Unmarshal(v.Value(), &e); err != nil {
		r.t.Errorf("registration of %s: %v", name, err)
	}
	return e, true
}

// request of that many output tokens, and no end before them.
func request(id string, maxTokens int) *subjects.Request {
	return &subjects.Request{ID: id, Job: "j", Model: "m", PromptTokenIDs: []uint32{1, 2, 3, 4},
		Sampling: subjects.SamplingParams{MaxTokens: maxTokens, IgnoreEOS: true}, ReplyKey: "key"}
}

// bind plays a dispatcher that binds to e1's epoch of now.
func (r *rig) bind(req *subjects.Request, change ...func(*subjects.Held)) kvstate.Reservation {
	r.t.Helper()
	body, err := json.Marshal(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.bindBody(req.Job, req.ID, body, change...)
}

func (r *rig) bindBody(job, id string, body []byte, change ...func(*subjects.Held)) kvstate.Reservation {
	r.t.Helper()
	e, ok := r.engine("e1")
	if !ok {
		r.t.Fatal("e1 is not registered")
	}
	h := subjects.Held{
		Engine: "e1", Job: job, ID: id, Bind: 1, Epoch: e.Epoch, LeftMS: 600_000, Tokens: 100, PromptTokens: 4,
		Lane: subjects.LaneNormal, Reader: "main", Dispatcher: "d", Policy: "kv_tokens", Reason: "least",
	}
	for _, f := range change {
		f(&h)
	}
	return r.write(h, body)
}

func (r *rig) write(h subjects.Held, body []byte) kvstate.Reservation {
	r.t.Helper()
	var expected uint64
	for {
		_, err := r.store.Bind(r.ctx(), kvstate.Bind{Held: h, Expected: expected, Body: body})
		var conflict *kvstate.ConflictError
		switch {
		case err == nil:
			res, err := r.store.Reservation(r.ctx(), h.Engine, h.Job, h.ID)
			if err != nil && !errors.Is(err, kvstate.ErrGone) {
				r.t.Fatal(err)
			}
			return res
		case errors.As(err, &conflict):
			expected = conflict.Actual
		default:
			r.t.Fatal(err)
		}
	}
}

// result waits for a rollout's answer.
func (r *rig) result(id string) *subjects.Result {
	r.t.Helper()
	var out *subjects.Result
	r.eventually("an answer of "+id, func() bool {
		got, err := r.store.Result(r.ctx(), "j", "main", id)
		if err != nil {
			return false
		}
		var derr error
		if out, derr = subjects.DecodeResult(got.Body); derr != nil {
			r.t.Fatal(derr)
		}
		return true
	})
	return out
}

// released waits until a key is gone.
func (r *rig) released(id string) {
	r.t.Helper()
	r.eventually("the key of "+id+" is released", func() bool {
		_, err := r.store.Reservation(r.ctx(), "e1", "j", id)
		return errors.Is(err, kvstate.ErrGone)
	})
}

// marker is the delete marker of a key.
func (r *rig) marker(id string) kvstate.Marker {
	r.t.Helper()
	r.released(id)
	var out kvstate.Marker
	found := false
	ctx, cancel := context.WithCancel(r.ctx())
	defer cancel()
	err := r.store.FollowReservations(ctx, kvstate.FollowConfig{Name: "test", Filter: "e1.j." + id},
		kvstate.Handler[kvstate.Reservation, kvstate.Marker]{Swap: func(_ []kvstate.Reservation, all []kvstate.Marker) {
			for _, m := range all {
				out, found = m, true
			}
			cancel()
		}})
	if !found {
		r.t.Fatalf("no marker of %s: %v", id, err)
	}
	return out
}

// returned waits until a key is given back.
func (r *rig) returned(id string) kvstate.Reservation {
	r.t.Helper()
	var out kvstate.Reservation
	r.eventually("the key of "+id+" is returned", func() bool {
		res, err := r.store.Reservation(r.ctx(), "e1", "j", id)
		out = res
		return err == nil && res.State == subjects.StateReturned
	})
	return out
}

// reserved lists what is held on e1, bound or returned.
func (r *rig) reserved() int {
	n := 0
	ctx, cancel := context.WithCancel(r.ctx())
	defer cancel()
	_ = r.store.FollowReservations(ctx, kvstate.FollowConfig{Name: "count", Filter: "e1.>"},
		kvstate.Handler[kvstate.Reservation, kvstate.Marker]{Swap: func(all []kvstate.Reservation, _ []kvstate.Marker) {
			n = len(all)
			cancel()
		}})
	return n
}
