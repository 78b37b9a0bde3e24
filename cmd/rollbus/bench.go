package main

// Bench measures parts of rollbus on this machine.
type Bench struct {
	Decide      BenchDecide  `cmd:"" help:"One placement: hash, match, score, pick, record."`
	Index       BenchIndex   `cmd:"" help:"The block index: inserts, lookups, memory."`
	CacheIngest BenchIngest  `cmd:"" name:"cache-ingest" help:"An agent's work on cache events."`
	Poll        BenchPoll    `cmd:"" name:"poll-overhead" help:"What an agent's looks at an engine's load cost the engine."`
	Bus         BenchBus     `cmd:"" help:"The bus beside a bare chain of the same JetStream operations."`
	Journal     BenchJournal `cmd:"" help:"Recording and replaying journals: decisions a CPU second, overhead, bytes."`

	Hot51   BenchHot51   `cmd:"" name:"hot51" help:"A burst on one hot prefix, 51 engines."`
	Tail    BenchTail    `cmd:"" help:"A step of reasoning rollouts with a long tail, on engines of two speeds."`
	Agentic BenchAgentic `cmd:"" help:"Conversations with tools, at loads from 20 % to 120 %."`
	Trace   BenchTrace   `cmd:"" help:"A recorded trace, at loads from 20 % to 120 %."`
	Burst   BenchBurst   `cmd:"" help:"Equal requests at once, four dispatchers with views that lag."`
	Faults  BenchFaults  `cmd:"" help:"Late and lost reports, disconnects, restarts."`
	Weights BenchWeights `cmd:"" help:"Weight updates that empty every cache."`

	Canary  BenchCanary  `cmd:"" help:"One beginning whose owner is almost full: hold, seed, project."`
	Explore BenchExplore `cmd:"" help:"The protocol of owners and seeds, in every order."`
}
