// Package kvstate is what dispatchers, agents and tools share in NATS KV and in
// the result register: guarded writes, reads from the leader, and followers that
// turn a stream into a complete view followed by its changes.
//
// Writes (reservations.go, register.go, queues.go, values.go) are one publish
// each and say what happened by exactly one of the sentinels of errors.go. They
// never retry: repeating is the caller's decision. A write that NATS refuses for
// want of permission has no answer and is ErrUnknown; the connection's error
// handler hears of it.
//
// Reads that decide (Reservation, Result, Settings) ask the stream's leader.
//
// Followers (follow.go) deliver a complete view (Swap), then every change in
// stream order, on one goroutine that waits for the handler: a slow handler holds
// up its own follower, and at most one request's worth of messages waits. After
// any doubt (reconnect, silence, a gap, a stream made anew, this process having
// stood still, a copy behind its leader) they start over with a fresh consumer
// and deliver a new Swap: resuming would miss what was deleted and expired
// meanwhile. That something expired reaches no follower: time it by Stored and
// TTL on a ServerClock, as ReservationView does.
//
// Tests start real servers with package natstest. The conformance suite runs
// against memory R1, file R1 and a three-server cluster; ROLLBUS_LONG=1 makes its
// races longer.
package kvstate
