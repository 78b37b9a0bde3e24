// Package workload makes and reads what is run against engines: public request
// traces, and seeded generators with published parameters.
//
//	trace file --Read--> rows --FromRows-->  Workload --Pace--> rollouts as they are due
//	generator (Reasoning, Agentic, HotPrefix) --^     --Request--> messages for the bus
//
// A prompt is a list of segments. Equal segments at equal places mean equal
// tokens, so what a cache may find is known without a token: Names gives block
// names for a simulation, Tokens the token ids for a real engine.
//
// The same configuration and seed give the same workload. Nothing here waits,
// reads a clock or starts a goroutine; readers are bounded by the line and by
// the number of rows, and their errors name the line.
package workload
