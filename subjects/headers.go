package subjects

// Headers of rollbus. On a submit they are hints of an untrusted writer: job,
// lane and id come from the subject and Nats-Msg-Id alone.
const (
	HdrState            = "Rollout-State"             // State of a reservation
	HdrBind             = "Rollout-Bind"              // bind number, rises with every bind, refused or not
	HdrBurnt            = "Rollout-Burnt"             // attempts that count against max_attempts
	HdrEpoch            = "Rollout-Epoch"             // one life of the engine's cache
	HdrEngine           = "Rollout-Engine"            // engine that produced a result
	HdrLeft             = "Rollout-Left"              // milliseconds to the deadline when written
	HdrTokens           = "Rollout-Tokens"            // reserved tokens: prompt + expected output
	HdrPromptTokens     = "Rollout-Prompt-Tokens"     // tokens
	HdrMaxTokens        = "Rollout-Max-Tokens"        // tokens
	HdrCompletionTokens = "Rollout-Completion-Tokens" // tokens
	HdrCachedTokens     = "Rollout-Cached-Tokens"     // tokens; absent = unknown
	HdrBlockTokens      = "Rollout-Block-Tokens"      // block size the hashes were made with
	HdrBlocks           = "Rollout-Blocks"            // base64 of 8-byte LE block hashes, first block first
	HdrNamespace        = "Rollout-Namespace"         // hex of the namespace hash (model, LoRA, salt)
	HdrAffinity         = "Rollout-Affinity"          // affinity key
	HdrLane             = "Rollout-Lane"              // lane
	HdrGroup            = "Rollout-Group"             // group id
	HdrTrajectory       = "Rollout-Trajectory"        // trajectory id
	HdrTurn             = "Rollout-Turn"              // turn of the trajectory, from 1
	HdrStep             = "Rollout-Step"              // training step
	HdrDeadline         = "Rollout-Deadline"          // milliseconds from acceptance
	HdrWeights          = "Rollout-Weights"           // min=,exact=,max_staleness=
	HdrTried            = "Rollout-Tried"             // engines tried, comma separated
	HdrDispatcher       = "Rollout-Dispatcher"        // who bound it
	HdrReason           = "Rollout-Reason"            // why this engine: a policy reason
	HdrReturnReason     = "Rollout-Return-Reason"     // why it came back
	HdrOutcome          = "Rollout-Outcome"           // of a release
	HdrStatus           = "Rollout-Status"            // of a result
	HdrReader           = "Rollout-Reader"            // which process of the job reads the result
	HdrMaxAttempts      = "Rollout-Max-Attempts"      // limit of burnt attempts
	HdrAttemptTimeout   = "Rollout-Attempt-Timeout"   // milliseconds
	HdrExpectedTokens   = "Rollout-Expected-Tokens"   // caller's own guess of the output length
	HdrLoRA             = "Rollout-Lora"              // adapter name
	HdrRank             = "Rollout-Rank"              // data-parallel rank, when one is pinned
	HdrError            = "Rollout-Error"             // reason, in DEAD
	HdrModel            = "Rollout-Model"             // model asked for
	HdrPolicy           = "Rollout-Policy"            // policy that decided a bind
	HdrPredictedCached  = "Rollout-Predicted-Cached"  // tokens the policy expected to be cached
	HdrAccepted         = "Rollout-Accepted"          // server time of acceptance, unix nanoseconds
	HdrOwnerKey         = "Rollout-Owner-Key"         // of the owner map, 16 hex digits
	HdrAnchor           = "Rollout-Anchor"            // hex of the hash of the anchor's last block
	HdrWeightVersion    = "Rollout-Weight-Version"    // of the engine when it was bound
	HdrRollout          = "Rollout-Name"              // <job>.<id> of a seeded rollout
)

// Headers of NATS that rollbus sets or reads.
const (
	HdrMsgID           = "Nats-Msg-Id"
	HdrExpectLastSeq   = "Nats-Expected-Last-Subject-Sequence"
	HdrExpectLastSubj  = "Nats-Expected-Last-Subject-Sequence-Subject"
	HdrTTL             = "Nats-TTL"
	HdrKVOperation     = "KV-Operation"
	KVOperationDelete  = "DEL"
	HdrExpectedPrefix  = "Nats-Expected-" // refused on a submit
	HdrMarkerReason    = "Nats-Marker-Reason"
	HdrBatchID         = "Nats-Batch-Id" // of an atomic batch
	HdrBatchSequence   = "Nats-Batch-Sequence"
	HdrBatchCommit     = "Nats-Batch-Commit"
	MaxHeaderBlocks    = 2048 // block hashes a header carries at most: headers end at 64 KiB
	MaxPayload         = 8 << 20
	MaxRequestBytes    = MaxPayload / 2
	MaxDeadline        = 24 * Hour
	ReservationGraceMS = 24 * 3600 * 1000 // added to the time left in a reservation's TTL
)

// State of a reservation.
type State string

// States of a reservation.
const (
	StateBound    State = "bound"
	StateReturned State = "returned"
	StateExternal State = "external" // held by a caller of the balancer interface
)
