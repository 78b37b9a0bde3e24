package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/kvevents"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// SGLangConfig configures an adapter for SGLang.
type SGLangConfig struct {
	OpenAIConfig
	// Events: what /server_info does not tell; the replay endpoint never is.
	Events EventsConfig
	// NoPush leaves load messages over ZeroMQ alone and polls.
	NoPush bool
}

// SGLang drives SGLang by its native /generate, which says more than its OpenAI
// routes; chat goes through those.
type SGLang struct {
	*OpenAI
	cfg SGLangConfig

	mu      sync.Mutex
	info    telemetry.ServerInfo
	known   bool
	loadVia int // of loadPaths: the first that answered
	push    *telemetry.Push
}

var (
	_ Adapter      = (*SGLang)(nil)
	_ Controller   = (*SGLang)(nil)
	_ EventSourcer = (*SGLang)(nil)
)

// NewSGLang makes an adapter. It asks the server nothing yet.
func NewSGLang(cfg SGLangConfig) (*SGLang, error) {
	o, err := withEvents(cfg.OpenAIConfig, cfg.Events)
	if err != nil {
		return nil, err
	}
	return &SGLang{OpenAI: o, cfg: cfg}, nil
}

// ErrPrefillOnly is an engine of a disaggregated pair that generates nothing.
var ErrPrefillOnly = errors.New("the engine runs in disaggregation mode prefill: it generates nothing by itself; use the decode engine's router or an ordinary engine")

// Close ends subscriptions and closes idle connections.
func (a *SGLang) Close() error {
	a.mu.Lock()
	push := a.push
	a.push = nil
	a.mu.Unlock()
	if push != nil {
		push.Close()
	}
	return a.OpenAI.Close()
}

// serverInfo asks /server_info, or its older name.
func (a *SGLang) serverInfo(ctx context.Context) (telemetry.ServerInfo, error) {
	var last error
	for _, path := range [...]string{"/server_info", "/get_server_info"} {
		status, b, err := a.get(ctx, path)
		switch {
		case err != nil:
			return telemetry.ServerInfo{}, fmt.Errorf("ask %s for its server info: %w", a.base, err)
		case status != http.StatusOK:
			last = errors.New(refusal(status, b).Message)
			continue
		}
		info, err := telemetry.ParseServerInfo(b)
		if err == nil {
			return info, nil
		}
		last = err
	}
	return telemetry.ServerInfo{}, fmt.Errorf("ask %s for its server info: %w", a.base, last)
}

// Capabilities asks /server_info, /v1/models and, where metrics are on, when
// the process started.
func (a *SGLang) Capabilities(ctx context.Context) (Capabilities, error) {
	info, err := a.serverInfo(ctx)
	if err != nil {
		return Capabilities{}, err
	}
	if info.Disaggregation == "prefill" {
		return Capabilities{}, ErrPrefillOnly
	}
	c := Capabilities{Kind: "sglang", Model: info.Model, Version: info.Version, Ranks: info.Ranks, Events: "none", EngineBlock: info.BlockSize}
	if m, err := a.models(ctx); err == nil {
		for _, e := range m.Data {
			if e.Parent != "" {
				c.LoRAs = append(c.LoRAs, e.ID)
			} else if c.MaxModelLen == nil {
				c.MaxModelLen = positive(e.MaxModelLen)
			}
		}
	}
	if c.MaxModelLen == nil {
		c.MaxModelLen = info.ContextLength
	}
	if n := info.MaxRunning; n != nil {
		all := *n * c.Ranks
		c.Slots = &all
	}
	if n := info.CapacityTokens; n != nil {
		all := *n * int64(c.Ranks)
		c.CapacityTokens, c.CapacitySource = &all, telemetry.CapacityReported
	}
	if n, err := strconv.ParseInt(info.WeightVersion, 10, 64); err == nil {
		c.WeightVersion = &n
	}
	if info.Metrics {
		if b, ok := a.optional(ctx, "/metrics"); ok {
			var m Capabilities
			fromMetrics(b, &m)
			c.StartedAt = m.StartedAt
		}
	}
	a.learn(info)
	if s, err := a.sources(info); err == nil && len(s) > 0 {
		c.Events = "exact"
	}
	a.served.Store(&served{model: c.Model, hints: telemetry.Hints{Ranks: &info.Ranks, MaxRunning: info.MaxRunning, CapacityTokens: info.CapacityTokens}})
	return c, nil
}

// learn keeps what the server said and follows its load messages.
func (a *SGLang) learn(info telemetry.ServerInfo) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.info, a.known = info, true
	u, err := url.Parse(a.base)
	if err != nil || a.cfg.NoPush || info.KVEvents == nil || info.KVEvents.LoadBase == 0 {
		return
	}
	var ends []string
	for r := range info.Ranks {
		ends = append(ends, info.KVEvents.LoadEndpoint(u, r))
	}
	if a.push == nil {
		a.push = telemetry.NewPush()
	}
	a.push.Follow(ends, info.KVEvents.LoadTopic)
}

// EventSources is where the ranks publish, by /server_info or configuration.
func (a *SGLang) EventSources(ctx context.Context) ([]kvevents.Source, error) {
	info, err := a.serverInfo(ctx)
	if err != nil {
		return nil, err
	}
	return a.sources(info)
}

func (a *SGLang) sources(info telemetry.ServerInfo) ([]kvevents.Source, error) {
	k := info.KVEvents
	if k == nil || a.cfg.Events.Endpoint != "" {
		return a.cfg.Events.sources(a.base, info.Ranks)
	}
	u, err := url.Parse(a.base)
	if err != nil {
		return nil, err
	}
	out := make([]kvevents.Source, k.Ranks)
	for r := range out {
		out[r] = kvevents.Source{Rank: r, Endpoint: k.Endpoint(u, r), Topic: k.Topic}
		if out[r].Replay, err = a.cfg.Events.replay(u, r); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// loadPaths, best first: the last is of no use for occupancy, since its series
// may be of one tensor-parallel rank, late, or switched off.
var loadPaths = [...]struct {
	path  string
	parse func([]byte) (telemetry.Sample, error)
}{
	{"/v1/loads?include=core", telemetry.ParseLoads},
	{"/v1/loads", telemetry.ParseLoads},
	{"/get_load", telemetry.ParseGetLoad},
	{"/metrics", func(b []byte) (telemetry.Sample, error) { s, _, err := telemetry.ParseMetrics(b); return s, err }},
}

// Load is what the ranks pushed, when all of them did lately, else what the best
// endpoint says that the server has.
func (a *SGLang) Load(ctx context.Context) (*subjects.Load, error) {
	a.mu.Lock()
	push, ranks, known := a.push, a.info.Ranks, a.known
	a.mu.Unlock()
	if push != nil && known {
		s, age := push.Sample(&ranks)
		a.fill(&s)
		if s.Complete() {
			l := a.gauges.observe(s)
			l.AgeMS = ms(age)
			return &l, nil
		}
	}
	s, err := a.poll(ctx)
	if err != nil || s == nil {
		return nil, err
	}
	a.fill(s)
	l := a.gauges.observe(*s)
	return &l, nil
}

func (a *SGLang) fill(s *telemetry.Sample) {
	if v := a.served.Load(); v != nil {
		s.Fill(v.hints)
	}
}

// poll asks the endpoint that answered last time; one that is gone (404, 405)
// or does not understand (400, 500) gives way to the next.
func (a *SGLang) poll(ctx context.Context) (*telemetry.Sample, error) {
	a.mu.Lock()
	via := a.loadVia
	a.mu.Unlock()
	for i := range loadPaths {
		n := (via + i) % len(loadPaths)
		status, b, err := a.get(ctx, loadPaths[n].path)
		if err != nil {
			return nil, err
		}
		if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
			return nil, fmt.Errorf("%s: HTTP %d", loadPaths[n].path, status)
		}
		if status != http.StatusOK {
			continue
		}
		s, err := loadPaths[n].parse(b)
		if err != nil {
			continue
		}
		a.mu.Lock()
		a.loadVia = n
		a.mu.Unlock()
		return &s, nil
	}
	return nil, nil
}

// Abort ends a run by its name, and returns when the engine shows no more than it
// was given (scenario R20). SGLang matches names by their beginning, which is why
// those of runs have one length; it answers 200 whether it knew the name or not.
func (a *SGLang) Abort(ctx context.Context, run Run) error {
	if run.ID == "" {
		return errors.New("abort of a run without a name: it would abort every run")
	}
	if _, err := a.post(ctx, "/abort_request", map[string]any{"rid": run.ID, "abort_all": false}); err != nil {
		return err
	}
	return a.untilStopped(ctx, run, a.poll, nil)
}

// Pause implements Controller. SGLang has no waiting mode: waiting is done here.
func (a *SGLang) Pause(ctx context.Context, mode PauseMode) error {
	m, ok := map[PauseMode]string{PauseAbort: "abort", PauseKeep: "in_place", PauseWait: "retract"}[mode]
	if !ok {
		return fmt.Errorf("pause mode %q: give abort, wait or keep", mode)
	}
	if mode == PauseWait {
		if err := a.untilIdle(ctx); err != nil {
			return err
		}
	}
	_, err := a.post(ctx, "/pause_generation", map[string]any{"mode": m})
	return err
}

func (a *SGLang) untilIdle(ctx context.Context) error {
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for {
		s, err := a.poll(ctx)
		if err != nil {
			return err
		}
		if s == nil {
			return fmt.Errorf("pause when idle: %w: it tells no load", ErrNoControl)
		}
		idle := s.Complete()
		for _, r := range s.Ranks {
			idle = idle && r.Running != nil && *r.Running == 0 && r.Waiting != nil && *r.Waiting == 0
		}
		if idle {
			return nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Resume implements Controller.
func (a *SGLang) Resume(ctx context.Context) error {
	_, err := a.post(ctx, "/continue_generation", map[string]any{})
	return err
}

// Sleep implements Controller. Level 1 releases the KV cache, 2 the weights too.
func (a *SGLang) Sleep(ctx context.Context, level int) error {
	tags := []string{"kv_cache"}
	if level > 1 {
		tags = append(tags, "weights")
	}
	_, err := a.post(ctx, "/release_memory_occupation", map[string]any{"tags": tags})
	return err
}

// Wake implements Controller.
func (a *SGLang) Wake(ctx context.Context) error {
	_, err := a.post(ctx, "/resume_memory_occupation", map[string]any{})
	return err
}

// Flush implements Controller. It fails while requests run.
func (a *SGLang) Flush(ctx context.Context) error {
	_, err := a.post(ctx, "/flush_cache", nil)
	return err
}

// SetWeightVersion implements Controller. The server's default aborts all
// requests: it is told not to.
func (a *SGLang) SetWeightVersion(ctx context.Context, version string) error {
	_, err := a.post(ctx, "/update_weight_version", map[string]any{"new_version": version, "abort_all_requests": false})
	return err
}

// State implements Controller. SGLang does not say whether it is paused.
func (a *SGLang) State(ctx context.Context) (State, error) {
	if b, ok := a.optional(ctx, "/model_info"); ok {
		var o struct {
			Version string `json:"weight_version"`
		}
		if json.Unmarshal(b, &o) == nil && o.Version != "" {
			return State{WeightVersion: o.Version}, nil
		}
	}
	info, err := a.serverInfo(ctx)
	return State{WeightVersion: info.WeightVersion}, err
}
