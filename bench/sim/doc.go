// Package sim runs real decision cores against a model of NATS and of engines,
// in virtual time. One seed gives one run. The cores are those of production;
// what is modelled is what they talk to:
//
//   - Bus: guarded binds, message ids, work queues with redelivery, the result
//     register, TTLs of keys and markers, and followers that see changes late.
//   - Node: an agent and its engine, which run what is bound and answer. With
//     SetModel the engine is package model, and the node tells load and cache.
//   - World: time, faults, and the history that the tests judge; with
//     Options.Audit also what decisions counted on.
//
// # What NATS allows, and is modelled
//
//   - Order. Each followed stream comes in its own order, and no two streams
//     together: a key may be seen before its engine's registration, an answer
//     before its release. Reports (load, cache, snapshots) come in order from one
//     engine to one dispatcher.
//   - Delay. Everything is late by a random span (Latency one way for a write,
//     up to WatchDelay for a follower, SlowWrites up to 5 s), each dispatcher by
//     its own.
//   - Loss. Streams lose nothing. Reports are plain subjects and may never come
//     (Telemetry.LoadLoss, CacheLoss). The answer of a stored write may be lost
//     (Bus.Lost): the shell repeats the identical publish.
//   - Again. A message that is not acked within AckWait, or is given back, comes
//     again, before those that were never delivered.
//   - TTL. A key ends by its TTL without a word to anybody, and a marker after a
//     minute; the last sequence under the engine falls back.
//   - Partitions. Node.Cut and Heal; Dispatcher.Pause and Resume (a stopped process
//     keeps what it is sent), Kill. StepClock moves the server's clock.
//
// It leaves out bytes: requests are facts, and a follower's connection is a
// delay. Replication is left out too: writes are serial, so the answers of three
// servers that race (10164, a stale direct get) do not occur here; kvstate's
// tests meet them on real clusters.
//
// Package kvstate/conform holds the promises that both this model and real
// servers keep: what a server does differently belongs there first, and then here.
package sim
