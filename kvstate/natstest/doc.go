// Package natstest starts real NATS servers inside a test's own process: one
// alone, or a cluster that speaks over real routes on the loopback interface.
// Data stays in the test's temporary directory over Stop, Start and Restart,
// and ports stay the same, so that clients reconnect by themselves. Everything
// is shut down when the test ends.
//
// A server stopped here hands its leaderships over first, as on SIGTERM. A test
// that needs SIGKILL needs a server in a process of its own.
//
// Inside a testing/synctest bubble use InProcess and Dir with a directory made
// outside of the bubble: sockets do not work in there.
package natstest
