package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// Report is what an agent would see of an engine: `rollbus agent probe`.
type Report struct {
	URL          string         `json:"url"`
	Detection    Detection      `json:"detection"`
	Capabilities Capabilities   `json:"capabilities"`
	Load         *subjects.Load `json:"load"` // now; null = the server tells none
	LoadProblem  string         `json:"load_problem,omitempty"`
	Sources      []SourceReport `json:"event_sources"`
	Control      bool           `json:"control"` // pausing and the like are served
	State        *State         `json:"state,omitempty"`
	Missing      []Missing      `json:"missing"`
}

// SourceReport is where a rank publishes its cache events, and whether somebody
// listens there.
type SourceReport struct {
	kvevents.Source
	Problem string `json:"problem,omitempty"`
}

// Missing is something that a better configuration of the server would provide.
type Missing struct {
	What   string `json:"what"`
	Effect string `json:"effect"` // what the fleet loses
	Flag   string `json:"flag"`   // what to start the server with
}

// Probe asks an engine for everything that needs no generation.
func Probe(ctx context.Context, spec string, opts Options) (*Report, error) {
	a, d, err := Open(ctx, spec, opts)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	_, url, ok := strings.Cut(spec, "=")
	if !ok {
		url = spec
	}
	r := &Report{URL: url, Detection: d}
	if r.Capabilities, err = a.Capabilities(ctx); err != nil {
		return nil, err
	}
	if r.Load, err = a.Load(ctx); err != nil {
		r.LoadProblem = err.Error()
	}
	if e, ok := a.(EventSourcer); ok {
		sources, err := e.EventSources(ctx)
		if err != nil {
			r.Missing = append(r.Missing, Missing{What: "event sources", Effect: "they cannot be read: " + err.Error()})
		}
		for _, s := range sources {
			r.Sources = append(r.Sources, SourceReport{Source: s, Problem: reach(ctx, s)})
		}
	}
	if c, ok := a.(Controller); ok {
		r.Control = controllable(ctx, c)
		if s, err := c.State(ctx); err == nil {
			r.State = &s
		}
	}
	r.advise()
	return r, nil
}

// controllable asks for something that changes nothing: is_paused of vLLM;
// SGLang's calls are always there.
func controllable(ctx context.Context, c Controller) bool {
	if v, ok := c.(*VLLM); ok {
		return v.flag(ctx, "/is_paused", "is_paused") != nil || v.flag(ctx, "/is_sleeping", "is_sleeping") != nil
	}
	return true
}

// reach looks whether a port is open; what speaks there shows only to a feed.
func reach(ctx context.Context, s kvevents.Source) string {
	if s.Bind {
		return ""
	}
	network, addr := "tcp", strings.TrimPrefix(s.Endpoint, "tcp://")
	if path, ok := strings.CutPrefix(s.Endpoint, "ipc://"); ok {
		network, addr = "unix", path
	}
	d := net.Dialer{Timeout: 2 * time.Second}
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return "advertised and mute: " + err.Error()
	}
	_ = c.Close()
	return ""
}

// flags by kind of server.
var eventFlags = map[string]string{
	"vllm":   `--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}' and prefix caching on`,
	"sglang": `--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}' --page-size 64`,
}

// advise lists what is missing, what that costs, and which flag provides it.
func (r *Report) advise() {
	c := &r.Capabilities
	miss := func(when bool, what, effect, flag string) {
		if when {
			r.Missing = append(r.Missing, Missing{what, effect, flag})
		}
	}
	vllm, sglang, llama := c.Kind == "vllm" || c.Kind == "sim", c.Kind == "sglang", c.Kind == "llamacpp"
	events := eventFlags[c.Kind]
	if events == "" {
		events = "this kind of server publishes none"
	}
	miss(len(r.Sources) == 0, "cache events", "the cache view is a guess from what ran there", events)
	replay := false
	for _, s := range r.Sources {
		replay = replay || s.Replay != ""
		miss(s.Problem != "", fmt.Sprintf("rank %d's events", s.Rank), s.Problem, "check the port, and that the publisher binds to more than localhost")
	}
	miss(len(r.Sources) > 0 && !replay, "a replay endpoint", "an agent that starts later, or misses a message, knows nothing until the cache turns over",
		`"replay_endpoint" in --kv-events-config; for SGLang also in the agent's configuration, since the server does not advertise it`)
	miss(sglang && c.EngineBlock != nil && *c.EngineBlock == 1 && len(r.Sources) > 0, "a page size", "one event for each token", "--page-size 64")
	miss(c.Slots == nil && vllm, "slots", "the agent has to be told how many requests run at once", "VLLM_SERVER_DEV_MODE=1, or the slots in the agent's configuration")
	miss(c.Slots == nil && !vllm, "slots", "the agent has to be told how many requests run at once", "the slots in the agent's configuration")
	miss(c.CapacityTokens == nil, "KV capacity", "admission knows only slots, not memory", "the capacity in the agent's configuration")
	miss(c.MaxModelLen == nil, "context length", "a prompt that is too long is refused by the engine, not before it", "the context length in the agent's configuration")
	switch {
	case r.Load == nil && llama:
		miss(true, "load", "only what this agent sent is known", "--metrics")
	case r.Load == nil && sglang:
		miss(true, "load", "only what this agent sent is known", "a release with /v1/loads, or --enable-metrics")
	case r.Load == nil:
		miss(true, "load", "only what this agent sent is known", "a server with /metrics")
	}
	miss(c.StartedAt == nil && sglang, "process start", "after a lost connection the cache view begins anew", "--enable-metrics")
	miss(!r.Control && vllm, "control calls", "weights cannot be synchronised without restarting", "VLLM_SERVER_DEV_MODE=1")
}

// errNotApplicable marks a check that says nothing about this server.
var errNotApplicable = errors.New("not applicable")
