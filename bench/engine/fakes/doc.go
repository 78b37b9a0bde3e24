// Package fakes serves the simulated engine of package engine as vLLM or SGLang
// would be served: their endpoints, their exposition, their cache events and
// load messages over ZeroMQ, replay included, in the dialects of several
// releases. What is below the wire, scheduling, cache, output and faults, is the
// simulated engine's, so a fake can restart, hang or drip like it.
//
// The bytes of events are compared with recorded ones (package kvevents), frames
// with those of the recordings here.
//
// An event publisher loses what a subscriber does not read: it keeps a bounded
// queue for each and drops above it in silence, as libzmq does. A restart begins
// the sequence at 0 with an empty ring and no cleared event, as both engines do.
package fakes
