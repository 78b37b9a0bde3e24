package fakes

import (
	"fmt"
	"net/http"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
)

func (g *sglang) loads(s *engine.Server, w http.ResponseWriter) {
	stats, err := s.Stats()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	out := make([]any, 0, len(stats))
	for i := len(stats) - 1; i >= 0; i-- { // in any order
		t := &stats[i]
		out = append(out, map[string]any{"dp_rank": i, "num_running_reqs": t.Running, "num_waiting_reqs": t.Waiting,
			"num_waiting_uncached_tokens": t.WaitingTokens, "num_used_tokens": t.KVUsed, "num_total_tokens": t.KVUsed + t.WaitingTokens,
			"max_total_num_tokens": t.Capacity, "max_running_requests": g.cfg.slots(s), "token_usage": usage(t), "gen_throughput": 0.0,
			"cache_hit_rate": 0.0, "utilization": 0.0, "total_prefill_uncached_tokens": t.PromptTokens - t.PrefixHits})
	}
	writeJSON(w, http.StatusOK, map[string]any{"timestamp": time.Now().UTC().Format(time.RFC3339Nano), "version": "0.0.0", "loads": out})
}

func (c *SGLangConfig) slots(s *engine.Server) int { return s.Config().Engine.MaxRunning }

func usage(t *model.Stats) float64 {
	if t.Capacity == 0 {
		return 0
	}
	return float64(t.KVUsed) / float64(t.Capacity)
}

func (g *sglang) getLoad(s *engine.Server, w http.ResponseWriter) {
	stats, err := s.Stats()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	out := make([]any, len(stats))
	for i := range stats {
		t := &stats[i]
		out[i] = map[string]any{"dp_rank": i, "num_reqs": t.Running + t.Waiting, "num_waiting_reqs": t.Waiting, "num_tokens": t.KVUsed + t.WaitingTokens,
			"num_pending_tokens": t.WaitingTokens, "ts_tic": t.Now.Seconds()}
	}
	writeJSON(w, http.StatusOK, out)
}

// metrics repeats every number for two tensor-parallel ranks, as an engine with
// metrics of all schedulers does.
func (g *sglang) metrics(s *engine.Server, w http.ResponseWriter) {
	stats, err := s.Stats()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	name := s.Config().Model
	series := []struct {
		name, kind string
		of         func(*modelStats) float64
	}{
		{"num_running_reqs", "gauge", func(t *modelStats) float64 { return float64(t.Running) }},
		{"num_queue_reqs", "gauge", func(t *modelStats) float64 { return float64(t.Waiting) }},
		{"num_used_tokens", "gauge", func(t *modelStats) float64 { return float64(t.KVUsed) }},
		{"max_total_num_tokens", "gauge", func(t *modelStats) float64 { return float64(t.Capacity) }},
		{"token_usage", "gauge", func(t *modelStats) float64 { return usage(t) }},
		{"page_size", "gauge", func(*modelStats) float64 { return float64(s.Config().Engine.BlockTokens) }},
		{"generation_tokens_total", "counter", func(t *modelStats) float64 { return float64(t.GenerationTokens) }},
		{"prompt_tokens_total", "counter", func(t *modelStats) float64 { return float64(t.PromptTokens) }},
	}
	for _, m := range series {
		_, _ = fmt.Fprintf(w, "# TYPE sglang:%s %s\n", m.name, m.kind)
		for i := range stats {
			for tp := range 2 {
				_, _ = fmt.Fprintf(w, "sglang:%s{dp_rank=\"%d\",engine_type=\"unified\",model_name=%q,moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"%d\"} %v\n",
					m.name, i, name, tp, m.of(&stats[i]))
			}
		}
	}
}

type modelStats = model.Stats

// loadStat is the long form of a LoadStat message.
func (g *sglang) loadStat(rank int) []byte {
	if g.f.Server == nil {
		return nil
	}
	stats, err := g.f.Server.Stats()
	if err != nil || rank >= len(stats) {
		return nil
	}
	t := &stats[rank]
	b, err := msgpack.Marshal([]any{"LoadStat", t.Running, t.Waiting, t.KVUsed, t.Capacity, rank, t.WaitingTokens, t.KVUsed + t.WaitingTokens,
		g.cfg.slots(g.f.Server), t.PromptTokens - t.PrefixHits, int64(t.Busy / time.Microsecond)})
	if err != nil {
		return nil
	}
	return b
}
