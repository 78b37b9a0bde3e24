package main

// Bench measures parts of rollbus on this machine.
type Bench struct {
	Decide      BenchDecide  `cmd:"" help:"One placement: hash, match, score, pick, record."`
	Index       BenchIndex   `cmd:"" help:"The block index: inserts, lookups, memory."`
	CacheIngest BenchIngest  `cmd:"" name:"cache-ingest" help:"An agent's work on cache events."`
	Poll        BenchPoll    `cmd:"" name:"poll-overhead" help:"What an agent's looks at an engine's load cost the engine."`
	Bus         BenchBus     `cmd:"" help:"The bus beside a bare chain of the same JetStream operations."`
	Journal     BenchJournal `cmd:"" help:"Recording and replaying journals: decisions a CPU second, overhead, bytes."`
}
