package subjects

import (
	"crypto/sha256"
	"encoding/hex"
)

// EngineState is what an agent says of its engine.
type EngineState string

// Engine states. Only ready engines take new work.
const (
	EngineReady    EngineState = "ready"
	EngineStarting EngineState = "starting"
	EnginePaused   EngineState = "paused"
	EngineDraining EngineState = "draining"
	EngineStale    EngineState = "stale" // restarted, weight version not accepted yet
	EngineDown     EngineState = "down"  // the agent lives, the engine does not answer
)

// Engine is the registration of one engine: engines/<engine>.
type Engine struct {
	SchemaVersion  int               `json:"schema_version"`
	Engine         string            `json:"engine"`
	Agent          string            `json:"agent"`
	Epoch          string            `json:"epoch"`
	Kind           string            `json:"kind"` // vllm, sglang, openai, sim
	Model          string            `json:"model"`
	LoRAs          []string          `json:"loras,omitempty"`
	State          EngineState       `json:"state"`
	Cause          string            `json:"cause,omitempty"` // why it is not ready, for people
	Slots          int               `json:"slots"`           // requests that can run at once, all ranks
	Ranks          int               `json:"ranks"`           // data-parallel ranks
	CapacityTokens *int64            `json:"capacity_tokens"` // KV tokens, all ranks; null = unknown
	CapacitySource string            `json:"capacity_source,omitempty"`
	MaxModelLen    *int              `json:"max_model_len"`
	EngineBlock    *int              `json:"engine_block"` // tokens
	BlockTokens    int               `json:"block_tokens"` // the pool's
	Events         string            `json:"events"`       // exact, approximate, none
	WeightVersion  *int64            `json:"weight_version"`
	DecodeTokS     *float64          `json:"decode_tok_s,omitempty"`  // profile: what all ranks together made a second when last busy, this life or an earlier one
	PrefillTokS    *float64          `json:"prefill_tok_s,omitempty"` // the same of prompts; null = never seen busy
	Versions       map[string]string `json:"versions,omitempty"`
}

// Dispatcher is the registration of one dispatcher: dispatchers/<dispatcher>.
type Dispatcher struct {
	SchemaVersion int    `json:"schema_version"`
	Dispatcher    string `json:"dispatcher"`
	Version       string `json:"version"`
	CoreVersion   int    `json:"core_version"`
	Started       int64  `json:"started"` // its own clock, unix ms; for people only
}

// CancelScope kinds.
const (
	CancelID         = "id"
	CancelGroup      = "group"
	CancelTrajectory = "trajectory"
	CancelJob        = "job"
	CancelVersion    = "version" // runs whose weight version is below Value
)

// Cancel asks that work is given up: cancels/<kind>.<job>[.<value>].
type Cancel struct {
	SchemaVersion int    `json:"schema_version"`
	Kind          string `json:"kind"`
	Job           string `json:"job"`
	Value         string `json:"value,omitempty"`
	Reason        string `json:"reason,omitempty"`
	At            int64  `json:"at"` // unix ms of whoever asked; for people only
}

// Key is the cancel's key in its bucket. Values that cannot stand in a key
// (groups and trajectories are free strings) stand as "_" and their hash.
func (c Cancel) Key() string {
	if c.Kind == CancelJob {
		return c.Kind + "." + c.Job
	}
	v := c.Value
	if CheckToken("value", v) != nil {
		sum := sha256.Sum256([]byte(v))
		v = "_" + hex.EncodeToString(sum[:16])
	}
	return c.Kind + "." + c.Job + "." + v
}

// Load is one snapshot of an engine's load. A nil number is unknown, never zero.
type Load struct {
	SchemaVersion   int        `json:"schema_version"`
	Engine          string     `json:"engine"`
	Epoch           string     `json:"epoch"`
	Seq             uint64     `json:"seq"`
	AppliedRevision uint64     `json:"applied_revision"` // last reservation revision the agent had handed to the engine
	Source          string     `json:"source"`
	IntervalMS      int        `json:"interval_ms"`
	AgeMS           float64    `json:"age_ms"` // of the sample when it was published
	RanksAdvertised *int       `json:"ranks_advertised"`
	Ranks           []RankLoad `json:"ranks"`

	// What the agent knows of its own runs and no engine tells; nil = not told.
	// Pending is as of AppliedRevision: newer reservations are for the reader to add.
	PendingPrefillTokens *int64 `json:"pending_prefill_tokens,omitempty"` // prompts without a first token, less what was expected in the cache
	PendingOutputTokens  *int64 `json:"pending_output_tokens,omitempty"`  // expected and not made yet
	OwnRequests          *int   `json:"own_requests,omitempty"`           // at the engine when the sample was taken
	Problem              string `json:"problem,omitempty"`                // why the engine's own picture does not count, for people
}

// RankLoad is one data-parallel rank's part of a Load.
type RankLoad struct {
	Rank                  int      `json:"rank"`
	Running               *int     `json:"running"`
	Waiting               *int     `json:"waiting"`
	WaitingUncachedTokens *int64   `json:"waiting_uncached_tokens"`
	KVUsedTokens          *int64   `json:"kv_used_tokens"`
	KVCapacityTokens      *int64   `json:"kv_capacity_tokens"`
	KVUsage               *float64 `json:"kv_usage"` // 0..1, where the engine reports only the fraction
	MaxRunning            *int     `json:"max_running"`
	DecodeTokS            *float64 `json:"decode_tok_s"`
	PrefillTokS           *float64 `json:"prefill_tok_s"`
	PreemptionsTotal      *int64   `json:"preemptions_total"`
}

// Delta is a piece of streamed output, on the tokens subject of its rollout.
// Deltas are not kept: what matters is the result. A higher Bind starts the
// output anew; a gap in Seq means that some were lost.
type Delta struct {
	SchemaVersion int      `json:"schema_version"`
	Bind          int      `json:"bind"` // attempt that produces it
	Seq           int      `json:"seq"`  // from 0 in each attempt
	TokenIDs      []uint32 `json:"token_ids,omitempty"`
	Text          string   `json:"text,omitempty"`
	Last          bool     `json:"last,omitempty"` // this attempt ends here; the answer follows, or another attempt
}
