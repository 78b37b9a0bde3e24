// Package baseline is what other routers do, written plainly from their public
// descriptions, to be measured against. They run in the simulator only.
//
//	round_robin      engines in turn
//	sticky_lru       a session stays on the engine it was first sent to, remembered in a bounded LRU;
//	                 new ones go to the engine with the fewest requests in flight
//	consistent_hash  a key's place on a ring of virtual nodes
//	cache_aware      an approximate prefix tree of each engine: the longest match above a threshold wins,
//	                 else the smallest tree; the shortest queue when loads are out of balance
//	load_only        the fewest requests in flight, whatever is cached
//
// A router decides when a request arrives, at once, and counts what it has sent
// and what has been answered: that is all it knows, and it is always up to date
// (one router, no delay, no failure), which is kinder than reality. Where a
// description leaves a choice open, the choice is the one that serves the
// router better. Each has a golden of 20 decisions worked by hand.
package baseline
