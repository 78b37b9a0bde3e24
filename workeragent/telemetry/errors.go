package telemetry

import "errors"

var (
	// ErrRouter is an exposition that a router serves for its workers: its
	// numbers belong to many engines. Give the agent the engine's own URL.
	ErrRouter = errors.New("the exposition has worker_addr labels: it is a router's, not an engine's; use the engine's own address")
	// ErrNoSeries is an exposition without any series that is known here.
	ErrNoSeries = errors.New("the exposition has no series of vLLM, SGLang or llama.cpp; are metrics switched on there?")
	// ErrShape is a body that is not what its endpoint is known to answer.
	ErrShape = errors.New("the answer has another shape than expected")
	// ErrMalformed is a message that must be dropped; the subscription stays.
	ErrMalformed = errors.New("malformed load message")
)
