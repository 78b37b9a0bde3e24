package telemetry

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"
)

// ServerInfo is SGLang's GET /server_info (or /get_server_info), per rank where
// a number is a rank's.
type ServerInfo struct {
	Ranks          int
	Model          string
	Version        string
	WeightVersion  string
	CapacityTokens *int64 // per rank
	MaxRunning     *int   // per rank, the effective one
	MaxInput       *int   // tokens of one prompt
	ContextLength  *int   // tokens of prompt and output
	BlockSize      *int
	Disaggregation string // "", prefill, decode
	Metrics        bool
	KVEvents       *KVEvents // nil = off
	Notes          []string
}

// KVEvents is where an SGLang engine publishes its events.
type KVEvents struct {
	Host      string // "" = the host of the engine's own URL
	PortBase  int    // rank r publishes at PortBase + r
	LoadBase  int    // 0 = no load messages
	Topic     string
	LoadTopic string
	BlockSize *int
	Ranks     int
}

// Endpoint is where rank r publishes its cache events, for an engine at base.
func (k KVEvents) Endpoint(base *url.URL, r int) string { return k.at(base, k.PortBase+r) }

// LoadEndpoint is where rank r publishes its load, "" when it does not.
func (k KVEvents) LoadEndpoint(base *url.URL, r int) string {
	if k.LoadBase == 0 {
		return ""
	}
	return k.at(base, k.LoadBase+r)
}

func (k KVEvents) at(base *url.URL, port int) string {
	host := k.Host
	if host == "" {
		host = base.Hostname()
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
}

// wildcard tells hosts that mean "every interface": useless to dial.
func wildcard(host string) bool {
	switch host {
	case "", "*", "0.0.0.0", "::", "[::]":
		return true
	}
	return false
}

// ParseServerInfo reads the flat object. The slots are the effective ones of
// the internal states, not the number typed on the command line.
func ParseServerInfo(b []byte) (ServerInfo, error) {
	var in struct {
		ModelPath      string `json:"model_path"`
		Served         string `json:"served_model_name"`
		Version        string `json:"version"`
		WeightVersion  string `json:"weight_version"`
		DPSize         *int   `json:"dp_size"`
		PageSize       *int   `json:"page_size"`
		MaxTotal       *int64 `json:"max_total_num_tokens"`
		MaxInput       *int   `json:"max_req_input_len"`
		Context        *int   `json:"context_length"`
		Disaggregation string `json:"disaggregation_mode"`
		Metrics        bool   `json:"enable_metrics"`
		States         []struct {
			Effective *int `json:"effective_max_running_requests_per_dp"`
		} `json:"internal_states"`
		KVEvents *struct {
			Host      string `json:"endpoint_host"`
			PortBase  int    `json:"endpoint_port_base"`
			LoadBase  int    `json:"load_endpoint_port_base"`
			Topic     string `json:"topic"`
			LoadTopic string `json:"load_topic"`
			BlockSize *int   `json:"block_size"`
			DPSize    *int   `json:"dp_size"`
		} `json:"kv_events"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return ServerInfo{}, fmt.Errorf("/server_info: %w: %w", ErrShape, err)
	}
	if in.ModelPath == "" && in.DPSize == nil && in.States == nil {
		return ServerInfo{}, fmt.Errorf("/server_info: none of model_path, dp_size, internal_states: %w", ErrShape)
	}
	out := ServerInfo{Ranks: 1, Model: in.Served, Version: in.Version, WeightVersion: in.WeightVersion,
		CapacityTokens: positive(in.MaxTotal), MaxInput: positive(in.MaxInput), ContextLength: positive(in.Context), BlockSize: positive(in.PageSize), Metrics: in.Metrics}
	if out.Model == "" {
		out.Model = in.ModelPath
	}
	if out.ContextLength == nil {
		out.ContextLength = out.MaxInput
	}
	if in.Disaggregation != "null" {
		out.Disaggregation = in.Disaggregation
	}
	if n := positive(in.DPSize); n != nil && *n <= maxRank {
		out.Ranks = *n
	}
	for _, s := range in.States {
		if n := positive(s.Effective); n != nil && (out.MaxRunning == nil || *n < *out.MaxRunning) {
			out.MaxRunning = n
		}
	}
	if len(in.States) > 0 && len(in.States) != out.Ranks {
		out.Notes = append(out.Notes, fmt.Sprintf("dp_size is %d, but %d internal states", out.Ranks, len(in.States)))
	}
	if k := in.KVEvents; k != nil && k.PortBase > 0 {
		out.KVEvents = &KVEvents{Host: k.Host, PortBase: k.PortBase, LoadBase: k.LoadBase, Topic: k.Topic, LoadTopic: k.LoadTopic,
			BlockSize: positive(k.BlockSize), Ranks: out.Ranks}
		if wildcard(k.Host) {
			out.KVEvents.Host = ""
		}
		if n := positive(k.DPSize); n != nil && *n <= maxRank {
			out.KVEvents.Ranks = *n
		}
		if k.BlockSize != nil && in.PageSize != nil && *k.BlockSize != *in.PageSize {
			out.Notes = append(out.Notes, fmt.Sprintf("kv_events.block_size is %d, page_size %d: the events decide", *k.BlockSize, *in.PageSize))
		}
	}
	return out, nil
}

// EventSource is where one rank of a vLLM engine publishes.
type EventSource struct {
	Endpoint string
	Replay   string // "" = none
	Topic    string
}

// ParseEventSources reads vLLM's GET /kv_event_sources, in both of its shapes:
// a map by rank and a list with ranks inside. Empty = events are off.
func ParseEventSources(b []byte) (map[int]EventSource, error) {
	type source struct {
		Rank     *int    `json:"data_parallel_rank"`
		Endpoint string  `json:"endpoint"`
		Replay   *string `json:"replay_endpoint"`
		Topic    string  `json:"topic"`
	}
	var top map[string]json.RawMessage
	if err := json.Unmarshal(b, &top); err != nil {
		return nil, fmt.Errorf("/kv_event_sources: %w: %w", ErrShape, err)
	}
	out := map[int]EventSource{}
	add := func(rank int, s source) error {
		if _, twice := out[rank]; twice || rank < 0 || rank > maxRank || s.Endpoint == "" {
			return fmt.Errorf("/kv_event_sources: rank %d at %q: %w", rank, s.Endpoint, ErrShape)
		}
		e := EventSource{Endpoint: s.Endpoint, Topic: s.Topic}
		if s.Replay != nil {
			e.Replay = *s.Replay
		}
		out[rank] = e
		return nil
	}
	if raw, ok := top["sources"]; ok {
		var list []source
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, fmt.Errorf("/kv_event_sources: %w: %w", ErrShape, err)
		}
		for i, s := range list {
			rank := i
			if s.Rank != nil {
				rank = *s.Rank
			}
			if err := add(rank, s); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	for key, raw := range top {
		rank, err := strconv.Atoi(key)
		if err != nil {
			continue // a key that some later release adds
		}
		var s source
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, fmt.Errorf("/kv_event_sources: rank %d: %w: %w", rank, ErrShape, err)
		}
		if err := add(rank, s); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Models is GET /v1/models.
type Models struct {
	IDs         []string // base models and aliases
	LoRAs       []string // entries with a parent
	MaxModelLen *int     // the smallest that any entry names
	OwnedBy     string
}

// ParseModels reads GET /v1/models of any server that speaks the OpenAI API.
func ParseModels(b []byte) (Models, error) {
	var in struct {
		Data []struct {
			ID      string  `json:"id"`
			Parent  *string `json:"parent"`
			OwnedBy string  `json:"owned_by"`
			MaxLen  *int    `json:"max_model_len"`
			Meta    struct {
				NCtx *int `json:"n_ctx"`
			} `json:"meta"`
		} `json:"data"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return Models{}, fmt.Errorf("/v1/models: %w: %w", ErrShape, err)
	}
	if len(in.Data) == 0 {
		return Models{}, fmt.Errorf("/v1/models: no data: %w", ErrShape)
	}
	var out Models
	for _, m := range in.Data {
		if m.Parent != nil && *m.Parent != "" {
			out.LoRAs = append(out.LoRAs, m.ID)
		} else {
			out.IDs = append(out.IDs, m.ID)
		}
		if out.OwnedBy == "" {
			out.OwnedBy = m.OwnedBy
		}
		for _, n := range []*int{positive(m.MaxLen), positive(m.Meta.NCtx)} {
			if n != nil && (out.MaxModelLen == nil || *n < *out.MaxModelLen) {
				out.MaxModelLen = n
			}
		}
	}
	return out, nil
}
