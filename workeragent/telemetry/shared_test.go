//go:build shared

package telemetry_test

import (
	"cmp"
	"os"
	"path/filepath"
	"testing"
)

// sharedData finds the folder of shared fixtures: ROLLBUS_SHARED, else the
// folder "shared" beside the repository.
func sharedData(t *testing.T) string {
	t.Helper()
	if dir := cmp.Or(os.Getenv("ROLLBUS_SHARED"), os.Getenv("SHARED_DIR")); dir != "" {
		return filepath.Join(dir, "data")
	}
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, "..", "shared", "data")
		}
		up := filepath.Dir(dir)
		if up == dir {
			t.Fatal("no go.mod above the test: set ROLLBUS_SHARED")
		}
		dir = up
	}
}

func TestEverySharedFixtureReadsAsExpected(t *testing.T) {
	checkDir(t, filepath.Join(sharedData(t), "engine"))
}

func TestEverySharedLoadMessageReadsAsExpected(t *testing.T) {
	checkLoadMessages(t, filepath.Join(sharedData(t), "kvevents", "sglang_load.json"))
}
