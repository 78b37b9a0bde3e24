package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/dispatcher"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// Config of a pool in one process.
type Config struct {
	Pool        string
	NATS        NATSConfig
	Layout      subjects.Layout
	Settings    subjects.Settings // written when the pool has none
	Dispatchers int               // at least 1
	Engines     []Engine          // at least one

	DispatcherTimings dispatcher.Timings  // zero fields take the default
	AgentTimings      workeragent.Timings // zero fields take the default

	Journal bool // dispatchers record what they saw and decided
	Explain bool // decisions are published with their candidates
	// SelfCheck has each dispatcher replay samples of its journal; nil = off.
	SelfCheck *journal.SelfCheck

	Version string
	Log     *slog.Logger // nil = nowhere
}

// journalEnd is how long a stop waits for the journals' tails.
const journalEnd = 3 * time.Second

// Engine is one engine of the pool: simulated here, or a server elsewhere.
type Engine struct {
	Name string
	Sim  *simengine.Config // runs on its own listener; nil = Adapter is set
	// Adapter drives a server elsewhere.
	Adapter engine.Adapter
	URL     string // of a server elsewhere, for people
	Slots   int    // 0 = what it reports
}

// registerWait is how long engines may take to register.
const registerWait = 20 * time.Second

// Pool is a running pool.
type Pool struct {
	NATS     *NATS
	Store    *kvstate.Store // on a connection of its own, for tools
	Name     subjects.Pool
	Settings subjects.Settings // as they stood when it started, defaults filled in

	Dispatchers []*dispatcher.Dispatcher
	Agent       *workeragent.Agent
	Sims        []*fakes.Fake

	cfg      Config
	conns    []*nats.Conn
	journals []*journal.Writer
	runs     sync.WaitGroup
	hard     context.CancelCauseFunc
	ended    chan error // of parts that ended by themselves
}

// Start starts everything and waits until every engine is registered. When it
// fails nothing is left running.
func Start(ctx context.Context, cfg Config) (p *Pool, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	name, err := subjects.NewPool(cfg.Pool)
	if err != nil {
		return nil, err
	}
	if cfg.Dispatchers < 1 || len(cfg.Engines) < 1 {
		return nil, fmt.Errorf("a pool of %d dispatchers and %d engines: give at least one of each", cfg.Dispatchers, len(cfg.Engines))
	}
	run, hard := context.WithCancelCause(context.WithoutCancel(ctx))
	p = &Pool{Name: name, cfg: cfg, hard: hard, ended: make(chan error, cfg.Dispatchers+1)}
	defer func() {
		if err != nil {
			p.abort()
			p = nil
		}
	}()
	if p.NATS, err = StartNATS(ctx, cfg.NATS, cfg.Log); err != nil {
		return p, err
	}
	if err = p.makePool(ctx); err != nil {
		return p, err
	}
	if err = p.startDispatchers(run); err != nil {
		return p, err
	}
	if err = p.startEngines(run); err != nil {
		return p, err
	}
	return p, p.awaitEngines(ctx)
}

func (p *Pool) connect(name string) (*nats.Conn, error) {
	nc, err := p.NATS.Conn(name)
	if err == nil {
		p.conns = append(p.conns, nc)
	}
	return nc, err
}

func (p *Pool) makePool(ctx context.Context) error {
	nc, err := p.connect("rollbus tools")
	if err != nil {
		return err
	}
	if p.Store, err = kvstate.Open(nc, p.Name); err != nil {
		return fmt.Errorf("open pool %s: %w", p.Name, err)
	}
	layout := p.cfg.Layout
	layout.Record = p.cfg.Settings.Record
	if err := subjects.Ensure(ctx, p.Store.JS(), p.Name, layout); err != nil {
		return err
	}
	if _, err := p.Store.PutSettings(ctx, p.cfg.Settings, 0); err != nil && !errors.Is(err, kvstate.ErrConflict) {
		return fmt.Errorf("write the settings of pool %s: %w", p.Name, err)
	}
	s, _, err := p.Store.Settings(ctx)
	if err != nil {
		return fmt.Errorf("read the settings of pool %s: %w", p.Name, err)
	}
	p.Settings = s.WithDefaults()
	return nil
}

// watch runs a part and keeps what ended it.
func (p *Pool) watch(name string, run func() error) {
	p.runs.Go(func() {
		if err := run(); err != nil {
			p.ended <- fmt.Errorf("%s: %w", name, err)
			return
		}
		p.ended <- nil
	})
}

func (p *Pool) startDispatchers(run context.Context) error {
	for i := range p.cfg.Dispatchers {
		name := fmt.Sprintf("d%d", i+1)
		nc, err := p.connect("rollbus dispatcher " + name)
		if err != nil {
			return err
		}
		cfg := dispatcher.Config{
			Pool: p.cfg.Pool, Name: name, Version: p.cfg.Version, Layout: p.cfg.Layout,
			Timings: p.cfg.DispatcherTimings, Explain: p.cfg.Explain, Log: p.cfg.Log,
		}.WithDefaults()
		if p.cfg.Journal {
			w, err := journal.ForPool(p.Store.JS(), p.Name, cfg.CoreConfig(), p.cfg.Version, p.cfg.SelfCheck, p.cfg.Log)
			if err != nil {
				return err
			}
			p.journals = append(p.journals, w)
			cfg.Recorder = w
		}
		d, err := dispatcher.New(cfg, nc)
		if err != nil {
			return err
		}
		p.Dispatchers = append(p.Dispatchers, d)
		p.watch("dispatcher "+name, func() error { return d.Run(run) })
	}
	return nil
}

func (p *Pool) startEngines(run context.Context) error {
	engines := make([]workeragent.EngineConfig, 0, len(p.cfg.Engines))
	for _, e := range p.cfg.Engines {
		adapter := e.Adapter
		if e.Sim != nil {
			// Its cache events take the way of a real engine's: ZeroMQ, replay included.
			sim, err := fakes.VLLM(fakes.VLLMConfig{Engine: *e.Sim, Events: &fakes.EventsConfig{}, Sources: true})
			if err != nil {
				return fmt.Errorf("engine %s: %w", e.Name, err)
			}
			p.Sims = append(p.Sims, sim)
			if adapter, err = engine.NewVLLM(engine.VLLMConfig{OpenAIConfig: engine.OpenAIConfig{URL: sim.URL()}}); err != nil {
				return fmt.Errorf("engine %s: %w", e.Name, err)
			}
		}
		engines = append(engines, workeragent.EngineConfig{Name: e.Name, Adapter: adapter, Slots: e.Slots})
	}
	nc, err := p.connect("rollbus agent")
	if err != nil {
		return err
	}
	p.Agent, err = workeragent.New(workeragent.Config{
		Pool: p.cfg.Pool, Name: "local", Version: p.cfg.Version, Engines: engines, Timings: p.cfg.AgentTimings, Log: p.cfg.Log,
	}, nc)
	if err != nil {
		return err
	}
	p.watch("agent", func() error { return p.Agent.Run(run) })
	return nil
}

// awaitEngines follows the registrations until every engine has one.
func (p *Pool) awaitEngines(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, registerWait, fmt.Errorf("not every engine registered within %v", registerWait))
	defer cancel()
	missing := map[string]bool{}
	for _, e := range p.cfg.Engines {
		missing[e.Name] = true
	}
	done, finish := context.WithCancel(ctx)
	defer finish()
	seen := func(v kvstate.Value[subjects.Engine]) {
		if delete(missing, v.V.Engine); len(missing) == 0 {
			finish()
		}
	}
	err := p.Store.FollowEngines(done, kvstate.FollowConfig{Name: "local", Values: true}, kvstate.Handler[kvstate.Value[subjects.Engine], kvstate.Value[struct{}]]{
		Swap: func(all []kvstate.Value[subjects.Engine], _ []kvstate.Value[struct{}]) {
			for _, v := range all {
				seen(v)
			}
		},
		Put: seen, Gone: func(kvstate.Value[struct{}]) {}, Alive: func() {},
	})
	switch {
	case len(missing) == 0:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("wait for engines: %w", context.Cause(ctx))
	}
	return fmt.Errorf("wait for engines: %w", err)
}

// Wait blocks until a dispatcher or the agent has ended, or ctx ends. It returns
// what ended it, nil after an orderly stop.
func (p *Pool) Wait(ctx context.Context) error {
	select {
	case err := <-p.ended:
		return err
	case <-ctx.Done():
		return nil
	}
}

// Addresses are where the engines serve, by name.
func (p *Pool) Addresses() map[string]string {
	out := map[string]string{}
	sims := p.Sims
	for _, e := range p.cfg.Engines {
		if out[e.Name] = e.URL; e.Sim != nil {
			out[e.Name], sims = sims[0].URL(), sims[1:]
		}
	}
	return out
}

// Stop stops everything, softly until ctx ends. What runs is finished or given
// back; streams stay in the server's folder.
func (p *Pool) Stop(ctx context.Context) error {
	var errs []error
	if p.Agent != nil {
		errs = append(errs, p.Agent.Stop(ctx))
	}
	for _, d := range p.Dispatchers {
		errs = append(errs, d.Stop(ctx))
	}
	p.abort()
	return errors.Join(errs...)
}

// abort ends what is left, at once.
func (p *Pool) abort() {
	p.hard(errStopped)
	p.runs.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), journalEnd)
	defer cancel()
	for _, w := range p.journals {
		if err := w.Close(ctx); err != nil {
			p.cfg.Log.Warn("the journal's tail is missing", "err", err)
		}
	}
	for _, nc := range p.conns {
		nc.Close()
	}
	if p.NATS != nil {
		p.NATS.Stop()
	}
	for _, s := range p.Sims {
		_ = s.Close() // it has nothing to lose
	}
}
