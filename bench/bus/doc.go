// Package bus measures what rollbus costs over the JetStream operations that it
// cannot do without. Two sides take turns on one NATS server, in one process:
//
//   - the bus: client, dispatchers, agents, as they are deployed; only the
//     engines are adapters that answer at once;
//   - the bare chain: a program that makes the same writes under the same guards
//     with the same followers and consumers, and decides nothing. It places by
//     engine number, and its dispatchers never meet at an engine.
//
// What one rollout costs on the bus is the same on both sides:
//
//	who          what                                                   guard
//	trainer      publish to ROLLOUTS, acked in pulls by a durable        message id
//	dispatcher   publish the reservation, whole request in it,           engine's sequence, message id
//	             then ack the message
//	agent        publish the result                                      expected sequence 0
//	agent        publish the reservation's delete marker, 60 s           exact revision
//	dispatchers  each one follows reservations and results, headers only
//	agents       one consumer an engine on its reservations, with values
//
// Messages are of one size and carry the same headers on both sides: the bus
// encodes them, the chain copies them. A refused bind is repeated by the chain
// at once with the sequence that the refusal names; the bus waits until its view
// has what moved it, and decides again. Only the bus registers engines and
// dispatchers, reports load and cache, publishes decision lines, watches its
// queues and proves its views: that is its logic.
//
// Both offer the same number of outstanding rollouts. Latencies are taken while
// half of the bus's own throughput is offered to either side, and are the
// difference of two times of the NATS server: request stored in ROLLOUTS,
// reservation stored. Nothing is received: answers stay in RESULTS on both sides.
//
// Everything shares the machine, servers included, so that figures are of this
// machine; ratios are less so.
package bus
