package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// Capabilities asks /v1/models, which must answer, and whatever else the server
// has: /version, /server_info, /metrics, and llama.cpp's /props.
func (a *OpenAI) Capabilities(ctx context.Context) (Capabilities, error) {
	c := Capabilities{Kind: "openai", Ranks: 1, Events: "none"}
	models, err := a.models(ctx)
	if err != nil {
		return Capabilities{}, err
	}
	v := &served{}
	if m := models.pick(a.cfg.Model); m != nil {
		c.Model = m.ID
		c.MaxModelLen = positive(m.MaxModelLen)
		v.model = m.ID
		if m.OwnedBy == "llamacpp" {
			c.Kind, v.llamacpp = "llamacpp", true
			c.MaxModelLen = positive(m.Meta.NCtx)
		}
		for _, l := range models.Data {
			if l.Parent == m.ID {
				c.LoRAs = append(c.LoRAs, l.ID)
			}
		}
	}
	if b, ok := a.optional(ctx, "/version"); ok {
		var o struct {
			Version string `json:"version"`
		}
		if json.Unmarshal(b, &o) == nil {
			c.Version = o.Version
		}
	}
	if v.llamacpp {
		a.props(ctx, &c)
	} else {
		if b, ok := a.optional(ctx, "/server_info?config_format=json"); ok {
			serverInfo(b, &c)
		}
		if b, ok := a.optional(ctx, "/weight_info"); ok {
			weightInfo(b, &c)
		}
	}
	if b, ok := a.optional(ctx, "/metrics"); ok {
		fromMetrics(b, &c)
	}
	c.Ranks = min(max(1, c.Ranks), maxRanks)
	v.hints = hintsOf(&c)
	a.served.Store(v)
	return c, nil
}

type modelList struct {
	Data []modelEntry `json:"data"`
}

type modelEntry struct {
	ID          string `json:"id"`
	Parent      string `json:"parent"`
	OwnedBy     string `json:"owned_by"`
	MaxModelLen *int   `json:"max_model_len"`
	Meta        struct {
		NCtx *int `json:"n_ctx"`
	} `json:"meta"`
}

// pick is the model by name, else the first that is no adapter.
func (l modelList) pick(name string) *modelEntry {
	var first *modelEntry
	for i := range l.Data {
		m := &l.Data[i]
		if name != "" && m.ID == name {
			return m
		}
		if first == nil && m.Parent == "" {
			first = m
		}
	}
	return first
}

func (a *OpenAI) models(ctx context.Context) (modelList, error) {
	status, b, err := a.get(ctx, "/v1/models")
	switch {
	case err != nil:
		return modelList{}, fmt.Errorf("ask %s for its models: %w", a.base, err)
	case status != http.StatusOK:
		return modelList{}, fmt.Errorf("ask %s for its models: %s", a.base, refusal(status, b).Message)
	}
	var l modelList
	if err := json.Unmarshal(b, &l); err != nil {
		return modelList{}, fmt.Errorf("ask %s for its models: the answer is no list of models: check the address", a.base)
	}
	return l, nil
}

// props reads what llama.cpp says of its slots; the context is per slot.
func (a *OpenAI) props(ctx context.Context, c *Capabilities) {
	b, ok := a.optional(ctx, "/props")
	if !ok {
		return
	}
	var o struct {
		TotalSlots *int   `json:"total_slots"`
		Build      string `json:"build_info"`
		Asleep     *bool  `json:"is_sleeping"`
		Settings   struct {
			NCtx *int `json:"n_ctx"`
		} `json:"default_generation_settings"`
	}
	if json.Unmarshal(b, &o) != nil {
		return
	}
	c.Slots, c.Asleep = positive(o.TotalSlots), o.Asleep
	if n := positive(o.Settings.NCtx); n != nil {
		c.MaxModelLen = n
	}
	c.Version = or(c.Version, o.Build)
}

// get reads a small answer whole.
func (a *OpenAI) get(ctx context.Context, path string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.ProbeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.base+path, nil)
	if err != nil {
		return 0, nil, err
	}
	a.headers(req)
	resp, err := a.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	const most = 16 << 20
	b, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	switch {
	case err != nil:
		return 0, nil, err
	case len(b) > most:
		return 0, nil, fmt.Errorf("%s answers with more than %d bytes", path, most)
	}
	return resp.StatusCode, b, nil
}

// optional is an endpoint that a server may not have.
func (a *OpenAI) optional(ctx context.Context, path string) ([]byte, bool) {
	status, b, err := a.get(ctx, path)
	return b, err == nil && status == http.StatusOK
}

func positive(v *int) *int {
	if v == nil || *v <= 0 {
		return nil
	}
	return v
}
