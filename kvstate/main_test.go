package kvstate

import (
	"context"
	"errors"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		child(url)
		return
	}
	goleak.VerifyTestMain(m)
}

// testHeartbeat makes followers ten times faster than by default.
const testHeartbeat = 50 * time.Millisecond

// within bounds every wait of these tests: an election takes up to 9 s.
const within = 30 * time.Second

// env is one kind of NATS that kvstate must hold on.
type env struct {
	layout   subjects.Layout
	node     *natstest.Node  // alone
	cluster  *natstest.Nodes // or three
	lossy    bool            // a restart loses everything
	pool     subjects.Pool
	store    *Store
	nc       *nats.Conn
	restarts func(t *testing.T)
}

func single(t *testing.T, storage jetstream.StorageType) *env {
	n := natstest.Server(t)
	e := &env{
		layout: subjects.Layout{Storage: storage, Budget: 128 << 20, LivenessTTL: time.Second},
		node:   n, lossy: storage == jetstream.MemoryStorage, nc: n.Conn(t, nats.ReconnectBufSize(-1)),
		restarts: func(*testing.T) { n.Restart() },
	}
	return e.open(t)
}

func clustered(t *testing.T) *env {
	c := natstest.Cluster(t, 3)
	e := &env{
		layout:  subjects.Layout{Replicas: 3, Budget: 128 << 20, LivenessTTL: time.Second},
		cluster: c, nc: c.Conn(t, nats.ReconnectBufSize(-1)),
	}
	e.restarts = func(*testing.T) {
		c.StopAll()
		c.StartAll()
	}
	return e.open(t)
}

func (e *env) open(t *testing.T) *env {
	t.Helper()
	pool, err := subjects.NewPool("p")
	must(t, err)
	e.pool = pool
	e.store = e.storeOn(t, e.nc)
	e.ensure(t)
	return e
}

func (e *env) ensure(t *testing.T) {
	t.Helper()
	// A request that is lost while servers elect must not take all the time.
	var err error
	natstest.EventuallyOr(t, within, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		err = subjects.Ensure(ctx, e.store.JS(), e.pool, e.layout)
		return err == nil
	}, func() string { return "the pool made: " + err.Error() })
}

// restartLeader restarts the server that leads the reservations.
func (e *env) restartLeader(t *testing.T) {
	t.Helper()
	if e.node != nil {
		e.restart(t)
		return
	}
	e.cluster.Leader(e.store.reservationsStream()).Restart()
}

// restart restarts every server; what a lossy one loses is made again, empty.
func (e *env) restart(t *testing.T) {
	t.Helper()
	before := e.nc.Stats().Reconnects
	e.restarts(t)
	natstest.Eventually(t, within, "the connection back", func() bool {
		return e.nc.Stats().Reconnects > before && e.nc.IsConnected()
	})
	if e.lossy {
		e.ensure(t)
	}
	for _, cfg := range e.pool.Streams(e.layout) {
		natstest.Eventually(t, within, "an answer of the leader of "+cfg.Name, func() bool {
			_, err := e.store.streamInfo(t.Context(), cfg.Name)
			return err == nil
		})
		if e.cluster != nil {
			e.cluster.WaitStream(cfg.Name)
		}
	}
}

func (e *env) storeOn(t *testing.T, nc *nats.Conn, opts ...Option) *Store {
	t.Helper()
	s, err := Open(nc, e.pool, append([]Option{Heartbeat(testHeartbeat), Timeout(time.Second)}, opts...)...)
	must(t, err)
	return s
}

// anyNode is a server that is not the reservations' leader, where there are others.
func (e *env) anyNode() *natstest.Node {
	if e.node != nil {
		return e.node
	}
	leader := e.cluster.Leader(e.store.reservationsStream())
	for _, n := range e.cluster.List {
		if n != leader {
			return n
		}
	}
	return e.cluster.List[0]
}

// remote is a store behind a line that the test can disturb.
func (e *env) remote(t *testing.T, opts ...Option) (*Store, *natstest.Line) {
	t.Helper()
	line := natstest.Link(t, e.anyNode())
	return e.storeOn(t, line.Conn(t, nats.ReconnectBufSize(-1)), opts...), line
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
	kinds := 0
	for _, k := range []error{ErrConflict, ErrBusy, ErrDuplicate, ErrUnknown, ErrSuperseded, ErrFull, ErrGone, ErrUnavailable, ErrRefused} {
		if errors.Is(err, k) {
			kinds++
		}
	}
	if kinds != 1 {
		t.Fatalf("error %v is of %d kinds, want exactly one", err, kinds)
	}
}

func held(engine, id string, bind int) subjects.Held {
	return subjects.Held{
		Engine: engine, Job: engine, ID: id, Bind: bind, Epoch: "e", LeftMS: 60_000,
		Tokens: 100, PromptTokens: 60, Lane: subjects.LaneNormal, Reader: "main", Dispatcher: "d1",
	}
}

func released(engine, id string, bind int) subjects.Released {
	used := 40
	return subjects.Released{
		Engine: engine, Job: engine, ID: id, Outcome: subjects.OutcomeAnswered, Bind: bind, Epoch: "e",
		Tokens: 100, PromptTokens: 60, CompletionTokens: &used,
	}
}

// bind binds on whatever the engine's sequence is, as a retrying dispatcher does.
func (e *env) bind(t *testing.T, engine, id string, n int) uint64 {
	t.Helper()
	b := Bind{Held: held(engine, id, n), Body: []byte("body of " + id)}
	return eventually(t, "bound "+id, func() (uint64, error) {
		seq, err := e.store.Bind(t.Context(), b)
		if c, ok := errors.AsType[*ConflictError](err); ok {
			b.Expected = c.Actual
		}
		return seq, err
	})
}

// eventually repeats a write while its error says that it may work later.
func eventually(t *testing.T, what string, write func() (uint64, error)) uint64 {
	t.Helper()
	var seq uint64
	natstest.Eventually(t, within, what, func() bool {
		var err error
		if seq, err = write(); err == nil {
			return true
		}
		for _, soft := range []error{ErrConflict, ErrBusy, ErrUnknown, ErrUnavailable} {
			if errors.Is(err, soft) {
				return false
			}
		}
		t.Fatalf("%s: %v", what, err)
		return false
	})
	return seq
}

// settled repeats a write while another one is in flight (R3).
func settled(t *testing.T, write func() error) error {
	t.Helper()
	var err error
	natstest.Eventually(t, within, "a write that nothing else is in the way of", func() bool {
		err = write()
		return !errors.Is(err, ErrBusy)
	})
	return err
}

// following is a view fed by a follower, with what it was told counted.
type following struct {
	*ReservationView
	mu      sync.Mutex
	swaps   int
	alive   int
	puts    []Reservation
	markers []Marker
	bad     []Undecodable
	err     error
	ended   chan struct{} // err is set
	stop    func()
}

func follows(t *testing.T, s *Store, run func(context.Context, Handler[Reservation, Marker]) error) *following {
	t.Helper()
	f := &following{ReservationView: NewReservationView(s.Clock())}
	view := f.Handler()
	count := func(add func()) {
		f.mu.Lock()
		defer f.mu.Unlock()
		add()
	}
	h := Handler[Reservation, Marker]{
		Swap: func(rs []Reservation, ms []Marker) {
			view.Swap(rs, ms)
			count(func() { f.swaps++ })
		},
		Put: func(r Reservation) {
			view.Put(r)
			count(func() { f.puts = append(f.puts, r) })
		},
		Gone: func(m Marker) {
			view.Gone(m)
			count(func() { f.markers = append(f.markers, m) })
		},
		Alive: func() {
			view.Alive()
			count(func() { f.alive++ })
		},
		Bad: func(u Undecodable) { count(func() { f.bad = append(f.bad, u) }) },
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.ended = make(chan struct{})
	go func() {
		defer close(f.ended)
		f.err = run(ctx, h)
	}()
	f.stop = func() {
		cancel()
		<-f.ended
	}
	t.Cleanup(f.stop)
	return f
}

func (f *following) counts() (swaps, alive int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.swaps, f.alive
}

func (f *following) wait(t *testing.T) *following {
	t.Helper()
	select {
	case <-f.Ready():
	case <-time.After(within):
		t.Fatalf("no complete view after %v", within)
	}
	return f
}

// keys of a view, as engine/rollout#bind@revision.
func (f *following) keys() []string {
	out := []string{}
	for _, r := range f.Snapshot() {
		out = append(out, r.Engine+"/"+r.Key()+"#"+strconv.Itoa(r.Bind)+"@"+strconv.FormatUint(r.Revision, 10))
	}
	return out
}

func keyOf(engine, id string, bind int, rev uint64) string {
	return engine + "/" + engine + "." + id + "#" + strconv.Itoa(bind) + "@" + strconv.FormatUint(rev, 10)
}
