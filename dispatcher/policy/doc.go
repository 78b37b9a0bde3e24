// Package policy decides which engine takes a request. Pure: no goroutine,
// clock, network or randomness; the same input gives the same decision, bit for
// bit, on every machine.
//
// A [Decider] runs one pipeline on one picture of the fleet:
//
//	eligible -> load basis -> admission -> score -> (owner guard) -> stickiness -> escape -> pick
//
// The load basis is chosen once for all candidates, and a quantity that one of
// them lacks counts for none. Every candidate that is left out has a [Filter],
// every decision a [Reason]; both are closed lists in reason.go. A policy that
// panics or yields no number leaves the decision to the baseline.
//
// A new policy is a scorer (decide.go) with an entry in newScorer and Policies;
// its parameters are rows of the table in knobs.go. One that may refuse them all,
// or place under a condition, as owner_pressure does, is a guarder beside it.
//
// Beside it stand the small learners that feed a decision: [Judge] and [Fuser]
// make an engine's report usable, [Lengths] expects outputs, [Sticky] remembers
// last engines. All of them are values of their caller, bounded, and learn from
// events alone, so that dispatchers that saw the same events know the same.
//
// Not safe for concurrent use; the core's goroutine owns it all. Tests need
// nothing but candidates: see fleet_test.go.
package policy
