package journal

import (
	"errors"
	"fmt"
)

// Errors that a caller can tell apart.
var (
	// ErrForeign says that bytes are no journal at all.
	ErrForeign = errors.New("not a journal of rollbus")
	// ErrVersion says that a later program wrote it: read it with that one.
	ErrVersion = errors.New("a journal of a version that this program does not read")
	// ErrCorrupt says that bytes are missing or changed.
	ErrCorrupt = errors.New("the journal is damaged")
	// ErrGap says that events were dropped or are not there any more. What
	// follows can be read, and cannot be verified.
	ErrGap = errors.New("events are missing from the journal")
	// ErrNoBegin says that the start is gone: the journal cannot be read.
	ErrNoBegin = errors.New("the journal's beginning is missing")
)

// ReadError says where reading ended, and what could be read until there.
type ReadError struct {
	Dispatcher string
	Frame      int    // from 0, in the order read
	Event      uint64 // number of the first event that cannot be read
	Missing    uint64 // events missing, where that is known
	Err        error
}

func (e *ReadError) Error() string {
	s := fmt.Sprintf("journal of %s, frame %d, event %d: %v", e.Dispatcher, e.Frame, e.Event, e.Err)
	if e.Missing > 0 {
		s += fmt.Sprintf(" (%d of them)", e.Missing)
	}
	return s + fmt.Sprintf("; the events before %d can be read", e.Event)
}

func (e *ReadError) Unwrap() error { return e.Err }
