// Package poll measures what an agent's looks at an engine's load, five a
// second, cost the engine.
//
// Two things are measured, each in slices with and without polling that take
// turns, so that whatever else the machine does meets both sides alike. The order
// within a pair alternates.
//
//   - Idle: CPU time of the engine's process, with less without. What is left is
//     the looks' own cost.
//   - Busy: tokens that streams bring per second. The simulated engine runs so
//     much faster than its model that its CPU is what limits it: a look costs
//     output there, which no GPU in between can hide.
//
// It passes if the busy loss is under one percent, with the upper end of its 95 %
// interval over pairs, or if the idle cost is under half a percent of a core.
// Else it is inconclusive: a noisy machine proves nothing either way.
package poll
