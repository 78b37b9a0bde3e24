package fakes

import (
	"testing"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
)

// Start runs a small and quick fake vLLM for a test: four requests at once, a
// cache of 32,768 tokens in blocks of 16, events that are published, replayed and
// advertised. It ends with the test.
func Start(t testing.TB, change ...func(*VLLMConfig)) *Fake {
	t.Helper()
	cfg := VLLMConfig{
		Engine: engine.Config{Model: "m", TimeScale: 50, Engine: model.Config{MaxRunning: 4, BlockTokens: 16, KVTokens: 1 << 15}},
		Events: &EventsConfig{}, Sources: true,
	}
	for _, f := range change {
		f(&cfg)
	}
	f, err := VLLM(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}
