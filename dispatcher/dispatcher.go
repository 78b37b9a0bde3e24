package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Dispatcher is one dispatcher of one pool on one connection. It runs once.
type Dispatcher struct {
	cfg   Config
	pool  subjects.Pool
	nc    *nats.Conn
	store *kvstate.Store
	api   api
	log   *slog.Logger

	owner      *owner
	hand       *hand
	queues     *queues
	work       *mailbox[func(context.Context)]
	decisions  *lines
	clock      *serverClock
	settings   atomic.Pointer[subjects.Settings] // the pool's, defaults filled in
	peers      *peers
	registered registration
	walker     *walker
	snapshots  *snapshots
	acquires   *acquires
	rebuilds   *restarts
	ready      *readiness
	unread     *unread
	metrics    *metrics
	looks      chan struct{} // asks for a look at the queues at once

	bindKey func(context.Context, kvstate.Bind) (uint64, error) // store.Bind, or a test's
	seeds   seedWriter                                          // store, or a test's

	inflight  inflight        // effects that are still to be answered
	effects   sync.WaitGroup  // their goroutines
	workCtx   context.Context // ends with Run; writes and answers run under it
	intakeCtx context.Context // ends with the first stop; what brings new work runs under it

	began    atomic.Bool
	stopping chan struct{} // closed by the first Stop or Kill
	stopOnce sync.Once
	kill     context.CancelCauseFunc // ends everything at once; set by New
	hardCtx  context.Context
	done     chan struct{}
}

// New checks the configuration and makes a dispatcher that is not running yet.
// It sends nothing. The connection stays the caller's: it must outlive Run, and
// should reconnect for ever.
func New(cfg Config, nc *nats.Conn) (*Dispatcher, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("dispatcher configuration: %w", err)
	}
	c := core.New(cfg.CoreConfig())
	return newDispatcher(cfg, nc, c)
}

func newDispatcher(cfg Config, nc *nats.Conn, step Stepper) (*Dispatcher, error) {
	pool, err := subjects.NewPool(cfg.Pool)
	if err != nil {
		return nil, err
	}
	store, err := kvstate.Open(nc, pool,
		kvstate.Timeout(cfg.Timings.Attempt), kvstate.Heartbeat(cfg.Timings.FollowBeat), kvstate.Logger(cfg.Log))
	if err != nil {
		return nil, fmt.Errorf("open pool %s: %w", pool, err)
	}
	d := &Dispatcher{
		cfg: cfg, pool: pool, nc: nc, store: store, api: newAPI(nc, store.JS()),
		log:  cfg.Log.With("pool", cfg.Pool, "dispatcher", cfg.Name),
		work: newMailbox[func(context.Context)](), clock: &serverClock{}, rebuilds: newRestarts(), snapshots: newSnapshots(), acquires: newAcquires(),
		metrics: newMetrics(), looks: make(chan struct{}, 1),
		stopping: make(chan struct{}), done: make(chan struct{}),
	}
	if c, ok := cfg.Recorder.(prometheus.Collector); ok {
		if err := d.metrics.registry.Register(c); err != nil {
			return nil, fmt.Errorf("metrics of the recorder: %w", err)
		}
	}
	d.bindKey, d.seeds = store.Bind, store
	d.owner = &owner{
		d: d, step: step, start: time.Now(),
		in: make(chan arrival, cfg.Limits.Events), seen: map[core.ViewKind]bool{},
	}
	d.ready = newReadiness(cfg.Timings.ReadyAge)
	d.unread = newUnread(cfg.Timings.Core.Lost)
	d.hand = newHand(nc, cfg.Limits.HandBytes, d.metrics)
	d.queues = newQueues(d)
	d.peers = newPeers(cfg.Name, cfg.Timings.Core.Suspect)
	d.walker = newWalker(d)
	d.decisions = newLines(nc, pool.Decision(), cfg.Limits.Decisions, d.metrics)
	d.settings.Store(new(subjects.Settings{}.WithDefaults()))
	d.hardCtx, d.kill = context.WithCancelCause(context.Background())
	return d, nil
}

// Name is the dispatcher's name in the pool.
func (d *Dispatcher) Name() string { return d.cfg.Name }

// Registry holds the dispatcher's metrics, those of a Recorder that has some too.
func (d *Dispatcher) Registry() *prometheus.Registry { return d.metrics.registry }

// Handler serves /metrics, /healthz and /readyz.
func (d *Dispatcher) Handler() http.Handler { return d.handler() }

// Run serves the pool until ctx ends or Stop or Kill is called. The end of ctx
// is a soft stop. It returns nil after an orderly stop, ErrNotGraceful when the
// soft stop ran out of time, and otherwise what broke.
func (d *Dispatcher) Run(ctx context.Context) error {
	if !d.began.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer close(d.done)
	defer d.kill(ErrStopped)
	select {
	case <-d.stopping:
		return ErrStopped
	default:
	}
	soft, endSoft := context.WithCancelCause(d.hardCtx)
	defer endSoft(nil)
	context.AfterFunc(ctx, func() { endSoft(context.Cause(ctx)) })
	go func() {
		select {
		case <-d.stopping:
			endSoft(ErrStopped)
		case <-soft.Done():
		}
	}()

	if err := d.ensure(soft); err != nil {
		if soft.Err() != nil {
			return nil // stopped before it began: nothing is in hand
		}
		return err
	}

	group, run := errgroup.WithContext(d.hardCtx)
	intake, endIntake := context.WithCancelCause(run)
	defer endIntake(nil)
	d.workCtx, d.intakeCtx = run, intake
	named := func(ctx context.Context, name string, f func(context.Context) error) {
		group.Go(func() error {
			if err := f(ctx); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	defer d.queues.close()
	named(run, "core", d.owner.run)
	named(run, "acks", d.hand.run)
	for range d.cfg.Limits.Writers {
		named(run, "writer", d.writer)
	}
	named(run, "decisions", d.decisions.run)
	named(intake, "connection", d.watchConnection)
	for view, follow := range d.followers() {
		named(intake, "follow "+string(view), follow)
	}
	named(intake, "queues", d.watchQueues)
	named(intake, "telemetry", d.watchTelemetry)
	named(intake, "registration", d.register)
	named(intake, "expiry walker", d.walker.run)

	graceful := true
	named(run, "stop", func(run context.Context) error {
		select {
		case <-soft.Done():
		case <-run.Done():
			return nil
		}
		graceful = d.giveBack(run, endIntake)
		d.kill(ErrStopped)
		return nil
	})
	err := group.Wait()
	d.effects.Wait() // the owner has ended: nobody begins another
	d.log.Info("dispatcher stopped", "graceful", graceful, "err", err)
	switch {
	case err != nil:
		return err
	case !graceful:
		return ErrNotGraceful
	}
	return nil
}

// ensure makes the pool's streams, for as long as it takes NATS to be there.
func (d *Dispatcher) ensure(ctx context.Context) error {
	pause := newPause(d.cfg.Timings.RestartMin, d.cfg.Timings.RestartMax)
	for {
		try, cancel := context.WithTimeout(ctx, 4*d.cfg.Timings.Attempt)
		err := subjects.Ensure(try, d.store.JS(), d.pool, d.cfg.Layout)
		late := try.Err() != nil
		cancel()
		switch {
		case err == nil:
			d.ready.report(partStreams, nil)
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case d.nc.IsClosed():
			return ErrConnectionClosed
		case !late && !errors.Is(err, nats.ErrTimeout) && !errors.Is(err, nats.ErrDisconnected):
			return err // an answer, not an absence: only the operator can change it
		}
		d.ready.report(partStreams, err)
		d.log.Warn("the pool's streams cannot be made yet", "err", err)
		if !pause.wait(ctx) {
			return context.Cause(ctx)
		}
	}
}

// giveBack is the soft stop: no new work, what waits in hand goes back, what is
// being written is answered, the registration goes. It reports whether all of
// it was done within the budget.
func (d *Dispatcher) giveBack(run context.Context, endIntake context.CancelCauseFunc) bool {
	ctx, cancel := context.WithTimeout(run, d.cfg.Timings.StopBudget)
	defer cancel()
	d.ready.stop()
	endIntake(ErrStopped)
	if !d.queues.drain(ctx) {
		return false
	}
	if !d.send(ctx, core.Stop{}) {
		return false
	}
	for {
		settled := false
		if err := d.ask(ctx, func() { settled = d.inflight.n() == 0 && len(d.owner.in) == 0 }); err != nil {
			return false
		}
		if settled {
			break
		}
		if !d.inflight.wait(ctx) {
			return false
		}
	}
	if !d.hand.drain(ctx) {
		return false
	}
	return d.unregister(ctx)
}

// Stop ends the dispatcher softly and waits until it has ended: what is in hand
// goes back at once. When ctx ends first, it ends hard. It may be called more
// than once, and before Run.
func (d *Dispatcher) Stop(ctx context.Context) error {
	d.stopOnce.Do(func() { close(d.stopping) })
	if !d.began.Load() {
		return nil
	}
	select {
	case <-d.done:
		return nil
	case <-ctx.Done():
		d.kill(context.Cause(ctx))
		<-d.done
		return fmt.Errorf("stop dispatcher %s: %w: %w", d.cfg.Name, ErrNotGraceful, context.Cause(ctx))
	}
}

// Kill ends the dispatcher at once, as a crash would, and waits until it has
// ended: what was in hand comes back after the consumers' AckWait.
func (d *Dispatcher) Kill() {
	d.stopOnce.Do(func() { close(d.stopping) })
	d.kill(ErrStopped)
	if d.began.Load() {
		<-d.done
	}
}
