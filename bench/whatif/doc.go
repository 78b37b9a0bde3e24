// Package whatif answers what recorded traffic would have met under another
// policy, other settings or another fleet.
//
// It reads journals ([Extract]), releases the same rollouts again into a pool in
// virtual time with the production core and the engine model (bench/contest,
// bench/sim, bench/engine/model), and sets the figures side by side ([Run]).
// Every figure is either recorded or modelled, and says which.
//
// What the model is worth is told first: it is fitted to the recorded run, runs
// that same policy, settings and fleet, and its distance to what was recorded is
// each figure's error. A difference between two modelled runs that is smaller
// than that proves nothing, and is marked so.
//
// Two things are known without any model: what was recorded, and what another
// policy would have decided on the very state of each recorded decision
// ([Beside]).
package whatif
