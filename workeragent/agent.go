package workeragent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Agent serves the engines of one node in one pool. Make it with New, let Run
// work, end it with Stop.
type Agent struct {
	cfg     Config
	t       Timings
	log     *slog.Logger
	nc      *nats.Conn
	pool    subjects.Pool
	store   *kvstate.Store
	units   []*unit
	cancels cancels
	spool   *spool
	metrics *metrics
	replays chan struct{} // bounds replays of cache events under way, over all engines

	settings atomic.Pointer[subjects.Settings] // with defaults
	contact  atomic.Int64                      // unix ns of the last proof of contact with NATS, own clock

	started  atomic.Bool
	stopping chan struct{} // closed by the first Stop
	hurry    chan struct{} // closed by the second Stop, or when the first's context ends
	stopOnce sync.Once
	hurryNow sync.Once
	done     chan struct{} // closed when Run has ended
	left     atomic.Int64  // keys that Stop left behind
}

// maxReplays of cache events at once: an engine holds its live events back
// while it replays.
const maxReplays = 4

// New makes an agent on a connection that it does not own. It talks to nobody
// yet. Open the connection with nats.ReconnectBufSize(-1) and MaxReconnects(-1).
func New(cfg Config, nc *nats.Conn) (*Agent, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	pool, err := subjects.NewPool(cfg.Pool)
	if err != nil {
		return nil, err
	}
	store, err := kvstate.Open(nc, pool, kvstate.Timeout(cfg.Timings.StoreTimeout),
		kvstate.Heartbeat(cfg.Timings.StoreHeartbeat), kvstate.Logger(cfg.Log))
	if err != nil {
		return nil, err
	}
	a := &Agent{
		cfg: cfg, t: cfg.Timings, log: cfg.Log, nc: nc, pool: pool, store: store,
		stopping: make(chan struct{}), hurry: make(chan struct{}), done: make(chan struct{}),
	}
	a.replays = make(chan struct{}, maxReplays)
	a.metrics = newMetrics(a)
	if a.spool, err = newSpool(cfg.SpoolBytes, cfg.SpoolDir); err != nil {
		return nil, err
	}
	def := subjects.Settings{}.WithDefaults()
	a.settings.Store(&def)
	for i := range cfg.Engines {
		a.units = append(a.units, newUnit(a, cfg.Engines[i]))
		for _, why := range returnReasons {
			a.metrics.returns.WithLabelValues(cfg.Engines[i].Name, why)
		}
	}
	return a, nil
}

// Collector gives the agent's metrics, for an own registry.
func (a *Agent) Collector() prometheus.Collector { return a.metrics }

// Name is the agent's name, for people.
func (a *Agent) Name() string { return a.cfg.Name }

// Run serves until Stop has finished (nil), every engine is served by a later
// agent (ErrReplaced), or ctx ends (its cause). The end of ctx is a hard stop:
// nothing is written any more, keys and registrations stay as they are. It may
// be called once.
func (a *Agent) Run(ctx context.Context) error {
	if !a.started.CompareAndSwap(false, true) {
		return errors.New("the agent was run before: make a new one")
	}
	defer close(a.done)
	if a.cfg.Layout != nil {
		if err := a.ensure(ctx); err != nil {
			if a.isStopping() && ctx.Err() == nil {
				return nil
			}
			return fmt.Errorf("make pool %s: %w", a.pool, err)
		}
	}
	life, end := context.WithCancel(ctx)
	defer end()
	var wg, shared sync.WaitGroup
	shared.Go(func() { a.followCancels(life) })
	shared.Go(func() { a.followSettings(life) })
	errs := make([]error, len(a.units))
	for i, u := range a.units {
		wg.Go(func() { errs[i] = u.run(life) })
	}
	wg.Wait()
	end()
	shared.Wait()
	for _, u := range a.units {
		if err := u.cfg.Adapter.Close(); err != nil {
			a.log.Warn("closing an adapter failed", "engine", u.name, "error", err)
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return errors.Join(dedup(errs)...)
}

// dedup reports ErrReplaced only when it is true of every engine.
func dedup(errs []error) []error {
	replaced := 0
	for _, err := range errs {
		if errors.Is(err, ErrReplaced) {
			replaced++
		}
	}
	var out []error
	for _, err := range errs {
		if err != nil && !errors.Is(err, ErrReplaced) {
			out = append(out, err)
		}
	}
	if replaced == len(errs) {
		out = append(out, ErrReplaced)
	}
	return out
}

// ensureTries are the timeouts of a write that one try to make the pool may take.
const ensureTries = 4

func (a *Agent) ensure(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-a.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	// An answer of NATS is final here; no answer in time is not.
	pause := a.pauses()
	for {
		try, done := context.WithTimeout(ctx, ensureTries*a.t.StoreTimeout)
		err := subjects.Ensure(try, a.store.JS(), a.pool, *a.cfg.Layout)
		late := try.Err() != nil
		done()
		_, answered := errors.AsType[*jetstream.APIError](err)
		if err == nil || answered && !late || errors.Is(err, subjects.ErrForeignStream) || errors.Is(err, subjects.ErrBadLayout) {
			return err
		}
		a.log.Warn("the pool's streams cannot be made yet", "error", err)
		if !pause.wait(ctx) {
			return err
		}
	}
}

// Stop ends the agent softly: it takes nothing new, lets runs finish for up to
// Timings.DrainTimeout, gives back the rest with its partial output, and takes
// its registrations away unless a later agent has replaced them. Called again,
// or when ctx ends, it gives back at once. It returns when Run has ended;
// ErrUnfinished says that something could not be given back.
func (a *Agent) Stop(ctx context.Context) error {
	if !a.started.Load() {
		return nil
	}
	first := false
	a.stopOnce.Do(func() {
		first = true
		close(a.stopping)
	})
	if !first {
		a.hurryUp()
	}
	select {
	case <-a.done:
	case <-ctx.Done():
		a.hurryUp()
		<-a.done // bounded: Timings.HandBack, and the end of Run's context
	}
	if n := a.left.Load(); n > 0 {
		return fmt.Errorf("%w: %d reservations", ErrUnfinished, n)
	}
	return nil
}

func (a *Agent) hurryUp() { a.hurryNow.Do(func() { close(a.hurry) }) }

func (a *Agent) isStopping() bool {
	select {
	case <-a.stopping:
		return true
	default:
		return false
	}
}

// Ready is nil while the agent serves: NATS was heard of lately and every engine
// is registered. What is missing is named.
func (a *Agent) Ready() error {
	var errs []error
	if !a.started.Load() {
		return fmt.Errorf("%w: the agent is not running", ErrNotReady)
	}
	if age := a.contactAge(); age > a.t.ReadyAge {
		errs = append(errs, fmt.Errorf("%w: no contact with NATS for %v", ErrNotReady, age.Round(time.Millisecond)))
	}
	if a.isStopping() {
		errs = append(errs, fmt.Errorf("%w: the agent is stopping", ErrNotReady))
	}
	for _, u := range a.units {
		if s := u.state(); s != subjects.EngineReady {
			errs = append(errs, fmt.Errorf("%w: engine %s is %s", ErrNotReady, u.name, s))
		}
		if err := u.unregistered(); err != nil {
			errs = append(errs, fmt.Errorf("%w: engine %s cannot be registered, look at the disks of NATS: %w", ErrNotReady, u.name, err))
		}
	}
	return errors.Join(errs...)
}

func (a *Agent) alive() { a.contact.Store(time.Now().UnixNano()) }

func (a *Agent) contactAge() time.Duration {
	at := a.contact.Load()
	if at == 0 {
		return 1<<63 - 1
	}
	return time.Since(time.Unix(0, at))
}

// followSettings keeps the pool's settings.
func (a *Agent) followSettings(ctx context.Context) {
	put := func(v kvstate.Value[subjects.Settings]) {
		s := v.V.WithDefaults()
		a.settings.Store(&s)
		for _, u := range a.units {
			kick(u.kickCache)
		}
	}
	a.followShared(ctx, "settings", func(ctx context.Context, engine string) error {
		return a.store.FollowPools(ctx, kvstate.FollowConfig{Name: engine, Filter: a.pool.String(), Agent: true},
			kvstate.Handler[kvstate.Value[subjects.Settings], kvstate.Value[struct{}]]{
				Swap: func(all []kvstate.Value[subjects.Settings], _ []kvstate.Value[struct{}]) {
					def := subjects.Settings{}.WithDefaults()
					a.settings.Store(&def)
					for _, v := range all {
						put(v)
					}
				},
				Put: put,
				Gone: func(kvstate.Value[struct{}]) {
					def := subjects.Settings{}.WithDefaults()
					a.settings.Store(&def)
				},
				Alive: a.alive,
			})
	})
}

// followShared is follow for what concerns all engines, under the name of one of
// them: of one that no later agent serves, or the two would take the consumer
// from each other for ever.
func (a *Agent) followShared(ctx context.Context, what string, f func(ctx context.Context, engine string) error) {
	a.follow(ctx, what, func() error {
		u := a.units[0]
		for _, x := range a.units {
			if !x.isReplaced() {
				u = x
				break
			}
		}
		try, end := context.WithCancelCause(ctx)
		defer end(nil)
		if !u.isReplaced() {
			go func() {
				select {
				case <-u.replaced:
					end(ErrReplaced)
				case <-try.Done():
				}
			}()
		}
		if err := f(try, u.name); err != nil {
			return err
		}
		return context.Cause(try)
	})
}

// follow runs a follower until ctx ends, anew when it gives up.
func (a *Agent) follow(ctx context.Context, what string, f func() error) {
	pause := pauses{min: a.t.RepeatMin, max: a.t.RepeatMax}
	for ctx.Err() == nil {
		err := f()
		if ctx.Err() != nil {
			return
		}
		a.log.Warn("a follower ended and is begun anew", "what", what, "error", err)
		pause.wait(ctx)
	}
}
