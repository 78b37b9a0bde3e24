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
	before, rest, ok := strings.Cut(head, beginPicture)
	_, after, ok2 := strings.Cut(rest, endPicture)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the picture: it stands between %s and %s", path, beginPicture, endPicture)
	}
	want := before + beginPicture + worth(t) + endPicture + after + table.String()
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

const (
	beginPicture = "<!-- picture -->\n"
	endPicture   = "<!-- /picture -->\n"
)

// worth draws where a prompt goes that one engine has cached and another,
// idle, has not, by how many requests run at the holder.
func worth(t *testing.T) string {
	var b strings.Builder
	b.WriteString("```text\nrunning at the holder  0    5    10   15   20   25   30   35\n")
	for _, name := range policy.Policies() {
		fmt.Fprintf(&b, "%-22s ", name)
		d := enforcing(t, name, nil)
		for n := range 38 {
			cs := engines(2)
			cs[0].ReservedRequests, cs[0].ReservedTokens, cs[0].ReservedPromptTokens = n, int64(n)*4608, int64(n)*4096
			cs[0].LastPicked = 1 // an idle holder loses a tie, unless its cache breaks it
			cs = reports(cs)
			cs[0].MatchGPU = 4096
			in := input(cs, request())
			in.Request.PromptTokens = 4096
			if got, _ := decide(d, in); got == "e0" {
				b.WriteByte('H')
			} else {
				b.WriteByte('.')
			}
		}
		b.WriteByte('\n')
	}
	b.WriteString("```\n")
	return b.String()
}
