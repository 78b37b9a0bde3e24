//go:build shared

package engine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/rollbus/rollbus/bench/shared"
)

func TestEverySharedStreamReadsAsExpected(t *testing.T) {
	dir := shared.Path(t, "streams")
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
