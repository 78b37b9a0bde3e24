// Package canary plays the canary of S2 over real processes: two simulated
// engines that speak HTTP, their agents and the dispatchers, each a process of its
// own, NATS in this one, and the public client as the trainer. bench/contest plays
// it in virtual time and judges both.
//
// Everything is started anew for each arm, with cold caches, and ended after it.
// Engines run faster than what they model by a time scale; intervals of telemetry
// and of leases do not, so that they are longer for the engines by that much.
package canary
