// Package demo replays a trace through a whole pool in one process and tells
// what happened: which engine ran what, how fast it was placed, how much of the
// prompts came from caches, and whether every promise of docs/guarantees.md was
// kept. Nothing in its report is assumed: every figure is counted by package
// checker from messages that were observed on the bus.
//
// Run submits at the trace's own pace, sped up, reads every answer as a trainer
// does, and ends when all are answered and every reservation is retired, or
// when its context ends; then the pool is stopped and its folder removed.
package demo
