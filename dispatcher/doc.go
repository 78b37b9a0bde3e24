// Package dispatcher is the shell of a dispatcher: it feeds the decision core
// with what happens on NATS and carries out what the core decides.
//
//	followers, queues, load, cache, answers, ticks
//	        |  events, one bounded channel
//	        v
//	one goroutine owns the core: Step(event, now) -> effects
//	        |  started in order, never waited for
//	        v
//	pulls, binds, other writes, acks, decision lines
//
// Ordering. Events of one source keep their order; events of different sources
// do not have one. Effects of a Step are started in the order given; acks and
// naks leave in that order on one goroutine. The core emits an Ack only after
// the answer that proves the next place, so that starting order is enough.
//
// Ownership. A fetched message is the core's from Fetched until Ack or
// NakDelay; its body stays here under its Handle. A message that arrives for a
// pull that has ended, or after Stop, is given back at once and never shown to
// the core. A message that is neither acked nor given back (a crash) comes back
// after the consumer's AckWait.
//
// Back-pressure. Followers and answers wait for room in the event channel.
// Load and cache messages do not: the oldest are dropped and counted, which a
// load message survives by being replaced and a cache view by a new snapshot.
// Writes wait in queues that cannot outgrow what the core holds: it has at most
// one write in flight for a message in hand and one for a reservation.
//
// Failure. A write without an answer is repeated, identical, until it is
// answered; only then, or after Timings.AttemptsFor, does the core hear of it.
// A follower in doubt starts over and delivers a whole view. A pull that falls
// silent is asked anew, and its consumer is looked after (queues.go). NATS
// being away stops nothing for good: see Ready for what is missing meanwhile.
//
// Stopping. Stop gives back what is in hand, waits for the writes in flight,
// deletes the registration at its own revision and ends within
// Timings.StopBudget. Kill ends at once; what was in hand comes back by itself.
//
// To test against it, give New an embedded server's connection (package
// kvstate/natstest) and Timings scaled down by Timings.Scale.
package dispatcher
