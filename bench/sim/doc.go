// Package sim runs real decision cores against a model of NATS and of engines,
// in virtual time. One seed gives one run. The cores are those of production;
// what is modelled is what they talk to:
//
//   - Bus: guarded binds, message ids, work queues with redelivery, the result
//     register, TTLs, and followers that see changes late and in order.
//   - Node: an agent and its engine, which run what is bound and answer.
//   - World: time, faults, and the history that the tests judge.
//
// It leaves out bytes: requests are facts, and a follower's connection is a
// delay. What a real server does differently belongs into the conformance
// suite of kvstate first, and then here.
package sim
