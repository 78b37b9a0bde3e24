// Package workeragent is the agent: it registers the engines of its node, runs
// what is bound to them and writes the answers.
//
// It reconciles. What stands under an engine's keys is what should run there;
// the agent starts what is missing, gives back what it cannot run, and drops
// what has moved on:
//
//	key seen: bound, this epoch --> run --> result stored --> key released
//	          |                      |
//	          |                      +--> returned (failed, refused, hung, drained)
//	          |                      +--> dropped (the key is gone or at another revision)
//	          +-- bound, an older epoch --> released when answered, else returned
//	          +-- bound, a newer epoch --> left alone: another agent has taken over
//
// Ordering. The result is stored first, the key is released after it. A
// returned key carries the whole request. Each write is guarded by the revision
// held, so that it changes nothing when somebody else was first.
//
// Ownership. A key of the current epoch belongs to the agent until one of the
// arrows above has ended; each run is one goroutine that ends in exactly one of
// them. On a hard stop (Run's context) nothing is written: the keys stay and are
// returned by the next agent of that engine, or requeued by a dispatcher.
//
// Epochs. An epoch is one life of an engine's cache under one life of its agent.
// It begins with the stream sequence of the agent's first registration, so that
// of two agents of one engine both know which came later, by no clock. The
// earlier one steps aside and touches nothing of the later one.
//
// Back-pressure. An engine gets what fits its slots and a small prefetch; what
// is bound beyond that is returned, and costs no attempt. While finished answers
// cannot be stored they are kept (the spool, bounded) and their keys stay, so
// that dispatchers bind less and less; over the bound the agent takes nothing new.
//
// Failure. A cut from NATS ends no run: generation goes on, answers wait in the
// spool, and keys that are still at their revision go on afterwards. An engine
// that makes no progress loses the run; one that refuses is left alone for a
// while; one that restarted gets a new epoch.
//
// To test against it, give New a connection of package kvstate/natstest, an
// adapter for an httptest server and Timings scaled down by Timings.Scale.
package workeragent
