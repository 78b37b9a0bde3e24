package core

import (
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Version of the core's behaviour. A journal of another version replays with
// its differences listed.
const Version = 3

// Event is an input of the core. Events are plain data: they encode, decode and
// re-run to equal effects (codec.go).
type Event interface{ event() }

// Handle names a fetched message in the shell. The core gives it back in Ack,
// NakDelay, Bind and PublishResult; it is never reused.
type Handle uint64

// ViewKind is one of the followed views.
type ViewKind string

// The views. The core decides nothing before it has had a complete view of
// each but owners.
const (
	ViewReservations ViewKind = "reservations"
	ViewResults      ViewKind = "results"
	ViewEngines      ViewKind = "engines"
	ViewDispatchers  ViewKind = "dispatchers"
	ViewCancels      ViewKind = "cancels"
	ViewPools        ViewKind = "pools"
	ViewOwners       ViewKind = "owners"
)

// Queue is one durable consumer: a lane of a job on ROLLOUTS, or a job on RETRY.
type Queue struct {
	Job   string        `json:"job"`
	Lane  subjects.Lane `json:"lane,omitempty"` // empty with Retry
	Retry bool          `json:"retry,omitempty"`
}

// Tick drives everything that depends on time; the shell sends one every
// Timings.Tick.
type Tick struct{}

// ServerTime is a sample of the NATS server's clock, unix ns. The core's
// estimate never goes back.
type ServerTime struct {
	UnixNano int64 `json:"unix_nano"`
}

// Contact tells whether NATS was just heard from, through the follower of View
// ("" = all of them). Proven comes with every message or heartbeat of a
// follower, merged to at most ten a second and at least one a second.
type Contact struct {
	Proven bool     `json:"proven"`
	View   ViewKind `json:"view,omitempty"`
}

// ViewSwap replaces one view by a complete new one, in the shell read from the
// start of the stream. Only the slice of its kind is set.
type ViewSwap struct {
	Kind         ViewKind          `json:"kind"`
	Reservations []ReservationPut  `json:"reservations,omitempty"`
	Gone         []ReservationGone `json:"gone,omitempty"` // delete markers still there
	Answered     []Answered        `json:"answered,omitempty"`
	Engines      []EnginePut       `json:"engines,omitempty"`
	Dispatchers  []DispatcherPut   `json:"dispatchers,omitempty"`
	Cancels      []CancelPut       `json:"cancels,omitempty"`
	Pool         *PoolPut          `json:"pool,omitempty"`
	Seeds        []SeedPut         `json:"seeds,omitempty"` // beside Reservations
	SeedsGone    []SeedGone        `json:"seeds_gone,omitempty"`
	Owners       []OwnerPut        `json:"owners,omitempty"`
}

// ReservationPut is a reservation as stored.
type ReservationPut struct {
	subjects.Held
	Revision uint64 `json:"revision"` // sequence in the bucket's stream
	Stored   int64  `json:"stored"`   // server time, unix ns
	TTLMS    int64  `json:"ttl_ms,omitempty"`
}

// ReservationGone is a delete marker.
type ReservationGone struct {
	subjects.Released
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`
}

// Answered is an entry of the result register.
type Answered struct {
	subjects.Answer
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`
}

// EnginePut is a registration or its renewal.
type EnginePut struct {
	subjects.Engine
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`
}

// EngineGone is a deleted registration: the agent said goodbye.
type EngineGone struct {
	Engine   string `json:"engine"`
	Revision uint64 `json:"revision"`
}

// DispatcherPut is a dispatcher's registration or its renewal.
type DispatcherPut struct {
	Dispatcher string `json:"dispatcher"`
	Revision   uint64 `json:"revision"`
	Stored     int64  `json:"stored"`
}

// DispatcherGone is a dispatcher that said goodbye.
type DispatcherGone struct {
	Dispatcher string `json:"dispatcher"`
	Revision   uint64 `json:"revision"`
}

// CancelPut asks that work is given up.
type CancelPut struct {
	subjects.Cancel
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`
}

// PoolPut is the pool's settings; its revision is their digest.
type PoolPut struct {
	Settings subjects.Settings `json:"settings"`
	Revision uint64            `json:"revision"`
}

// Jobs is what waits in ROLLOUTS and RETRY, by queue.
type Jobs struct {
	Queues []QueueDepth `json:"queues"`
}

// QueueDepth is the number of messages of one queue, delivered ones included.
type QueueDepth struct {
	Queue
	Messages uint64 `json:"messages"`
}

// Fetched is a message in hand. It is the core's until Ack or NakDelay.
type Fetched struct {
	Handle  Handle         `json:"handle"`
	Queue   Queue          `json:"queue"`
	Facts   subjects.Facts `json:"facts"`
	Seq     uint64         `json:"seq"`
	Stored  int64          `json:"stored"`  // server time, unix ns
	Pending uint64         `json:"pending"` // messages behind it for this consumer
	Bytes   int            `json:"bytes"`
	// Bad is set when the body cannot be a rollout: the message is answered
	// with rejected where it has an id, and kept in DEAD.
	Bad *Bad `json:"bad,omitempty"`
}

// Bad says why a message can never run.
type Bad struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Acquire asks for a reservation that a caller outside holds itself: the
// balancer interface. It is answered by Granted or Refused under its handle.
type Acquire struct {
	Handle Handle         `json:"handle"`
	Facts  subjects.Facts `json:"facts"`
	TTLMS  int64          `json:"ttl_ms"` // the caller renews it before that
}

// FetchDone ends a Fetch: no more messages come of it.
type FetchDone struct {
	Queue     Queue  `json:"queue"`
	Asked     int    `json:"asked"`
	Delivered int    `json:"delivered"`
	Err       string `json:"err,omitempty"`
}

// Answer kinds of a write: what a caller can do differently.
type Answer string

// Answers.
const (
	OK          Answer = "ok"
	Conflict    Answer = "conflict"    // guard moved: Actual says where to (0 = nothing stands under the engine)
	Busy        Answer = "busy"        // another guarded write in flight on R3
	Duplicate   Answer = "duplicate"   // the id was seen within the window: Seq says where
	Superseded  Answer = "superseded"  // another answer or revision was first
	Full        Answer = "full"        // the stream refuses more
	Gone        Answer = "gone"        // the key is not there any more
	Unavailable Answer = "unavailable" // typed refusal without effect; try later
	Unknown     Answer = "unknown"     // no answer: it may or may not have happened. Only the shell sees it: it repeats the identical publish until it is answered or Step says drop
)

// BindAnswer answers Bind.
type BindAnswer struct {
	Handle Handle `json:"handle"`
	Engine string `json:"engine"`
	Job    string `json:"job"`
	ID     string `json:"id"`
	Bind   int    `json:"bind"`
	Answer Answer `json:"answer"`
	Seq    uint64 `json:"seq,omitempty"`    // OK, Duplicate
	Actual uint64 `json:"actual,omitempty"` // Conflict
	Stored int64  `json:"stored,omitempty"` // server time estimate of the shell at the ack, unix ns
	Seed   bool   `json:"seed,omitempty"`   // Conflict of a SeedBind: it is the seed's key that moved
}

// LeaderAnswer answers GetFromLeader.
type LeaderAnswer struct {
	Handle Handle `json:"handle"`
	Engine string `json:"engine"`
	Job    string `json:"job"`
	ID     string `json:"id"`
	// Reservation is what the key holds now, nil when nothing.
	Reservation *ReservationPut `json:"reservation,omitempty"`
	// Answered is the register's entry, nil when none.
	Answered *Answered `json:"answered,omitempty"`
	Err      string    `json:"err,omitempty"` // the leader could not be asked: ask again
}

// RetryAnswer answers Retry.
type RetryAnswer struct {
	Engine   string `json:"engine"`
	Job      string `json:"job"`
	ID       string `json:"id"`
	Revision uint64 `json:"revision"`
	Answer   Answer `json:"answer"`
}

// DeleteAnswer answers DeleteKey.
type DeleteAnswer struct {
	Engine   string `json:"engine"`
	Job      string `json:"job"`
	ID       string `json:"id"`
	Revision uint64 `json:"revision"`
	Answer   Answer `json:"answer"`
	Seq      uint64 `json:"seq,omitempty"`
}

// ResultAnswer answers PublishResult.
type ResultAnswer struct {
	Handle Handle `json:"handle,omitempty"`
	Job    string `json:"job"`
	ID     string `json:"id"`
	Answer Answer `json:"answer"` // OK and Superseded both mean: it is answered
	Seq    uint64 `json:"seq,omitempty"`
}

// DeadAnswer answers PublishDead.
type DeadAnswer struct {
	Handle Handle `json:"handle,omitempty"`
	Job    string `json:"job"`
	ID     string `json:"id"`
	Answer Answer `json:"answer"`
}

// Load is an engine's load snapshot as received.
type Load struct {
	subjects.Load
}

// Cache is one cache event of an engine.
type Cache struct {
	Engine    string   `json:"engine"`
	Epoch     string   `json:"epoch"`
	Seq       uint64   `json:"seq"`
	Namespace uint64   `json:"namespace"`
	Op        string   `json:"op"` // stored, removed, cleared
	Tier      string   `json:"tier,omitempty"`
	Blocks    []uint64 `json:"blocks,omitempty"` // parent first for stored
	// Parent of the first stored block, Namespace where that begins a prompt.
	// HasParent is false when the agent does not say: it is not checked.
	Parent    uint64 `json:"parent,omitempty"`
	HasParent bool   `json:"has_parent,omitempty"`
}

// Snapshot is a part of an engine's whole block set.
type Snapshot struct {
	Engine string   `json:"engine"`
	Epoch  string   `json:"epoch"`
	AsOf   uint64   `json:"as_of"`
	Phase  string   `json:"phase"` // begin, part, end, failed
	Tier   string   `json:"tier,omitempty"`
	Blocks []uint64 `json:"blocks,omitempty"`
}

// SeedPut is a seed or its cooldown as stored, of the same stream as
// reservations and in its order.
type SeedPut struct {
	subjects.Seed
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"` // server time, unix ns
	TTLMS    int64  `json:"ttl_ms,omitempty"`
}

// SeedGone is the marker of a seed that was given back.
type SeedGone struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`
	TTLMS    int64  `json:"ttl_ms,omitempty"`
}

// OwnerPut is an entry of the owner map.
type OwnerPut struct {
	subjects.Ownership
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`
	TTLMS    int64  `json:"ttl_ms,omitempty"`
}

// OwnersGone is a deleted entry of the owner map.
type OwnersGone struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"`
}

// SeedAnswer answers WriteSeed.
type SeedAnswer struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"` // that was expected
	Answer   Answer `json:"answer"`   // Superseded, Gone: somebody else has ended it
	Seq      uint64 `json:"seq,omitempty"`
}

// OwnersAnswer answers WriteOwners.
type OwnersAnswer struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"` // that was expected
	Answer   Answer `json:"answer"`
	Seq      uint64 `json:"seq,omitempty"`
	Actual   uint64 `json:"actual,omitempty"` // Conflict
}

// Stop gives back what is in hand; the core fetches and binds no more.
type Stop struct{}

func (Tick) event()            {}
func (ServerTime) event()      {}
func (Contact) event()         {}
func (ViewSwap) event()        {}
func (ReservationPut) event()  {}
func (ReservationGone) event() {}
func (Answered) event()        {}
func (EnginePut) event()       {}
func (EngineGone) event()      {}
func (DispatcherPut) event()   {}
func (DispatcherGone) event()  {}
func (CancelPut) event()       {}
func (PoolPut) event()         {}
func (Jobs) event()            {}
func (Fetched) event()         {}
func (FetchDone) event()       {}
func (Acquire) event()         {}
func (BindAnswer) event()      {}
func (LeaderAnswer) event()    {}
func (RetryAnswer) event()     {}
func (DeleteAnswer) event()    {}
func (ResultAnswer) event()    {}
func (DeadAnswer) event()      {}
func (Load) event()            {}
func (Cache) event()           {}
func (Snapshot) event()        {}
func (Stop) event()            {}
func (SeedPut) event()         {}
func (SeedGone) event()        {}
func (OwnerPut) event()        {}
func (OwnersGone) event()      {}
func (SeedAnswer) event()      {}
func (OwnersAnswer) event()    {}

// Timings are all durations of the core in one place, so that tests scale them.
type Timings struct {
	Tick            time.Duration `json:"tick"`             // 50ms
	Suspect         time.Duration `json:"suspect"`          // 15s without renewal, of proven contact
	Lost            time.Duration `json:"lost"`             // 30s
	ContactFresh    time.Duration `json:"contact_fresh"`    // 2s: no decision on an older view
	FreezeMost      time.Duration `json:"freeze_most"`      // 120s of frozen requeueing after a mass loss
	HoldInHand      time.Duration `json:"hold_in_hand"`     // 10s a fetched message is held
	NakMin          time.Duration `json:"nak_min"`          // 200ms
	NakMax          time.Duration `json:"nak_max"`          // 2s
	ViewWait        time.Duration `json:"view_wait"`        // 1s a conflicted bind waits for the view
	RequeueStagger  time.Duration `json:"requeue_stagger"`  // 5s: the k-th dispatcher requeues after k of them
	PauseRebuild    time.Duration `json:"pause_rebuild"`    // 10s without a step: drop all in hand, rebuild
	AgingStep       time.Duration `json:"aging_step"`       // 30s of waiting outweigh one lane
	FairWindow      time.Duration `json:"fair_window"`      // 60s half-life of recently used tokens
	RetiredKeep     time.Duration `json:"retired_keep"`     // 3m that a retired bind number is remembered
	ReleaseGrace    time.Duration `json:"release_grace"`    // 5s that an answered key may wait for its agent's release
	FetchExpiry     time.Duration `json:"fetch_expiry"`     // 2s a pull waits for work
	Backoff         time.Duration `json:"backoff"`          // 1s before a refused effect is tried again
	Sweep           time.Duration `json:"sweep"`            // 250ms between walks over what is held
	QueueIdle       time.Duration `json:"queue_idle"`       // 5m after which an empty queue is forgotten
	PreemptionBlock time.Duration `json:"preemption_block"` // 10s
}

// DefaultTimings are those of production.
func DefaultTimings() Timings {
	return Timings{
		Tick: 50 * time.Millisecond, Suspect: 15 * time.Second, Lost: 30 * time.Second,
		ContactFresh: 2 * time.Second, FreezeMost: 2 * time.Minute, HoldInHand: 10 * time.Second,
		NakMin: 200 * time.Millisecond, NakMax: 2 * time.Second, ViewWait: time.Second,
		RequeueStagger: 5 * time.Second, PauseRebuild: 10 * time.Second, AgingStep: 30 * time.Second,
		FairWindow: time.Minute, RetiredKeep: 3 * time.Minute, ReleaseGrace: 5 * time.Second,
		FetchExpiry: 2 * time.Second, Backoff: time.Second, Sweep: 250 * time.Millisecond,
		QueueIdle: 5 * time.Minute, PreemptionBlock: 10 * time.Second,
	}
}
