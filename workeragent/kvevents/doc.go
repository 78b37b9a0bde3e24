// Package kvevents follows the KV cache of engines: vLLM and SGLang publish over
// ZeroMQ which blocks they stored and removed; this package turns that into
// pool blocks, the hashes that dispatchers and clients compute of a prompt.
//
//	socket -> ring -> frames -> Sequencer -> Decoder -> Index -> View -> wire
//
// One goroutine a socket does nothing but receive into a bounded ring; one a
// rank decodes and applies. Nothing ever blocks an engine: a full ring drops,
// the sequence numbers show the gap, and the gap is replayed or the rank is
// degraded. A degraded rank has no blocks in the view: no credit is better than
// false credit. The rules are in Sequencer.
//
// Engine blocks have any size and a hash that nobody else can compute. Index
// maps them by their token ids: it follows each chain of engine blocks, cuts it
// into pool blocks and hashes those in the namespace (model, LoRA, salt). A
// pool block is present in a tier when every engine block that covers it is.
// Blocks whose parent is unknown are parked, never rooted: a chain that begins
// in the middle would be a false prefix.
//
// View is the engine-wide result over all ranks, numbered by (epoch, sequence),
// and answers snapshots. Everything is bounded: ring, replay buffer, parked
// stores, nodes, problems told. What does not decode is counted and costs its
// siblings nothing; what smells (two publishers on a port, block sizes that do
// not fit, events from which nothing decodes) is an Alarm.
package kvevents
