package telemetry

import (
	"math"
	"strconv"
)

// sglangMetrics collects SGLang's exposition. With metrics of all schedulers
// switched on every tensor-parallel rank repeats the same number, so one number
// a data-parallel rank is the maximum over them, never their sum; a series
// without dp_rank beside ranked ones is their total; priority="" is the total
// of its priority buckets.
type sglangMetrics struct {
	s      *Sample
	points map[string][]sgPoint // by metric name
	ranked bool                 // some series names its dp_rank
}

type sgPoint struct {
	rank     int // anyRank = no dp_rank label
	copyOf   string
	priority string
	v        float64
}

func (m *sglangMetrics) add(name string, labels []label, v float64) {
	switch name {
	case "num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "max_total_num_tokens", "page_size",
		"prompt_tokens_total", "generation_tokens_total", "num_retracted_reqs", "gen_throughput":
	case "realtime_tokens_total":
		mode, _ := get(labels, "mode")
		name += "/" + mode
	default:
		return
	}
	p := sgPoint{rank: anyRank, v: v}
	for _, l := range labels {
		switch l.name {
		case "dp_rank":
			n, err := strconv.Atoi(l.value)
			if err != nil || n < 0 || n > maxRank {
				m.s.problem(-1, name, "label dp_rank=%.20q is no rank", l.value)
				return
			}
			p.rank, m.ranked = n, true
		case "tp_rank", "pp_rank", "moe_ep_rank", "pid":
			p.copyOf += l.name + l.value + " "
		case "priority":
			p.priority = l.value
		}
	}
	if m.points == nil {
		m.points = map[string][]sgPoint{}
	}
	m.points[name] = append(m.points[name], p)
}

// value of a metric at a rank: total of its priorities in each copy, then the
// largest copy.
func (m *sglangMetrics) value(name string, rank int) (float64, bool) {
	type cell struct {
		total, buckets float64
		hasTotal       bool
	}
	copies := map[string]cell{}
	for _, p := range m.points[name] {
		if p.rank != rank {
			continue
		}
		c := copies[p.copyOf]
		if p.priority == "" {
			c.total, c.hasTotal = p.v, true
		} else {
			c.buckets += p.v
		}
		copies[p.copyOf] = c
	}
	v, found := 0.0, false
	for _, c := range copies {
		x := c.buckets
		if c.hasTotal {
			x = c.total
		}
		if !found || x > v || math.IsNaN(x) {
			v = x
		}
		found = true
		if math.IsNaN(x) {
			break
		}
	}
	return v, found
}

func (m *sglangMetrics) finish() {
	m.s.Source = SourceSGLangMetrics
	if !m.ranked {
		m.fill(m.s.rank(0), anyRank)
		m.s.Totals = m.s.Ranks[0].Counters
		return
	}
	for _, points := range m.points {
		for _, p := range points {
			if p.rank != anyRank {
				m.s.rank(p.rank)
			}
		}
	}
	for i := range m.s.Ranks {
		m.fill(&m.s.Ranks[i], m.s.Ranks[i].Rank)
	}
	m.s.Totals = m.counters(anyRank, -1)
}

func (m *sglangMetrics) fill(r *Rank, rank int) {
	s := m.s
	if v, ok := m.value("num_running_reqs", rank); ok {
		r.Running = s.small(r.Rank, "num_running_reqs", v)
	}
	if v, ok := m.value("num_queue_reqs", rank); ok {
		r.Waiting = s.small(r.Rank, "num_queue_reqs", v)
	}
	if v, ok := m.value("num_used_tokens", rank); ok {
		r.KVUsedTokens = s.count(r.Rank, "num_used_tokens", v)
	}
	if v, ok := m.value("token_usage", rank); ok {
		r.KVUsage = &v
	}
	if v, ok := m.value("max_total_num_tokens", rank); ok {
		r.KVCapacityTokens = positive(s.count(r.Rank, "max_total_num_tokens", v))
	}
	if v, ok := m.value("num_retracted_reqs", rank); ok {
		r.Retracted = s.small(r.Rank, "num_retracted_reqs", v)
	}
	if v, ok := m.value("page_size", rank); ok {
		s.BlockSize = positive(s.small(r.Rank, "page_size", v))
	}
	r.DecodeTokS = throughput(m.value("gen_throughput", rank))
	r.Counters = m.counters(rank, r.Rank)
}

// throughput is a reported rate. Zero means idle or never written: unknown.
func throughput(v float64, ok bool) *float64 {
	if !ok || math.IsNaN(v) || math.IsInf(v, 0) || v <= 0 {
		return nil
	}
	return &v
}

func (m *sglangMetrics) counters(rank, report int) Counters {
	get := func(names ...string) *int64 {
		var sum float64
		for _, name := range names {
			v, ok := m.value(name, rank)
			if !ok {
				return nil
			}
			sum += v
		}
		return m.s.count(report, names[0], sum)
	}
	c := Counters{
		PromptTokens:          get("prompt_tokens_total"),
		GenerationTokens:      get("generation_tokens_total"),
		PrefillUncachedTokens: get("realtime_tokens_total/prefill_compute"),
		PrefixHitTokens:       get("realtime_tokens_total/prefill_cache"),
		PrefixQueryTokens:     get("realtime_tokens_total/prefill_compute", "realtime_tokens_total/prefill_cache"),
	}
	if c.GenerationTokens == nil {
		c.GenerationTokens = get("realtime_tokens_total/decode")
	}
	if c.PromptTokens == nil {
		c.PromptTokens = c.PrefixQueryTokens
	}
	return c
}
