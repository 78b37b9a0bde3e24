package bus

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

const (
	job = "bench"
	// inFlight is how many submits wait for their acks at once.
	inFlight = 256
	// outstanding is how many rollouts may be submitted and not answered, for
	// each engine: its slots and a few that wait.
	outstanding = slots + 6
	slots       = 16
	// drainWait bounds the end of a turn.
	drainWait = 30 * time.Second
)

// side is one of the two that take turns.
type side struct {
	name    string
	pool    subjects.Pool
	servers *servers
	// submit stores the rollouts of these ids as they come.
	submit func(ctx context.Context, ids iter.Seq[string]) error

	ends []func() // in reverse order

	nc       *nats.Conn // the stopwatch's own
	js       jetstream.JetStream
	ids      int64 // so far
	gate     chan struct{}
	answered atomic.Int64
	refused  atomic.Int64 // binds that met a moved sequence or another write
}

func newSide(ctx context.Context, name string, s *servers, c Case) (*side, error) {
	pool, err := subjects.NewPool(name)
	if err != nil {
		return nil, err
	}
	x := &side{name: name, pool: pool, servers: s, gate: make(chan struct{}, outstanding*c.Engines)}
	if x.nc, x.js, err = x.connect("stopwatch", 0); err != nil {
		return nil, err
	}
	layout := subjects.Layout{Storage: c.Storage, Replicas: c.Replicas}
	if err := subjects.Ensure(ctx, x.js, pool, layout); err != nil {
		return x, err
	}
	watch := subjects.FollowerConsumer("f-stopwatch-results", pool.ResultFilter("", ""), true)
	return x, follow(ctx, x.nc, x.js, pool.Results(), watch, func(*nats.Msg) {
		x.answered.Add(1)
		<-x.gate
	})
}

func (x *side) connect(name string, i int) (*nats.Conn, jetstream.JetStream, error) {
	nc, err := x.servers.connect(x.name+" "+name, i)
	if err != nil {
		return nil, nil, err
	}
	x.ends = append(x.ends, nc.Close)
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(inFlight))
	return nc, js, err
}

func (x *side) stop() {
	for i := len(x.ends) - 1; i >= 0; i-- {
		x.ends[i]()
	}
	x.ends = nil
}

// next waits for room and names a rollout; false when ctx ends.
func (x *side) next(ctx context.Context) (string, bool) {
	if ctx.Err() != nil {
		return "", false
	}
	select {
	case x.gate <- struct{}{}:
		x.ids++
		return "r" + strconv.FormatInt(x.ids, 10), true
	case <-ctx.Done():
		return "", false
	}
}

// errNothing says that a slice was over before the first answer came.
var errNothing = errors.New("nothing was answered in the time of a turn")

// turn is what one slice came to.
type turn struct {
	n   int64
	in  time.Duration
	cpu time.Duration

	refused int64
}

// saturate keeps as many rollouts outstanding as are allowed and counts answers.
func (x *side) saturate(ctx context.Context, length time.Duration) (turn, error) {
	slice, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	done := make(chan error, 1)
	began, cpu, n, refused := time.Now(), cpuTime(), x.answered.Load(), x.refused.Load()
	go func() {
		done <- x.submit(ctx, func(yield func(string) bool) {
			for {
				id, ok := x.next(slice)
				if !ok || !yield(id) {
					return
				}
			}
		})
	}()
	<-slice.Done()
	t := turn{x.answered.Load() - n, time.Since(began), cpuTime() - cpu, x.refused.Load() - refused}
	err := <-done
	if err == nil {
		err = x.drain(ctx)
	}
	if err == nil && t.n == 0 {
		err = errNothing
	}
	return t, err
}

// drain waits until nothing is outstanding.
func (x *side) drain(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, drainWait, fmt.Errorf("some are not answered after %v", drainWait))
	defer cancel()
	every := time.NewTicker(2 * time.Millisecond)
	defer every.Stop()
	for len(x.gate) > 0 {
		select {
		case <-every.C:
		case <-ctx.Done():
			return fmt.Errorf("%d rollouts: %w", len(x.gate), context.Cause(ctx))
		}
	}
	return nil
}

// paced submits at a rate and measures each rollout from ROLLOUTS to its
// reservation, in milliseconds of the NATS server's clock.
func (x *side) paced(ctx context.Context, length time.Duration, perSecond float64) ([]float64, error) {
	w := &waits{submitted: map[string]time.Time{}, bound: map[string]time.Time{}, ended: map[string]time.Time{}}
	end, err := w.watch(ctx, x)
	if err != nil {
		return nil, err
	}
	defer end()
	slice, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	began, sent := time.Now(), 0
	err = x.submit(ctx, func(yield func(string) bool) {
		every := time.NewTicker(time.Millisecond)
		defer every.Stop()
		for {
			for due := int(time.Since(began).Seconds() * perSecond); sent < due; sent++ {
				if id, ok := x.next(slice); !ok || !yield(id) {
					return
				}
			}
			select {
			case <-every.C:
			case <-slice.Done():
				return
			}
		}
	})
	if err == nil {
		err = x.drain(ctx)
	}
	if err != nil {
		return nil, err
	}
	// What was answered was stored; to be seen here may take longer.
	ctx, stop := context.WithTimeoutCause(ctx, drainWait, fmt.Errorf("not every reservation was seen after %v", drainWait))
	defer stop()
	every := time.NewTicker(5 * time.Millisecond)
	defer every.Stop()
	for w.seen() < sent {
		select {
		case <-every.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d: %w", w.seen(), sent, context.Cause(ctx))
		}
	}
	out := w.list()
	if len(out) == 0 {
		return nil, errors.New("no latency was seen")
	}
	return out, nil
}

// waits joins what is stored in ROLLOUTS with what is stored in reservations.
type waits struct {
	mu               sync.Mutex
	submitted, bound map[string]time.Time
	ended            map[string]time.Time // deleted: a bind that was not delivered before is none that can be seen
}

// watch looks from outside, alike on both sides: at the copies that ROLLOUTS
// publishes of what it stores, and at the reservations' headers.
func (w *waits) watch(ctx context.Context, x *side) (end func(), err error) {
	nc, err := x.servers.connect("stopwatch", 0)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	_, err = nc.Subscribe(x.pool.RecordPrefix()+".submit.>", func(m *nats.Msg) {
		_, id, _ := strings.Cut(m.Header.Get(subjects.HdrMsgID), ".")
		at, err := time.Parse(time.RFC3339Nano, m.Header.Get("Nats-Time-Stamp"))
		if err == nil {
			w.put(w.submitted, id, at)
		}
	})
	if err != nil {
		nc.Close()
		return nil, err
	}
	cfg := subjects.FollowerConsumer("f-stopwatch-reservations", subjects.BucketSubject(x.pool.Bucket(subjects.Reservations), ">"), true)
	cfg.DeliverPolicy = jetstream.DeliverNewPolicy // not the markers of a minute
	stream := subjects.BucketStream(x.pool.Bucket(subjects.Reservations))
	err = follow(ctx, nc, js, stream, cfg, func(m *nats.Msg) {
		_, _, id, ok := x.pool.ParseReservationSubject(m.Subject)
		meta, err := m.Metadata()
		switch {
		case !ok || err != nil:
		case m.Header.Get(subjects.HdrKVOperation) == "":
			w.put(w.bound, id, meta.Timestamp)
		default:
			w.put(w.ended, id, meta.Timestamp)
		}
	})
	if err != nil {
		nc.Close()
		return nil, err
	}
	return func() {
		_ = js.DeleteConsumer(ctx, stream, cfg.Name) // else it goes by itself
		nc.Close()
	}, nil
}

func (w *waits) put(m map[string]time.Time, id string, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := m[id]; !ok { // the first bind counts
		m[id] = at
	}
}

// seen is how many rollouts were seen from one end to the other.
func (w *waits) seen() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return min(len(w.submitted), len(w.ended))
}

func (w *waits) list() []float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []float64
	for id, at := range w.submitted {
		if b, ok := w.bound[id]; ok {
			out = append(out, float64(b.Sub(at).Microseconds())/1000)
		}
	}
	return out
}

// cpuTime is what this process has used, user and system.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
