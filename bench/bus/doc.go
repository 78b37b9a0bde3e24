// Package bus measures what rollbus costs over the JetStream operations that it
// cannot do without. Two sides take turns on one NATS server, in one process:
//
//   - the bus: client, dispatchers, agents, as they are deployed; only the
//     engines are adapters that answer at once;
//   - the bare chain: a program that makes the same writes under the same guards
//     with the same followers and consumers, and decides nothing. It places by
//     engine number, its dispatchers never meet at an engine, its messages carry
//     no header that NATS does not need.
//
// Both offer the same number of outstanding rollouts. Latencies are taken while
// half of the bus's own throughput is offered to either side, and are the
// difference of two times of the NATS server: request stored in ROLLOUTS,
// reservation stored. Nothing is received: answers stay in RESULTS on both sides.
//
// Everything shares the machine, servers included, so that figures are of this
// machine; ratios are less so.
package bus
