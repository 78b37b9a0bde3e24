package main

// Bench measures parts of rollbus on this machine.
type Bench struct {
	Bus BenchBus `cmd:"" help:"The bus beside a bare chain of the same JetStream operations."`
}
