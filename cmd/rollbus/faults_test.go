package main

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// scenariosOfTests reads which tests of the repository name which scenarios, in
// a comment above them or behind them.
func scenariosOfTests(t *testing.T) map[string]map[string]bool {
	t.Helper()
	function := regexp.MustCompile(`^func (\w+)\(`)
	named := regexp.MustCompile(`scenarios? ([A-Z]\d+(?:(?:, | and )[A-Z]\d+)*)`)
	one := regexp.MustCompile(`[A-Z]\d+`)
	tests := map[string]map[string]bool{}
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var pending []string
		for line := range strings.Lines(string(b)) {
			for _, m := range named.FindAllStringSubmatch(line, -1) {
				pending = append(pending, one.FindAllString(m[1], -1)...)
			}
			switch m := function.FindStringSubmatch(line); {
			case m != nil:
				if tests[m[1]] == nil {
					tests[m[1]] = map[string]bool{}
				}
				for _, s := range pending {
					tests[m[1]][s] = true
				}
				pending = nil
			case strings.HasPrefix(line, "}"):
				pending = nil
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tests
}

func TestEveryFaultOfTheTableIsTestedByTestsThatNameIt(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(docsDir, "faults.md"))
	if err != nil {
		t.Fatal(err)
	}
	tests := scenariosOfTests(t)
	test := regexp.MustCompile("`(Test\\w+)`")
	rows := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^\| ([A-Z]\d+) \|(.*)$`).FindAllStringSubmatch(string(b), -1) {
		found := test.FindAllStringSubmatch(m[2], -1)
		if len(found) == 0 {
			t.Errorf("%s: no test", m[1])
		}
		rows[m[1]] += len(found)
		for _, f := range found {
			switch scenarios, ok := tests[f[1]]; {
			case !ok:
				t.Errorf("%s: there is no test %s", m[1], f[1])
			case !scenarios[m[1]]:
				t.Errorf("%s: %s does not name it (// scenario %s), it names %v", m[1], f[1], m[1], slices.Sorted(maps.Keys(scenarios)))
			}
		}
	}
	for letter, n := range map[string]int{"F": 18, "B": 11} {
		for i := range n {
			if name := fmt.Sprintf("%s%d", letter, i+1); rows[name] == 0 {
				t.Errorf("docs/faults.md: no row for %s", name)
			}
		}
	}
}
