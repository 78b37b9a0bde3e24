package engine

import (
	"bytes"
	"encoding/json"
	"strconv"
	"time"
)

// answer builds the bodies of one call: chunks of a stream, or the whole.
type answer struct {
	c       *call
	created int64
	sent    int // tokens in earlier chunks
	cut     int // bytes of text in all; -1 = all of it
}

type choice struct {
	Index        int             `json:"index"`
	Text         *string         `json:"text,omitempty"`
	Delta        *chatDelta      `json:"delta,omitempty"`
	Message      *chatDelta      `json:"message,omitempty"`
	Logprobs     json.RawMessage `json:"logprobs"`
	FinishReason *string         `json:"finish_reason"`
	StopReason   any             `json:"stop_reason"`
	TokenIDs     *[]uint32       `json:"token_ids,omitempty"`
	PromptIDs    []uint32        `json:"prompt_token_ids,omitempty"`
}

type chatDelta struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type body struct {
	ID      string    `json:"id"`
	Object  string    `json:"object"`
	Created int64     `json:"created"`
	Model   string    `json:"model"`
	Choices []choice  `json:"choices"`
	Usage   *apiUsage `json:"usage,omitempty"`
}

type apiUsage struct {
	Prompt     int            `json:"prompt_tokens"`
	Completion int            `json:"completion_tokens"`
	Total      int            `json:"total_tokens"`
	Details    *promptDetails `json:"prompt_tokens_details,omitempty"`
}

type promptDetails struct {
	Cached int `json:"cached_tokens"`
}

func (a *answer) body(object string, cs ...choice) body {
	if cs == nil {
		cs = []choice{}
	}
	return body{ID: a.c.id, Object: object, Created: a.created, Model: a.c.model, Choices: cs}
}

func (a *answer) object(stream bool) string {
	switch {
	case !a.c.chat:
		return "text_completion"
	case stream:
		return "chat.completion.chunk"
	}
	return "chat.completion"
}

// piece is the text of tokens that follow those sent, up to the cut.
func (a *answer) piece(tokens []uint32) string {
	s, from := text(tokens), a.sent*tokenBytes
	if a.cut >= 0 && from+len(s) > a.cut {
		s = s[:max(0, a.cut-from)]
	}
	return s
}

// chunk is a delta of the stream; end is nil but in the last one.
func (a *answer) chunk(tokens []uint32, end *End) body {
	s := a.piece(tokens)
	c := choice{Logprobs: a.logprobs(tokens)}
	if a.c.chat {
		c.Delta = &chatDelta{Content: &s}
	} else {
		c.Text = &s
	}
	if a.c.ids {
		ids := append([]uint32{}, tokens...)
		c.TokenIDs = &ids
		if a.sent == 0 && len(tokens) > 0 && !a.c.chat {
			c.PromptIDs = a.c.gen.Prompt
		}
	}
	if end != nil {
		c.FinishReason, c.StopReason = &end.Reason, end.Stop
	}
	a.sent += len(tokens)
	return a.body(a.object(true), c)
}

// role is the first chunk of a chat.
func (a *answer) role() body {
	empty := ""
	c := choice{Delta: &chatDelta{Role: "assistant", Content: &empty}}
	if a.c.ids {
		c.PromptIDs = a.c.gen.Prompt
	}
	return a.body(a.object(true), c)
}

// whole is the answer to a call that does not stream.
func (a *answer) whole(tokens []uint32, end *End, u *apiUsage) body {
	s := a.piece(tokens)
	c := choice{Logprobs: a.logprobs(tokens), FinishReason: &end.Reason, StopReason: end.Stop}
	if a.c.chat {
		c.Message = &chatDelta{Role: "assistant", Content: &s}
	} else {
		c.Text = &s
	}
	if a.c.ids {
		ids := append([]uint32{}, tokens...)
		c.TokenIDs, c.PromptIDs = &ids, a.c.gen.Prompt
	}
	b := a.body(a.object(false), c)
	b.Usage = u
	return b
}

func (a *answer) usage(end *End, omitZero bool) *apiUsage {
	p := len(a.c.gen.Prompt)
	u := &apiUsage{Prompt: p, Completion: end.Tokens, Total: p + end.Tokens}
	if end.Cached > 0 || !omitZero {
		u.Details = &promptDetails{Cached: end.Cached}
	}
	return u
}

// logprobs of tokens: a fixed function of the token, between -2 and 0.
func (a *answer) logprobs(tokens []uint32) json.RawMessage {
	if !a.c.logprobs || len(tokens) == 0 {
		return nil
	}
	var b []byte
	if a.c.chat {
		b = append(b, `{"content":[`...)
		for i, t := range tokens {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, `{"token":"`...)
			b = AppendText(b, []uint32{t})
			b = append(b, `","logprob":`...)
			b = appendLogprob(b, t)
			b = append(b, `,"bytes":null,"top_logprobs":[]}`...)
		}
		return append(b, `]}`...)
	}
	list := func(key string, each func(i int, t uint32)) {
		b = append(b, '"')
		b = append(b, key...)
		b = append(b, `":[`...)
		for i, t := range tokens {
			if i > 0 {
				b = append(b, ',')
			}
			each(i, t)
		}
		b = append(b, ']')
	}
	b = append(b, '{')
	list("text_offset", func(i int, _ uint32) { b = strconv.AppendInt(b, int64((a.sent+i)*tokenBytes), 10) })
	b = append(b, ',')
	list("token_logprobs", func(_ int, t uint32) { b = appendLogprob(b, t) })
	b = append(b, ',')
	list("tokens", func(_ int, t uint32) { b = append(AppendText(append(b, '"'), []uint32{t}), '"') })
	return append(b, `,"top_logprobs":null}`...)
}

func appendLogprob(b []byte, t uint32) []byte {
	return strconv.AppendFloat(b, -float64(mix(uint64(t))%2000)/1000, 'f', -1, 64)
}

// event frames a chunk for the stream.
func event(dst *bytes.Buffer, v any) error {
	dst.WriteString("data: ")
	e := json.NewEncoder(dst)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil { // ends the line
		return err
	}
	dst.WriteByte('\n')
	return nil
}

func newAnswer(c *call, cut int) *answer {
	return &answer{c: c, created: time.Now().Unix(), cut: cut}
}
