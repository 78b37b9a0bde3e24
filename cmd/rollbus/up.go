package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/rollbus/rollbus/bench/demo/local"
	"github.com/rollbus/rollbus/workeragent"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// Up runs a whole pool in this process.
type Up struct {
	Engine       []string      `short:"e" help:"Engines: sim, or [name=]kind=url; without any, --engines simulated ones." placeholder:"SPEC"`
	Engines      int           `default:"4" help:"Simulated engines when --engine names none." placeholder:"N"`
	Dispatchers  int           `default:"1" help:"Dispatchers." placeholder:"N"`
	Listen       string        `default:"127.0.0.1:4222" help:"Address of NATS; port 0 is a free one." placeholder:"HOST:PORT"`
	Data         string        `type:"path" help:"Keep the streams here; without it they go when this process ends." placeholder:"DIR"`
	Model        string        `default:"sim" help:"Model that simulated engines say they serve." placeholder:"NAME"`
	APIKey       string        `name:"api-key" help:"Bearer token for engines elsewhere; better in ROLLBUS_API_KEY." placeholder:"TEXT"`
	DrainTimeout time.Duration `default:"30s" help:"How long a stop waits for what runs." placeholder:"DURATION"`
	readyFlag
	simFlags
	journalFlag
	eventFlags
	httpFlag
}

// Help shows examples.
func (Up) Help() string {
	return `Examples:
  rollbus up
  rollbus up --engine auto=http://127.0.0.1:8000 --data ./streams
  rollbus up --listen 127.0.0.1:0 --ready-file up.json &
Then, elsewhere: rollbus submit --prompt "2+2=" --wait
A second SIGTERM or Ctrl-C hands back what runs at once.`
}

// addresses of a pool that is up.
type addresses struct {
	Pool    string            `json:"pool"`
	NATS    string            `json:"nats"`
	HTTP    string            `json:"http,omitempty"`
	Engines map[string]string `json:"engines"` // name -> address
}

func ordinal(i int, _ *url.URL) string { return fmt.Sprintf("e%d", i+1) }

// Run serves until told to stop.
func (c *Up) Run(a *app) (err error) {
	cfg, err := c.config(a)
	if err != nil {
		return err
	}
	if cfg.NATS.Dir == "" {
		dir, err := os.MkdirTemp("", "rollbus-up-")
		if err != nil {
			return fmt.Errorf("folder for the streams: %w", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		cfg.NATS.Dir = dir
	}
	p, err := local.Start(a.ctx, cfg)
	if err != nil {
		return coded(exitUnavailable, "up: %w", err)
	}
	at := addresses{Pool: a.opts.Pool, NATS: p.NATS.URL(), Engines: p.Addresses()}
	var parts []part
	if c.HTTP != "" {
		h, addr, err := httpPart(c.HTTP, upHandler(p))
		if err != nil {
			_ = p.Stop(a.ctx)
			return err
		}
		at.HTTP, parts = "http://"+addr, append(parts, h)
	}
	if err := c.announce(a, at); err != nil {
		_ = p.Stop(a.ctx)
		return err
	}
	return supervise(a.ctx, cfg.Log, c.DrainTimeout+handBack, append(parts, part{name: "pool", run: p.Wait, stop: p.Stop})...)
}

func (c *Up) config(a *app) (local.Config, error) {
	specs := c.Engine
	if len(specs) == 0 {
		for range c.Engines {
			specs = append(specs, simKind)
		}
	}
	engines, err := parseEngines(specs, true, ordinal)
	if err != nil {
		return local.Config{}, err
	}
	events, err := c.of(engines)
	if err != nil {
		return local.Config{}, err
	}
	cfg := local.Config{
		Pool: a.opts.Pool, NATS: local.NATSConfig{Dir: c.Data, Listen: c.Listen, Sync: c.Data != ""},
		Settings: recommended(), Dispatchers: c.Dispatchers, Journal: c.Journal, Explain: true, SelfCheck: c.selfCheck(), Version: programVersion(), Log: a.log(),
		AgentTimings: workeragent.Timings{DrainTimeout: c.DrainTimeout},
	}
	sims := true
	for _, s := range engines {
		e := local.Engine{Name: s.name, Slots: c.Slots}
		if s.kind == simKind {
			sim := c.simFlags.config(c.Model, "")
			e.Sim = &sim
		} else {
			var found engine.Detection
			if e.Adapter, found, err = s.adapter(a.ctx, engine.OpenAIConfig{APIKey: c.APIKey}, events[s.name]); err != nil {
				return cfg, err
			}
			e.URL, sims = s.url, false
			if s.kind == autoKind {
				a.say("engine %s at %s is %s: %s", s.name, s.url, found.Kind, strings.Join(found.Found, "; "))
			}
		}
		cfg.Engines = append(cfg.Engines, e)
	}
	if sims {
		cfg.Settings.Model = c.Model // prompts that name none hash as the engines' caches
	}
	return cfg, nil
}

func (c *Up) announce(a *app, at addresses) error {
	err := a.printer().each(at, func() error {
		a.say("pool %s is up: NATS at %s, %d engines", at.Pool, at.NATS, len(at.Engines))
		if at.HTTP != "" {
			a.say("metrics and health at %s", at.HTTP)
		}
		a.say("try: rollbus --server %s submit --prompt \"2+2=\" --wait", at.NATS)
		return nil
	})
	if err != nil {
		return err
	}
	return c.ready(at)
}

// upHandler serves the first dispatcher's pages, and the agent's below /agent.
func upHandler(p *local.Pool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", p.Dispatchers[0].Handler())
	mux.Handle("/agent/", http.StripPrefix("/agent", web(p.Agent.Collector(), p.Agent.Ready)))
	return mux
}
