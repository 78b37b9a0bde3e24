// Package model is one inference engine as a value machine: continuous batching
// with a token budget, chunked prefill, a block prefix cache, a KV pool and
// preemption. The simulated HTTP engine and the virtual-time simulator run the
// same code.
//
// It has no goroutine, no clock and no randomness: time comes in with every
// call, as a duration since some origin, and never goes back. The same calls
// give the same events.
//
//	Add ---> waiting --plan--> running: prefill chunks --> decode --> finished
//	            ^                               |
//	            +---------- preempted ----------+      Abort ends it anywhere
//
// Steps. A step is planned at its start and nobody joins or leaves its batch
// before its end. When a batch only decodes, nothing changes until the first
// of its requests ends or the KV pool runs out; those steps are one jump, with
// the sum of their times in closed form, so that the cost of a run is that of
// its batch changes and not of its tokens. Times are whole picoseconds inside:
// a jump ends exactly where its single steps would.
//
// Scheduling follows vLLM's V1 scheduler: running requests first (decodes, then
// chunks), then waiting ones in order of arrival; a head that does not fit
// blocks those behind it; when a decode finds no block the request admitted
// last is preempted, keeps its tokens, goes to the head of the queue and is
// computed again. It differs on purpose in three points: a prompt's blocks are
// all taken when it is admitted (vLLM takes them by the chunk and checks the
// whole), blocks without a name are reused before cached ones, and a block
// computed twice is kept once.
//
// Cache. Blocks are named by the caller's chained hashes. A name is known from
// the step that computes the block on, so siblings of one step share it; a hit
// never covers the last token of a prompt. Unreferenced blocks stay until they
// are evicted, least recently used first, the end of a chain before its start.
//
// Not safe for concurrent use.
package model
