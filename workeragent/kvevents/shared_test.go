//go:build shared

package kvevents

import (
	"cmp"
	"os"
	"path/filepath"
	"testing"
)

// TestEverySharedFixtureReadsAsExpected reads the folder of shared fixtures:
// ROLLBUS_SHARED, else the folder "shared" beside the repository.
func TestEverySharedFixtureReadsAsExpected(t *testing.T) {
	dir := cmp.Or(os.Getenv("ROLLBUS_SHARED"), os.Getenv("SHARED_DIR"))
	if dir == "" {
		root, err := os.Getwd()
		for err == nil {
			if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
				break
			}
			if root == filepath.Dir(root) {
				t.Fatal("no go.mod above the test: set ROLLBUS_SHARED")
			}
			root = filepath.Dir(root)
		}
		dir = filepath.Join(root, "..", "shared")
	}
	dir = filepath.Join(dir, "data", "kvevents")
	t.Run("payloads", func(t *testing.T) { checkPayloads(t, dir) })
	t.Run("frames", func(t *testing.T) { checkFrames(t, dir) })
	t.Run("sequences", func(t *testing.T) { checkStories(t, dir) })
	t.Run("vectors", func(t *testing.T) { checkVectors(t, dir) })
}
