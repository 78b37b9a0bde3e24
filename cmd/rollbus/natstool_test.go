//go:build natscli

package main

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// natsTool is the version that the documentation is tried with.
const natsTool = "github.com/nats-io/natscli/nats@v0.5.1"

// The commands of docs/submit.md, by the real tool. `make test-nats-cli` runs
// it: building the tool takes most of a minute where it was never built.
func TestARolloutIsSubmittedAndReadWithNothingButTheNatsTool(t *testing.T) {
	bin := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	install := exec.CommandContext(ctx, "go", "install", natsTool)
	install.Dir = bin // away from our module
	install.Env = append(os.Environ(), "GOBIN="+bin, "GOFLAGS=")
	begin := time.Now()
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("go install %s: %v\n%s", natsTool, err, out)
	}
	t.Logf("built in %v", time.Since(begin).Round(time.Second))

	p := newPage(t, "submit.md")
	p.env = append(p.env, "PATH="+bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
	p.up(fence{text: "rollbus up --engines 1"})
	var blocks []fence
	for _, f := range fences(t, p.name) {
		if f.info == "sh nats" {
			blocks = append(blocks, f)
		}
	}
	if len(blocks) != 5 {
		t.Fatalf("%d blocks for the nats tool, want 5: submit, take, look, received, cancel", len(blocks))
	}
	// sees tells whether our own tool finds the answer unread.
	sees := func() bool {
		out := p.run(fence{text: "rollbus results --job math -o jsonl"})
		return strings.Contains(out, `"id":"0001"`)
	}
	p.run(blocks[0])
	answer := p.run(blocks[1])
	line := answer[strings.Index(answer, `{"schema_version"`):]
	var r struct{ ID, Status string }
	if err := json.NewDecoder(strings.NewReader(line)).Decode(&r); err != nil || r.ID != "0001" || r.Status != "completed" && r.Status != "truncated" {
		t.Errorf("the answer: %+v, %v\n%s", r, err, answer)
	}
	if out := p.run(blocks[2]); !strings.Contains(out, "RESULTS_default#1") || !strings.Contains(out, "Rollout-Status") {
		t.Errorf("looking at the answer:\n%s", out)
	}
	if !sees() {
		t.Error("an answer that was taken and not received must stay unread")
	}
	p.run(blocks[3])
	if sees() {
		t.Error("an answer that was received is still unread")
	}
	if out := p.run(blocks[4]); !strings.Contains(out, `"id":"0001"`) {
		t.Errorf("RECORD does not show the submit:\n%s", out)
	}
}
