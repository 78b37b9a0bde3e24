package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// engineSpec is an engine named on the command line: [name=]kind=url, or sim.
type engineSpec struct {
	name, kind, url string
}

// simKind is an engine simulated in this process.
const simKind = "sim"

// engineKinds are the adapters there are; auto asks the server which.
var engineKinds = []string{"vllm", "sglang", "openai", autoKind}

const autoKind = "auto"

// eventFlags say where engines publish cache events that do not tell it
// themselves, and what no server tells: SGLang's replay endpoint.
type eventFlags struct {
	KVEvents []string `name:"kv-events" help:"Where an engine publishes cache events, if it does not tell: [name=]tcp://host:port of rank 0, rank r at port + r." placeholder:"SPEC"`
	KVReplay []string `name:"kv-replay" help:"Where it replays them, likewise: SGLang tells that never." placeholder:"SPEC"`
}

// of gives every engine its endpoints. A spec without a name is of the only engine.
func (f eventFlags) of(specs []engineSpec) (map[string]engine.EventsConfig, error) {
	out := map[string]engine.EventsConfig{}
	read := func(flag string, given []string, put func(*engine.EventsConfig) *string) error {
		for _, spec := range given {
			name, endpoint, named := strings.Cut(spec, "=")
			if !named {
				endpoint = spec
				if len(specs) != 1 {
					return coded(exitUsage, "%s %s: of which of %d engines? write <name>=%s", flag, spec, len(specs), spec)
				}
				name = specs[0].name
			}
			known := false
			for _, s := range specs {
				known = known || s.name == name
				if s.name == name && (s.kind == "openai" || s.kind == simKind) {
					return coded(exitUsage, "%s %s: engine %s is %s, which publishes none: write vllm=, sglang= or auto=", flag, spec, name, s.kind)
				}
			}
			if !known {
				return coded(exitUsage, "%s %s: there is no engine %q in --engine", flag, spec, name)
			}
			c := out[name]
			if *put(&c) != "" {
				return coded(exitUsage, "%s %s: given twice for engine %s", flag, spec, name)
			}
			*put(&c) = endpoint
			if err := c.Validate(); err != nil {
				return coded(exitUsage, "%s %s: %w", flag, spec, err)
			}
			out[name] = c
		}
		return nil
	}
	return out, errors.Join(
		read("--kv-events", f.KVEvents, func(c *engine.EventsConfig) *string { return &c.Endpoint }),
		read("--kv-replay", f.KVReplay, func(c *engine.EventsConfig) *string { return &c.Replay }),
	)
}

// parseEngines reads what --engine was given, comma separated or repeated. An
// engine without a name gets one from naming.
func parseEngines(specs []string, simAllowed bool, naming func(i int, url *url.URL) string) ([]engineSpec, error) {
	out := make([]engineSpec, 0, len(specs))
	seen := map[string]bool{}
	for i, spec := range specs {
		e, u, err := parseEngine(spec, simAllowed)
		if err != nil {
			return nil, coded(exitUsage, "--engine %s: %w", spec, err)
		}
		if e.name == "" {
			e.name = naming(i, u)
		}
		if err := subjects.CheckToken("engine", e.name); err != nil {
			return nil, coded(exitUsage, "--engine %s: %w: write <name>=%s", spec, err, spec)
		}
		if seen[e.name] {
			return nil, coded(exitUsage, "--engine %s: there is an engine %s already: give each its own name, <name>=%s", spec, e.name, spec)
		}
		seen[e.name] = true
		out = append(out, e)
	}
	return out, nil
}

func parseEngine(spec string, simAllowed bool) (engineSpec, *url.URL, error) {
	const form = "write [name=]kind=url, as in auto=http://127.0.0.1:8000 or e1=vllm=http://127.0.0.1:8000"
	if simAllowed {
		if name, ok := strings.CutSuffix("="+spec, "="+simKind); ok {
			return engineSpec{name: strings.TrimPrefix(name, "="), kind: simKind}, nil, nil
		}
	}
	head, raw, ok := strings.Cut(spec, "=http")
	if !ok {
		return engineSpec{}, nil, fmt.Errorf("no http or https address in it: %s", form)
	}
	raw = "http" + raw
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return engineSpec{}, nil, fmt.Errorf("%q is no address of a server: %s", raw, form)
	}
	e := engineSpec{kind: head, url: raw}
	if name, kind, named := strings.Cut(head, "="); named {
		e.name, e.kind = name, kind
	}
	for _, k := range engineKinds {
		if e.kind == k {
			return e, u, nil
		}
	}
	return engineSpec{}, nil, fmt.Errorf("no adapter for %q: there is %s; %s", e.kind, strings.Join(engineKinds, ", "), form)
}

// detectWait is how long a server may take to say what it is.
const detectWait = 15 * time.Second

// adapter makes the engine's adapter. With auto the server is asked, and has to
// answer; the detection tells what by.
func (e engineSpec) adapter(ctx context.Context, cfg engine.OpenAIConfig, events engine.EventsConfig) (engine.Adapter, engine.Detection, error) {
	ctx, cancel := context.WithTimeout(ctx, detectWait)
	defer cancel()
	a, d, err := engine.Open(ctx, e.kind+"="+e.url, engine.Options{OpenAI: cfg, Events: events})
	switch {
	case err == nil:
		return a, d, nil
	case errors.Is(err, engine.ErrNoEngine):
		return nil, d, coded(exitUnavailable, "engine %s: %w: start it first, or name its kind instead of %s", e.name, err, autoKind)
	}
	return nil, d, coded(exitUsage, "engine %s: %w", e.name, err)
}

// nodeName names an engine after this machine and the engine's port: names are
// unique in a pool, and a restarted agent must use the same.
func nodeName(_ int, u *url.URL) string {
	host, err := os.Hostname()
	if err != nil {
		host = "node"
	}
	port := "sim"
	if u != nil {
		if port = u.Port(); port == "" {
			port = u.Scheme
		}
	}
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '-'
	}, strings.ToLower(host)) + "-" + port
}

// simFlags shape simulated engines.
type simFlags struct {
	TimeScale float64 `default:"1" help:"Simulated engines run this much faster than the engine they model." placeholder:"X"`
	KVTokens  int     `name:"kv-tokens" default:"0" help:"KV cache of a simulated engine, tokens; 0 = that of an 8B model on 80 GB." placeholder:"N"`
	Slots     int     `default:"0" help:"Requests that one engine runs at once; 0 = what it reports." placeholder:"N"`
}

func (f simFlags) config(modelName, listen string) simengine.Config {
	return simengine.Config{
		Listen: listen, Model: modelName, TimeScale: f.TimeScale,
		Engine: model.Config{KVTokens: f.KVTokens, MaxRunning: f.Slots},
	}
}
