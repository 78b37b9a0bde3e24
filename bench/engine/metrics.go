package engine

import (
	"maps"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/rollbus/rollbus/bench/engine/model"
)

var perRank = []string{"model_name", "engine"}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// The series of vLLM that the simulated engine has a value for, and its own.
var (
	descRunning     = desc("vllm:num_requests_running", "Requests in the execution batch.", perRank...)
	descWaiting     = desc("vllm:num_requests_waiting", "Requests waiting, preempted ones included.", perRank...)
	descUsage       = desc("vllm:kv_cache_usage_perc", "KV cache in use, 1 means full.", perRank...)
	descQueries     = desc("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", perRank...)
	descHits        = desc("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", perRank...)
	descPrompt      = desc("vllm:prompt_tokens_total", "Prompt tokens processed.", perRank...)
	descGeneration  = desc("vllm:generation_tokens_total", "Tokens generated.", perRank...)
	descPreemptions = desc("vllm:num_preemptions_total", "Preemptions.", perRank...)
	descSuccess     = desc("vllm:request_success_total", "Requests ended, by finish reason.", append(perRank, "finished_reason")...)
	descSleep       = desc("vllm:engine_sleep_state", "1 for the state the engine is in.", append(perRank, "sleep_state")...)
	descCache       = desc("vllm:cache_config_info", "Cache configuration as labels.", "model_name", "engine", "block_size", "cache_dtype",
		"enable_prefix_caching", "kv_cache_size_tokens", "num_cpu_blocks", "num_gpu_blocks", "num_gpu_blocks_override")
	descStart = desc("process_start_time_seconds", "Start of this life of the simulated engine, unix seconds.")
	descSim   = desc("rollbus_sim_info", "A simulated engine, no model behind it.", "profile", "time_scale")
	descBusy  = desc("rollbus_sim_busy_seconds_total", "Modelled seconds spent in steps.", perRank...)
)

// metrics serves /metrics from a registry of its own: in-process engines do
// not mix. Values are read from the model at the instant of the scrape.
func (l *life) metrics() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collector{l})
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})
}

type collector struct{ l *life }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descRunning, descWaiting, descUsage, descQueries, descHits, descPrompt, descGeneration,
		descPreemptions, descSuccess, descSleep, descCache, descStart, descSim, descBusy} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	stats, err := c.l.stats()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descRunning, err)
		return
	}
	var done map[string]int64
	if err := c.l.drv.do(func() { done = maps.Clone(c.l.drv.done) }); err != nil {
		ch <- prometheus.NewInvalidMetric(descSuccess, err)
		return
	}
	cfg := &c.l.s.cfg
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	put(descStart, prometheus.GaugeValue, float64(c.l.started.UnixNano())/1e9)
	put(descSim, prometheus.GaugeValue, 1, cfg.Engine.Profile.Name, strconv.FormatFloat(cfg.TimeScale, 'g', -1, 64))
	for i, s := range stats {
		c.rank(put, i, s)
	}
	for _, reason := range []string{"stop", "length", ReasonAbort, ReasonError} {
		put(descSuccess, prometheus.CounterValue, float64(done[reason]), cfg.Model, "0", reason)
	}
}

func (c collector) rank(put func(*prometheus.Desc, prometheus.ValueType, float64, ...string), i int, s model.Stats) {
	cfg, rank := &c.l.s.cfg, strconv.Itoa(i)
	gauge := func(d *prometheus.Desc, v float64, more ...string) {
		put(d, prometheus.GaugeValue, v, append([]string{cfg.Model, rank}, more...)...)
	}
	count := func(d *prometheus.Desc, v int64) {
		put(d, prometheus.CounterValue, float64(v), cfg.Model, rank)
	}
	gauge(descRunning, float64(s.Running))
	gauge(descWaiting, float64(s.Waiting))
	gauge(descUsage, float64(s.KVUsed)/float64(s.Capacity))
	count(descQueries, s.PrefixQueries)
	count(descHits, s.PrefixHits)
	count(descPrompt, s.PromptTokens)
	count(descGeneration, s.GenerationTokens)
	count(descPreemptions, s.Preemptions)
	put(descBusy, prometheus.CounterValue, s.Busy.Seconds(), cfg.Model, rank)
	c.l.mu.Lock()
	asleep := c.l.asleep
	c.l.mu.Unlock()
	for level, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		v := 0.0
		if level == asleep {
			v = 1
		}
		gauge(descSleep, v, state)
	}
	e := &cfg.Engine
	caching := "True"
	if e.NoCache {
		caching = "False"
	}
	gauge(descCache, 1, strconv.Itoa(e.BlockTokens), "auto", caching, strconv.Itoa(s.Capacity),
		"None", strconv.Itoa(s.Capacity/e.BlockTokens), "None")
}
