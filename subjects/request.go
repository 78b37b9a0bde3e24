package subjects

import "encoding/json"

// SchemaVersion is the version of every message and value that rollbus writes.
const SchemaVersion = 1

// Request is one rollout: one request, one sample. Field names are those of
// vLLM and OpenAI where they exist. Fields that are not listed here are kept in
// Extra and go to the engine unchanged.
type Request struct {
	SchemaVersion int    `json:"schema_version"`
	ID            string `json:"id"`
	Job           string `json:"job"`
	Model         string `json:"model,omitempty"`
	LoRA          string `json:"lora,omitempty"`

	// Exactly one of the three.
	PromptTokenIDs []uint32        `json:"prompt_token_ids,omitempty"`
	Prompt         string          `json:"prompt,omitempty"`
	Messages       json.RawMessage `json:"messages,omitempty"` // OpenAI chat messages, passed on unchanged

	Sampling       SamplingParams    `json:"sampling_params"`
	Priority       *int              `json:"priority,omitempty"` // lower is sooner: < 0 urgent, 0 normal, > 0 batch
	Group          *Group            `json:"group,omitempty"`
	Trajectory     *Trajectory       `json:"trajectory,omitempty"`
	Step           *int64            `json:"step,omitempty"`
	WeightVersion  *WeightVersion    `json:"weight_version,omitempty"`
	CacheSalt      string            `json:"cache_salt,omitempty"`
	Deadline       Duration          `json:"deadline,omitempty"`        // from acceptance; 0 = the pool's default; at most 24 h
	AttemptTimeout Duration          `json:"attempt_timeout,omitempty"` // of one run; 0 = the pool's default
	MaxAttempts    int               `json:"max_attempts,omitempty"`    // 0 = the pool's default
	Resume         *Resume           `json:"resume,omitempty"`
	ExpectedTokens int               `json:"expected_tokens,omitempty"` // the caller's guess of the output; 0 = none
	Affinity       string            `json:"affinity,omitempty"`
	Stream         bool              `json:"stream,omitempty"`
	Return         *Return           `json:"return,omitempty"`
	Reader         string            `json:"reader,omitempty"` // default "main"
	ReplyKey       string            `json:"reply_key,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	Meta           json.RawMessage   `json:"meta,omitempty"` // echoed in the result

	Extra map[string]json.RawMessage `json:"-"`
}

// SamplingParams are handed to the engine; what is not listed is in Extra.
type SamplingParams struct {
	MaxTokens    int      `json:"max_tokens"` // required; max_new_tokens is read as an alias
	Temperature  *float64 `json:"temperature,omitempty"`
	TopP         *float64 `json:"top_p,omitempty"`
	TopK         *int     `json:"top_k,omitempty"`
	MinP         *float64 `json:"min_p,omitempty"`
	Seed         *int64   `json:"seed,omitempty"`
	Stop         []string `json:"stop,omitempty"`
	StopTokenIDs []int64  `json:"stop_token_ids,omitempty"`
	Logprobs     *int     `json:"logprobs,omitempty"`
	IgnoreEOS    bool     `json:"ignore_eos,omitempty"`

	Extra map[string]json.RawMessage `json:"-"`
}

// Group ties the n samples of one prompt.
type Group struct {
	ID           string `json:"id"`
	Index        int    `json:"index"`
	Size         int    `json:"size,omitempty"`
	Need         int    `json:"need,omitempty"` // enough answers; 0 = all
	CancelRest   bool   `json:"cancel_rest,omitempty"`
	MinSurvivors int    `json:"min_survivors,omitempty"`
}

// Trajectory ties the turns of one conversation.
type Trajectory struct {
	ID   string `json:"id"`
	Turn int    `json:"turn"` // from 1
	Last bool   `json:"last,omitempty"`
}

// WeightVersion says which weights may answer.
type WeightVersion struct {
	Min          *int64 `json:"min,omitempty"`
	Exact        *int64 `json:"exact,omitempty"`
	MaxStaleness *int64 `json:"max_staleness,omitempty"`
}

// Resume continues a rollout that was cut: these tokens count as generated.
type Resume struct {
	TokenIDs []uint32        `json:"token_ids"`
	Logprobs json.RawMessage `json:"logprobs,omitempty"`
	Segments []Segment       `json:"segments,omitempty"`
}

// Return says what the result must carry.
type Return struct {
	Logprobs bool                       `json:"logprobs,omitempty"`
	Extra    map[string]json.RawMessage `json:"-"`
}

// DefaultReader is the reader of a request that names none.
const DefaultReader = "main"

// ReaderOrDefault is the reader whose subject gets the result.
func (r *Request) ReaderOrDefault() string {
	if r.Reader == "" {
		return DefaultReader
	}
	return r.Reader
}

// Lane is the queue the request belongs to, from priority and turn.
func (r *Request) Lane() Lane {
	switch {
	case r.Priority != nil && *r.Priority < 0:
		return LaneUrgent
	case r.Priority != nil && *r.Priority > 0:
		return LaneBatch
	case r.Trajectory != nil && r.Trajectory.Turn > 1:
		return LaneContinue
	}
	return LaneNormal
}

// Key is the rollout's name, <job>.<id>.
func (r *Request) Key() string { return RolloutKey(r.Job, r.ID) }
