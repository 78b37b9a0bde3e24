package telemetry

import (
	"math"
	"strconv"
)

// vllmMetrics collects the series of vLLM, of any release (names changed in
// v0.6 to v0.10) and of its look-alike, llm-d-inference-sim.
type vllmMetrics struct {
	s       *Sample
	gauges  map[rankName]gauge
	sums    map[rankName]float64
	configs map[int]cacheConfig // by rank; anyRank where the label is absent
	awake   map[int]bool
}

type rankName struct {
	rank int
	name string
}

// gauge is the largest value over API servers (label pid). twice marks two
// different values that nothing tells apart.
type gauge struct {
	v     float64
	pid   bool
	twice bool
}

type cacheConfig struct{ tokens, blocks, blockSize int64 }

const anyRank = -1

// gauge names, new before old: the first one that is there counts.
var (
	vllmUsage   = []string{"kv_cache_usage_perc", "gpu_cache_usage_perc"}
	vllmQueries = []string{"prefix_cache_queries_total", "gpu_prefix_cache_queries_total"}
	vllmHits    = []string{"prefix_cache_hits_total", "gpu_prefix_cache_hits_total"}
)

func (m *vllmMetrics) add(name string, labels []label, v float64) {
	rank := 0
	engine, hasEngine := get(labels, "engine")
	if hasEngine {
		n, err := strconv.Atoi(engine)
		if err != nil || n < 0 || n > maxRank {
			m.s.problem(-1, name, "label engine=%.20q is no rank", engine)
			return
		}
		rank = n
	}
	switch name {
	case "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc":
		_, pid := get(labels, "pid")
		m.gauge(rankName{rank, name}, v, pid)
	case "prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "prefix_cache_hits_total", "gpu_prefix_cache_hits_total",
		"prompt_tokens_total", "generation_tokens_total", "num_preemptions_total":
		if m.sums == nil {
			m.sums = map[rankName]float64{}
		}
		m.sums[rankName{rank, name}] += v
	case "engine_sleep_state":
		if state, _ := get(labels, "sleep_state"); state == "awake" {
			if m.awake == nil {
				m.awake = map[int]bool{}
			}
			m.awake[rank] = v != 0
		}
	case "cache_config_info":
		if !hasEngine {
			rank = anyRank
		}
		if m.configs == nil {
			m.configs = map[int]cacheConfig{}
		}
		m.configs[rank] = readCacheConfig(labels)
	}
}

func (m *vllmMetrics) gauge(k rankName, v float64, pid bool) {
	if m.gauges == nil {
		m.gauges = map[rankName]gauge{}
	}
	old, seen := m.gauges[k]
	switch {
	case !seen:
		m.gauges[k] = gauge{v: v, pid: pid}
	case pid && old.pid:
		old.v = math.Max(old.v, v) // NaN stays NaN: unknown
		m.gauges[k] = old
	case old.v != v:
		old.twice = true
		m.gauges[k] = old
	}
}

// readCacheConfig reads the labels of cache_config_info; "None" is no number.
func readCacheConfig(labels []label) cacheConfig {
	num := func(name string) int64 {
		v, _ := get(labels, name)
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < 0 || n > 1<<50 {
			return 0
		}
		return n
	}
	return cacheConfig{tokens: num("kv_cache_size_tokens"), blocks: num("num_gpu_blocks"), blockSize: num("block_size")}
}

// capacity in tokens. Blocks x block size is wrong on hybrid models, so it is
// the second choice.
func (c cacheConfig) capacity() *int64 {
	n := c.tokens
	if n == 0 && c.blockSize < 1<<20 {
		n = c.blocks * c.blockSize
	}
	return positive(&n)
}

func (m *vllmMetrics) finish() {
	m.s.Source = SourceVLLMMetrics
	for k := range m.gauges {
		m.s.rank(k.rank)
	}
	for k := range m.sums {
		m.s.rank(k.rank)
	}
	for rank := range m.configs {
		if rank != anyRank {
			m.s.rank(rank)
		}
	}
	for i := range m.s.Ranks {
		r := &m.s.Ranks[i]
		r.Running = m.requests(r.Rank, "num_requests_running")
		r.Waiting = m.requests(r.Rank, "num_requests_waiting")
		for _, name := range vllmUsage {
			if g, ok := m.gauges[rankName{r.Rank, name}]; ok {
				if !m.doubled(r.Rank, name, g) {
					r.KVUsage = &g.v
				}
				break
			}
		}
		r.PromptTokens = m.sum(r.Rank, "prompt_tokens_total")
		r.GenerationTokens = m.sum(r.Rank, "generation_tokens_total")
		r.Preemptions = m.sum(r.Rank, "num_preemptions_total")
		r.PreemptionsTotal = r.Preemptions
		r.PrefixQueryTokens = m.sum(r.Rank, vllmQueries...)
		r.PrefixHitTokens = m.sum(r.Rank, vllmHits...)
		c, ok := m.configs[r.Rank]
		if !ok {
			c = m.configs[anyRank]
		}
		r.KVCapacityTokens = c.capacity()
		if c.blockSize > 0 && c.blockSize < 1<<20 {
			n := int(c.blockSize)
			m.s.BlockSize = &n
		}
	}
	if len(m.awake) > 0 {
		all := true
		for _, a := range m.awake {
			all = all && a
		}
		m.s.Awake = &all
	}
}

func (m *vllmMetrics) doubled(rank int, name string, g gauge) bool {
	if g.twice {
		m.s.problem(rank, name, "reported twice with different values")
	}
	return g.twice
}

func (m *vllmMetrics) requests(rank int, name string) *int {
	g, ok := m.gauges[rankName{rank, name}]
	if !ok || m.doubled(rank, name, g) {
		return nil
	}
	return m.s.small(rank, name, g.v)
}

// sum gives the first of the names that is there.
func (m *vllmMetrics) sum(rank int, names ...string) *int64 {
	for _, name := range names {
		if v, ok := m.sums[rankName{rank, name}]; ok {
			return m.s.count(rank, name, v)
		}
	}
	return nil
}
