package dispatcher

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// within bounds whatever a test waits for.
const within = 15 * time.Second

// fakeCore is a core that does what a test says and remembers what it was told.
type fakeCore struct {
	mu     sync.Mutex
	events []core.Event // all but ticks
	ticks  int
	todo   []core.Effect
	react  func(core.Event) []core.Effect // called with mu held
}

func (f *fakeCore) Step(ev core.Event, _ time.Duration) []core.Effect {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := ev.(core.Tick); ok {
		f.ticks++
	} else {
		f.events = append(f.events, ev)
	}
	out := f.todo
	f.todo = nil
	if f.react != nil {
		out = append(out, f.react(ev)...)
	}
	return out
}

// do makes the next step return these effects.
func (f *fakeCore) do(effects ...core.Effect) {
	f.mu.Lock()
	f.todo = append(f.todo, effects...)
	f.mu.Unlock()
}

func (f *fakeCore) on(react func(core.Event) []core.Effect) {
	f.mu.Lock()
	f.react = react
	f.mu.Unlock()
}

// seen are the events of one type so far.
func seen[E core.Event](f *fakeCore) []E {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []E
	for _, e := range f.events {
		if x, ok := e.(E); ok {
			out = append(out, x)
		}
	}
	return out
}

// waitFor waits for the n-th event of a type that match takes (nil = any).
func waitFor[E core.Event](t *testing.T, f *fakeCore, n int, match func(E) bool) E {
	t.Helper()
	var got []E
	natstest.Eventually(t, within, fmt.Sprintf("%d events of %T", n, *new(E)), func() bool {
		got = got[:0]
		for _, e := range seen[E](f) {
			if match == nil || match(e) {
				got = append(got, e)
			}
		}
		return len(got) >= n
	})
	return got[n-1]
}

// bench is one server, one pool and what tests need of them.
type bench struct {
	t     *testing.T
	dial  func(testing.TB, ...nats.Option) *nats.Conn
	node  *natstest.Node
	nc    *nats.Conn
	js    jetstream.JetStream
	pool  subjects.Pool
	store *kvstate.Store
}

func newBench(t *testing.T, options ...natstest.Option) *bench {
	t.Helper()
	t.Parallel() // a server of its own: tests mostly wait
	return benchOn(t, natstest.Server(t, options...))
}

func benchOn(t *testing.T, node *natstest.Node) *bench {
	t.Helper()
	return benchAt(t, node, node.Conn)
}

func benchAt(t *testing.T, node *natstest.Node, connect func(testing.TB, ...nats.Option) *nats.Conn) *bench {
	t.Helper()
	b := &bench{t: t, node: node, dial: connect, nc: connect(t)}
	b.pool = must(subjects.NewPool("p"))
	b.js = must(jetstream.New(b.nc))
	b.store = must(kvstate.Open(b.nc, b.pool))
	return b
}

// connect opens a connection of its own.
func (b *bench) connect() *nats.Conn { return b.dial(b.t) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// quick are timings a tenth as long as in production, the consumers' apart:
// what is given back must come back because it was given back.
func quick() Timings {
	t := DefaultTimings().Scale(0.1)
	t.Core.Tick = 5 * time.Millisecond
	t.AckWait, t.Inactive = 30*time.Second, time.Hour
	t.Attempt = 500 * time.Millisecond
	t.StopBudget = 5 * time.Second
	return t
}

func (b *bench) config() Config {
	return Config{
		Pool: "p", Timings: quick(), Layout: subjects.Layout{Budget: 1 << 30},
		Log: slog.New(slog.NewTextHandler(b.t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

func (b *bench) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	b.t.Cleanup(cancel)
	return ctx
}

// running starts a dispatcher on a connection of its own, driven by step (nil =
// the real core), and stops it when the test ends.
func (b *bench) running(cfg Config, step Stepper) (*Dispatcher, <-chan error) {
	b.t.Helper()
	nc := b.connect()
	var d *Dispatcher
	if step == nil {
		d = must(New(cfg, nc))
	} else {
		cfg = cfg.WithDefaults()
		if err := cfg.Validate(); err != nil {
			b.t.Fatal(err)
		}
		d = must(newDispatcher(cfg, nc, step))
	}
	ended := make(chan error, 1)
	go func() { ended <- d.Run(context.Background()) }()
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		if err := d.Stop(ctx); err != nil {
			b.t.Errorf("stop: %v", err)
		}
	})
	return d, ended
}

// ready waits until a dispatcher misses nothing.
func (b *bench) ready(d *Dispatcher) {
	b.t.Helper()
	natstest.Eventually(b.t, within, "a ready dispatcher", func() bool { return len(d.Ready()) == 0 })
}

func (b *bench) faked() (*Dispatcher, *fakeCore) {
	b.t.Helper()
	f := &fakeCore{}
	d, _ := b.running(b.config(), f)
	b.ready(d)
	return d, f
}

// request is a small valid one.
func request(job, id string) *subjects.Request {
	return &subjects.Request{
		SchemaVersion: subjects.SchemaVersion, Job: job, ID: id, Prompt: "what is left of a rollout",
		Sampling: subjects.SamplingParams{MaxTokens: 16}, ReplyKey: "secret",
		Labels: map[string]string{"l": "1"}, Meta: json.RawMessage(`{"m":1}`),
	}
}

func body(r *subjects.Request) []byte { return must(json.Marshal(r)) }

// submit publishes as the client library does.
func (b *bench) submit(r *subjects.Request) uint64 {
	b.t.Helper()
	f := subjects.FactsFromRequest(r, subjects.Settings{})
	return b.publish(b.pool.Submit(r.Job, r.Lane()), subjects.RolloutKey(r.Job, r.ID), f.Header(), body(r))
}

func (b *bench) publish(subject, msgID string, h nats.Header, data []byte) uint64 {
	b.t.Helper()
	m := nats.NewMsg(subject)
	if h != nil {
		m.Header = h
	}
	if msgID != "" {
		m.Header.Set(subjects.HdrMsgID, msgID)
	}
	m.Data = data
	ack, err := b.js.PublishMsg(b.ctx(), m)
	if err != nil {
		b.t.Fatalf("publish on %s: %v", subject, err)
	}
	return ack.Sequence
}

// messages is how many a stream holds.
func (b *bench) messages(stream string) uint64 {
	b.t.Helper()
	return must(must(b.js.Stream(b.ctx(), stream)).Info(b.ctx())).State.Msgs
}

func queueOf(r *subjects.Request) core.Queue { return core.Queue{Job: r.Job, Lane: r.Lane()} }

// fetchOne has the core fetch one message of a queue.
func (b *bench) fetchOne(f *fakeCore, q core.Queue) core.Fetched {
	b.t.Helper()
	n, ended := len(seen[core.Fetched](f)), len(seen[core.FetchDone](f))
	fetch := core.Fetch{Queue: q, N: 1, Wait: 5 * time.Second}
	f.do(fetch)
	natstest.Eventually(b.t, within, "a message", func() bool {
		if len(seen[core.Fetched](f)) > n {
			return true
		}
		if done := len(seen[core.FetchDone](f)); done > ended { // it brought nothing: again, as the core does
			ended = done
			f.do(fetch)
		}
		return false
	})
	return seen[core.Fetched](f)[n]
}

// held is a reservation of that message on e1.
func heldOn(engine string, f core.Fetched, bind int) subjects.Held {
	return subjects.Held{
		Engine: engine, Job: f.Facts.Job, ID: f.Facts.ID, State: subjects.StateBound, Bind: bind,
		Epoch: "ep", LeftMS: 60_000, Tokens: 32, PromptTokens: f.Facts.PromptTokens, MaxTokens: f.Facts.MaxTokens,
		Lane: f.Facts.Lane, Reader: f.Facts.Reader, Dispatcher: "d", Policy: "least_requests", Reason: "least_requests",
	}
}

func bindOf(engine string, f core.Fetched, bind int, expected uint64) core.Bind {
	return core.Bind{Handle: f.Handle, Held: heldOn(engine, f, bind), Expected: expected, TTL: 25 * time.Hour}
}

// bound has the core bind a fresh request to e1 and ack it.
func (b *bench) bound(f *fakeCore, r *subjects.Request) (core.Fetched, core.BindAnswer) {
	b.t.Helper()
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	n := len(seen[core.BindAnswer](f))
	f.do(bindOf("e1", got, 1, b.sequence("e1")))
	a := waitFor[core.BindAnswer](b.t, f, n+1, nil)
	if a.Answer != core.OK {
		b.t.Fatalf("bind: %+v", a)
	}
	f.do(core.Ack{Handle: got.Handle})
	return got, a
}

// sequence is the last one under an engine's keys; 0 = none.
func (b *bench) sequence(engine string) uint64 {
	b.t.Helper()
	s := must(b.js.Stream(b.ctx(), subjects.BucketStream(b.pool.Bucket(subjects.Reservations))))
	m, err := s.GetLastMsgForSubject(b.ctx(), b.pool.EngineGuard(engine))
	if err != nil {
		return 0
	}
	return m.Sequence
}

// result waits for the answer of a rollout.
func (b *bench) result(job, id string) *subjects.Result {
	b.t.Helper()
	var out *subjects.Result
	natstest.Eventually(b.t, within, "an answer of "+subjects.RolloutKey(job, id), func() bool {
		r, err := b.store.Result(b.ctx(), job, subjects.DefaultReader, id)
		if err != nil {
			return false
		}
		out = must(subjects.DecodeResult(r.Body))
		return true
	})
	return out
}

// message is one with that reply subject.
func (b *bench) message(reply string) *nats.Msg {
	m := nats.NewMsg("s")
	m.Reply = reply
	return m
}
