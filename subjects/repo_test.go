package subjects_test

import (
	"go/parser"
	gotoken "go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Every program, also outside this repository, depends on this package: it must
// stay light.
func TestThisPackageDependsOnNatsGoAndTheBlockHashAlone(t *testing.T) {
	allowed := map[string]bool{
		"github.com/nats-io/nats.go":                    true,
		"github.com/nats-io/nats.go/jetstream":          true,
		"github.com/cespare/xxhash/v2":                  true,
		"github.com/rollbus/rollbus/subjects/blockhash": true,
	}
	seen := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		seen++
		f, err := parser.ParseFile(gotoken.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, i := range f.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			if strings.Contains(p, ".") && !allowed[p] {
				t.Errorf("%s imports %s", path, p)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 10 {
		t.Fatalf("only %d files were looked at", seen)
	}
}
