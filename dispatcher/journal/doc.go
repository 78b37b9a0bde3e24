// Package journal records what the decision core of a dispatcher saw and
// decided, reads it back, re-runs it, and explains one rollout from it.
//
// A [Writer] is a dispatcher's Recorder. Each step is encoded on the goroutine
// that owns the core (encoding is the copy), batched by age and bytes, and
// compressed and published by a goroutine of its own. Acting never waits: when
// the writer cannot follow, whole batches are dropped, counted and named in the
// next one. Memory is bounded by [Options].
//
// A journal is a sequence of frames, one NATS message each (frame.go). The first
// holds the [Begin]: versions, the core's configuration, and the schema of the
// encoding, so that a later program finds its fields by name. It starts with its
// dispatcher, and so it replays from an empty core. Now and then a frame is a
// checkpoint, the core's whole state with a Begin of its own: replay may start
// there, and goes on there behind a gap. Checkpoints are paced by their bytes and
// by the time that taking one costs the core (checkpoint.go).
//
// [Replay] steps a new core through a journal and compares. Every step that had
// effects carries a digest of all effects since the start: one difference
// anywhere is seen at its step. At a checkpoint the whole state is compared.
// Candidates of decisions are not recorded: they come again when the replaying
// core explains. A [SelfCheck] has a dispatcher replay samples of its own.
//
// To test against this package hand a Writer a Publish that keeps the frames.
package journal
