// Package checker tells whether a pool kept its promises: it reads a History,
// what happened as seen from outside, and names every broken invariant in an
// English sentence (docs/guarantees.md lists the invariants).
//
// A History is plain data. A Recorder makes one by following the pool's real
// streams with its own ephemeral consumers, plus what only the submitter and
// the reader know: which submits were acknowledged and what user code was
// handed. Nothing is taken from the code under test.
//
// Ordering: reservations and results are in the order of their streams; what
// submitters and readers report is in the order they reported it. Times are
// the NATS server's.
//
// Limits: a stream that keeps one message a subject forgets what is
// overwritten before the recorder sees it, in a cluster mostly while its
// consumer's server is away; Watch reads every server's copy. Gaps are counted in
// History.Unseen; while there are any, a check that needs the missing message
// says nothing. Submit and retry copies come over core NATS and may be missed;
// they feed figures, never a verdict.
//
// Check is a pure function and may be used on histories from anywhere: live
// recordings, simulations, files.
package checker
