package workeragent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
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
	a := r.launch(r.node.Conn(r.t, nats.ReconnectBufSize(-1)), url, change...)
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

// puppet is an engine whose every answer a test writes.
type puppet struct {
	t     *testing.T
	url   string
	calls chan *call

	mu    sync.Mutex
	model string
	down  int // status of everything, 0 = up
	total int
}

// call is one generation at a puppet.
type call struct {
	header http.Header
	body   map[string]any
	write  chan string
	gone   chan struct{} // the agent has closed the connection
	t      *testing.T
}

func newPuppet(t *testing.T) *puppet {
	p := &puppet{t: t, calls: make(chan *call, 1024), model: `{"id":"m","max_model_len":4096}`}
	s := httptest.NewServer(http.HandlerFunc(p.serve))
	t.Cleanup(s.Close)
	p.url = s.URL
	return p
}

func (p *puppet) serve(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	down, model := p.down, p.model
	p.mu.Unlock()
	switch {
	case down != 0:
		w.WriteHeader(down)
		return
	case r.URL.Path == "/v1/models":
		fmt.Fprintf(w, `{"data":[%s]}`, model)
		return
	case r.URL.Path != "/v1/completions":
		http.NotFound(w, r)
		return
	}
	b, _ := io.ReadAll(r.Body)
	c := &call{header: r.Header, write: make(chan string), gone: make(chan struct{}), t: p.t}
	_ = json.Unmarshal(b, &c.body)
	p.mu.Lock()
	p.total++
	p.mu.Unlock()
	defer close(c.gone)
	p.calls <- c
	for {
		select {
		case s := <-c.write:
			if s == "" {
				return
			}
			if _, err := io.WriteString(w, s); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (p *puppet) setDown(status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = status
}

func (p *puppet) arrivals() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.total
}

// next waits for a generation.
func (p *puppet) next() *call {
	p.t.Helper()
	select {
	case c := <-p.calls:
		return c
	case <-time.After(within):
		p.t.Fatal("no request came to the engine")
		return nil
	}
}

func (c *call) say(s string) {
	c.t.Helper()
	select {
	case c.write <- s:
	case <-c.gone:
		c.t.Fatal("the agent has closed the connection")
	case <-time.After(within):
		c.t.Fatal("the engine cannot write")
	}
}

// tokens streams token ids; each one's text is a letter.
func (c *call) tokens(ids ...uint32) {
	c.t.Helper()
	b, _ := json.Marshal(ids)
	text := ""
	for _, id := range ids {
		text += string(rune('a' + id%26))
	}
	c.say(fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":%q,\"token_ids\":%s}]}\n\n", text, b))
}

// finish ends the answer well.
func (c *call) finish(reason string) {
	c.t.Helper()
	c.say(fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":\"\",\"token_ids\":[],\"finish_reason\":%q}]}\n\ndata: [DONE]\n\n", reason))
	c.end()
}

func (c *call) end() {
	select {
	case c.write <- "":
	case <-c.gone:
	}
}

// left waits until the agent has closed the connection.
func (c *call) left() {
	c.t.Helper()
	select {
	case <-c.gone:
	case <-time.After(within):
		c.t.Fatal("the engine still runs it")
	}
}

// line is a connection to NATS that a test can cut at a chosen message: what
// trips it is not sent, or is sent and never answered.
type line struct {
	mu      sync.Mutex
	trip    func(b []byte) bool
	after   bool // cut after the message was sent
	cut     bool // no connection until mended
	conns   []net.Conn
	tripped chan struct{}
}

// conn is a connection over the line.
func (l *line) conn(r *rig) *nats.Conn {
	r.t.Helper()
	return r.node.Conn(r.t, nats.ReconnectBufSize(-1), nats.SetCustomDialer(l))
}

func (l *line) Dial(network, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errors.New("the line is cut")
	}
	c, err := net.DialTimeout(network, address, time.Second)
	if err != nil {
		return nil, err
	}
	l.conns = append(l.conns, c)
	return &wire{Conn: c, l: l}, nil
}

// cutAt cuts the line at the first write that trip knows.
func (l *line) cutAt(after bool, trip func([]byte) bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trip, l.after, l.tripped = trip, after, make(chan struct{})
	return l.tripped
}

func (l *line) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

func (l *line) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.severLocked()
}

func (l *line) severLocked() {
	l.cut = true
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}

type wire struct {
	net.Conn
	l *line
}

func (w *wire) Write(b []byte) (int, error) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	if w.l.cut {
		return 0, net.ErrClosed
	}
	if w.l.trip == nil || !w.l.trip(b) {
		return w.Conn.Write(b)
	}
	w.l.trip = nil
	close(w.l.tripped)
	if w.l.after {
		// What is written arrives; what is answered is not read any more.
		w.l.cut = true
		return w.Conn.Write(b)
	}
	w.l.severLocked()
	return 0, net.ErrClosed
}

func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	if w.l.cut {
		return 0, net.ErrClosed
	}
	return n, err
}
