package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// apiRequest holds what completions and chat completions have in common, and
// the prompt of either. Fields that are not listed are ignored, as by vLLM.
type apiRequest struct {
	Model    string          `json:"model"`
	Prompt   json.RawMessage `json:"prompt"`
	Messages []chatMessage   `json:"messages"`

	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	N                   *int            `json:"n"`
	Seed                int64           `json:"seed"`
	Stop                json.RawMessage `json:"stop"`
	StopTokenIDs        []int64         `json:"stop_token_ids"`
	IgnoreEOS           bool            `json:"ignore_eos"`
	Stream              bool            `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	ReturnTokenIDs bool            `json:"return_token_ids"`
	Logprobs       json.RawMessage `json:"logprobs"` // an int for completions, a bool for chat
	PromptLogprobs *int            `json:"prompt_logprobs"`
	CacheSalt      string          `json:"cache_salt"`
	Priority       int             `json:"priority"`

	// Ours: where the output ends, see Generation.
	SimOutputTokens int `json:"sim_output_tokens"`
	SimTotalTokens  int `json:"sim_total_tokens"`
}

type chatMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// maxStops bounds stop strings and stop token ids of a request, maxStop the
// bytes of one.
const (
	maxStops = 64
	maxStop  = 256
)

// call is a request, checked.
type call struct {
	gen      *Generation
	model    string
	id       string // with its prefix
	chat     bool
	usage    bool // a usage chunk at the end of the stream
	ids      bool // return_token_ids
	logprobs bool
}

// decode reads a request for generation, or answers with vLLM's error.
func (l *life) decode(w http.ResponseWriter, r *http.Request, chat bool) (*call, bool) {
	var q apiRequest
	if !readJSON(w, r, &q) {
		return nil, false
	}
	lora, ok := l.modelNamed(q.Model)
	if !ok {
		writeError(w, http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", q.Model))
		return nil, false
	}
	g := &Generation{MinTokens: q.MinTokens, Seed: q.Seed, LoRA: lora, Salt: q.CacheSalt, StopTokenIDs: q.StopTokenIDs,
		IgnoreEOS: q.IgnoreEOS, OutputTokens: q.SimOutputTokens, TotalTokens: q.SimTotalTokens, Stream: q.Stream}
	c := &call{gen: g, model: or(q.Model, l.s.cfg.Model), chat: chat, ids: q.ReturnTokenIDs,
		usage: q.StreamOptions != nil && q.StreamOptions.IncludeUsage}
	var errs []error
	refuse := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	refuse(q.N != nil && *q.N != 1, "n is %v: this simulated engine makes one sample a request", deref(q.N))
	refuse(q.StreamOptions != nil && !q.Stream, "Stream options can only be defined when `stream=True`.")
	refuse(q.PromptLogprobs != nil, "prompt_logprobs are not simulated")
	refuse(q.Priority != 0, "Got priority %d but priority scheduling is not enabled.", q.Priority)
	refuse(len(q.StopTokenIDs) > maxStops, "%d stop_token_ids: at most %d", len(q.StopTokenIDs), maxStops)
	refuse(q.MinTokens < 0, "min_tokens is %d: give 0 or more", q.MinTokens)
	var err error
	if g.Stop, err = stops(q.Stop); err != nil {
		errs = append(errs, err)
	}
	c.logprobs = len(q.Logprobs) > 0 && string(q.Logprobs) != "null" && string(q.Logprobs) != "false"
	if chat {
		refuse(len(q.Messages) == 0, "messages are missing")
		g.Prompt = chatPrompt(q.Messages)
	} else if g.Prompt, err = promptTokens(q.Prompt); err != nil {
		errs = append(errs, err)
	}
	switch {
	case q.MaxCompletionTokens != nil:
		g.MaxTokens = *q.MaxCompletionTokens
	case q.MaxTokens != nil:
		g.MaxTokens = *q.MaxTokens
	case chat:
		g.MaxTokens = max(1, l.s.cfg.MaxModelLen-len(g.Prompt))
	default:
		g.MaxTokens = 16
	}
	g.Rank = rank(r.Header.Get("X-Data-Parallel-Rank"))
	if len(errs) > 0 {
		badRequest(w, errors.Join(errs...).Error())
		return nil, false
	}
	c.id = l.requestID(r, chat)
	w.Header().Set("X-Request-Id", strings.SplitN(c.id, "-", 2)[1])
	return c, true
}

func deref(p *int) int {
	if p == nil {
		return 0
	}
	return *p
}

// rank of the header; what is no integer is ignored, as by vLLM.
func rank(h string) *int {
	if n, err := strconv.Atoi(h); err == nil {
		return &n
	}
	return nil
}

// modelNamed finds the LoRA behind a served name; the base model has none. An
// absent name is the base model.
func (l *life) modelNamed(name string) (lora string, ok bool) {
	if name == "" || name == l.s.cfg.Model {
		return "", true
	}
	return name, slices.Contains(l.s.cfg.LoRAs, name)
}

func stops(raw json.RawMessage) ([]string, error) {
	var many []string
	var one string
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, nil
	case json.Unmarshal(raw, &one) == nil:
		many = []string{one}
	case json.Unmarshal(raw, &many) != nil:
		return nil, errors.New("stop is neither a string nor a list of strings")
	}
	bad := func(s string) bool { return s == "" || len(s) > maxStop }
	if len(many) > maxStops || slices.ContainsFunc(many, bad) {
		return nil, fmt.Errorf("stop has an empty string, one over %d bytes, or more than %d", maxStop, maxStops)
	}
	return many, nil
}

// promptTokens reads the four shapes of a prompt, one prompt only.
func promptTokens(raw json.RawMessage) ([]uint32, error) {
	var s string
	var ids []uint32
	var texts []string
	var many [][]uint32
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, errors.New("prompt is missing")
	case json.Unmarshal(raw, &ids) == nil:
		return ids, nil
	case json.Unmarshal(raw, &s) == nil:
		return Tokenize(nil, s), nil
	case json.Unmarshal(raw, &texts) == nil && len(texts) == 1:
		return Tokenize(nil, texts[0]), nil
	case json.Unmarshal(raw, &many) == nil && len(many) == 1:
		return many[0], nil
	case len(texts) > 1 || len(many) > 1:
		return nil, errors.New("several prompts: this simulated engine takes one a request")
	}
	return nil, errors.New("prompt is neither a string nor a list of token ids from 0 to 4294967295")
}

// chatPrompt is the chat template: a marker token for each role, the content,
// and the marker of the assistant at the end. Text parts of a content list are
// joined; other parts count as their JSON.
func chatPrompt(ms []chatMessage) []uint32 {
	var out []uint32
	for _, m := range ms {
		out = append(out, tokenOf("<|"+m.Role+"|>"))
		out = Tokenize(out, contentText(m.Content))
	}
	return append(out, tokenOf("<|assistant|>"))
}

func contentText(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return string(raw)
	}
	var b strings.Builder
	for _, p := range parts {
		var t struct {
			Text *string `json:"text"`
		}
		if json.Unmarshal(p, &t) == nil && t.Text != nil {
			b.WriteString(*t.Text)
		} else {
			b.Write(p)
		}
	}
	return b.String()
}

func (l *life) requestID(r *http.Request, chat bool) string {
	id := r.Header.Get("X-Request-Id")
	if id == "" {
		id = strconv.FormatUint(mix(uint64(l.started.UnixNano())^l.s.ids.Add(1)), 16)
	}
	if chat {
		return "chatcmpl-" + id
	}
	return "cmpl-" + id
}
