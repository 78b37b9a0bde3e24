package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Generate runs one request through /generate; chat messages, whose template
// runs in the engine, through the OpenAI route.
func (a *SGLang) Generate(ctx context.Context, r *subjects.Request, run Run, onDelta func(Delta)) (Outcome, error) {
	if len(r.Messages) > 0 {
		return a.OpenAI.Generate(ctx, r, run, onDelta)
	}
	body, err := a.generateBody(r, run)
	if err != nil {
		return unaskable(err)
	}
	return a.generate(ctx, r, run, "/generate", body, &sglangAnswer{maxTokens: a.allowed(r), onDelta: onDelta, begun: time.Now(), rank: run.Rank})
}

// sglangOwn are sampling parameters that are set here.
var sglangOwn = map[string]bool{"n": true, "max_new_tokens": true, "max_tokens": true}

func (a *SGLang) generateBody(r *subjects.Request, run Run) ([]byte, error) {
	s := &r.Sampling
	left := s.MaxTokens - resumed(r)
	switch {
	case left < 1:
		return nil, fmt.Errorf("max_tokens is %d and %d tokens are resumed from: nothing is left to generate", s.MaxTokens, resumed(r))
	case r.Resume != nil && len(r.PromptTokenIDs) == 0:
		return nil, errors.New("resume needs prompt_token_ids: tokens cannot be joined to a text")
	}
	f, err := extraFields(r)
	if err != nil {
		return nil, err
	}
	for name := range s.Extra {
		delete(f, name) // of the sampling parameters, not of the request
	}
	p := map[string]any{"max_new_tokens": left, "n": 1}
	for name, x := range s.Extra {
		if !sglangOwn[name] && !ownFields[name] {
			p[name] = x
		}
	}
	sampling(p, s, "sampling_seed")
	f["rid"], f["sampling_params"], f["stream"] = run.ID, p, true
	if len(r.PromptTokenIDs) > 0 {
		f["input_ids"] = tokens(r)
	} else {
		f["text"] = r.Prompt
	}
	if s.Logprobs != nil {
		f["return_logprob"], f["logprob_start_len"], f["top_logprobs_num"] = true, -1, max(0, *s.Logprobs)
	}
	if r.LoRA != "" {
		f["lora_path"] = r.LoRA
	}
	if r.CacheSalt != "" { // older builds know only the second
		f["cache_salt"], f["extra_key"] = r.CacheSalt, r.CacheSalt
	}
	if run.Rank != nil { // some builds dropped the one, some know only the other
		f["routed_dp_rank"], f["data_parallel_rank"] = *run.Rank, *run.Rank
	}
	return json.Marshal(f)
}

// sglangChunk is one answer of /generate, or one piece of a stream.
type sglangChunk struct {
	Text      string          `json:"text"`
	OutputIDs *[]uint32       `json:"output_ids"`
	Meta      *sglangMeta     `json:"meta_info"`
	Error     json.RawMessage `json:"error"`
	Object    string          `json:"object"`
}

type sglangMeta struct {
	FinishReason     json.RawMessage `json:"finish_reason"`
	PromptTokens     *int            `json:"prompt_tokens"`
	CompletionTokens *int            `json:"completion_tokens"`
	CachedTokens     *int            `json:"cached_tokens"`
	WeightVersion    string          `json:"weight_version"`
	DPRank           *int            `json:"dp_rank"`
	Retractions      *int            `json:"num_retractions"`
	TokenLogprobs    json.RawMessage `json:"output_token_logprobs"`
	TopLogprobs      json.RawMessage `json:"output_top_logprobs"`
	WeightVersions   []struct {
		Start   int    `json:"start"`
		End     int    `json:"end"`
		Version string `json:"version"`
	} `json:"weight_versions"`
}

type sglangFinish struct {
	Type    string `json:"type"`
	Message string `json:"message"`
	Status  *int   `json:"status_code"`
	Matched any    `json:"matched"`
}

// sglangAnswer collects what /generate says about one request.
type sglangAnswer struct {
	maxTokens int
	onDelta   func(Delta)
	begun     time.Time
	rank      *int // asked for

	ids      []uint32
	text     string
	lastText string // of the last chunk, for cumulative streams
	noIDs    bool
	meta     sglangMeta
	finish   *sglangFinish
	fault    *apiFault
	logprobs logprobs
	tokenLP  json.RawMessage // of a cumulative stream: the last whole list
	topLP    json.RawMessage
	adding   bool // the stream is incremental
	held     int  // bytes kept
	ttft     time.Duration
	output   bool
}

func (a *sglangAnswer) chunk(b []byte) error {
	if b = bytes.TrimSpace(b); len(b) > 0 && b[0] == '[' { // a batch of one
		var list []json.RawMessage
		if json.Unmarshal(b, &list) != nil || len(list) != 1 {
			return fmt.Errorf("%w: a list of %d answers to one request", errMalformed, len(list))
		}
		b = list[0]
	}
	var c sglangChunk
	if err := json.Unmarshal(b, &c); err != nil {
		return fmt.Errorf("%w: %w", errMalformed, err)
	}
	if f := faultOf(&apiChunk{Error: c.Error, Object: c.Object}, b); f != nil {
		a.fault = f
		return nil
	}
	if c.Meta == nil {
		return fmt.Errorf("%w: no meta_info", errMalformed)
	}
	if a.finish != nil {
		return fmt.Errorf("%w: output after the finish reason", errMalformed)
	}
	if err := a.readFinish(c.Meta.FinishReason); err != nil {
		return err
	}
	ids, text, err := a.news(&c)
	if err != nil {
		return err
	}
	a.meta = *c.Meta
	a.ids, a.text = append(a.ids, ids...), a.text+text
	if err := a.addLogprobs(); err != nil {
		return err
	}
	if a.maxTokens > 0 && len(a.ids) > a.maxTokens {
		return errRunaway
	}
	if a.held += len(text) + 4*len(ids); a.adding {
		a.held += len(a.meta.TokenLogprobs) + len(a.meta.TopLogprobs)
	}
	if a.held+len(a.tokenLP)+len(a.topLP) > maxHeld {
		return errHeld
	}
	if (len(ids) > 0 || text != "") && !a.output {
		a.output, a.ttft = true, time.Since(a.begun)
	}
	if a.onDelta != nil {
		a.onDelta(Delta{TokenIDs: ids, Text: text})
	}
	return nil
}

// news tells what a chunk adds. Chunks carry the whole output so far, unless
// the server runs with incremental streaming; completion_tokens tells which.
func (a *sglangAnswer) news(c *sglangChunk) (ids []uint32, text string, err error) {
	n := c.Meta.CompletionTokens
	if n != nil && *n < 0 {
		return nil, "", fmt.Errorf("%w: %d completion tokens", errMalformed, *n)
	}
	if c.OutputIDs == nil {
		a.noIDs = a.noIDs || c.Text != ""
		if rest, ok := strings.CutPrefix(c.Text, a.lastText); ok && !a.adding {
			a.lastText = c.Text
			return nil, rest, nil
		}
		a.adding = true
		return nil, c.Text, nil
	}
	whole := *c.OutputIDs
	cumulative := len(whole) >= len(a.ids) && slices.Equal(whole[:len(a.ids)], a.ids) && (n == nil && !a.adding || n != nil && *n == len(whole))
	switch {
	case cumulative:
		rest, ok := strings.CutPrefix(c.Text, a.lastText)
		if !ok { // the detokeniser thought again about its last piece
			rest = ""
			a.text, a.lastText = c.Text, c.Text
			return whole[len(a.ids):], rest, nil
		}
		a.lastText = c.Text
		return whole[len(a.ids):], rest, nil
	case n == nil || *n == len(a.ids)+len(whole):
		a.adding = true
		a.lastText = ""
		return whole, c.Text, nil
	}
	return nil, "", fmt.Errorf("%w: %d ids after %d, and %d completion tokens", errMalformed, len(whole), len(a.ids), *n)
}

func (a *sglangAnswer) readFinish(raw json.RawMessage) error {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	f := &sglangFinish{}
	if json.Unmarshal(raw, f) != nil && json.Unmarshal(raw, &f.Type) != nil || f.Type == "" {
		return fmt.Errorf("%w: finish reason %.80s", errMalformed, raw)
	}
	a.finish = f
	return nil
}

// addLogprobs keeps the last list of a cumulative stream, joins those of an
// incremental one.
func (a *sglangAnswer) addLogprobs() error {
	m := &a.meta
	if len(m.TokenLogprobs) == 0 {
		return nil
	}
	if !a.adding {
		a.tokenLP, a.topLP = m.TokenLogprobs, m.TopLogprobs
		return nil
	}
	o := map[string]json.RawMessage{"output_token_logprobs": m.TokenLogprobs}
	if len(m.TopLogprobs) > 0 {
		o["output_top_logprobs"] = m.TopLogprobs
	}
	b, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("%w: logprobs", errMalformed)
	}
	_, err = a.logprobs.add(b)
	return err
}

func (a *sglangAnswer) logprobsJSON() []byte {
	if len(a.tokenLP) == 0 {
		return a.logprobs.json()
	}
	o := map[string]json.RawMessage{"output_token_logprobs": a.tokenLP}
	if len(a.topLP) > 0 && string(a.topLP) != "null" {
		o["output_top_logprobs"] = a.topLP
	}
	b, err := json.Marshal(o)
	if err != nil {
		return nil
	}
	return b
}

// outcome judges. err is what broke the reading, nil if it ended by itself.
func (a *sglangAnswer) outcome(how end, err error, believeNoMark bool) Outcome {
	m := &a.meta
	o := Outcome{TokenIDs: a.ids, Text: a.text, Logprobs: a.logprobsJSON(), WeightVersion: m.WeightVersion,
		TTFTMS: ms(a.ttft), RunMS: ms(time.Since(a.begun))}
	if a.noIDs {
		o.TokenIDs = nil
	}
	if m.PromptTokens != nil && m.CompletionTokens != nil && *m.PromptTokens >= 0 {
		o.Usage = &subjects.Usage{PromptTokens: *m.PromptTokens, CompletionTokens: *m.CompletionTokens, CachedTokens: m.CachedTokens}
	}
	for _, s := range m.WeightVersions {
		o.Segments = append(o.Segments, subjects.Segment{WeightVersion: s.Version, Start: s.Start, End: s.End})
	}
	if m.DPRank != nil {
		o.add("dp_rank", *m.DPRank)
		if a.rank != nil && *a.rank != *m.DPRank {
			o.add("dp_rank_asked", *a.rank) // the server went elsewhere (scenario P23)
		}
	}
	if m.Retractions != nil && *m.Retractions > 0 {
		o.add("num_retractions", *m.Retractions)
	}
	fail := func(k Kind, code, message string) Outcome {
		o.Kind, o.Code, o.Message = k, code, message
		return o
	}
	if a.finish != nil {
		o.FinishReason = a.finish.Type
		if a.finish.Matched != nil {
			o.add("stop_reason", a.finish.Matched)
		}
	}
	if k, code, message, broken := breach(a.fault, a.output, err, a.maxTokens); broken {
		return fail(k, code, message)
	}
	switch {
	case a.finish == nil:
		return fail(unfinished(how, err, a.output))
	case a.finish.Type == "abort":
		return a.aborted(fail)
	case err != nil, how == endCut, how == endEOF && !believeNoMark:
		return fail(Failed, codeNoEnd, noEnd)
	case a.finish.Type != "stop" && a.finish.Type != "length":
		return fail(Failed, codeUnknownReason, fmt.Sprintf("finish reason %.40q is not known to be a sample", a.finish.Type))
	case o.Usage == nil && !believeNoMark:
		return fail(Failed, codeNoUsage, "the engine ended the run without its token counts")
	case !a.output && (m.CompletionTokens == nil || *m.CompletionTokens == 0):
		return fail(Failed, codeEmpty, "the engine reports a finished run without a single token")
	}
	o.Kind = Completed
	return o
}

// aborted tells the meanings of an abort apart; SGLang hides refusals in them,
// with HTTP 200.
func (a *sglangAnswer) aborted(fail func(Kind, string, string) Outcome) Outcome {
	message := or(clip(a.finish.Message), "the engine aborted the run")
	if a.finish.Status == nil || *a.finish.Status == 0 {
		return fail(Aborted, codeAborted, message)
	}
	return fail(kindOfStatus(*a.finish.Status), fmt.Sprintf("abort_%d", *a.finish.Status), message)
}
