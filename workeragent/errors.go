package workeragent

import "errors"

// Errors of an agent.
var (
	// ErrReplaced: later agents serve all engines of this one. It has stopped
	// and changed nothing of theirs.
	ErrReplaced = errors.New("every engine is served by a later agent")
	// ErrNotReady wraps what is missing until an agent serves.
	ErrNotReady = errors.New("not ready")
	// ErrUnfinished: Stop ended with work that it could neither finish nor give
	// back. Dispatchers requeue it when the registration is gone.
	ErrUnfinished = errors.New("work left behind")
)

// Why a run was ended from outside: the causes of its context.
var (
	errDropped        = errors.New("the reservation is no longer held")
	errExpired        = errors.New("deadline passed")
	errAttemptTimeout = errors.New("attempt timeout passed")
	errNoProgress     = errors.New("no progress")
	errHandBack       = errors.New("the agent is stopping")
	errRestarted      = errors.New("the engine has restarted")
)

// cancelledError is a cancel of the trainer.
type cancelledError struct{ reason string }

func (e *cancelledError) Error() string {
	if e.reason == "" {
		return "cancelled"
	}
	return "cancelled: " + e.reason
}
