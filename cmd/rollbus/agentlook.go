package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/workeragent/engine"
)

// enginePlace is the engine that a look is at.
type enginePlace struct {
	URL      string `arg:"" help:"Address of the engine, or kind=address; without a kind it is asked." placeholder:"URL"`
	Model    string `help:"Model to name to it; without one what it lists first." placeholder:"NAME"`
	APIKey   string `name:"api-key" help:"Bearer token; better in ROLLBUS_API_KEY." placeholder:"TEXT"`
	KVEvents string `name:"kv-events" help:"Where it publishes cache events, if it does not tell: tcp://host:port of rank 0." placeholder:"ADDR"`
	KVReplay string `name:"kv-replay" help:"Where it replays them." placeholder:"ADDR"`
}

// spec is the address with its kind, and the options.
func (e enginePlace) spec() (string, engine.Options, error) {
	opts := engine.Options{OpenAI: engine.OpenAIConfig{Model: e.Model, APIKey: e.APIKey}, Events: engine.EventsConfig{Endpoint: e.KVEvents, Replay: e.KVReplay}}
	at, err := parseEngines([]string{e.URL}, false, func(int, *url.URL) string { return "engine" })
	if err != nil {
		if at, err = parseEngines([]string{autoKind + "=" + e.URL}, false, func(int, *url.URL) string { return "engine" }); err != nil {
			return "", opts, coded(exitUsage, "%s: give the address of an engine, as in http://127.0.0.1:8000 or vllm=http://127.0.0.1:8000", e.URL)
		}
	}
	if err := opts.Events.Validate(); err != nil {
		return "", opts, coded(exitUsage, "%w", err)
	}
	return at[0].kind + "=" + at[0].url, opts, nil
}

// unreachable is an engine that does not answer.
func unreachable(err error) error {
	return coded(exitUnavailable, "%w", err)
}

// AgentProbe asks an engine for everything that needs no generation.
type AgentProbe struct {
	enginePlace
}

// Help shows examples.
func (AgentProbe) Help() string {
	return `Examples:
  rollbus agent probe http://127.0.0.1:8000
  rollbus agent probe sglang=http://10.0.0.7:30000 --kv-replay tcp://10.0.0.7:5657 -o json
Exit 0 also when something is missing: that is told, with what it costs. Exit 5 when no engine answers there.`
}

// probeWait bounds a whole look.
const probeWait = 30 * time.Second

// Run prints the report.
func (c *AgentProbe) Run(a *app) error {
	spec, opts, err := c.spec()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(a.ctx, probeWait)
	defer cancel()
	r, err := engine.Probe(ctx, spec, opts)
	if err != nil {
		return unreachable(err)
	}
	return a.printer().one(r, func() error { return printProbe(a.printer(), r) })
}

func printProbe(p printer, r *engine.Report) error {
	known := func(v *int) string {
		if v == nil {
			return "not told"
		}
		return strconv.Itoa(*v)
	}
	c := &r.Capabilities
	capacity, load := "not told", "none"
	if c.CapacityTokens != nil {
		capacity = fmt.Sprintf("%d tokens (%s)", *c.CapacityTokens, c.CapacitySource)
	}
	if r.Load != nil {
		load = fmt.Sprintf("%s, %d ranks", r.Load.Source, len(r.Load.Ranks))
	} else if r.LoadProblem != "" {
		load = r.LoadProblem
	}
	if err := p.fields("url", r.URL, "kind", c.Kind, "model", c.Model, "version", c.Version, "ranks", strconv.Itoa(max(1, c.Ranks)),
		"slots", known(c.Slots), "kv capacity", capacity, "context", known(c.MaxModelLen), "engine block", known(c.EngineBlock),
		"load", load, "control", strconv.FormatBool(r.Control)); err != nil {
		return err
	}
	for _, f := range r.Detection.Found {
		fmt.Fprintf(p.w, "found    %s\n", f)
	}
	for _, s := range r.Sources {
		fmt.Fprintf(p.w, "events   rank %d at %s", s.Rank, s.Endpoint)
		if s.Replay != "" {
			fmt.Fprintf(p.w, ", replay at %s", s.Replay)
		}
		if s.Problem != "" {
			fmt.Fprintf(p.w, ": %s", s.Problem)
		}
		fmt.Fprintln(p.w)
	}
	for _, m := range r.Missing {
		fmt.Fprintf(p.w, "missing  %s: %s", m.What, m.Effect)
		if m.Flag != "" {
			fmt.Fprintf(p.w, "; provided by %s", m.Flag)
		}
		fmt.Fprintln(p.w)
	}
	return nil
}

// AgentConformance checks an engine.
type AgentConformance struct {
	enginePlace
	PromptTokens int           `default:"512" help:"Tokens of an ordinary prompt, at least 256." placeholder:"N"`
	FirstToken   uint32        `default:"1000" help:"Lowest token id to use; ids from there on must be ordinary ones." placeholder:"ID"`
	CheckTimeout time.Duration `default:"60s" help:"How long one check may take." placeholder:"DURATION"`
}

// Help shows examples.
func (AgentConformance) Help() string {
	return `Examples:
  rollbus agent conformance http://127.0.0.1:8000
  rollbus agent conformance vllm=http://127.0.0.1:8000 -o json
The engine should be idle otherwise. Exit 1 when a check failed, 5 when no engine answers there.`
}

// conformanceReport is what it prints.
type conformanceReport struct {
	URL    string         `json:"url"`
	Kind   string         `json:"kind"`
	Passed bool           `json:"passed"`
	Checks []engine.Check `json:"checks"`
}

// Run runs every check.
func (c *AgentConformance) Run(a *app) error {
	spec, opts, err := c.spec()
	if err != nil {
		return err
	}
	if c.PromptTokens < 256 || c.PromptTokens > 1<<20 || c.CheckTimeout <= 0 {
		return coded(exitUsage, "conformance: --prompt-tokens 256 to 1048576, --check-timeout above 0")
	}
	open, cancel := context.WithTimeout(a.ctx, probeWait)
	defer cancel()
	adapter, d, err := engine.Open(open, spec, opts)
	if err != nil {
		return unreachable(err)
	}
	defer adapter.Close()
	if _, err := adapter.Capabilities(open); err != nil {
		return unreachable(err)
	}
	r := conformanceReport{URL: c.URL, Kind: d.Kind, Passed: true}
	r.Checks = engine.Conformance(a.ctx, adapter, engine.ConformanceConfig{PromptTokens: c.PromptTokens, FirstToken: c.FirstToken, CheckTimeout: c.CheckTimeout})
	rows := make([][]string, 0, len(r.Checks))
	for _, k := range r.Checks {
		r.Passed = r.Passed && k.Verdict != engine.Broken
		rows = append(rows, []string{k.Name, string(k.Verdict), fmt.Sprintf("%.0f ms", k.MS), k.Detail})
	}
	if err := a.printer().one(r, func() error { return a.printer().table([]string{"CHECK", "VERDICT", ">TOOK", "DETAIL"}, rows) }); err != nil {
		return err
	}
	switch {
	case a.ctx.Err() != nil:
		return errors.Join(errInterrupted, context.Cause(a.ctx))
	case !r.Passed:
		return &codedError{exitNo, errSaid}
	}
	return nil
}
