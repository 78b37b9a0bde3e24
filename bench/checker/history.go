package checker

import (
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// History is what happened in one pool, as seen from outside.
type History struct {
	Pool string `json:"pool"`
	// Ended says that everything had the time to end: what is missing is a
	// violation. Without it only what happened is judged.
	Ended bool `json:"ended"`

	Submits      []Submit      `json:"submits,omitempty"`
	Reservations []Reservation `json:"reservations,omitempty"` // in stream order
	Results      []Result      `json:"results,omitempty"`      // in stream order
	Attempts     []Attempt     `json:"attempts,omitempty"`     // answers published, stored or not
	Retries      []Retry       `json:"retries,omitempty"`
	Dead         []Dead        `json:"dead,omitempty"`
	Seeds        []Seed        `json:"seeds,omitempty"`  // in stream order
	Owned        []Owned       `json:"owned,omitempty"`  // in stream order, as far as it was seen
	Seen         []Seen        `json:"seen,omitempty"`   // in the order user code was handed them
	Bounds       []Bound       `json:"bounds,omitempty"` // of memory, queues, spools

	// Windows is how many requests may be bound to an engine at once, the
	// largest value it ever advertised. An engine that is not in it is not judged.
	Windows map[string]int `json:"windows,omitempty"`
	// Left are the reservations in the bucket at the end, as subjects.Held keys
	// <engine>.<job>.<id>. Only with Ended.
	Left []string `json:"left,omitempty"`

	Unreadable []string `json:"unreadable,omitempty"` // messages whose headers make no sense, with the reason

	Limits Limits `json:"limits"`

	UnseenReservations int `json:"unseen_reservations,omitempty"` // revisions overwritten before they were seen
	UnseenResults      int `json:"unseen_results,omitempty"`
}

// Limits are what the checks hold attempts against.
type Limits struct {
	MaxAttempts int           // burnt attempts of a rollout that names no limit; 0 = subjects.DefaultMaxAttempts
	MaxBinds    int           // binds of one rollout, refused ones included; 0 = DefaultMaxBinds
	LateBind    time.Duration // a bind may be this much later than the answer, server time; 0 = DefaultLateBind
}

// Defaults of Limits. A dispatcher decides on views at most 2 s behind, and
// repeats an unanswered publish; after that a bind of an answered rollout is a fault.
const (
	DefaultMaxBinds = 50
	DefaultLateBind = 5 * time.Second
)

func (l Limits) withDefaults() Limits {
	if l.MaxAttempts == 0 {
		l.MaxAttempts = subjects.DefaultMaxAttempts
	}
	if l.MaxBinds == 0 {
		l.MaxBinds = DefaultMaxBinds
	}
	if l.LateBind == 0 {
		l.LateBind = DefaultLateBind
	}
	return l
}

// SubmitOutcome is what the submitter learnt.
type SubmitOutcome string

// Outcomes of a submit.
const (
	Accepted SubmitOutcome = "accepted" // acknowledged, as new or as a duplicate
	Refused  SubmitOutcome = "refused"  // a typed error: nothing was stored
	Unknown  SubmitOutcome = "unknown"  // no answer: it may have been stored
)

// Submit is one submission as its submitter saw it.
type Submit struct {
	Job     string        `json:"job"`
	ID      string        `json:"id"`
	Outcome SubmitOutcome `json:"outcome"`
	Seq     uint64        `json:"seq,omitempty"`    // in ROLLOUTS, when accepted
	Stored  int64         `json:"stored,omitempty"` // server time, unix ns; 0 = not seen
	Err     string        `json:"err,omitempty"`    // when refused or unknown
}

// Reservation is one message of the reservations bucket: a key written (Held)
// or deleted (Released).
type Reservation struct {
	Revision uint64             `json:"revision"`
	Stored   int64              `json:"stored"` // server time, unix ns
	Held     *subjects.Held     `json:"held,omitempty"`
	Released *subjects.Released `json:"released,omitempty"`
	// Guard is the revision of the key that an update or a release expected;
	// 0 for a bind, and where it is not told.
	Guard     uint64 `json:"guard,omitempty"`
	Unguarded bool   `json:"unguarded,omitempty"` // written without the guard it must carry
	Inferred  bool   `json:"inferred,omitempty"`  // not seen itself: the release that overwrote it names it
}

// Result is one message of the result register. An empty Status is a received mark.
type Result struct {
	subjects.Answer
	Revision uint64 `json:"revision"`
	Stored   int64  `json:"stored"`             // server time, unix ns
	Replaces uint64 `json:"replaces,omitempty"` // sequence that a received mark was guarded by
	// Unguarded: written without the guard that makes the first answer stand.
	Unguarded bool `json:"unguarded,omitempty"`
}

// Attempt is an answer that somebody published, whether it was stored or not.
type Attempt struct {
	subjects.Answer
}

// Retry is a requeued request.
type Retry struct {
	Job  string `json:"job"`
	ID   string `json:"id"`
	Bind int    `json:"bind"` // of the bind to come
}

// Dead is an entry of the DEAD stream.
type Dead struct {
	Job    string `json:"job"`
	ID     string `json:"id,omitempty"` // empty: the body had no usable one
	Reason string `json:"reason,omitempty"`
}

// Seen is an answer handed to user code, or the end of that: the received mark
// that the reader had acknowledged.
type Seen struct {
	Job      string `json:"job"`
	ID       string `json:"id"`
	Received bool   `json:"received,omitempty"`
}

// Bound is a measured quantity and the most it may be.
type Bound struct {
	Name  string  `json:"name"` // what and where, with its unit: "a-e1 spool, bytes"
	Value float64 `json:"value"`
	Most  float64 `json:"most"`
}

// Violation is one broken promise.
type Violation struct {
	Invariant string `json:"invariant"` // I1 ... I11
	Rollout   string `json:"rollout,omitempty"`
	Text      string `json:"text"` // a sentence that names the rollout and the revisions
}

// String is the sentence with its invariant.
func (v Violation) String() string { return v.Invariant + ": " + v.Text }
