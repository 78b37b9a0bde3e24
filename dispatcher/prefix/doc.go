// Package prefix is the block index: which engine holds how much of a prompt,
// and in which tier. Blocks are the chained hashes of subjects/blockhash, so
// the namespace (model, LoRA, salt) is in every key.
//
// # What it trusts
//
// An engine's blocks count only while its view is whole: its agent's snapshot
// "as of" a sequence has been taken in, and every event after it has come in
// order. What comes meanwhile is buffered. A gap, a sequence that falls, an
// unknown parent or another epoch end the trust at once, and a verdict asks
// for a new snapshot; until that is complete the engine gets no credit.
//
//	unknown --Begin--> loading --End, nothing missing--> trusted
//	    ^----------- gap, restart, epoch, unknown parent ---'
//
// # How it is built
//
// Blocks of a shared prefix are held by the same engines, so sets of holders
// are stored once: a block costs its hash and a set's number, however many
// engines share it. A holder is a slot: one life of one tier of one engine.
// Removing an engine, a new epoch, a cleared cache and the expiry of a lower
// tier each kill slots, which takes effect at once and costs nothing; a sweep
// that goes on in small steps reclaims their memory.
//
// Memory is bounded by Options.MaxBytes: beyond it the blocks that were neither
// stored nor matched for longest are forgotten, which costs credit and
// nothing else.
//
// One goroutine. No clock: now is an argument. The same calls give the same
// answers on every machine.
package prefix
