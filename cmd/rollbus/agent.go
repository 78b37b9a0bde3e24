package main

import (
	"context"
	"runtime/debug"
	"time"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/workeragent"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// AgentCmd runs an agent, or looks at an engine as an agent would.
type AgentCmd struct {
	Run         Agent            `cmd:"" default:"withargs" help:"Run an agent beside one or more engines (the default)."`
	Probe       AgentProbe       `cmd:"" help:"Ask an engine what it is, and tell what is missing and which flag provides it."`
	Conformance AgentConformance `cmd:"" help:"Check that an engine behaves as an agent needs it; it generates some thousand tokens."`
}

// Agent is the daemon beside the engines.
type Agent struct {
	Engine            []string      `short:"e" required:"" help:"Engines of this node: [name=]kind=url." placeholder:"SPEC"`
	Name              string        `help:"Name of the agent, for people." placeholder:"NAME"`
	Slots             int           `help:"Requests that one engine runs at once; 0 = what it reports." placeholder:"N"`
	Model             string        `help:"Model to name to the engines; without one what they list first." placeholder:"NAME"`
	APIKey            string        `name:"api-key" help:"Bearer token for the engines; better in ROLLBUS_API_KEY." placeholder:"TEXT"`
	Capacity          int64         `name:"capacity-tokens" help:"KV cache of one engine, tokens, where it neither reports it nor ever did." placeholder:"N"`
	MaxModelLen       int           `help:"Longest context of one engine, tokens, where it does not report it." placeholder:"N"`
	AcceptMissingDone bool          `help:"Take an answer for whole at its finish reason, without end mark and usage: for engines that send neither."`
	SpoolDir          string        `type:"path" help:"Keep answers that cannot be stored yet on disk too." placeholder:"DIR"`
	StateDir          string        `type:"path" help:"Keep what engines report of themselves here, for when they do not; without it in the user's state folder." placeholder:"DIR"`
	DrainTimeout      time.Duration `default:"5m" help:"How long a stop waits for what runs." placeholder:"DURATION"`
	Init              bool          `help:"Make the pool's streams where they are missing."`
	eventFlags
	layoutFlags
	httpFlag
	scaleFlag
}

// Help shows examples.
func (Agent) Help() string {
	return `Examples:
  rollbus agent --engine vllm=http://127.0.0.1:8000
  rollbus agent --engine gpu0=vllm=http://127.0.0.1:8000 --engine gpu1=sglang=http://127.0.0.1:8001 --kv-replay gpu1=tcp://127.0.0.1:5657
  rollbus agent --engine auto=http://127.0.0.1:8000 --http :9471
  rollbus agent probe http://127.0.0.1:8000
  rollbus agent conformance http://127.0.0.1:8000 -o json
Kinds are vllm, sglang, openai (anything that speaks that API) and auto, which asks the server once, at the start.
Where the engine publishes its cache events is asked of it; --kv-events says so for servers that do not tell. Without
events the cache view is a guess from what ran there, and prompts get no credit for it.
The KV capacity is what the engine reports, else what it reported once (--state-dir), else --capacity-tokens; rollbus get
engines -o wide says which.
Without a name an engine is called after this host and its port. Names are unique in the pool.
SIGTERM takes nothing new and finishes what runs, --drain-timeout at most; a second one hands it back at once.`
}

// Run serves until told to stop.
func (c *Agent) Run(a *app) error {
	if err := c.check(); err != nil {
		return err
	}
	specs, err := parseEngines(c.Engine, false, nodeName)
	if err != nil {
		return err
	}
	events, err := c.of(specs)
	if err != nil {
		return err
	}
	staySmall()
	log := a.log()
	cfg := workeragent.Config{Pool: a.opts.Pool, Name: c.Name, Version: programVersion(), SpoolDir: c.SpoolDir, StateDir: c.StateDir, Log: log}
	if cfg.StateDir == "" {
		cfg.StateDir = a.state
	}
	cfg.Timings = workeragent.DefaultTimings().Scale(c.TimingScale)
	cfg.Timings.DrainTimeout = c.DrainTimeout
	for _, s := range specs {
		adapter, found, err := s.adapter(a.ctx, engine.OpenAIConfig{Model: c.Model, APIKey: c.APIKey, AcceptMissingDone: c.AcceptMissingDone}, events[s.name])
		if err != nil {
			return err
		}
		if s.kind == autoKind {
			log.Info("detected", "engine", s.name, "kind", found.Kind, "model", found.Model, "version", found.Version, "by", found.Found)
		}
		cfg.Engines = append(cfg.Engines, workeragent.EngineConfig{Name: s.name, Adapter: adapter, Slots: c.Slots, CapacityTokens: c.Capacity, MaxModelLen: c.MaxModelLen})
	}
	if c.Init {
		layout := c.layout(true)
		cfg.Layout = &layout
	}
	nc, err := a.connectDaemon("rollbus agent")
	if err != nil {
		return err
	}
	defer nc.Close()
	agent, err := workeragent.New(cfg, nc)
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	var parts []part
	if c.HTTP != "" {
		h, addr, err := httpPart(c.HTTP, web(agent.Collector(), agent.Ready))
		if err != nil {
			return err
		}
		log.Info("serving metrics and health", "http", addr)
		parts = append(parts, h)
	}
	for _, s := range specs {
		log.Info("serving engine", "engine", s.name, "kind", s.kind, "url", s.url, "pool", a.opts.Pool)
	}
	return supervise(a.ctx, log, c.DrainTimeout+handBack, append(parts, part{name: "agent", run: agent.Run, stop: agent.Stop})...)
}

// staySmall has the heap collected at half the usual growth: an agent shares its
// machine with an engine, and has CPU to spare for it. GOGC in the environment
// stands above.
func staySmall() {
	const usual, small = 100, 50 // percent
	if was := debug.SetGCPercent(small); was != usual {
		debug.SetGCPercent(was)
	}
}

// handBack is how long an agent may take to give back what was not finished.
const handBack = 15 * time.Second

// Engine is a simulated engine as a process of its own.
type Engine struct {
	Listen string `default:"127.0.0.1:8000" help:"Address of its API." placeholder:"HOST:PORT"`
	Model  string `default:"sim" help:"Model that it says it serves." placeholder:"NAME"`
	Events bool   `name:"cache-events" help:"Publish cache events over ZeroMQ, on ports of its own that it tells who asks, replay included."`
	readyFlag
	simFlags
}

// engineAddress is where a simulated engine serves.
type engineAddress struct {
	URL   string `json:"url"`
	Model string `json:"model"`
}

// Help shows examples.
func (Engine) Help() string {
	return `Examples:
  rollbus engine --listen 127.0.0.1:8000 --time-scale 10
  curl 127.0.0.1:8000/v1/completions -d '{"model":"sim","prompt":"2+2=","max_tokens":8}'
Its answers are made up and its timing is modelled; its interface is the real one.`
}

// simulated is a running engine.
type simulated interface {
	URL() string
	Close() error
}

func (c *Engine) start(cfg simengine.Config) (simulated, error) {
	if c.Events {
		return fakes.VLLM(fakes.VLLMConfig{Engine: cfg, Events: &fakes.EventsConfig{}, Sources: true})
	}
	s, err := simengine.New(cfg)
	if err != nil {
		return nil, err
	}
	return s, s.Start()
}

// engineBudget is how long a stopped engine may take.
const engineBudget = 5 * time.Second

// Run serves until told to stop.
func (c *Engine) Run(a *app) error {
	cfg := c.config(c.Model, c.Listen)
	cfg.Logger = a.log()
	s, err := c.start(cfg)
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	at := engineAddress{s.URL(), c.Model}
	err = a.printer().each(at, func() error {
		a.say("simulated engine serving %s at %s", at.Model, at.URL)
		return nil
	})
	if err != nil {
		return err
	}
	if err := c.ready(at); err != nil {
		return err
	}
	done := make(chan struct{})
	return supervise(a.ctx, cfg.Logger, engineBudget, part{
		name: "engine",
		run: func(ctx context.Context) error {
			select {
			case <-done:
			case <-ctx.Done():
			}
			return nil
		},
		stop: func(context.Context) error { defer close(done); return s.Close() },
	})
}
