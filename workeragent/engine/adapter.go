// Package engine drives inference servers: one small interface, and an adapter
// a kind of server (openai, vllm, sglang). An adapter translates; it keeps no
// reservation, knows no NATS and never retries: retrying is a placement.
//
// A call that generates returns an Outcome for everything the server said, and
// an error only when ctx ended or the call was misused. HTTP 200 and [DONE]
// prove nothing: Completed needs a terminal finish reason and the end of the
// stream (docs/engines.md).
package engine

import (
	"context"
	"encoding/json"

	"github.com/rollbus/rollbus/subjects"
)

// Adapter is one engine server. Implementations are safe for concurrent use.
type Adapter interface {
	// Capabilities asks the server what it is. It fails when the server does
	// not answer; what the server does not tell stays unknown (nil).
	Capabilities(ctx context.Context) (Capabilities, error)
	// Generate runs one request to its end. onDelta, if not nil, is called in
	// order on the calling goroutine for every piece of output: it is also the
	// progress that the agent's watchdog sees, so it is called with an empty
	// Delta for a keep-alive that proves progress of this request only.
	// Ending ctx aborts the run at the engine.
	Generate(ctx context.Context, r *subjects.Request, run Run, onDelta func(Delta)) (Outcome, error)
	// Load reads the engine's own picture once. A nil Load with a nil error
	// means: this server has none.
	Load(ctx context.Context) (*subjects.Load, error)
	// Abort stops a run by the name it was given in Run, for engines that do
	// not stop when the client leaves. Best effort; nil when there is nothing to do.
	Abort(ctx context.Context, run Run) error
	// Close releases connections and subscriptions. Generate calls in flight end.
	Close() error
}

// Run names one attempt at the engine. ID is unique over all attempts, of one
// length per engine, and no prefix of another.
type Run struct {
	ID   string
	Rank *int // data-parallel rank to pin, nil = the engine chooses
}

// Capabilities of an engine. Nil = not told.
type Capabilities struct {
	Kind           string // openai, vllm, sglang, llamacpp, sim
	Model          string
	LoRAs          []string
	Version        string
	Slots          *int // running at once, over all ranks
	Ranks          int  // data-parallel ranks, at least 1
	CapacityTokens *int64
	CapacitySource string
	MaxModelLen    *int
	EngineBlock    *int
	WeightVersion  *int64
	StartedAt      *float64 // process start, unix seconds of the engine's clock: compared for equality only
	Events         string   // exact, none
	Paused         *bool    // it takes requests and runs none until somebody resumes or wakes it
	Asleep         *bool    // its cache is gone; llama.cpp wakes at the next request
}

// Delta is a piece of output.
type Delta struct {
	TokenIDs []uint32
	Text     string
	Silent   bool // output that is neither: reasoning, tool calls
}

// Kind of an outcome: the closed list of what a server's answer can mean.
type Kind string

// Kinds.
const (
	Completed   Kind = "completed"    // a sample: stop or length
	Aborted     Kind = "aborted"      // cut by the engine with partial output: resume or requeue
	Failed      Kind = "failed"       // infra: another engine may do it
	DataError   Kind = "data_error"   // it would fail anywhere
	NotAccepted Kind = "not_accepted" // queue full, loading: place elsewhere, no attempt burnt
)

// Outcome is what a run came to.
type Outcome struct {
	Kind          Kind
	FinishReason  string // the engine's word, as the OpenAI API spells it
	TokenIDs      []uint32
	Text          string
	Logprobs      []byte // JSON as the engine gave it, nil when none
	Usage         *subjects.Usage
	WeightVersion string
	Segments      []subjects.Segment // where the engine tells them
	TTFTMS, RunMS float64
	// Extra are fields of the answer that have no place here, as the engine
	// spelled them: tool_calls, reasoning_content, stop_reason.
	Extra   map[string]json.RawMessage
	Code    string // of an error, machine-readable
	Message string // for people; never a prompt
}
