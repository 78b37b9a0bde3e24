package subjects

import "encoding/json"

// Status of a result.
type Status string

// The statuses. Only Completed and Truncated carry a sample.
const (
	Completed Status = "completed"
	Truncated Status = "truncated" // max_tokens or the context ended it
	Aborted   Status = "aborted"   // cut short with partial output
	Failed    Status = "failed"    // ran and did not work
	Cancelled Status = "cancelled"
	Expired   Status = "expired"  // deadline
	Stale     Status = "stale"    // weight version out of range
	Rejected  Status = "rejected" // can never run: invalid, or larger than any engine
)

// Valid tells whether the status is one of the list.
func (s Status) Valid() bool {
	switch s {
	case Completed, Truncated, Aborted, Failed, Cancelled, Expired, Stale, Rejected:
		return true
	}
	return false
}

// Sample tells whether the status carries output that a trainer may learn from.
func (s Status) Sample() bool { return s == Completed || s == Truncated }

// Result is the one terminal answer of a rollout.
type Result struct {
	SchemaVersion int                        `json:"schema_version"`
	ID            string                     `json:"id"`
	Job           string                     `json:"job"`
	Attempt       int                        `json:"attempt"` // bind number of the run that answered; 0 = never bound
	Status        Status                     `json:"status"`
	FinishReason  string                     `json:"finish_reason,omitempty"`
	Error         *ResultError               `json:"error,omitempty"`
	TokenIDs      []uint32                   `json:"token_ids,omitempty"`
	Text          string                     `json:"text,omitempty"`
	Logprobs      json.RawMessage            `json:"logprobs,omitempty"`
	Segments      []Segment                  `json:"segments,omitempty"`
	Usage         *Usage                     `json:"usage,omitempty"` // null = unknown
	Timing        Timing                     `json:"timing"`
	Route         Route                      `json:"route"`
	Group         *Group                     `json:"group,omitempty"`
	Trajectory    *Trajectory                `json:"trajectory,omitempty"`
	Labels        map[string]string          `json:"labels,omitempty"`
	ReplyKey      string                     `json:"reply_key,omitempty"` // echoed; shows a forged answer
	Meta          json.RawMessage            `json:"meta,omitempty"`
	Extra         map[string]json.RawMessage `json:"extra,omitempty"` // unknown fields of the request, back
}

// Error classes.
const (
	ClassInfra = "infra" // a fault of the fleet: another attempt may work
	ClassData  = "data"  // a fault of the request: it would fail anywhere
)

// ResultError says what went wrong, in whose part, and what to do.
type ResultError struct {
	Class     string `json:"class"`
	Code      string `json:"code"`
	Message   string `json:"message"`
	Retryable bool   `json:"retryable"`
}

// Segment is a stretch of output made by one engine under one weight version.
type Segment struct {
	Engine        string `json:"engine"`
	Epoch         string `json:"epoch"`
	WeightVersion string `json:"weight_version,omitempty"`
	Start         int    `json:"start"` // token index, inclusive
	End           int    `json:"end"`   // token index, exclusive
}

// Usage counts tokens; Cached is null when the engine does not say.
type Usage struct {
	PromptTokens     int  `json:"prompt_tokens"`
	CompletionTokens int  `json:"completion_tokens"`
	CachedTokens     *int `json:"cached_tokens"`
}

// Timing of the run that answered, each on one process's clock.
type Timing struct {
	QueuedMS float64 `json:"queued_ms,omitempty"` // stored in ROLLOUTS to bound, on server time
	TTFTMS   float64 `json:"ttft_ms,omitempty"`   // sent to the engine to first token
	RunMS    float64 `json:"run_ms,omitempty"`    // sent to the engine to finished
}

// Route says where it ran and why there.
type Route struct {
	Engine                string `json:"engine,omitempty"`
	Epoch                 string `json:"epoch,omitempty"`
	Policy                string `json:"policy,omitempty"`
	Reason                string `json:"reason,omitempty"`
	Dispatcher            string `json:"dispatcher,omitempty"`
	PredictedCachedTokens *int   `json:"predicted_cached_tokens,omitempty"`
}

// Key is the rollout's name, <job>.<id>.
func (r *Result) Key() string { return RolloutKey(r.Job, r.ID) }
