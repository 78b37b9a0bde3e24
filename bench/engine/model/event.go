package model

import (
	"errors"
	"time"
)

// Errors of Add.
var (
	// ErrDuplicate: a request of that id is waiting or running.
	ErrDuplicate = errors.New("request id is in use")
	// ErrTooLarge: prompt and output exceed the KV pool; it could never finish.
	ErrTooLarge = errors.New("request is larger than the KV pool")
	// ErrBadRequest: no id, no prompt or no output.
	ErrBadRequest = errors.New("bad request")
)

// Request is one prompt and how much is generated for it.
type Request struct {
	ID           string
	PromptTokens int
	OutputTokens int // tokens generated before it ends; the caller has decided stop or length
	// Blocks are the chained hashes of the prompt's whole blocks, first first.
	// Fewer than there are: the rest is never cached. The slice is not changed.
	Blocks []uint64
	// Output names block i of prompt and output together, for the blocks that
	// generation completes. It is called once for each i in rising order, and
	// only when Blocks is complete. nil: output is not cached.
	Output func(i int) uint64
}

// Kind of an Event.
type Kind uint8

// Kinds. A request has one Started (one more after each Preempted), one
// FirstToken, one Finished; an aborted one ends without a further event.
const (
	Started    Kind = iota + 1 // admitted to the batch; Tokens = prompt tokens found in the cache
	FirstToken                 // the first output token exists
	Preempted                  // back to the queue; Tokens = generated so far
	Finished                   // Tokens = generated
	Stored                     // Blocks are cached, the first being block First of the request
	Removed                    // Blocks were evicted
	Cleared                    // all names are gone
)

func (k Kind) String() string {
	names := [...]string{"", "started", "first_token", "preempted", "finished", "stored", "removed", "cleared"}
	if int(k) < len(names) {
		return names[k]
	}
	return "unknown"
}

// Event is something that happened at At.
type Event struct {
	Kind   Kind
	At     time.Duration
	ID     string
	Tokens int
	First  int
	Parent uint64 // of Blocks[0]; meaningless when First is 0
	Blocks []uint64
}

// Stats are the figures of an engine at the time last advanced to. Tokens are
// tokens, counters count since New.
type Stats struct {
	Now      time.Duration
	Running  int
	Waiting  int // preempted ones included
	Frozen   bool
	KVUsed   int // tokens in referenced blocks, whole blocks
	KVCached int // tokens in unreferenced cached blocks: free to take
	Capacity int
	// WaitingTokens are prompt tokens of waiting requests, cached or not.
	WaitingTokens int
	// PrefillTokens are tokens of running requests still to be computed.
	PrefillTokens int

	PrefixQueries    int64 // prompt tokens looked up at first admission
	PrefixHits       int64
	PromptTokens     int64 // of prompts computed or found, counted when complete
	GenerationTokens int64
	RecomputedTokens int64 // computed again after a preemption
	Preemptions      int64
	Finished         int64
	Aborted          int64
	Evictions        int64 // blocks
	Steps            int64
	Busy             time.Duration // sum of all steps
}
