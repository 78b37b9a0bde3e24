// Package local runs a whole pool in one process: a NATS server, dispatchers,
// simulated engines on HTTP listeners of their own, and agents with their real
// loop. `rollbus up` and `rollbus demo` are made of it; nothing in it is a
// shortcut but that NATS may be reached without a socket.
//
// Start returns when every engine is registered. Stop stops agents first (they
// finish what runs), then dispatchers (they give back what they hold), then
// NATS, then the engines; its context bounds each. Both may be called once.
package local
