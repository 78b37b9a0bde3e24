package core

import (
	"errors"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// ErrCheckpoint says that a checkpoint cannot be restored: it contradicts itself
// or was taken by a later core.
var ErrCheckpoint = errors.New("not a checkpoint that this core can restore")

// CheckpointVersion is that of Checkpoint's meaning. Fields may be added within
// a version as long as their zero value means what was true before them.
const CheckpointVersion = 1

// Source is a core whose state can be taken.
type Source interface {
	CheckpointBytes() int64
	Checkpoint() *Checkpoint
}

// Checkpoint is all that a core's decisions depend on, as plain data: one
// restored from it with the same Config goes on exactly as the original. Lists
// are in a fixed order, so that equal cores have equal checkpoints.
//
// What follows from the rest is not in it: candidates, counts by stage, orders.
// A test holds every field of the core's types against this one.
type Checkpoint struct {
	Version int
	Core    int // Version of the behaviour

	Now     time.Duration
	Stepped bool
	Stopped bool
	Dirty   bool
	Server  ServerClock
	Contact ContactClock
	Proof   []ViewProof // by view
	Ready   []ViewKind  // sorted

	Settings subjects.Settings
	Revision uint64

	Engines   []EngineState // by name
	Tags      int           // free ones included
	Others    []OtherState  // by name
	Live      []string      // sorted
	Cancels   []CancelPut   // by key
	Held      []HeldState   // by rollout, then in the order in which they were learned
	Answered  AnsweredState
	Retired   RetiredState
	Lengths   policy.LengthsState
	Sticky    policy.StickyState
	Index     []byte // of prefix.Index.AppendState
	Picks     uint64
	Frozen    time.Duration
	FreezeFor []string
	Swept     time.Duration
	AtOnce    int // binds in flight; 0 = no limit

	Jobs   []JobState   // by name
	Hand   []ItemState  // by handle
	Queues []QueueState // in the order in which they are served
	Idle   int

	Owners OwnersState
}

// ServerClock is the estimate of the NATS server's clock.
type ServerClock struct {
	Sample int64 // unix ns
	At     time.Duration
	Floor  int64
}

// ContactClock is the clock of proven contact.
type ContactClock struct {
	Total, Last time.Duration
}

// ViewProof is when contact was last proven through a view.
type ViewProof struct {
	View ViewKind
	At   time.Duration
}

// OtherState is another dispatcher, with the contact clock of its last renewal.
type OtherState struct {
	Dispatcher string
	At         time.Duration
}

// EngineState is what is known of one engine.
type EngineState struct {
	Name     string
	Tag      int
	AskAt    time.Duration
	Reg      subjects.Engine
	Revision uint64
	Known    bool
	Gone     bool
	External bool
	Renewed  time.Duration
	Health   string
	Past     []string
	Seq      uint64
	Sum      policy.Reserved
	Binding  uint64   // handle; 0 = none
	Assigned []uint64 // handles
	Awaited  int
	Picked   uint64
	Decode   float64 // tokens/s when last busy
	Prefill  float64
	Load     LoadState
}

// LoadState is what an engine says of its load, judged.
type LoadState struct {
	Load       subjects.Load
	Until      time.Duration
	Usable     policy.Observed
	Why        policy.Why
	Newer      policy.Reserved
	Fuser      policy.FuserState
	KVBlocked  bool
	Preempted  time.Duration
	PreemptSum int64
	Counted    bool
}

// Names in checkpoints: numbers may move, names may not.
var (
	itemStageNames = [stageCount]string{
		itemNew: "new", itemWaiting: "waiting", itemAssigned: "assigned", itemHolding: "holding",
		itemChecking: "checking", itemBinding: "binding", itemBurying: "burying", itemAnswering: "answering",
	}
	causeNames = []string{
		causeNone: "", causeAnswered: "answered", causeExpired: "expired", causeCancelled: "cancelled",
		causeReturned: "returned", causeEpoch: "epoch", causeLost: "lost",
	}
	actingNames = []string{stageIdle: "", stageRetry: "retry", stageDead: "dead", stageResult: "result", stageDelete: "delete"}
)

// HeldState is one reservation in the view.
type HeldState struct {
	Put     ReservationPut
	Counted bool
	Ended   bool
	Unseen  bool
	Cause   string
	Since   time.Duration
	Acting  string
	Next    time.Duration
}

// AnsweredState is the memory of answered ids: 16 bytes each, little endian,
// hash and stamp, in the order of the ring.
type AnsweredState struct {
	Ring    []byte
	Next    int
	Horizon int64
}

// RetiredState is the memory of retired bind numbers, oldest first.
type RetiredState struct {
	Order []RetiredBind
}

// RetiredBind is a rollout and when one of its bind numbers was retired, ns.
// The number stands where it is the highest one and not forgotten.
type RetiredBind struct {
	Key      string
	At       int64
	Current  bool
	Bind     int
	Requeued bool
}

// JobState is one job.
type JobState struct {
	Name     string
	Reserved int64
	Count    int
	Used     float64
	Waiting  [][]uint64 // handles, by lane, in their order
}

// ItemState is one message in hand.
type ItemState struct {
	Handle    uint64
	Queue     Queue
	Facts     subjects.Facts
	Seq       uint64
	Stored    int64
	Lane      int
	At        time.Duration
	Stage     string
	TTL       time.Duration
	Bind      int
	Tokens    int
	Engine    string
	Expected  uint64
	Busy      int
	Reason    string
	Policy    string
	Predict   *int
	HoldUntil time.Duration
	WaitSeq   uint64
	WaitUntil time.Duration
	AskAt     time.Duration
	Held      subjects.Held
	Result    PublishResult
	Named     bool // it stands for its rollout
	Seed      bool
	Sown      subjects.Seed
	SeedAt    uint64
	Kept      bool
}

// QueueState is one durable consumer.
type QueueState struct {
	Queue   Queue
	Backlog uint64
	Seen    time.Duration
	Pulling int
	Next    time.Duration
	Misfits int
}
