package client

import (
	"errors"
	"fmt"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

var (
	// ErrBackpressure says that the pool takes no more for now; see BackpressureError.
	ErrBackpressure = errors.New("the pool takes no more for now")
	// ErrLost says that a rollout was accepted, never answered, and nowhere to be found; see LostError.
	ErrLost = errors.New("rollout lost")
	// ErrForged says that an answer does not carry its request's reply key; see ReplyKeyError.
	ErrForged = errors.New("answer without the reply key of its request")
	// ErrBadAnswer says that an answer does not decode; its id and job are set.
	ErrBadAnswer = errors.New("answer does not decode")
	// ErrReceived says that the answer was received before, here or by another process
	// of this reader's name. Nobody is handed it again.
	ErrReceived = errors.New("answer was received before")
	// ErrUnknown says that NATS did not say whether the rollout was stored. Submit the
	// same id again: that is always safe.
	ErrUnknown = errors.New("not known whether the rollout was stored")
	// ErrUnavailable says that nothing was stored, and NATS does not answer. Try later.
	ErrUnavailable = errors.New("NATS does not answer")
	// ErrNoPool says that no stream takes requests of this pool.
	ErrNoPool = errors.New("no such pool")
	// ErrClosed says that the client was closed.
	ErrClosed = errors.New("client is closed")
	// ErrBadOption says that an option of Open is refused.
	ErrBadOption = errors.New("bad option")
)

// BackpressureError says when to try again. Nothing of the request was stored.
type BackpressureError struct {
	RetryAfter time.Duration
	Cause      string // who refused, in NATS's words
}

func (e *BackpressureError) Error() string {
	return fmt.Sprintf("%v (%s): try again in %v", ErrBackpressure, e.Cause, e.RetryAfter)
}

// Unwrap makes errors.Is(err, ErrBackpressure) true.
func (e *BackpressureError) Unwrap() error { return ErrBackpressure }

// LostError names a rollout that NATS acknowledged and no longer has.
type LostError struct {
	Job, ID string
	// Again tells that it was submitted a second time, and lost a second time.
	Again bool
}

func (e *LostError) Error() string {
	what := "it was too large to be kept for another try"
	if e.Again {
		what = "it was submitted twice"
	}
	return fmt.Sprintf("%v: %s was accepted and has neither an answer nor a place (%s): submit it again under the same id, and look at the disks of NATS",
		ErrLost, subjects.RolloutKey(e.Job, e.ID), what)
}

// Unwrap makes errors.Is(err, ErrLost) true.
func (e *LostError) Unwrap() error { return ErrLost }

// ReplyKeyError names an answer that was not made from our request: written by
// somebody with the right to answer who never saw it, or made from an earlier
// submit of the same id by a process with another reply secret.
type ReplyKeyError struct{ Job, ID string }

func (e *ReplyKeyError) Error() string {
	return fmt.Sprintf("%v: %s: do not learn from it; if this process submits ids that an earlier one submitted, give both the same ReplySecret",
		ErrForged, subjects.RolloutKey(e.Job, e.ID))
}

// Unwrap makes errors.Is(err, ErrForged) true.
func (e *ReplyKeyError) Unwrap() error { return ErrForged }
