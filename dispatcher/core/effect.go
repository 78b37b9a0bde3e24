package core

import (
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Effect is something the shell must do. Effects of one Step are carried out in
// order of their start; those that are answered (Bind, Retry, ...) run
// concurrently after that.
type Effect interface{ effect() }

// EnsureConsumer creates the durable of a queue if it is not there.
type EnsureConsumer struct {
	Queue Queue `json:"queue"`
}

// Fetch pulls at most N messages of a queue, waiting at most Wait for the first
// (0 = only what is there). Answered by Fetched for each and FetchDone at the end.
type Fetch struct {
	Queue Queue         `json:"queue"`
	N     int           `json:"n"`
	Wait  time.Duration `json:"wait"`
}

// Bind writes the reservation of a message in hand: one publish guarded by the
// engine's sequence. No answer = the shell repeats the identical publish.
// Answered by BindAnswer.
type Bind struct {
	Handle   Handle        `json:"handle"`
	Held     subjects.Held `json:"held"`
	Expected uint64        `json:"expected"` // last sequence seen under the engine
	TTL      time.Duration `json:"ttl"`
}

// SeedBind is a Bind that adds an owner to a key: seed and reservation in one
// atomic batch, each under its own guard. The shell does not publish it when it
// has waited for longer than a second since the step: what it was chosen on may
// have changed. Answered by BindAnswer.
type SeedBind struct {
	Handle   Handle        `json:"handle"`
	Held     subjects.Held `json:"held"`
	Expected uint64        `json:"expected"` // last sequence seen under the engine
	TTL      time.Duration `json:"ttl"`      // of both
	Seed     subjects.Seed `json:"seed"`
	SeedAt   uint64        `json:"seed_at"` // last sequence seen at the seed's key
}

// WriteSeed ends a seed at exactly its revision: by its cooldown, or by giving
// it back. Answered by SeedAnswer.
type WriteSeed struct {
	Seed     subjects.Seed `json:"seed"`
	Revision uint64        `json:"revision"`
	GiveBack bool          `json:"give_back,omitempty"` // delete it
	TTL      time.Duration `json:"ttl,omitempty"`       // of the cooldown
}

// WriteOwners replaces an entry of the owner map at exactly its revision, 0 =
// there is none; no owners = delete it. Answered by OwnersAnswer.
type WriteOwners struct {
	subjects.Ownership
	Revision uint64        `json:"revision"`
	TTL      time.Duration `json:"ttl"`
}

// Transition is a change of owners or seeds that this dispatcher has made: for
// consoles. What: seeded, proved, cooldown, given_back, over_ceiling, first,
// struck, refreshed.
type Transition struct {
	Key     string `json:"key"`
	What    string `json:"what"`
	Engine  string `json:"engine,omitempty"`
	Rollout string `json:"rollout,omitempty"`
	Why     string `json:"why,omitempty"` // a seed was given back
	Owners  int    `json:"owners"`        // of the key now
}

// GetFromLeader reads a key and the register from the leader: a direct get may
// be stale. Answered by LeaderAnswer.
type GetFromLeader struct {
	Handle Handle `json:"handle"`
	Engine string `json:"engine"` // "" = only the register
	Job    string `json:"job"`
	ID     string `json:"id"`
	Reader string `json:"reader"`
}

// Retry publishes the body that a key holds at Revision to RETRY. The shell
// reads it from the leader; another revision there = Gone. Only after OK or
// Duplicate may the key be deleted. Answered by RetryAnswer.
type Retry struct {
	Engine   string        `json:"engine"`
	Job      string        `json:"job"`
	ID       string        `json:"id"`
	Revision uint64        `json:"revision"`
	Bind     int           `json:"bind"` // of the next bind
	Burnt    int           `json:"burnt"`
	Tried    []string      `json:"tried,omitempty"`
	LeftMS   int64         `json:"left_ms"`
	Lane     subjects.Lane `json:"lane"`
	Accepted int64         `json:"accepted,omitempty"`
}

// DeleteKey retires a reservation at exactly its revision. Answered by DeleteAnswer.
type DeleteKey struct {
	Engine   string            `json:"engine"`
	Job      string            `json:"job"`
	ID       string            `json:"id"`
	Revision uint64            `json:"revision"`
	Released subjects.Released `json:"released"`
}

// PublishResult writes the terminal answer of what never ran, at the register
// with expected sequence 0. Handle or Engine+Revision say where the request's
// body can be read for what the result echoes. Answered by ResultAnswer; the
// message is acked, or the key deleted, only after that.
type PublishResult struct {
	Handle   Handle               `json:"handle,omitempty"`
	Engine   string               `json:"engine,omitempty"`
	Revision uint64               `json:"revision,omitempty"`
	Job      string               `json:"job"`
	ID       string               `json:"id"`
	Reader   string               `json:"reader"`
	Attempt  int                  `json:"attempt"`
	Status   subjects.Status      `json:"status"`
	Error    subjects.ResultError `json:"error"`
	Group    string               `json:"group,omitempty"`
	LeftMS   int64                `json:"left_ms,omitempty"`
}

// PublishDead keeps the whole request with the reason. Answered by DeadAnswer.
type PublishDead struct {
	Handle   Handle `json:"handle,omitempty"`
	Engine   string `json:"engine,omitempty"`
	Revision uint64 `json:"revision,omitempty"`
	Job      string `json:"job"`
	ID       string `json:"id"`
	Code     string `json:"code"`
	Reason   string `json:"reason"`
}

// Ack gives up a message whose next place is written.
type Ack struct {
	Handle Handle `json:"handle"`
}

// Granted answers Acquire: the caller holds the key at Revision.
type Granted struct {
	Handle   Handle        `json:"handle"`
	Held     subjects.Held `json:"held"`
	Revision uint64        `json:"revision"`
}

// Refused answers Acquire: nothing is held.
type Refused struct {
	Handle  Handle `json:"handle"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

// NakDelay gives a message back to its queue.
type NakDelay struct {
	Handle Handle        `json:"handle"`
	Delay  time.Duration `json:"delay"`
}

// AskSnapshot requests an engine's whole block set.
type AskSnapshot struct {
	Engine string `json:"engine"`
	Epoch  string `json:"epoch"`
}

// Rebuild asks for fresh views of every kind: the core has been away too long
// to trust what it holds.
type Rebuild struct {
	Why string `json:"why"`
}

// Decision is the record of one decision.
type Decision struct {
	Rollout    string         `json:"rollout"`
	Bind       int            `json:"bind"`
	Engine     string         `json:"engine,omitempty"` // empty = not placed
	Policy     string         `json:"policy"`
	Mode       string         `json:"mode"`
	Reason     string         `json:"reason"` // of the closed list in package policy
	Basis      string         `json:"basis"`
	Shadow     string         `json:"shadow,omitempty"` // what the policy would have chosen
	ShadowWhy  string         `json:"shadow_why,omitempty"`
	Tokens     int            `json:"tokens"` // to be reserved
	OwnerKey   string         `json:"owner_key,omitempty"`
	Seed       bool           `json:"seed,omitempty"`     // bound only together with a seed of its key
	NoSpill    string         `json:"no_spill,omitempty"` // why pressured owners made no seed
	Candidates []Considered   `json:"candidates,omitempty"`
	Filtered   map[string]int `json:"filtered,omitempty"` // engines by filter
	WaitFor    string         `json:"wait_for,omitempty"` // engine with its prefix that it waits for; in mode shadow: would have
	WaitMS     int64          `json:"wait_ms,omitempty"`  // at most
}

// Considered is one candidate of a decision record.
type Considered struct {
	Engine string             `json:"engine"`
	Filter string             `json:"filter,omitempty"` // why it was left out
	Score  float64            `json:"score"`
	Parts  map[string]float64 `json:"parts,omitempty"`

	// Features, on the decision's basis.
	Requests float64 `json:"requests"`           // running, waiting, reserved
	Tokens   int64   `json:"tokens"`             // in use or reserved
	Cached   float64 `json:"cached,omitempty"`   // tokens of the prompt credited as cached
	KVUsage  float64 `json:"kv_usage,omitempty"` // of the fullest rank; -1 = unknown
	// Of projected_time: tokens/s that it counted with, and where from: engine, profile, peers, default.
	DecodeTokS  float64 `json:"decode_tok_s,omitempty"`
	PrefillTokS float64 `json:"prefill_tok_s,omitempty"`
	DecodeFrom  string  `json:"decode_from,omitempty"`
	PrefillFrom string  `json:"prefill_from,omitempty"`
}

// Count adds to a metric.
type Count struct {
	Name  string `json:"name"`
	Label string `json:"label,omitempty"`
	N     int    `json:"n"`
}

func (EnsureConsumer) effect() {}
func (Fetch) effect()          {}
func (Bind) effect()           {}
func (GetFromLeader) effect()  {}
func (Retry) effect()          {}
func (DeleteKey) effect()      {}
func (PublishResult) effect()  {}
func (PublishDead) effect()    {}
func (Ack) effect()            {}
func (NakDelay) effect()       {}
func (Granted) effect()        {}
func (Refused) effect()        {}
func (AskSnapshot) effect()    {}
func (Rebuild) effect()        {}
func (Decision) effect()       {}
func (Count) effect()          {}
func (SeedBind) effect()       {}
func (WriteSeed) effect()      {}
func (WriteOwners) effect()    {}
func (Transition) effect()     {}
