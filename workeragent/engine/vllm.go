package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/kvevents"
	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// VLLMConfig configures an adapter for vLLM.
type VLLMConfig struct {
	OpenAIConfig
	Events EventsConfig
	// TokensOnly sends prompts of tokens to /inference/v1/generate where the
	// server has it: no text comes back then. Off: /v1/completions, which gives
	// both.
	TokensOnly bool
}

// VLLM drives vLLM: generation is the OpenAI adapter's, the rest is vLLM's own.
type VLLM struct {
	*OpenAI
	cfg       VLLMConfig
	tokensAPI atomic.Bool // /inference/v1/generate is there
	ranks     atomic.Int32
}

var (
	_ Adapter      = (*VLLM)(nil)
	_ Controller   = (*VLLM)(nil)
	_ EventSourcer = (*VLLM)(nil)
)

// NewVLLM makes an adapter. It asks the server nothing yet.
func NewVLLM(cfg VLLMConfig) (*VLLM, error) {
	o, err := withEvents(cfg.OpenAIConfig, cfg.Events)
	if err != nil {
		return nil, err
	}
	v := &VLLM{OpenAI: o, cfg: cfg}
	v.ranks.Store(1)
	return v, nil
}

// Capabilities adds to the OpenAI adapter's whether the server publishes cache
// events and takes tokens.
func (v *VLLM) Capabilities(ctx context.Context) (Capabilities, error) {
	c, err := v.OpenAI.Capabilities(ctx)
	if err != nil {
		return c, err
	}
	if c.Kind == "openai" {
		c.Kind = "vllm"
	}
	v.ranks.Store(int32(c.Ranks))
	if v.cfg.TokensOnly {
		v.tokensAPI.Store(v.hasGenerate(ctx))
	}
	if s, err := v.EventSources(ctx); err == nil && len(s) > 0 {
		c.Events = "exact"
	}
	c.Paused, c.Asleep = v.flag(ctx, "/is_paused", "is_paused"), v.flag(ctx, "/is_sleeping", "is_sleeping")
	if c.Asleep != nil && *c.Asleep {
		c.Paused = c.Asleep // only a call wakes it
	}
	return c, nil
}

// hasGenerate probes with a body that no server takes: absent is 404 or 405.
func (v *VLLM) hasGenerate(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, v.OpenAI.cfg.ProbeTimeout)
	defer cancel()
	_, err := v.post(ctx, generatePath, map[string]any{})
	return err != nil && (strings.Contains(err.Error(), "HTTP 400") || strings.Contains(err.Error(), "HTTP 422"))
}

const generatePath = "/inference/v1/generate"

// Generate implements Adapter.
func (v *VLLM) Generate(ctx context.Context, r *subjects.Request, run Run, onDelta func(Delta)) (Outcome, error) {
	if len(r.PromptTokenIDs) == 0 || !v.tokensAPI.Load() || len(r.Sampling.Stop) > 0 {
		return v.OpenAI.Generate(ctx, r, run, onDelta)
	}
	body, err := v.generateBody(r, run)
	if err != nil {
		return unaskable(err)
	}
	return v.generate(ctx, r, run, generatePath, body, &answer{maxTokens: v.allowed(r), onDelta: onDelta, begun: time.Now()})
}

// generateBody spells a request of tokens for /inference/v1/generate.
func (v *VLLM) generateBody(r *subjects.Request, run Run) ([]byte, error) {
	s := &r.Sampling
	left := s.MaxTokens - resumed(r)
	if left < 1 {
		return nil, fmt.Errorf("max_tokens is %d and %d tokens are resumed from: nothing is left to generate", s.MaxTokens, resumed(r))
	}
	p := map[string]any{}
	for name, x := range s.Extra {
		if ownFields[name] {
			return nil, fmt.Errorf("field %q cannot be passed on: it is set by rollbus", name)
		}
		p[name] = x
	}
	p["max_tokens"] = left
	sampling(p, s, "seed") // without stop strings: those requests go elsewhere
	set(p, "logprobs", s.Logprobs)
	f := map[string]any{}
	for name, x := range r.Extra {
		if ownFields[name] {
			return nil, fmt.Errorf("field %q cannot be passed on: it is set by rollbus", name)
		}
		f[name] = x
	}
	f["request_id"], f["token_ids"], f["sampling_params"] = run.ID, tokens(r), p
	f["model"], f["stream"], f["stream_options"] = v.modelFor(r), true, map[string]bool{"include_usage": true}
	if r.CacheSalt != "" {
		f["cache_salt"] = r.CacheSalt
	}
	return json.Marshal(f)
}

// EventSources asks /kv_event_sources; a server without it is taken at what is
// configured. Publishers on another host's wildcard are at the engine's host.
func (v *VLLM) EventSources(ctx context.Context) ([]kvevents.Source, error) {
	status, b, err := v.get(ctx, "/kv_event_sources")
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return v.cfg.Events.sources(v.base, int(v.ranks.Load()))
	}
	told, err := telemetry.ParseEventSources(b)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(v.base)
	if err != nil {
		return nil, err
	}
	var out []kvevents.Source
	for rank := range maxRanks {
		s, ok := told[rank]
		if !ok {
			continue
		}
		src := kvevents.Source{Rank: rank, Endpoint: zmq.Resolve(s.Endpoint, u), Topic: s.Topic}
		if s.Replay != "" {
			src.Replay = zmq.Resolve(s.Replay, u)
		}
		if out = append(out, src); len(out) == len(told) {
			break
		}
	}
	return out, nil
}

// Abort ends a run by its names if the engine still shows more than it was given,
// and returns when it shows no more than that (scenario R20).
func (v *VLLM) Abort(ctx context.Context, run Run) error {
	if run.ID == "" {
		return errors.New("abort of a run without a name: an empty list would abort everything")
	}
	if stopped, _ := v.stopped(ctx, v.shown); stopped {
		return nil
	}
	names := []string{"cmpl-" + run.ID, "cmpl-" + run.ID + "-0", "chatcmpl-" + run.ID, "generate-tokens-" + run.ID, run.ID}
	_, err := v.post(ctx, "/abort_requests", map[string]any{"request_ids": names})
	return v.untilStopped(ctx, run, v.shown, err)
}

// Pause implements Controller.
func (v *VLLM) Pause(ctx context.Context, mode PauseMode) error {
	_, err := v.post(ctx, "/pause?mode="+url.QueryEscape(string(mode)), nil)
	return err
}

// Resume implements Controller.
func (v *VLLM) Resume(ctx context.Context) error { _, err := v.post(ctx, "/resume", nil); return err }

// Sleep implements Controller.
func (v *VLLM) Sleep(ctx context.Context, level int) error {
	_, err := v.post(ctx, "/sleep?level="+strconv.Itoa(level), nil)
	return err
}

// Wake implements Controller.
func (v *VLLM) Wake(ctx context.Context) error { _, err := v.post(ctx, "/wake_up", nil); return err }

// Flush implements Controller.
func (v *VLLM) Flush(ctx context.Context) error {
	_, err := v.post(ctx, "/reset_prefix_cache", nil)
	return err
}

// SetWeightVersion implements Controller.
func (v *VLLM) SetWeightVersion(ctx context.Context, version string) error {
	_, err := v.post(ctx, "/update_weight_version", map[string]any{"new_version": version})
	return err
}

// State implements Controller.
func (v *VLLM) State(ctx context.Context) (State, error) {
	s := State{Paused: v.flag(ctx, "/is_paused", "is_paused"), Sleeping: v.flag(ctx, "/is_sleeping", "is_sleeping")}
	if b, ok := v.optional(ctx, "/weight_info"); ok {
		var o struct {
			Version json.RawMessage `json:"weight_version"`
		}
		if json.Unmarshal(b, &o) == nil {
			s.WeightVersion = strings.Trim(string(o.Version), `"`)
		}
	}
	return s, ctx.Err()
}
