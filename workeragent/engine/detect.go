package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// Detection is what an address turned out to be, and by what.
type Detection struct {
	Kind    string   `json:"kind"` // vllm, sglang, llamacpp, openai, sim
	Model   string   `json:"model"`
	Version string   `json:"version"`
	Found   []string `json:"found"` // what was asked and what it showed, in order
}

// ErrNoEngine is an address where no inference server answers.
var ErrNoEngine = errors.New("no inference server answers there")

// Detect finds out what serves at a URL by the shape of its answers; version
// strings are shown, never believed (builds from source say 0.0.0).
func Detect(ctx context.Context, cfg OpenAIConfig) (Detection, error) {
	a, err := NewOpenAI(cfg)
	if err != nil {
		return Detection{}, err
	}
	defer a.Close()
	d := Detection{}
	status, b, err := a.get(ctx, "/v1/models")
	if err != nil {
		return d, fmt.Errorf("%s: %w: %s", a.base, ErrNoEngine, cause(err))
	}
	models, merr := telemetry.ParseModels(b)
	if status == http.StatusOK && merr == nil {
		d.Model = first(models.IDs)
		d.found("/v1/models lists %q, owned by %q", d.Model, models.OwnedBy)
	} else {
		d.found("/v1/models: HTTP %d, no list of models", status)
	}
	if b, ok := a.optional(ctx, "/version"); ok {
		var o struct {
			Version string `json:"version"`
		}
		if json.Unmarshal(b, &o) == nil && o.Version != "" {
			d.Version = o.Version
			d.found("/version says %q", d.Version)
		}
	}
	for _, look := range []func(context.Context, *OpenAI, *Detection) error{lookServerInfo, lookProps, lookMetrics} {
		if err := look(ctx, a, &d); err != nil {
			return d, err
		}
		if d.Kind != "" {
			return d, nil
		}
	}
	switch {
	case merr != nil:
		return d, fmt.Errorf("%s: %w: %s", a.base, ErrNoEngine, strings.Join(d.Found, "; "))
	case models.OwnedBy == "vllm":
		d.Kind = "vllm"
	case models.OwnedBy == "sglang":
		d.Kind = "sglang"
	case models.OwnedBy == "llamacpp":
		d.Kind = "llamacpp"
	default:
		d.Kind = "openai"
		d.found("nothing that only one kind of server has")
	}
	return d, nil
}

func (d *Detection) found(format string, a ...any) {
	d.Found = append(d.Found, fmt.Sprintf(format, a...))
}

// lookServerInfo tells SGLang, vLLM's dev mode and the simulated engine apart.
func lookServerInfo(ctx context.Context, a *OpenAI, d *Detection) error {
	for _, path := range [...]string{"/server_info?config_format=json", "/get_server_info"} {
		b, ok := a.optional(ctx, path)
		if !ok {
			continue
		}
		var o struct {
			Simulated bool            `json:"simulated"`
			VLLM      json.RawMessage `json:"vllm_config"`
		}
		if json.Unmarshal(b, &o) == nil {
			switch {
			case o.Simulated:
				d.Kind = "sim"
				d.found("%s calls itself simulated", path)
				return nil
			case len(o.VLLM) > 0:
				d.Kind = "vllm"
				d.found("%s has vllm_config: dev mode is on", path)
				return nil
			}
		}
		if i, err := telemetry.ParseServerInfo(b); err == nil {
			d.Kind, d.Model = "sglang", or(d.Model, i.Model)
			d.Version = or(d.Version, i.Version)
			d.found("%s is SGLang's: %d ranks", path, i.Ranks)
			return nil
		}
	}
	return nil
}

func lookProps(ctx context.Context, a *OpenAI, d *Detection) error {
	b, ok := a.optional(ctx, "/props")
	if !ok {
		return nil
	}
	p, err := telemetry.ParseProps(b)
	if err != nil {
		return nil
	}
	d.Kind, d.Model, d.Version = "llamacpp", or(d.Model, p.ModelAlias), or(d.Version, p.Build)
	d.found("/props has total_slots, build %q", p.Build)
	return nil
}

func lookMetrics(ctx context.Context, a *OpenAI, d *Detection) error {
	b, ok := a.optional(ctx, "/metrics")
	if !ok {
		d.found("/metrics is not served")
		return nil
	}
	_, dialect, err := telemetry.ParseMetrics(b)
	switch {
	case errors.Is(err, telemetry.ErrRouter):
		return fmt.Errorf("%s/metrics: %w", a.base, err)
	case err != nil:
		d.found("/metrics has no series of a known engine")
	default:
		d.Kind = string(dialect)
		d.found("/metrics has series of %s", dialect)
	}
	return nil
}

// Options for Open: what the kinds share, and what only some have.
type Options struct {
	OpenAI     OpenAIConfig // URL is taken from the spec
	Events     EventsConfig
	TokensOnly bool
}

// Open makes the adapter for a spec: "vllm=URL", "sglang=URL", "openai=URL" or
// "auto=URL", a bare URL meaning auto. auto asks the server, the others do not.
func Open(ctx context.Context, spec string, opts Options) (Adapter, Detection, error) {
	kind, url, ok := strings.Cut(spec, "=")
	if !ok || strings.Contains(kind, "/") {
		kind, url = "auto", spec
	}
	cfg := opts.OpenAI
	cfg.URL = url
	d := Detection{Kind: kind}
	if kind == "auto" {
		var err error
		if d, err = Detect(ctx, cfg); err != nil {
			return nil, d, err
		}
	}
	switch d.Kind {
	case "vllm", "sim":
		a, err := NewVLLM(VLLMConfig{OpenAIConfig: cfg, Events: opts.Events, TokensOnly: opts.TokensOnly})
		if err != nil {
			return nil, d, err
		}
		return a, d, nil
	case "sglang":
		a, err := NewSGLang(SGLangConfig{OpenAIConfig: cfg, Events: opts.Events})
		if err != nil {
			return nil, d, err
		}
		return a, d, nil
	case "openai", "llamacpp":
		a, err := NewOpenAI(cfg)
		if err != nil {
			return nil, d, err
		}
		return a, d, nil
	}
	return nil, d, fmt.Errorf("engine kind %q: give auto, vllm, sglang or openai", d.Kind)
}

func first(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}
