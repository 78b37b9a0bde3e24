// Package kvstate is what dispatchers, agents and tools share in NATS KV and in
// the result register: guarded writes, and followers that turn a stream into a
// complete view followed by its changes.
//
// Writes (reservations.go, register.go, values.go) are one publish each and say
// what happened by one of the sentinels of errors.go. They never retry, but
// for ErrUnknown where the doc says so: repeating is the caller's decision.
//
// Followers (follow.go) deliver a complete view (Swap), then every change in
// stream order. After any doubt (reconnect, missed heartbeat, a gap, a stream
// made anew) they start over with a fresh consumer and deliver a new Swap:
// resuming would miss what was deleted or expired meanwhile.
package kvstate
