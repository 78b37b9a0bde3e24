package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/rollbus/rollbus/subjects"
)

// Load reads vLLM's names from /metrics, which the simulated engine and many
// look-alikes speak too. Nil when the server has none of them.
func (a *OpenAI) Load(ctx context.Context) (*subjects.Load, error) {
	status, b, err := a.get(ctx, "/metrics")
	switch {
	case err != nil:
		return nil, err
	case status != 200:
		return nil, nil
	}
	return loadFromMetrics(b), nil
}

// series of vLLM's exposition, per rank (label engine; absent = rank 0).
var rankSeries = map[string]func(*subjects.RankLoad, float64){
	"vllm:num_requests_running": func(r *subjects.RankLoad, v float64) { r.Running = most(r.Running, v) },
	"vllm:num_requests_waiting": func(r *subjects.RankLoad, v float64) { r.Waiting = most(r.Waiting, v) },
	"vllm:kv_cache_usage_perc": func(r *subjects.RankLoad, v float64) {
		if v <= 1 {
			r.KVUsage = &v
		}
	},
	"vllm:num_preemptions_total": func(r *subjects.RankLoad, v float64) {
		n := int64(v)
		r.PreemptionsTotal = &n
	},
}

// most keeps the larger of two series of one rank: with several API processes
// a gauge may come once a process.
func most(old *int, v float64) *int {
	n := int(v)
	if old != nil && *old > n {
		return old
	}
	return &n
}

func loadFromMetrics(b []byte) *subjects.Load {
	ranks := map[int]*subjects.RankLoad{}
	told := false
	at := func(labels string) *subjects.RankLoad {
		n, err := strconv.Atoi(or(label(labels, "engine"), "0"))
		if err != nil || n < 0 || n >= maxRanks {
			return nil
		}
		if ranks[n] == nil {
			ranks[n] = &subjects.RankLoad{Rank: n}
		}
		return ranks[n]
	}
	eachSample(b, func(name, labels string, v float64) {
		if name == "vllm:cache_config_info" {
			if n := cacheTokens(labels); n > 0 {
				if r := at(labels); r != nil {
					r.KVCapacityTokens = &n
				}
			}
			return
		}
		set, ok := rankSeries[name]
		if !ok || v < 0 || math.IsNaN(v) || v > 1<<53 {
			return // NaN is unknown
		}
		if r := at(labels); r != nil {
			set(r, v)
			told = true
		}
	})
	if !told {
		return nil
	}
	l := &subjects.Load{SchemaVersion: subjects.SchemaVersion, Source: "metrics"}
	for _, r := range ranks {
		if r.KVUsage != nil && r.KVCapacityTokens != nil {
			used := int64(math.Round(*r.KVUsage * float64(*r.KVCapacityTokens)))
			r.KVUsedTokens = &used
		}
		l.Ranks = append(l.Ranks, *r)
	}
	slices.SortFunc(l.Ranks, func(x, y subjects.RankLoad) int { return x.Rank - y.Rank })
	return l
}

// cacheTokens is the KV capacity of one rank in tokens, 0 = unknown.
func cacheTokens(labels string) int64 {
	if n, err := strconv.ParseInt(label(labels, "kv_cache_size_tokens"), 10, 64); err == nil && n > 0 {
		return n
	}
	blocks, err := strconv.ParseInt(label(labels, "num_gpu_blocks"), 10, 64)
	if err != nil || blocks <= 0 {
		return 0
	}
	size, err := strconv.ParseInt(label(labels, "block_size"), 10, 64)
	if err != nil || size <= 0 || size > 1<<20 || blocks > 1<<40 {
		return 0
	}
	return blocks * size
}

// fromMetrics adds what an exposition says of the process and its cache.
func fromMetrics(b []byte, c *Capabilities) {
	var total int64
	ranks := map[string]bool{}
	var block int
	eachSample(b, func(name, labels string, v float64) {
		switch name {
		case "process_start_time_seconds":
			if v > 0 && !math.IsInf(v, 0) {
				c.StartedAt = &v
			}
		case "vllm:cache_config_info":
			rank := or(label(labels, "engine"), "0")
			if ranks[rank] {
				return
			}
			ranks[rank] = true
			total += cacheTokens(labels)
			if n, err := strconv.Atoi(label(labels, "block_size")); err == nil && n > 0 {
				block = n
			}
		}
	})
	if total > 0 && c.CapacityTokens == nil {
		c.CapacityTokens, c.CapacitySource = &total, "reported"
	}
	if block > 0 && c.EngineBlock == nil {
		c.EngineBlock = &block
	}
	c.Ranks = max(c.Ranks, len(ranks))
}

// serverInfo adds what vLLM tells in its dev mode, and the simulated engine.
func serverInfo(b []byte, c *Capabilities) {
	var o struct {
		Simulated bool `json:"simulated"`
		VLLM      struct {
			Model struct {
				MaxModelLen *int `json:"max_model_len"`
			} `json:"model_config"`
			Scheduler struct {
				Slots *int `json:"max_num_seqs"`
			} `json:"scheduler_config"`
			Parallel struct {
				Ranks int `json:"data_parallel_size"`
			} `json:"parallel_config"`
		} `json:"vllm_config"`
	}
	if json.Unmarshal(b, &o) != nil {
		return
	}
	if o.Simulated {
		c.Kind = "sim"
	}
	if n := o.VLLM.Parallel.Ranks; n > 1 && n <= maxRanks {
		c.Ranks = n
	}
	if n := positive(o.VLLM.Scheduler.Slots); n != nil {
		slots := *n * c.Ranks // max_num_seqs is of one rank
		c.Slots = &slots
	}
	if c.MaxModelLen == nil {
		c.MaxModelLen = positive(o.VLLM.Model.MaxModelLen)
	}
}

// weightInfo reads {"weight_version": "7"}; what is no number stays unknown.
func weightInfo(b []byte, c *Capabilities) {
	var o struct {
		Version json.RawMessage `json:"weight_version"`
	}
	if json.Unmarshal(b, &o) != nil {
		return
	}
	if n, err := strconv.ParseInt(strings.Trim(string(o.Version), `"`), 10, 64); err == nil {
		c.WeightVersion = &n
	}
}

const maxRanks = 4096

// eachSample reads a text exposition line by line and skips what is none.
func eachSample(b []byte, f func(name, labels string, v float64)) {
	for line := range bytes.Lines(b) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		s := string(line)
		name, rest, labels := s, "", ""
		if i := strings.IndexByte(s, '{'); i >= 0 {
			j := strings.LastIndexByte(s, '}')
			if j < i {
				continue
			}
			name, labels, rest = s[:i], s[i+1:j], s[j+1:]
		} else if name, rest, _ = strings.Cut(s, " "); rest == "" {
			continue
		}
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(fields[0], 64); err == nil {
			f(name, labels, v)
		}
	}
}

// label is the value of one label, "" when it is absent.
func label(labels, name string) string {
	for at := 0; ; {
		i := strings.Index(labels[at:], name+`="`)
		if i < 0 {
			return ""
		}
		i += at
		if i == 0 || labels[i-1] == ',' || labels[i-1] == ' ' {
			v := labels[i+len(name)+2:]
			if j := strings.IndexByte(v, '"'); j >= 0 {
				return v[:j]
			}
			return ""
		}
		at = i + 1
	}
}
