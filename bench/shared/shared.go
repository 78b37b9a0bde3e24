// Package shared finds the recorded traces and captures that are not part of the
// repository, for tests with the build tag shared.
package shared

import (
	"os"
	"path/filepath"
	"testing"
)

// Path is a file or folder of the recordings: below SHARED_DIR, else below the
// folder "shared" beside the repository. A test ends when it is not there.
func Path(t testing.TB, below ...string) string {
	t.Helper()
	dir := os.Getenv("SHARED_DIR")
	if dir == "" {
		dir = filepath.Join(root(t), "..", "shared")
	}
	path := filepath.Join(append([]string{dir, "data"}, below...)...)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: put the recordings there, or name their folder with SHARED_DIR", err)
	}
	return path
}

// root is the repository's.
func root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			t.Fatal("no go.mod above the test: name the folder of the recordings with SHARED_DIR")
		}
		dir = up
	}
}
