package main

import (
	"fmt"
	"net/url"
	"os"
	"strings"

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

// engineKinds are the adapters there are.
var engineKinds = []string{"openai"}

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
	const form = "write [name=]kind=url, as in openai=http://127.0.0.1:8000 or e1=openai=http://127.0.0.1:8000"
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

func (e engineSpec) adapter(model, apiKey string) (engine.Adapter, error) {
	a, err := engine.NewOpenAI(engine.OpenAIConfig{URL: e.url, Model: model, APIKey: apiKey})
	if err != nil {
		return nil, coded(exitUsage, "engine %s: %w", e.name, err)
	}
	return a, nil
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
