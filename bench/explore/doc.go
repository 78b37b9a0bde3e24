// Package explore checks the protocol of owners and seeds (S2) exhaustively: it
// walks every order of what can happen to a few dispatchers, engines and
// rollouts, up to stated bounds, and judges every write.
//
//	dispatchers  production cores (core.Core): their transitions are the ones that run
//	bus          linearised streams, a wildcard guard per engine, an exact guard per
//	             key, the atomic batch of a seed and its bind, message ids, TTLs
//	engines      complete with and without usage, fail, answer without releasing,
//	             lose their cache, begin a new life
//
// A move is one of: a message or the next entry of one followed stream reaches
// one dispatcher (each lags on its own); a write that a dispatcher has asked for
// reaches the bus, however late, with or without its answer; a run ends; a
// process dies or begins; time passes. Time stands still between those last
// moves, and all waits of the core that only save work are zero: whatever may be
// done is done at once by everybody, so that races are not hidden by delays.
//
// States are visited breadth first and told apart by a digest of the bus and of
// the cores' checkpoints, so that a broken rule is found with the fewest moves.
// A core's step is a function of its state and the event: each is computed once.
//
// From every state the world is then left alone: nothing fails any more, all
// that is on its way arrives, and it must come to rest with every rollout
// answered, nothing reserved and no seed left.
//
// Not modelled, since they decide nothing about owners: results, registrations of
// dispatchers and cancels reach everybody at once; views made anew (package sim
// has them); two servers of NATS that disagree.
package explore
