package engine

import "errors"

// Errors of the server and of Submit.
var (
	// ErrDown: the server is not running (closed, died, or not started).
	ErrDown = errors.New("simulated engine is down")
	// ErrRunning: Start was called twice.
	ErrRunning = errors.New("simulated engine is running already")
	// ErrQueueFull: MaxQueued requests are waiting.
	ErrQueueFull = errors.New("queue is full")
	// ErrBadRequest: the generation can never run; the text says why.
	ErrBadRequest = errors.New("bad request")
)
