// Package faketest starts fakes of engines for tests.
package faketest

import (
	"testing"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/bench/engine/model"
)

// VLLM runs a small and quick fake vLLM: four requests at once, a cache of 32,768
// tokens in blocks of 16, events that are published, replayed and advertised. It
// ends with the test.
func VLLM(t testing.TB, change ...func(*fakes.VLLMConfig)) *fakes.Fake {
	t.Helper()
	cfg := fakes.VLLMConfig{
		Engine: engine.Config{Model: "m", TimeScale: 50, Engine: model.Config{MaxRunning: 4, BlockTokens: 16, KVTokens: 1 << 15}},
		Events: &fakes.EventsConfig{}, Sources: true,
	}
	for _, f := range change {
		f(&cfg)
	}
	f, err := fakes.VLLM(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}
