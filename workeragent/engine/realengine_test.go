//go:build realengine

package engine

import (
	"os"
	"testing"
	"time"
)

// TestARealEngineConforms runs the conformance suite against the server that
// ROLLBUS_REAL_ENGINE names, as in http://127.0.0.1:8000 or vllm=http://...; it
// generates some thousand tokens there. make test-real-engine runs it, and says
// so when it does not.
func TestARealEngineConforms(t *testing.T) {
	spec := os.Getenv("ROLLBUS_REAL_ENGINE")
	if spec == "" {
		t.Fatal("ROLLBUS_REAL_ENGINE names no engine: give its address, or use make test-real-engine")
	}
	a, d, err := Open(t.Context(), spec, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	t.Logf("%s %s, model %s: %q", d.Kind, d.Version, d.Model, d.Found)
	for _, c := range Conformance(t.Context(), a, ConformanceConfig{CheckTimeout: time.Minute}) {
		t.Logf("%-45s %-15s %8.1f ms  %s", c.Name, c.Verdict, c.MS, c.Detail)
		if c.Verdict == Broken {
			t.Errorf("%s: %s", c.Name, c.Detail)
		}
	}
}
