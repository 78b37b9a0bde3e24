// Package affinity shows on live engines whether placement by prefix works: the
// validator of `rollbus validate`.
//
// It drives a pool through the bus, as a trainer does, in two arms, affinity off
// and on, each with one prompt repeated, one conversation of many turns, and
// prompts that share nothing. Beside every routing decision stand the engines'
// own cache counters, read from their /metrics before and after: with affinity
// the hits have to concentrate on one engine, without it they have to scatter,
// prompts that share nothing may not hit, and no counter may differ from what the
// answers' usage says by more than a block a request.
//
// The arms are made by the pool's settings (policy and mode), which are put back
// as they were, also when the run is interrupted. Other traffic at the engines
// shows in the counters, and fails the run.
package affinity
