package fakes

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// SGLangConfig of a fake SGLang.
type SGLangConfig struct {
	Engine engine.Config
	// Events: nil = KV events are off, SGLang's default. One rank's port is its
	// own here: ranks have to be configured where they are not consecutive.
	Events *EventsConfig
	// Dialect of the events: SGLangMaps or SGLangArrays. Default SGLangMaps.
	Dialect kvevents.Dialect
	// Loads pushes LoadStat messages over ZeroMQ; needs Events.
	Loads bool
	// NoLoads leaves /v1/loads out: an older build, which has /get_load.
	NoLoads bool
	// Metrics serves /metrics.
	Metrics bool
	// Incremental streams deltas (--incremental-streaming-output).
	Incremental bool
}

// sglang is what the fake remembers beside the engine.
type sglang struct {
	f   *Fake
	cfg SGLangConfig

	mu      sync.Mutex
	runs    map[string]*engine.Stream // by rid
	weights string
}

// vLLM's paths that SGLang has not, or not so.
var notSGLangs = []string{"/server_info", "/metrics", "/version", "/tokenize", "/abort_requests", "/is_paused", "/is_sleeping", "/weight_info", "/update_weight_version"}

// SGLang starts a fake SGLang.
func SGLang(cfg SGLangConfig) (*Fake, error) {
	if cfg.Dialect != kvevents.SGLangArrays {
		cfg.Dialect = kvevents.SGLangMaps
	}
	g := &sglang{cfg: cfg, runs: map[string]*engine.Stream{}, weights: strconv.FormatInt(cfg.Engine.WeightVersion, 10)}
	c := cfg.Engine
	c.Without = append(append([]string(nil), c.Without...), notSGLangs...)
	c.Routes = g.routes
	f, err := startInto(&g.f, c, cfg.Events, cfg.Loads, func(r *rank) {
		r.encoder.Dialect = cfg.Dialect
		pages := &pages{}
		r.spell, r.forget = pages.spell, pages.forget
	})
	if err == nil && cfg.Loads && cfg.Events != nil {
		for _, r := range f.ranks {
			r.load.wg.Go(func() { g.pushLoads(r) })
		}
	}
	return f, err
}

// pages gives blocks the hashes that SGLang would give them.
type pages struct {
	by map[uint64]kvevents.SGLangPage
}

func (p *pages) forget() { p.by = nil }

func (p *pages) spell(e *kvevents.Event, k *engine.KVEvent) {
	plain(e, k)
	e.Group, e.HasLoRAID, e.LoRA = -1, false, nil
	e.Hashes = make([]uint64, len(k.Hashes))
	if e.Kind == kvevents.Cleared {
		p.by = nil
		return
	}
	if p.by == nil {
		p.by = map[uint64]kvevents.SGLangPage{}
	}
	before := kvevents.SGLangRoot(k.Salt)
	if k.HasParent {
		page := p.by[k.Parent]
		before, e.Parent = &page, page.Event()
	}
	for i, h := range k.Hashes {
		page, known := p.by[h]
		if e.Kind == kvevents.Stored {
			page = kvevents.SGLangHash(before, k.Tokens[i*k.BlockTokens:(i+1)*k.BlockTokens])
			p.by[h] = page
			before = &page
		} else if known {
			delete(p.by, h)
		}
		e.Hashes[i] = page.Event()
	}
}

func (g *sglang) routes(s *engine.Server, mux *http.ServeMux) {
	mux.HandleFunc("POST /generate", func(w http.ResponseWriter, q *http.Request) { g.generate(s, w, q) })
	mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) { g.serverInfo(s, w, mux) })
	mux.HandleFunc("GET /get_server_info", func(w http.ResponseWriter, _ *http.Request) { g.serverInfo(s, w, mux) })
	mux.HandleFunc("GET /model_info", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"model_path": s.Config().Model, "weight_version": g.version()})
	})
	mux.HandleFunc("GET /get_load", func(w http.ResponseWriter, _ *http.Request) { g.getLoad(s, w) })
	if !g.cfg.NoLoads {
		mux.HandleFunc("GET /v1/loads", func(w http.ResponseWriter, _ *http.Request) { g.loads(s, w) })
	}
	if g.cfg.Metrics {
		mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) { g.metrics(s, w) })
	}
	mux.HandleFunc("POST /update_weight_version", g.updateVersion)
	mux.HandleFunc("POST /abort_request", func(w http.ResponseWriter, q *http.Request) { g.abort(w, q) })
	// The rest is the same engine by other names.
	rename := func(path string, to func(body map[string]any) (target string, send map[string]any)) {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, q *http.Request) {
			var body map[string]any
			_ = json.NewDecoder(http.MaxBytesReader(w, q.Body, 1<<20)).Decode(&body)
			target, send := to(body)
			status, text := inner(mux, http.MethodPost, target, send)
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		})
	}
	rename("/pause_generation", func(b map[string]any) (string, map[string]any) {
		if b["mode"] == "in_place" {
			return "/pause?mode=keep", nil
		}
		return "/pause?mode=abort", nil
	})
	rename("/continue_generation", func(map[string]any) (string, map[string]any) { return "/resume", nil })
	rename("/flush_cache", func(map[string]any) (string, map[string]any) { return "/reset_prefix_cache", nil })
	rename("/release_memory_occupation", func(map[string]any) (string, map[string]any) { return "/sleep?level=1", nil })
	rename("/resume_memory_occupation", func(map[string]any) (string, map[string]any) { return "/wake_up", nil })
}

func (g *sglang) version() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.weights
}

// updateVersion aborts every request unless it is told not to.
func (g *sglang) updateVersion(w http.ResponseWriter, q *http.Request) {
	in := struct {
		Version string `json:"new_version"`
		Abort   *bool  `json:"abort_all_requests"`
	}{}
	if json.NewDecoder(http.MaxBytesReader(w, q.Body, 1<<20)).Decode(&in) != nil || in.Version == "" {
		badRequest(w, "new_version: field required")
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.weights = in.Version
	for _, j := range g.runs {
		if in.Abort == nil || *in.Abort {
			j.Abort()
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"success": true, "new_version": in.Version})
}

func (g *sglang) serverInfo(s *engine.Server, w http.ResponseWriter, _ *http.ServeMux) {
	c := s.Config()
	var states []any
	for range c.Ranks {
		states = append(states, map[string]any{"effective_max_running_requests_per_dp": c.Engine.MaxRunning})
	}
	info := map[string]any{"model_path": "/models/" + c.Model, "served_model_name": c.Model, "tp_size": 1, "dp_size": c.Ranks,
		"page_size": c.Engine.BlockTokens, "max_running_requests": 2 * c.Engine.MaxRunning, "weight_version": g.version(), "enable_metrics": g.cfg.Metrics,
		"max_total_num_tokens": c.Engine.Capacity(), "max_req_input_len": c.MaxModelLen - 6, "context_length": c.MaxModelLen,
		"internal_states": states, "version": "0.0.0", "disaggregation_mode": "null", "kv_events": g.kvEvents(c)}
	writeJSON(w, http.StatusOK, info)
}

// kvEvents advertises the ports, if the ranks' are consecutive as SGLang's are.
func (g *sglang) kvEvents(c engine.Config) any {
	if len(g.f.ranks) == 0 {
		return nil
	}
	base, ok := consecutive(g.f.ranks, func(r *rank) *publisher { return r.events })
	if !ok {
		return nil
	}
	k := map[string]any{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": base, "topic": g.f.ranks[0].events.topic,
		"block_size": c.Engine.BlockTokens, "dp_size": c.Ranks}
	if g.cfg.Loads {
		if base, ok := consecutive(g.f.ranks, func(r *rank) *publisher { return r.load }); ok {
			k["load_endpoint_port_base"], k["load_topic"] = base, "load"
		}
	}
	return k
}

func consecutive(ranks []*rank, of func(*rank) *publisher) (base int, ok bool) {
	for i, r := range ranks {
		p := of(r)
		if p == nil || p.pub == nil {
			return 0, false
		}
		port := p.pub.Addr().(*net.TCPAddr).Port
		if i == 0 {
			base = port
		}
		if port != base+i {
			return 0, false
		}
	}
	return base, true
}

func (g *sglang) abort(w http.ResponseWriter, q *http.Request) {
	var in struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if json.NewDecoder(http.MaxBytesReader(w, q.Body, 1<<20)).Decode(&in) != nil {
		badRequest(w, "no JSON")
		return
	}
	g.mu.Lock()
	for rid, j := range g.runs {
		if in.All || strings.HasPrefix(rid, in.RID) { // by prefix, as SGLang does
			j.Abort()
		}
	}
	g.mu.Unlock()
	w.WriteHeader(http.StatusOK) // always, also for unknown ids
}

type sglangRequest struct {
	RID      string   `json:"rid"`
	Text     string   `json:"text"`
	Tokens   []uint32 `json:"input_ids"`
	Stream   bool     `json:"stream"`
	Logprob  bool     `json:"return_logprob"`
	Rank     *int     `json:"routed_dp_rank"`
	OldRank  *int     `json:"data_parallel_rank"`
	LoRA     string   `json:"lora_path"`
	Salt     string   `json:"cache_salt"`
	Sampling struct {
		MaxTokens    *int     `json:"max_new_tokens"`
		Seed         int64    `json:"sampling_seed"`
		Stop         []string `json:"stop"`
		StopTokenIDs []int64  `json:"stop_token_ids"`
		IgnoreEOS    bool     `json:"ignore_eos"`
	} `json:"sampling_params"`
}

func (g *sglang) generate(s *engine.Server, w http.ResponseWriter, q *http.Request) {
	var in sglangRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, q.Body, engine.MaxBody)).Decode(&in); err != nil {
		badRequest(w, "the body does not parse")
		return
	}
	gen := engine.Generation{Prompt: in.Tokens, MaxTokens: 128, Seed: in.Sampling.Seed, LoRA: in.LoRA, Salt: in.Salt, Stop: in.Sampling.Stop,
		StopTokenIDs: in.Sampling.StopTokenIDs, IgnoreEOS: in.Sampling.IgnoreEOS, Stream: in.Stream, Rank: in.Rank}
	if in.Rank == nil {
		gen.Rank = in.OldRank
	}
	if gen.Rank != nil && (*gen.Rank < 0 || *gen.Rank >= s.Config().Ranks) {
		gen.Rank = nil // falls back to the inner balancer in silence
	}
	if in.Sampling.MaxTokens != nil {
		gen.MaxTokens = *in.Sampling.MaxTokens
	}
	if len(in.Tokens) == 0 {
		gen.Prompt = engine.Tokenize(nil, in.Text)
	}
	j, err := s.Submit(gen)
	if err != nil {
		refuse(w, err)
		return
	}
	defer j.Abort()
	g.mu.Lock()
	g.runs[in.RID] = j
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.runs, in.RID)
		g.mu.Unlock()
	}()
	x := sglangExchange{g: g, in: &in, j: j, w: w, prompt: len(gen.Prompt)}
	x.run(q)
}

// sglangExchange answers one request.
type sglangExchange struct {
	g      *sglang
	in     *sglangRequest
	j      *engine.Stream
	w      http.ResponseWriter
	prompt int
	all    []uint32
}

func (x *sglangExchange) run(q *http.Request) {
	if x.in.Stream {
		x.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	}
	for {
		tokens, end, err := x.j.Next(q.Context(), -1, nil)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		x.all = append(x.all, tokens...)
		switch {
		case x.in.Stream:
			x.event(tokens, end)
		case end != nil:
			writeJSON(x.w, http.StatusOK, x.body(x.all, end))
		}
		if end != nil {
			if x.in.Stream {
				_, _ = fmt.Fprint(x.w, "data: [DONE]\n\n")
			}
			return
		}
	}
}

func (x *sglangExchange) event(tokens []uint32, end *engine.End) {
	show := x.all
	if x.g.cfg.Incremental {
		show = tokens
	}
	b, err := json.Marshal(x.body(show, end))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	_, _ = fmt.Fprintf(x.w, "data: %s\n\n", b)
	if f, ok := x.w.(http.Flusher); ok {
		f.Flush()
	}
}

func (x *sglangExchange) body(tokens []uint32, end *engine.End) map[string]any {
	meta := map[string]any{"id": x.in.RID, "finish_reason": nil, "prompt_tokens": x.prompt, "completion_tokens": len(x.all),
		"cached_tokens": max(0, x.j.Cached()), "weight_version": x.g.version()}
	if x.in.Logprob {
		list := make([]any, len(tokens))
		for i, t := range tokens {
			list[i] = []any{-1.0, t, nil}
		}
		meta["output_token_logprobs"] = list
	}
	if end != nil {
		meta["dp_rank"] = end.Rank
		meta["finish_reason"] = x.finish(end, meta)
	}
	if tokens == nil {
		tokens = []uint32{}
	}
	return map[string]any{"text": string(engine.AppendText(nil, tokens)), "output_ids": tokens, "meta_info": meta}
}

// finish spells the end; an abort before the first token lacks most of the rest.
func (x *sglangExchange) finish(end *engine.End, meta map[string]any) any {
	switch end.Reason {
	case engine.ReasonAbort, engine.ReasonError:
		f := map[string]any{"type": "abort", "message": "Aborted", "status_code": nil, "err_type": nil}
		if end.Reason == engine.ReasonError {
			f["status_code"], f["err_type"] = 500, "InternalServerError"
		} else if end.Tokens == 0 {
			f = map[string]any{"type": "abort", "message": "Abort in waiting queue"}
			delete(meta, "prompt_tokens")
			delete(meta, "cached_tokens")
		}
		return f
	case "length":
		return map[string]any{"type": "length", "length": end.Tokens}
	}
	return map[string]any{"type": "stop", "matched": end.Stop}
}

// pushLoads sends LoadStat messages, at least one a second.
func (g *sglang) pushLoads(r *rank) {
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			if b := g.loadStat(r.n); b != nil {
				r.load.send(b)
			}
		case <-r.load.ctx.Done():
			return
		}
	}
}
