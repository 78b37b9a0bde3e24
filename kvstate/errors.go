package kvstate

import (
	"errors"
	"fmt"
)

// What a caller can do differently, one sentinel a case. Every error returned
// by a write wraps exactly one of them.
var (
	// ErrConflict: the guard moved; see ConflictError. Decide again on a newer view.
	ErrConflict = errors.New("sequence moved")
	// ErrBusy: another guarded write is in flight (R3, 10164). Once more, then elsewhere.
	ErrBusy = errors.New("another guarded write is in flight")
	// ErrDuplicate: the message id was seen within the window; nothing was
	// written now. See DuplicateError. Never success by itself.
	ErrDuplicate = errors.New("message id seen before")
	// ErrUnknown: no answer. It may or may not have happened: repeat the
	// identical write until it is answered, choose nothing else meanwhile.
	ErrUnknown = errors.New("outcome unknown")
	// ErrSuperseded: somebody else was first (a result, or a key that is no
	// longer at the revision held). Drop what you have.
	ErrSuperseded = errors.New("superseded")
	// ErrFull: the stream refuses more (10077, 10167). Keep it and try later.
	ErrFull = errors.New("stream full")
	// ErrGone: the key or message is not there.
	ErrGone = errors.New("gone")
	// ErrUnavailable: refused or not even sent, without effect, for now (no
	// connection, no stream). It says nothing of an earlier attempt that was
	// ErrUnknown: that one stays unknown.
	ErrUnavailable = errors.New("unavailable")
	// ErrRefused: this message will never be taken as it is (a bad name, too
	// large, a header the stream does not allow). Nothing was written; change it.
	ErrRefused = errors.New("refused")
)

// ConflictError carries where the guarded sequence stands.
type ConflictError struct {
	Actual uint64
	Seed   bool // of Store.Seed: it is the seed's key that moved, not the engine's
}

func (e *ConflictError) Error() string {
	if e.Seed {
		return fmt.Sprintf("the seed moved to %d", e.Actual)
	}
	return fmt.Sprintf("sequence moved to %d", e.Actual)
}
func (e *ConflictError) Unwrap() error { return ErrConflict }

// DuplicateError carries the sequence that the first publish of the id got.
type DuplicateError struct{ Seq uint64 }

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("message id seen before, at sequence %d", e.Seq)
}
func (e *DuplicateError) Unwrap() error { return ErrDuplicate }
