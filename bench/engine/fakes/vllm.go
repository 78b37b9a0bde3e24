package fakes

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// VLLMConfig of a fake vLLM.
type VLLMConfig struct {
	Engine engine.Config
	// Events: nil = KV events are off, vLLM's default.
	Events *EventsConfig
	// Dialect of the events. Default VLLMMaps.
	Dialect kvevents.Dialect
	// Sources serves /kv_event_sources.
	Sources bool
	// TokensAPI serves /inference/v1/generate.
	TokensAPI bool
}

// VLLM starts a fake vLLM.
func VLLM(cfg VLLMConfig) (*Fake, error) {
	var f *Fake
	c := cfg.Engine
	c.Routes = func(s *engine.Server, mux *http.ServeMux) {
		if cfg.Sources {
			mux.HandleFunc("GET /kv_event_sources", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, f.vllmSources()) })
		}
		if cfg.TokensAPI {
			mux.HandleFunc("POST /inference/v1/generate", func(w http.ResponseWriter, q *http.Request) { generateTokens(s, w, q) })
		}
	}
	f, err := startInto(&f, c, cfg.Events, false, func(r *rank) {
		r.encoder.Dialect = cfg.Dialect
		r.spell = func(e *kvevents.Event, k *engine.KVEvent) {
			plain(e, k)
			e.Spec = []byte("full_attention")
		}
	})
	return f, err
}

func (f *Fake) vllmSources() map[string]any {
	out := map[string]any{}
	for i, r := range f.ranks {
		s := map[string]any{"publisher": "zmq", "endpoint": r.events.endpoint(), "replay_endpoint": nil, "topic": r.events.topic}
		if e := r.events.replayEndpoint(); e != "" {
			s["replay_endpoint"] = e
		}
		out[strconv.Itoa(i)] = s
	}
	return out
}

// generateTokens is vLLM's token endpoint: tokens in, tokens out, no text.
func generateTokens(s *engine.Server, w http.ResponseWriter, q *http.Request) {
	var in struct {
		RequestID string   `json:"request_id"`
		Tokens    []uint32 `json:"token_ids"`
		Salt      string   `json:"cache_salt"`
		Stream    bool     `json:"stream"`
		Sampling  struct {
			MaxTokens    int     `json:"max_tokens"`
			Seed         int64   `json:"seed"`
			IgnoreEOS    bool    `json:"ignore_eos"`
			StopTokenIDs []int64 `json:"stop_token_ids"`
		} `json:"sampling_params"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, q.Body, engine.MaxBody)).Decode(&in); err != nil || len(in.Tokens) == 0 {
		badRequest(w, "token_ids: field required")
		return
	}
	g := engine.Generation{Prompt: in.Tokens, MaxTokens: in.Sampling.MaxTokens, Seed: in.Sampling.Seed, Salt: in.Salt,
		IgnoreEOS: in.Sampling.IgnoreEOS, StopTokenIDs: in.Sampling.StopTokenIDs, Stream: true}
	if g.MaxTokens <= 0 {
		g.MaxTokens = 16
	}
	if h := q.Header.Get("X-Data-Parallel-Rank"); h != "" {
		if n, err := strconv.Atoi(h); err == nil {
			g.Rank = &n
		}
	}
	j, err := s.Submit(g)
	if err != nil {
		refuse(w, err)
		return
	}
	defer j.Abort()
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	chunk := func(v map[string]any) {
		v["request_id"] = "generate-tokens-" + in.RequestID
		b, _ := json.Marshal(v)
		fmt.Fprintf(w, "data: %s\n\n", b)
		if fl, ok := w.(http.Flusher); ok {
			fl.Flush()
		}
	}
	for {
		tokens, end, err := j.Next(q.Context(), -1, nil)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		choice := map[string]any{"index": 0, "token_ids": tokens, "logprobs": nil, "finish_reason": nil}
		if end != nil {
			choice["finish_reason"], choice["token_ids"] = end.Reason, []uint32{}
		}
		chunk(map[string]any{"choices": []any{choice}})
		if end != nil {
			chunk(map[string]any{"choices": []any{}, "usage": map[string]any{"prompt_tokens": len(in.Tokens), "completion_tokens": end.Tokens,
				"total_tokens": len(in.Tokens) + end.Tokens, "prompt_tokens_details": map[string]int{"cached_tokens": max(0, end.Cached)}}})
			_, _ = fmt.Fprint(w, "data: [DONE]\n\n")
			return
		}
	}
}

// refuse spells an error of Submit as both engines do.
func refuse(w http.ResponseWriter, err error) {
	status, kind := http.StatusInternalServerError, "InternalServerError"
	switch {
	case errors.Is(err, engine.ErrBadRequest):
		status, kind = http.StatusBadRequest, "BadRequestError"
	case errors.Is(err, engine.ErrQueueFull):
		status, kind = http.StatusServiceUnavailable, "ServiceUnavailable"
	case errors.Is(err, engine.ErrDown):
		panic(http.ErrAbortHandler)
	}
	writeJSON(w, status, map[string]any{"error": map[string]any{"message": err.Error(), "type": kind, "code": status}})
}
