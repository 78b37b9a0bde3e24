// Package faults kills the real processes of a whole pool, again and again, and
// shows what it costs: three NATS servers that form a cluster, dispatchers,
// engines and their agents, each a process of its own, struck by SIGKILL (and
// now and then stopped by SIGSTOP for a while) while the public client submits
// and reads. bench/checker judges the recorded history.
//
// The schedule of faults follows from the seed alone; what a fault meets does
// not, since processes run as they like. NATS servers are struck one at a time:
// the next only when all three are healthy again.
//
// SIGKILL keeps what a process has written: the page cache survives. Power
// failures are another matter, and so the servers do not sync every write here
// unless told to.
//
// A program that calls Run must call Reexec first thing in main (a test in
// TestMain): the NATS servers are that program, started anew.
//
//	make test-faults
//	go run ./bench/faults/cmd --seed 7 --kills 100 --rollouts 5000
package faults
