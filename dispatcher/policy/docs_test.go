package policy_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/dispatcher/policy"
)

var update = flag.Bool("update", false, "write docs/policies.md's table of knobs")

// The table of knobs in docs/policies.md is the one in the code; its reasons too.
func TestThePolicyPageSaysWhatTheCodeDoes(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "policies.md")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const mark = "| knob | policy | unit | default | bounds | what it does |\n"
	head, _, ok := strings.Cut(string(b), mark)
	if !ok {
		t.Fatalf("%s has no table of knobs: it begins with %q", path, mark)
	}
	var table strings.Builder
	table.WriteString(mark + "|---|---|---|---|---|---|\n")
	for _, k := range policy.Knobs() {
		who := k.Policy
		if who == "" {
			who = "all"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %v | %v to %v | %s |\n", k.Name, who, k.Unit, k.Default, k.Min, k.Max, k.Doc)
	}
	want := head + table.String()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want != string(b) {
		t.Errorf("%s is behind the code: go test ./dispatcher/policy -run PolicyPage -update", path)
	}
	for _, r := range policy.Reasons() {
		if !strings.Contains(head, "`"+string(r)+"`") {
			t.Errorf("%s does not name the reason %s", path, r)
		}
	}
}
