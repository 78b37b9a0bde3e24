package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// logprobs joins the pieces of a streamed logprobs object: lists are appended,
// whatever their names (content of chat; tokens, token_logprobs, top_logprobs,
// text_offset of completions), everything else keeps its last value.
type logprobs struct {
	lists map[string]*bytes.Buffer // elements, comma separated
	other map[string]json.RawMessage
}

// add takes one piece and returns the token ids found in it: llama.cpp's
// content[].id, or vLLM's "token_id:42" spelling of a token.
func (l *logprobs) add(raw json.RawMessage) ([]uint32, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, fmt.Errorf("%w: logprobs is no object", errMalformed)
	}
	for name, v := range fields {
		if list, ok := elements(v); ok {
			if l.lists == nil {
				l.lists = map[string]*bytes.Buffer{}
			}
			b := l.lists[name]
			if b == nil {
				b = new(bytes.Buffer)
				l.lists[name] = b
			}
			if b.Len() > 0 && len(list) > 0 {
				b.WriteByte(',')
			}
			b.Write(list)
			continue
		}
		if l.other == nil {
			l.other = map[string]json.RawMessage{}
		}
		l.other[name] = slices.Clone(v)
	}
	return tokenIDsOf(fields), nil
}

// elements is the inside of a JSON list.
func elements(v json.RawMessage) (json.RawMessage, bool) {
	v = bytes.TrimSpace(v)
	if len(v) < 2 || v[0] != '[' {
		return nil, false
	}
	return bytes.TrimSpace(v[1 : len(v)-1]), true
}

func tokenIDsOf(fields map[string]json.RawMessage) []uint32 {
	var ids []uint32
	if raw, ok := fields["content"]; ok {
		var content []struct {
			ID    *uint32 `json:"id"`
			Token string  `json:"token"`
		}
		if json.Unmarshal(raw, &content) != nil {
			return nil
		}
		for _, c := range content {
			id, ok := spelledID(c.Token)
			if c.ID != nil {
				id, ok = *c.ID, true
			}
			if !ok {
				return nil
			}
			ids = append(ids, id)
		}
		return ids
	}
	var tokens []string
	if json.Unmarshal(fields["tokens"], &tokens) != nil {
		return nil
	}
	for _, t := range tokens {
		id, ok := spelledID(t)
		if !ok {
			return nil
		}
		ids = append(ids, id)
	}
	return ids
}

func spelledID(token string) (uint32, bool) {
	s, ok := strings.CutPrefix(token, "token_id:")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil
}

// json is the joined object, nil when nothing came.
func (l *logprobs) json() []byte {
	if len(l.lists) == 0 {
		return nil
	}
	var b bytes.Buffer
	b.WriteByte('{')
	sep := func(name string) {
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		key, _ := json.Marshal(name)
		b.Write(key)
		b.WriteByte(':')
	}
	for _, name := range slices.Sorted(maps.Keys(l.lists)) {
		sep(name)
		b.WriteByte('[')
		b.Write(l.lists[name].Bytes())
		b.WriteByte(']')
	}
	for _, name := range slices.Sorted(maps.Keys(l.other)) {
		if _, both := l.lists[name]; !both {
			sep(name)
			b.Write(l.other[name])
		}
	}
	b.WriteByte('}')
	return b.Bytes()
}

// JoinLogprobs appends the lists of b to those of a, as a resumed run needs it.
// What is no JSON object is left out.
func JoinLogprobs(a, b []byte) []byte {
	var l logprobs
	for _, part := range [...][]byte{a, b} {
		if _, err := l.add(part); err != nil {
			continue
		}
	}
	return l.json()
}
