package dispatcher

import "errors"

var (
	// ErrStopped: the dispatcher has ended or is ending; make a new one.
	ErrStopped = errors.New("dispatcher has stopped")
	// ErrRunning: Run was called before; a Dispatcher runs once.
	ErrRunning = errors.New("dispatcher runs already or has run: make a new one")
	// ErrConnectionClosed: the NATS connection was closed for good. Connect with
	// unlimited reconnects, and start anew.
	ErrConnectionClosed = errors.New("the NATS connection is closed: connect again and start a new dispatcher")
	// ErrNotGraceful: the budget of a soft stop ran out; what was still in
	// flight ends by redelivery.
	ErrNotGraceful = errors.New("stopped before everything in flight was answered: the rest is redelivered")
	// ErrNoCore: Inspect was called on a dispatcher driven by something other than a core.
	ErrNoCore = errors.New("no core to inspect")
)
