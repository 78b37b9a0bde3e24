package subjects

import "time"

// Modes of a policy.
const (
	ModeOff     = "off"     // the baseline decides
	ModeShadow  = "shadow"  // the baseline decides, the policy's choice is recorded
	ModeEnforce = "enforce" // the policy decides
)

// Settings are the knobs of one pool: pools/<pool>. The zero value means
// "mode off" with every default; WithDefaults fills them in.
type Settings struct {
	SchemaVersion int    `json:"schema_version"`
	Model         string `json:"model,omitempty"` // empty = whatever the engines serve

	Policy string             `json:"policy,omitempty"` // least_requests when empty
	Mode   string             `json:"mode,omitempty"`   // off when empty
	Knobs  map[string]float64 `json:"knobs,omitempty"`  // of the policies: the table in package policy

	BlockTokens    int                `json:"block_tokens,omitempty"`    // tokens a pool block; 64
	AnchorTokens   int                `json:"anchor_tokens,omitempty"`   // tokens that make an affinity key; 1,024
	Deadline       Duration           `json:"deadline,omitempty"`        // 6h, at most 24h
	AttemptTimeout Duration           `json:"attempt_timeout,omitempty"` // 1h
	MaxAttempts    int                `json:"max_attempts,omitempty"`    // 3
	Prefetch       int                `json:"prefetch,omitempty"`        // requests bound to an engine beyond its slots; 2, -1 = none
	ResultsKeep    Duration           `json:"results_keep,omitempty"`    // 168h
	Record         bool               `json:"record,omitempty"`          // keep RECORD_<pool>
	JobWeights     map[string]float64 `json:"job_weights,omitempty"`     // share of a job; 1 when absent
	PartialsEvery  int                `json:"partials_every,omitempty"`  // tokens between checkpoints of partial output; 0 = off
	Paused         bool               `json:"paused,omitempty"`          // nothing new is bound
	KnownLoRAs     bool               `json:"known_loras,omitempty"`     // an adapter that no engine has loaded is rejected; else it may be loaded any time and is waited for
	Servers        []Server           `json:"servers,omitempty"`         // of the balancer interface, besides the engines that have agents
}

// Server is one that the callers of the balancer interface move requests to
// themselves. It has no agent: nothing from the queue is bound to it.
type Server struct {
	Name           string `json:"name"`
	Slots          int    `json:"slots"`                     // requests at once
	Model          string `json:"model,omitempty"`           // empty = any
	CapacityTokens int64  `json:"capacity_tokens,omitempty"` // KV cache; 0 = unknown
}

// Defaults of Settings.
const (
	DefaultBlockTokens    = 64
	DefaultAnchorTokens   = 1024
	DefaultDeadline       = Duration(6 * time.Hour)
	DefaultAttemptTimeout = Duration(time.Hour)
	DefaultMaxAttempts    = 3
	DefaultPrefetch       = 2
	DefaultResultsKeep    = Duration(7 * 24 * time.Hour)
	BaselinePolicy        = "least_requests"
)

// WithDefaults returns the settings with every zero replaced by its default.
func (s Settings) WithDefaults() Settings {
	set := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	dur := func(p *Duration, v Duration) {
		if *p == 0 {
			*p = v
		}
	}
	set(&s.SchemaVersion, SchemaVersion)
	set(&s.BlockTokens, DefaultBlockTokens)
	set(&s.AnchorTokens, DefaultAnchorTokens)
	set(&s.MaxAttempts, DefaultMaxAttempts)
	set(&s.Prefetch, DefaultPrefetch)
	dur(&s.Deadline, DefaultDeadline)
	dur(&s.AttemptTimeout, DefaultAttemptTimeout)
	dur(&s.ResultsKeep, DefaultResultsKeep)
	if s.Policy == "" {
		s.Policy = BaselinePolicy
	}
	if s.Mode == "" {
		s.Mode = ModeOff
	}
	return s
}

// PrefetchSlots is the number of requests bound beyond an engine's slots.
func (s Settings) PrefetchSlots() int { return max(0, s.Prefetch) }

// MaxBlockTokens bounds the size of a pool block, tokens.
const MaxBlockTokens = 4096
