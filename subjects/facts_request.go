package subjects

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

// FactsFromRequest decodes what placement needs from a whole request: the same
// facts, field for field, that the client library writes into headers.
func FactsFromRequest(r *Request, s Settings) Facts {
	s = s.WithDefaults()
	f := Facts{
		Job: r.Job, ID: r.ID, Reader: r.ReaderOrDefault(), Lane: r.Lane(),
		Model: r.Model, LoRA: r.LoRA,
		ExpectedTokens:   r.ExpectedTokens,
		Affinity:         r.Affinity,
		DeadlineMS:       r.Deadline.D().Milliseconds(),
		AttemptTimeoutMS: r.AttemptTimeout.D().Milliseconds(),
		MaxAttempts:      r.MaxAttempts,
	}
	var resumed []uint32
	if r.Resume != nil {
		resumed = r.Resume.TokenIDs
	}
	f.PromptTokens = r.promptTokens() + len(resumed)
	f.MaxTokens = max(0, r.Sampling.MaxTokens-len(resumed))
	if r.Group != nil {
		f.Group = r.Group.ID
	}
	if r.Trajectory != nil {
		f.Trajectory, f.Turn = r.Trajectory.ID, r.Trajectory.Turn
	}
	if r.Step != nil {
		f.Step = *r.Step
	}
	if w := r.WeightVersion; w != nil {
		f.WeightMin, f.WeightExact, f.WeightStaleness = w.Min, w.Exact, w.MaxStaleness
	}
	model := r.Model
	if model == "" {
		model = s.Model
	}
	f.Namespace = blockhash.Namespace(model, r.LoRA, r.CacheSalt)
	if len(r.PromptTokenIDs) > 0 {
		f.BlockTokens = s.BlockTokens
		f.Blocks = promptBlocks(f.Namespace, r.PromptTokenIDs, resumed, s.BlockTokens)
	}
	return f
}

// promptBlocks hashes the whole blocks of prompt and resumed tokens, the first
// MaxHeaderBlocks of them.
func promptBlocks(ns uint64, prompt, resumed []uint32, blockTokens int) []uint64 {
	h := blockhash.New(ns, blockTokens)
	var out []uint64
	for _, part := range [...][]uint32{prompt, resumed} {
		room := MaxHeaderBlocks*blockTokens - h.Tokens()
		out = h.Append(out, part[:min(len(part), max(0, room))])
	}
	return out
}

// promptTokens is exact for token ids, else characters / 4, rounded up (S1.6).
func (r *Request) promptTokens() int {
	if len(r.PromptTokenIDs) > 0 {
		return len(r.PromptTokenIDs)
	}
	chars := utf8.RuneCountInString(r.Prompt)
	if len(r.Messages) > 0 {
		chars += messageChars(r.Messages)
	}
	return (chars + 3) / 4
}

// messageChars counts the characters of the texts of chat messages; what is no
// text counts as it is written.
func messageChars(raw json.RawMessage) int {
	var msgs []struct {
		Content json.RawMessage `json:"content"`
	}
	if json.Unmarshal(raw, &msgs) != nil {
		return utf8.RuneCount(raw)
	}
	n := 0
	for _, m := range msgs {
		var text string
		if json.Unmarshal(m.Content, &text) == nil {
			n += utf8.RuneCountInString(text)
			continue
		}
		var parts []struct {
			Text string `json:"text"`
		}
		if json.Unmarshal(m.Content, &parts) == nil && len(parts) > 0 {
			for _, p := range parts {
				n += utf8.RuneCountInString(p.Text)
			}
			continue
		}
		n += utf8.RuneCount(m.Content)
	}
	return max(n, 1)
}
