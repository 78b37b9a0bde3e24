// Package core decides: which engine runs each rollout, what is fetched, what
// is requeued, expired or given up. It is a value machine after the manner of
// etcd's raft: Step(event, now) returns effects. It has no goroutine, no clock,
// no NATS and no randomness; live dispatch, shadow, simulation and replay run
// this same code.
//
// One goroutine owns a Core and calls Step. The shell carries out the effects
// in the order given; where an answer is expected it comes back as an event.
// The core never acks a message before the place that follows it is written:
// an Ack effect is only ever emitted after the BindAnswer, ResultAnswer or view
// entry that proves the next place.
package core
