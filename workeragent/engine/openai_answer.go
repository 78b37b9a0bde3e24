package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Codes of outcomes that are no sample, beside those that an engine spells itself.
const (
	codeTruncated     = "truncated_stream" // the connection ended before a finish reason
	codeNoEnd         = "no_end_of_stream" // a finish reason, then no end mark
	codeNoReason      = "no_finish_reason" // an end mark, no finish reason
	codeEmpty         = "empty_completion" // a finish reason, nothing generated
	codeNoUsage       = "no_usage"         // a finish reason, and nobody counted
	codeRunaway       = "too_many_tokens"  // more output than was asked for
	codeTooLarge      = "response_too_large"
	codeMalformed     = "malformed_response"
	codeHTML          = "not_an_engine" // a proxy's page
	codeRedirect      = "redirect"
	codeUnreachable   = "unreachable" // nothing was sent
	codeConnection    = "connection_lost"
	codeAborted       = "aborted_by_engine"
	codeUnknownReason = "unknown_finish_reason"
	codeSeveral       = "several_choices"
	codeBadRequest    = "bad_request" // this adapter cannot ask for it
	codeOwnBug        = "our_own_bug" // the engine could not parse what was sent
)

// apiChunk is one answer of the OpenAI API: a chunk of a stream or a whole body,
// of completions or chat.
type apiChunk struct {
	Object  string          `json:"object"`
	Choices []apiChoice     `json:"choices"`
	Usage   *apiUsage       `json:"usage"`
	Error   json.RawMessage `json:"error"`
	Message json.RawMessage `json:"message"` // of {"object": "error", ...}
	Meta    *struct {
		WeightVersion string `json:"weight_version"`
	} `json:"metadata"`
}

type apiChoice struct {
	Index        int             `json:"index"`
	Text         string          `json:"text"`
	Delta        *apiMessage     `json:"delta"`
	Message      *apiMessage     `json:"message"`
	Logprobs     json.RawMessage `json:"logprobs"`
	FinishReason *string         `json:"finish_reason"`
	StopReason   json.RawMessage `json:"stop_reason"`
	TokenIDs     *[]uint32       `json:"token_ids"` // absent and empty differ
}

type apiMessage struct {
	Content          json.RawMessage `json:"content"`
	Reasoning        string          `json:"reasoning"`
	ReasoningContent string          `json:"reasoning_content"`
	ToolCalls        []apiToolCall   `json:"tool_calls"`
}

type apiToolCall struct {
	Index    int    `json:"index"`
	ID       string `json:"id,omitempty"`
	Type     string `json:"type,omitempty"`
	Function struct {
		Name      string `json:"name,omitempty"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

type apiUsage struct {
	PromptTokens     *int `json:"prompt_tokens"`
	CompletionTokens *int `json:"completion_tokens"`
	Details          *struct {
		CachedTokens *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// answer collects what a server says about one request.
type answer struct {
	maxTokens int // tokens after which the server is not believed; 0 = no bound
	onDelta   func(Delta)
	begun     time.Time

	text      strings.Builder
	reasoning strings.Builder
	ids       []uint32
	idsHole   bool // output came without ids: they cannot be trusted as a whole
	logprobs  logprobs
	tools     []apiToolCall
	stop      json.RawMessage
	usage     *subjects.Usage
	weights   string
	reason    string
	several   bool
	unended   map[int]bool // choices other than the first, without a finish reason
	fault     *apiFault
	ttft      time.Duration
	output    bool
	held      int // bytes of output kept
}

// maxHeld bounds what is kept of one answer: twice what a message can carry, so
// that whatever could be delivered is never cut here.
const maxHeld = 2 * subjects.MaxPayload

var (
	errMalformed = errors.New("malformed answer")
	errRunaway   = errors.New("more output than was asked for")
	errHeld      = errors.New("more output than an answer can carry")
)

// chunk takes one JSON object.
func (a *answer) chunk(b []byte) error {
	var c apiChunk
	if err := json.Unmarshal(b, &c); err != nil {
		return fmt.Errorf("%w: %w", errMalformed, err)
	}
	if f := faultOf(&c, b); f != nil {
		a.fault = f
		return nil
	}
	if u := c.Usage; u != nil && u.PromptTokens != nil && u.CompletionTokens != nil {
		if *u.PromptTokens < 0 || *u.CompletionTokens < 0 {
			return fmt.Errorf("%w: negative usage", errMalformed)
		}
		a.usage = &subjects.Usage{PromptTokens: *u.PromptTokens, CompletionTokens: *u.CompletionTokens}
		if u.Details != nil && u.Details.CachedTokens != nil && *u.Details.CachedTokens >= 0 {
			a.usage.CachedTokens = u.Details.CachedTokens
		}
	}
	if c.Meta != nil && c.Meta.WeightVersion != "" {
		a.weights = c.Meta.WeightVersion
	}
	for i := range c.Choices {
		if err := a.choice(&c.Choices[i]); err != nil {
			return err
		}
	}
	return nil
}

func (a *answer) choice(c *apiChoice) error {
	if c.Index != 0 {
		a.several = true
		if a.unended == nil {
			a.unended = map[int]bool{}
		}
		if len(a.unended) < 64 {
			a.unended[c.Index] = c.FinishReason == nil
		}
	}
	text, silent := c.Text, false
	a.held += len(c.Text) + len(c.Logprobs)
	for _, m := range [...]*apiMessage{c.Delta, c.Message} {
		if m == nil {
			continue
		}
		t, err := contentText(m.Content)
		if err != nil {
			return err
		}
		text = or(text, t) // a choice has a text or a message
		a.held += len(m.Content) + len(m.Reasoning) + len(m.ReasoningContent)
		for i := range m.ToolCalls {
			a.held += len(m.ToolCalls[i].Function.Arguments) + len(m.ToolCalls[i].Function.Name)
		}
		a.reasoning.WriteString(m.Reasoning)
		a.reasoning.WriteString(m.ReasoningContent)
		a.callTools(m.ToolCalls)
		silent = silent || m.Reasoning != "" || m.ReasoningContent != "" || len(m.ToolCalls) > 0
	}
	if a.held > maxHeld {
		return errHeld
	}
	ids, err := a.logprobs.add(c.Logprobs)
	if err != nil {
		return err
	}
	if c.TokenIDs != nil {
		ids = *c.TokenIDs
	} else if len(ids) == 0 && text != "" {
		a.idsHole = true
	}
	a.text.WriteString(text)
	a.ids = append(a.ids, ids...)
	if a.maxTokens > 0 && len(a.ids) > a.maxTokens {
		return errRunaway
	}
	if string(c.StopReason) != "null" && len(c.StopReason) > 0 {
		a.stop = append(a.stop[:0], c.StopReason...)
	}
	if c.FinishReason != nil && c.Index == 0 {
		a.reason = *c.FinishReason
	}
	if text != "" || len(ids) > 0 || silent {
		if !a.output {
			a.output, a.ttft = true, time.Since(a.begun)
		}
	}
	if a.onDelta != nil {
		a.onDelta(Delta{TokenIDs: ids, Text: text, Silent: silent})
	}
	return nil
}

// contentText reads a message's content: a string, null, or a list of parts.
func contentText(raw json.RawMessage) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s, nil
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", fmt.Errorf("%w: content is neither text nor a list of parts", errMalformed)
	}
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(p.Text)
	}
	return b.String(), nil
}

// callTools joins the pieces of streamed tool calls.
func (a *answer) callTools(calls []apiToolCall) {
	for _, c := range calls {
		at := -1
		for i := range a.tools {
			if a.tools[i].Index == c.Index {
				at = i
			}
		}
		if at < 0 {
			if len(a.tools) < 256 {
				a.tools = append(a.tools, c)
			}
			continue
		}
		t := &a.tools[at]
		t.ID, t.Type = or(c.ID, t.ID), or(c.Type, t.Type)
		t.Function.Name += c.Function.Name
		t.Function.Arguments += c.Function.Arguments
	}
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// end is how a response body ended.
type end int

const (
	endMark end = iota // [DONE], or a whole JSON body
	endEOF             // the body ended properly, without a mark
	endCut             // the connection broke
)

// outcome judges what was collected; docs of the package say by which rules.
func (a *answer) outcome(how end, err error, believeNoMark bool) Outcome {
	o := Outcome{
		FinishReason: a.reason, Text: a.text.String(), TokenIDs: a.ids,
		Logprobs: a.logprobs.json(), Usage: a.usage, WeightVersion: a.weights,
		TTFTMS: ms(a.ttft), RunMS: ms(time.Since(a.begun)),
	}
	if a.idsHole {
		o.TokenIDs = nil
	}
	if len(a.tools) > 0 {
		o.add("tool_calls", a.tools)
	}
	if a.reasoning.Len() > 0 {
		o.add("reasoning_content", a.reasoning.String())
	}
	if len(a.stop) > 0 {
		o.add("stop_reason", a.stop)
	}
	fail := func(k Kind, code, message string) Outcome {
		o.Kind, o.Code, o.Message = k, code, message
		return o
	}
	if k, code, message, broken := breach(a.fault, a.output, err, a.maxTokens); broken {
		return fail(k, code, message)
	}
	switch {
	case a.several:
		return fail(Failed, codeSeveral, fmt.Sprintf("the engine sent %d choices for one sample, some of them unfinished or unasked", len(a.unended)+1))
	case a.reason == "":
		return fail(unfinished(how, err, a.output))
	case err != nil, how == endCut, how == endEOF && !believeNoMark:
		return fail(Failed, codeNoEnd, noEnd)
	}
	switch a.reason {
	case "stop", "length", "repetition", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence":
	case "abort", "aborted", "cancelled":
		return fail(Aborted, codeAborted, "the engine aborted the run")
	case "content_filter":
		return fail(DataError, "content_filter", "the engine's content filter ended the run")
	default:
		return fail(Failed, codeUnknownReason, fmt.Sprintf("finish reason %.40q is not known to be a sample", a.reason))
	}
	// A sample that nobody counted can be neither metered nor proven. Whoever
	// takes streams without their tail takes them without usage.
	if a.usage == nil && !believeNoMark {
		return fail(Failed, codeNoUsage, "the engine ended the run without its usage: rollbus asks for it with stream_options.include_usage")
	}
	// An end-of-sequence token alone is a legitimate empty text, and usage counts it.
	if !a.output && (a.usage == nil || a.usage.CompletionTokens == 0) {
		return fail(Failed, codeEmpty, "the engine reports a finished run without a single token")
	}
	o.Kind = Completed
	return o
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// add puts a field of the answer that has no place of its own into Extra.
func (o *Outcome) add(name string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		return
	}
	if o.Extra == nil {
		o.Extra = map[string]json.RawMessage{}
	}
	o.Extra[name] = b
}
