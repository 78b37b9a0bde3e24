package telemetry

import (
	"encoding/json"
	"fmt"

	"github.com/rollbus/rollbus/subjects"
)

// llamaMetrics collects llama.cpp's exposition: no labels, no KV usage, one rank.
type llamaMetrics struct {
	s    *Sample
	vals map[string]float64
}

func (m *llamaMetrics) add(name string, v float64) {
	if m.vals == nil {
		m.vals = map[string]float64{}
	}
	m.vals[name] = v
}

func (m *llamaMetrics) finish() {
	m.s.Source = SourceLlamaMetrics
	r := m.s.rank(0)
	if v, ok := m.vals["requests_processing"]; ok {
		r.Running = m.s.small(0, "requests_processing", v)
	}
	if v, ok := m.vals["requests_deferred"]; ok {
		r.Waiting = m.s.small(0, "requests_deferred", v)
	}
	count := func(name string) *int64 {
		v, ok := m.vals[name]
		if !ok {
			return nil
		}
		return m.s.count(0, name, v)
	}
	// Moves when a request ends, not while it decodes: Steps is the progress.
	r.GenerationTokens = count("tokens_predicted_total")
	r.Steps = count("n_decode_total")
	r.PrefillUncachedTokens = count("prompt_tokens_total")
	if hit := count("prompt_tokens_cached_total"); hit != nil && r.PrefillUncachedTokens != nil {
		all := *r.PrefillUncachedTokens + *hit
		r.PromptTokens, r.PrefixQueryTokens, r.PrefixHitTokens = &all, &all, hit
	}
}

// Slots is llama.cpp's GET /slots.
type Slots struct {
	Total, Busy    int
	ContextPerSlot int
	Decoded        []int // tokens decoded so far, per busy slot
	PromptDone     []int // prompt tokens processed or reused, per busy slot
}

// ParseSlots reads GET /slots.
func ParseSlots(b []byte) (Slots, error) {
	var in []struct {
		IsProcessing bool            `json:"is_processing"`
		NCtx         int             `json:"n_ctx"`
		Processed    int             `json:"n_prompt_tokens_processed"`
		Cached       int             `json:"n_prompt_tokens_cache"`
		Next         json.RawMessage `json:"next_token"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return Slots{}, fmt.Errorf("/slots: %w: %w", ErrShape, err)
	}
	out := Slots{Total: len(in)}
	for i, s := range in {
		if i == 0 || s.NCtx < out.ContextPerSlot {
			out.ContextPerSlot = s.NCtx
		}
		if !s.IsProcessing {
			continue
		}
		out.Busy++
		out.Decoded = append(out.Decoded, decoded(s.Next))
		out.PromptDone = append(out.PromptDone, s.Processed+s.Cached)
	}
	return out, nil
}

// decoded reads n_decoded from next_token: a list in today's builds, an object
// in older ones.
func decoded(b json.RawMessage) int {
	type next struct {
		N int `json:"n_decoded"`
	}
	var list []next
	if json.Unmarshal(b, &list) == nil && len(list) > 0 {
		return list[0].N
	}
	var one next
	_ = json.Unmarshal(b, &one)
	return one.N
}

// Sample is the load that the slots show; what waits is not in them.
func (s Slots) Sample() Sample {
	busy, total := s.Busy, s.Total
	r := Rank{RankLoad: subjects.RankLoad{Running: &busy, MaxRunning: positive(&total)}}
	return Sample{Source: SourceLlamaSlots, Ranks: []Rank{r}}
}

// Props is llama.cpp's GET /props.
type Props struct {
	Slots          *int
	ContextPerSlot *int
	Sleeping       *bool
	Build          string
	ModelAlias     string
	HasSlots       bool
	HasMetrics     bool
}

// ParseProps reads GET /props.
func ParseProps(b []byte) (Props, error) {
	var in struct {
		TotalSlots *int `json:"total_slots"`
		Defaults   struct {
			NCtx *int `json:"n_ctx"`
		} `json:"default_generation_settings"`
		Sleeping   *bool  `json:"is_sleeping"`
		Build      string `json:"build_info"`
		Alias      string `json:"model_alias"`
		HasSlots   bool   `json:"endpoint_slots"`
		HasMetrics bool   `json:"endpoint_metrics"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return Props{}, fmt.Errorf("/props: %w: %w", ErrShape, err)
	}
	if in.TotalSlots == nil {
		return Props{}, fmt.Errorf("/props: no total_slots: %w", ErrShape)
	}
	return Props{Slots: positive(in.TotalSlots), ContextPerSlot: positive(in.Defaults.NCtx), Sleeping: in.Sleeping,
		Build: in.Build, ModelAlias: in.Alias, HasSlots: in.HasSlots, HasMetrics: in.HasMetrics}, nil
}
