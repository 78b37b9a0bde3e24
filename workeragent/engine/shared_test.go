//go:build shared

package engine

import (
	"cmp"
	"os"
	"path/filepath"
	"testing"
)

// TestSharedStreams reads the recordings of the shared folder: ROLLBUS_SHARED,
// else the folder "shared" beside the repository.
func TestSharedStreams(t *testing.T) {
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
	dir = filepath.Join(dir, "data", "streams")
	checkSGLangStreams(t, dir)
	ours := filepath.Join("testdata", "streams")
	files, err := filepath.Glob(filepath.Join(dir, "*.[sj]*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files { // the rest is read by the tests of testdata: be sure it is the same
		a, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(ours, filepath.Base(f)))
		if err != nil || string(a) != string(b) {
			t.Errorf("%s is not what testdata has: %v", filepath.Base(f), err)
		}
	}
}
