package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// OpenAIConfig configures an adapter for anything that speaks the OpenAI API.
type OpenAIConfig struct {
	// URL of the server, http or https, with or without a trailing /v1.
	URL string
	// Model to name in requests. Empty = the request's, else the first that
	// /v1/models lists.
	Model string
	// APIKey is sent as a bearer token when it is not empty.
	APIKey string
	// AcceptMissingDone takes a stream for complete that gave a finish reason
	// and then ended without its end mark, or without usage. Off: it counts as failed.
	AcceptMissingDone bool
	// NoTokenIDs leaves return_token_ids out, for servers that refuse fields
	// they do not know.
	NoTokenIDs bool
	// TokenSlack is how many tokens over max_tokens a server may send before the
	// run is cut and failed; 64.
	TokenSlack int
	// Limits of one answer.
	Limits SSELimits
	// ProbeTimeout of one request that is no generation; 5 s.
	ProbeTimeout time.Duration
	// Tracker judges what the samples of the load come to, one after another.
	Tracker telemetry.TrackerConfig
	// StopCheck is how often Abort looks whether the engine still shows more than
	// it was given; 200 ms.
	StopCheck time.Duration
	// Connections bounds idle connections kept; 256.
	Connections int
	// Transport replaces the HTTP transport, for tests. nil = an own one, without proxies.
	Transport http.RoundTripper
}

// WithDefaults fills in what is zero.
func (c OpenAIConfig) WithDefaults() OpenAIConfig {
	if c.TokenSlack == 0 {
		c.TokenSlack = 64
	}
	if c.ProbeTimeout == 0 {
		c.ProbeTimeout = 5 * time.Second
	}
	if c.StopCheck == 0 {
		c.StopCheck = 200 * time.Millisecond
	}
	if c.Connections == 0 {
		c.Connections = 256
	}
	c.Limits = c.Limits.withDefaults()
	return c
}

// Validate names everything that is wrong with the configuration.
func (c OpenAIConfig) Validate() error {
	var errs []error
	if _, err := baseURL(c.URL); err != nil {
		errs = append(errs, err)
	}
	if c.TokenSlack < 0 {
		errs = append(errs, fmt.Errorf("token slack is %d: give 0 (64) or more", c.TokenSlack))
	}
	if c.ProbeTimeout < 0 {
		errs = append(errs, fmt.Errorf("probe timeout is %v: give 0 (5s) or more", c.ProbeTimeout))
	}
	if c.StopCheck < 0 {
		errs = append(errs, fmt.Errorf("stop check is %v: give 0 (200ms) or more", c.StopCheck))
	}
	if c.Connections < 0 {
		errs = append(errs, fmt.Errorf("connections is %d: give 0 (256) or more", c.Connections))
	}
	return errors.Join(errs...)
}

// baseURL checks an engine's address and takes /v1 and slashes off its end.
func baseURL(raw string) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return "", fmt.Errorf("engine address %q does not parse: give http://host:port", raw)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return "", fmt.Errorf("engine address %q is no http or https URL: give http://host:port", raw)
	case u.User != nil:
		return "", errors.New("engine address carries a user or password: give the key in its own setting")
	case u.RawQuery != "" || u.Fragment != "":
		return "", fmt.Errorf("engine address %q has a query or fragment: give http://host:port", raw)
	}
	path := strings.TrimRight(u.Path, "/")
	path = strings.TrimSuffix(path, "/v1")
	return u.Scheme + "://" + u.Host + strings.TrimRight(path, "/"), nil
}

// OpenAI is the adapter for anything that speaks the OpenAI API.
type OpenAI struct {
	cfg    OpenAIConfig
	base   string
	client *http.Client
	served atomic.Pointer[served]
	gauges *gauges
}

// served is what the last look at the server found and requests need.
type served struct {
	model    string
	llamacpp bool // token ids come inside logprobs only
	hints    telemetry.Hints
}

// NewOpenAI makes an adapter. It asks the server nothing yet.
func NewOpenAI(cfg OpenAIConfig) (*OpenAI, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	base, err := baseURL(cfg.URL)
	if err != nil {
		return nil, err
	}
	rt := cfg.Transport
	if rt == nil {
		rt = newTransport(cfg.Connections)
	}
	return &OpenAI{cfg: cfg, base: base, client: newClient(rt), gauges: newGauges(cfg.Tracker)}, nil
}

// newTransport talks to engines directly: no proxy of the environment, no
// compression, and no timeout on headers, which may come minutes after the
// request on a busy engine.
func newTransport(connections int) *http.Transport {
	return &http.Transport{
		DialContext:            (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		MaxIdleConnsPerHost:    connections,
		MaxIdleConns:           connections,
		IdleConnTimeout:        30 * time.Second,
		TLSHandshakeTimeout:    5 * time.Second,
		ExpectContinueTimeout:  time.Second,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
	}
}

func newClient(rt http.RoundTripper) *http.Client {
	return &http.Client{
		Transport:     rt,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close closes idle connections; runs in flight end by their contexts.
func (a *OpenAI) Close() error {
	a.client.CloseIdleConnections()
	return nil
}

// Generate runs one request as a stream. When ctx ends it returns what came
// until then, as Aborted, beside ctx's cause.
func (a *OpenAI) Generate(ctx context.Context, r *subjects.Request, run Run, onDelta func(Delta)) (Outcome, error) {
	path, body, err := a.requestBody(r)
	if err != nil {
		return unaskable(err)
	}
	return a.generate(ctx, r, run, path, body, &answer{maxTokens: a.allowed(r), onDelta: onDelta, begun: time.Now()})
}

func resumed(r *subjects.Request) int {
	if r.Resume == nil {
		return 0
	}
	return len(r.Resume.TokenIDs)
}

// drain reads the few bytes after the end mark, so that the connection can be
// used again; a server that keeps it open longer loses it.
func drain(body io.Reader, cancel func()) {
	stop := time.AfterFunc(100*time.Millisecond, cancel)
	defer stop.Stop()
	_, _ = io.CopyN(io.Discard, body, 4<<10)
}

// unsent judges an exchange that brought no response: refused at the door costs
// no attempt, a connection lost after that may have cost one.
func unsent(err error) Outcome {
	o := Outcome{Kind: Failed, Code: codeConnection, Message: "the connection broke before an answer: " + clip(cause(err))}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		o.Kind, o.Code = NotAccepted, codeUnreachable
		o.Message = "the engine cannot be reached: " + clip(cause(err))
	}
	return o
}

// cause leaves the URL out of a client's error.
func cause(err error) string {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err.Error()
	}
	return err.Error()
}

func (a *OpenAI) headers(req *http.Request) {
	if a.cfg.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+a.cfg.APIKey)
	}
}

// strip takes out what was asked for only to get token ids, and says when there
// are none although the request speaks in tokens.
func (a *OpenAI) strip(r *subjects.Request, o *Outcome) {
	if r.Sampling.Logprobs == nil {
		o.Logprobs = nil
	}
	if len(r.PromptTokenIDs) > 0 && len(o.TokenIDs) == 0 && o.Text != "" {
		o.add("token_ids_absent", true)
	}
}

// requestBody spells a request for this server.
func (a *OpenAI) requestBody(r *subjects.Request) (path string, body []byte, err error) {
	f, err := extraFields(r)
	if err != nil {
		return "", nil, err
	}
	path = "/v1/completions"
	s := &r.Sampling
	switch {
	case len(r.Messages) > 0:
		path = "/v1/chat/completions"
		f["messages"] = r.Messages
	case len(r.PromptTokenIDs) > 0:
		f["prompt"] = tokens(r)
	default:
		f["prompt"] = r.Prompt
	}
	if r.Resume != nil && len(r.PromptTokenIDs) == 0 {
		return "", nil, errors.New("resume needs prompt_token_ids: tokens cannot be joined to a text")
	}
	left := s.MaxTokens - resumed(r)
	if left < 1 {
		return "", nil, fmt.Errorf("max_tokens is %d and %d tokens are resumed from: nothing is left to generate", s.MaxTokens, resumed(r))
	}
	f["model"] = a.modelFor(r)
	f["max_tokens"] = left
	f["stream"] = true
	f["stream_options"] = map[string]bool{"include_usage": true}
	if !a.cfg.NoTokenIDs {
		f["return_token_ids"] = true
	}
	sampling(f, s, "seed")
	if r.CacheSalt != "" {
		f["cache_salt"] = r.CacheSalt
	}
	a.logprobFields(r, f)
	body, err = json.Marshal(f)
	return path, body, err
}

func (a *OpenAI) logprobFields(r *subjects.Request, f map[string]any) {
	n := 0
	if v := a.served.Load(); v != nil && v.llamacpp && len(r.PromptTokenIDs) > 0 {
		n = 1
	}
	if r.Sampling.Logprobs != nil {
		n = max(n, *r.Sampling.Logprobs)
	} else if n == 0 {
		return
	}
	if len(r.Messages) == 0 {
		f["logprobs"] = n
		return
	}
	f["logprobs"] = true
	if n > 0 {
		f["top_logprobs"] = n
	}
}

// sampling spells the parameters that all servers call alike but for the seed.
func sampling(f map[string]any, s *subjects.SamplingParams, seed string) {
	set(f, "temperature", s.Temperature)
	set(f, "top_p", s.TopP)
	set(f, "top_k", s.TopK)
	set(f, "min_p", s.MinP)
	set(f, seed, s.Seed)
	if len(s.Stop) > 0 {
		f["stop"] = s.Stop
	}
	if len(s.StopTokenIDs) > 0 {
		f["stop_token_ids"] = s.StopTokenIDs
	}
	if s.IgnoreEOS {
		f["ignore_eos"] = true
	}
}

func set[T any](f map[string]any, name string, v *T) {
	if v != nil {
		f[name] = *v
	}
}

// tokens is the prompt with what was generated before.
func tokens(r *subjects.Request) []uint32 {
	if r.Resume == nil {
		return r.PromptTokenIDs
	}
	out := make([]uint32, 0, len(r.PromptTokenIDs)+len(r.Resume.TokenIDs))
	return append(append(out, r.PromptTokenIDs...), r.Resume.TokenIDs...)
}

// modelFor names the model: an adapter of the request first.
func (a *OpenAI) modelFor(r *subjects.Request) string {
	if r.LoRA != "" {
		return r.LoRA
	}
	if a.cfg.Model != "" {
		return a.cfg.Model
	}
	if r.Model != "" {
		return r.Model
	}
	if v := a.served.Load(); v != nil {
		return v.model
	}
	return ""
}

// ownFields belong to the adapter: a request that brings them would change what
// an answer means.
var ownFields = map[string]bool{
	"model": true, "prompt": true, "messages": true, "max_tokens": true, "max_completion_tokens": true,
	"stream": true, "stream_options": true, "return_token_ids": true, "echo": true, "n": true, "best_of": true,
	"cache_salt": true, "suffix": true, "logprobs": true, "top_logprobs": true, "use_beam_search": true,
}

// extraFields are the fields that go to the engine unchanged.
func extraFields(r *subjects.Request) (map[string]any, error) {
	f := make(map[string]any, 16+len(r.Extra)+len(r.Sampling.Extra))
	var errs []error
	for _, extra := range [...]map[string]json.RawMessage{r.Extra, r.Sampling.Extra} {
		for name, v := range extra {
			if !ownFields[name] {
				f[name] = v
				continue
			}
			if s := strings.TrimSpace(string(v)); s != "null" && s != "false" && s != "1" || name == "model" {
				errs = append(errs, fmt.Errorf("field %q cannot be passed on: it is set by rollbus", name))
			}
		}
	}
	return f, errors.Join(errs...)
}
