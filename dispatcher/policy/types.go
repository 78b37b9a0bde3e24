package policy

import "time"

// Candidate is one engine as a decision sees it. The core fills it from its
// views; a policy only reads it. Tokens are tokens of all ranks together.
//
// What every decision reads of every candidate stands first and together: with
// thousands of engines a decision takes the time that memory takes.
type Candidate struct {
	State            State
	KVBlocked        bool // hysteresis state, kept by the core between decisions: Settings.KVGate
	MatchKnown       bool // false when the cache view of the engine may not be trusted
	MatchApproximate bool
	Sticky           bool // the trajectory's last engine, or one of the group's last ones
	StickyGroup      bool // and it was found by the group, not by the trajectory

	// Of the request's owner key; read by owner_pressure alone.
	Owner       bool      // proven to hold it, this life and weight version
	Provisional bool      // runs the key's oldest reservation, while the key has no owner that is ready
	Provable    bool      // its cache can be followed: a seed there can become an owner
	Seeding     SeedState // a live seed targets it

	Model          string // empty = the engine did not say: any request may try it
	MaxModelLen    int    // tokens; 0 = unknown
	CapacityTokens int64  // KV tokens; 0 = unknown
	Ranks          int    // data-parallel ranks; 0 = 1. A request lives on one of them
	Slots          int    // requests that run at once
	Window         int    // requests that may be bound: slots + prefetch

	PreemptionBlockUntil time.Duration
	// Observed is the engine's own picture, already complete and fresh, or nil.
	Observed *Observed

	// What is reserved here by every dispatcher, undecided binds of this one included.
	ReservedRequests     int
	ReservedTokens       int64 // prompt + expected output
	ReservedPromptTokens int64 // the prompts' part of ReservedTokens; 0 = not told apart
	ReservedCachedTokens int64 // of the prompts, expected in the cache when they were placed

	// Rates from the engine's profile (Settings.Profile), used while it reports
	// none. Tokens a second, all ranks together; 0 = no profile.
	ProfileDecodeTokS  float64
	ProfilePrefillTokS float64

	// Prefix match of this request in the engine's cache, tokens by tier.
	MatchGPU int
	MatchCPU int
	MatchSSD int

	Engine string
	Epoch  string
	// NameHash is HashName(Engine), kept by whoever keeps the candidate so that
	// ties cost no hashing; 0 = computed when needed.
	NameHash      uint64
	LastPicked    uint64 // number of this dispatcher's decision that last chose it; 0 = never
	KeyInFlight   int    // reservations of this request's own trajectory, group or affinity here
	Awaited       int    // requests that already wait for it to have room
	LoRAs         []string
	WeightVersion *int64
}

// Full tells whether as many requests are bound there as may be, direct clients
// of the engine counted in.
func (c *Candidate) Full() bool {
	n := c.ReservedRequests
	if c.Observed != nil {
		n += c.Observed.ExternalRequests
	}
	return n >= c.Window
}

// State of an engine as far as eligibility goes.
type State uint8

// States.
const (
	Ready State = iota
	Suspect
	Paused
	Draining
	Stale
	Down
)

// Observed is a complete, fresh, well-formed picture of an engine's load,
// summed over its ranks, worst rank beside it. Judge makes one.
//
// In the order of who reads it: with thousands of engines a decision takes the time
// that memory takes.
type Observed struct {
	// Read of every candidate to see whether it can take work.
	UsedTokens       int64   // fused: reserved + EMA(observed - reserved at the sample); -1 = unknown
	KVUsageWorst     float64 // 0..1 of the fullest rank; -1 = unknown
	ComingTokens     int64   // given to the engine and not begun: what waits there to be computed, and what is newer
	DecodeTokS       float64 // 0 = unknown
	PrefillTokS      float64 // 0 = unknown
	MaxRunning       int     // summed over ranks; 0 = unknown
	ExternalRequests int     // on the engine and reserved by nobody: direct clients. 0 = none known
	PendingTold      bool    // both Pending are known
	RanksAssumed     bool    // the engine did not say how many ranks it has: those seen were taken for all
	CountsScraped    bool    // running and waiting may be those of several copies of a rank: no occupancy

	// Read of those that can, to score them.
	Running              int
	Waiting              int
	PendingPrefillTokens int64 // what reserved runs have still to compute of their prompts
	PendingOutputTokens  int64 // and to make
	NewerRequests        int   // reservations newer than the sample
	NewerTokens          int64
	NewerPrefillTokens   int64
	NewerCachedTokens    int64 // of them, expected in the cache

	// Read when an agent does not tell what is pending.
	WaitingUncachedTokens int64 // of what waits; -1 = unknown
}

// Request is what a decision knows of the work.
type Request struct {
	Rollout        string // <job>.<id>
	Model          string
	LoRA           string
	PromptTokens   int
	MaxTokens      int
	ExpectedTokens int // of the output, already estimated and clamped
	BlockTokens    int
	Affinity       string // affinity or group: ties go to the highest hash(affinity, engine)
	WeightMin      *int64
	WeightExact    *int64
	Tried          []string // engines excluded, unless that leaves none
	Rank           *int

	// Of owner_pressure; OwnerKey empty = the request has none.
	OwnerKey string
	Owners   int  // proven owners of the key that are engines of this pool now
	SeedLive bool // a seed of the key is on its way
	Cooldown bool // the last seed was proven a moment ago
	NoSeed   bool // it came back from an engine once, or is held outside: ordinary traffic

	Waited  time.Duration // since it was accepted, on the server's clock
	MayWait time.Duration // longest that a policy may ask it to wait now; 0 = not at all
}

// Input of one decision.
type Input struct {
	Now        time.Duration // since the core started
	Dispatcher string        // for ties without affinity
	Request    Request
	Candidates []Candidate
}
