package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const docsDir = "../../docs"

// fence is a fenced block of a page.
type fence struct {
	info string // what stands behind the fence
	line int
	text string
}

// The blocks that are run, by what stands behind their fence:
//
//	sh up    starts a pool in the background, on free ports, until the page ends
//	sh run   run by bash, must end with 0, its output in the test's log
//	sh http  lines of `curl -fs URL`, done by this test
//	sh nats  for the nats tool: run by `make test-nats-cli`
func fences(t *testing.T, page string) []fence {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(docsDir, page))
	if err != nil {
		t.Fatal(err)
	}
	var out []fence
	var open *fence
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		switch rest, mark := strings.CutPrefix(strings.TrimRight(line, "\n"), "```"); {
		case mark && open == nil:
			open = &fence{info: rest, line: n}
		case mark:
			out, open = append(out, *open), nil
		case open != nil:
			open.text += line
		}
	}
	if open != nil {
		t.Fatalf("%s:%d: the block is not closed", page, open.line)
	}
	return out
}

// page runs the blocks of one page in a folder of its own.
type page struct {
	t    *testing.T
	name string
	dir  string
	env  []string
	at   addresses
}

func newPage(t *testing.T, name string) *page {
	dir := t.TempDir()
	p := &page{t: t, name: name, dir: dir}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, envPrefix) && !strings.HasPrefix(kv, "NATS_") && !strings.HasPrefix(kv, "XDG_") {
			p.env = append(p.env, kv)
		}
	}
	p.env = append(p.env, "HOME="+dir)
	return p
}

// up starts the pool that a block starts, on free ports.
func (p *page) up(f fence) {
	p.t.Helper()
	words := strings.Fields(f.text)
	if len(words) < 2 || words[0] != "rollbus" || words[1] != "up" {
		p.t.Fatalf("%s:%d: no `rollbus up` in it", p.name, f.line)
	}
	if i := slices.Index(words, "--http"); i >= 0 {
		words[i+1] = "127.0.0.1:0"
	}
	ready := filepath.Join(p.dir, "up.json")
	words = append(words[1:], "--listen", "127.0.0.1:0", "--ready-file", ready, "--time-scale", "50")
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	cmd := exec.CommandContext(ctx, "rollbus", words...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	var log bytes.Buffer
	cmd.Env, cmd.Dir, cmd.Stderr = p.env, p.dir, &log
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		cancel()
		if err := cmd.Wait(); err != nil && cmd.ProcessState.ExitCode() != 0 {
			p.t.Errorf("%s:%d: up: %v\n%s", p.name, f.line, err, log.String())
		}
	})
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(awaitWithin); ; {
		if b, err := os.ReadFile(ready); err == nil {
			if err := json.Unmarshal(b, &p.at); err != nil {
				p.t.Fatal(err)
			}
			p.env = append(p.env, "ROLLBUS_SERVER="+p.at.NATS, "NATS_URL="+p.at.NATS)
			return
		}
		select {
		case <-tick.C:
		case <-late:
			p.t.Fatalf("%s:%d: it is not up within %v\n%s", p.name, f.line, awaitWithin, log.String())
		}
	}
}

func (p *page) run(f fence) string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", f.text)
	cmd.Env, cmd.Dir = p.env, p.dir
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		p.t.Fatalf("%s:%d: %v\n%s\n%s", p.name, f.line, err, f.text, out)
	}
	p.t.Logf("%s:%d:\n%s", p.name, f.line, out)
	return string(out)
}

func (p *page) http(f fence) {
	p.t.Helper()
	for line := range strings.Lines(f.text) {
		url, ok := strings.CutPrefix(strings.TrimSpace(line), "curl -fs http://127.0.0.1:9470/")
		if !ok {
			p.t.Fatalf("%s:%d: %q is not understood here", p.name, f.line, line)
		}
		r, err := http.Get(p.at.HTTP + "/" + url)
		if err != nil {
			p.t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || len(body) == 0 {
			p.t.Errorf("%s:%d: %s: %s %v %.300s", p.name, f.line, url, r.Status, err, body)
		}
	}
}

func TestEveryCommandOfTheDocumentationRuns(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(docsDir, "*.md"))
	if err != nil || len(pages) < 5 {
		t.Fatalf("pages: %v %v", pages, err)
	}
	ran := map[string]int{}
	for _, name := range pages {
		name = filepath.Base(name)
		t.Run(name, func(t *testing.T) {
			p := newPage(t, name)
			for _, f := range fences(t, name) {
				switch f.info {
				case "sh up":
					p.up(f)
				case "sh run":
					p.run(f)
				case "sh http":
					p.http(f)
				case "sh", "bash", "shell":
					t.Errorf("%s:%d: say `sh run`, or leave the language away when it cannot be run here", name, f.line)
				}
				ran[f.info]++
			}
		})
	}
	if ran["sh up"] < 2 || ran["sh run"] < 10 || ran["sh http"] < 1 || ran["sh nats"] < 4 {
		t.Errorf("blocks that were found: %v: the pages are not read as they should be", ran)
	}
}

func TestTheExitCodesOfTheDocumentationAreThoseOfTheProgram(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(docsDir, "operate.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile(`(?m)^\| (\d+) \| (.*) \|$`).FindAllStringSubmatch(string(b), -1)
	want := "Exit codes:\n"
	for _, r := range rows {
		want += fmt.Sprintf("  %-3s  %s\n", r[1], r[2])
	}
	if want != exitCodes {
		t.Errorf("docs/operate.md says\n%sthe program says\n%s", want, exitCodes)
	}
}

func TestTheDocumentedSchemaIsTheOneInTheProgram(t *testing.T) {
	for _, f := range [][2]string{{filepath.Join(docsDir, "schema", "rollout.json"), "../../subjects/schema/rollout.json"}} {
		got, err := os.ReadFile(f[0])
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(f[1])
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not %s: copy it", f[0], f[1])
		}
	}
}

// Every command that a page or help names exists.
func TestTheDocumentationNamesOnlyCommandsThatExist(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(docsDir, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	command := regexp.MustCompile("`rollbus ((?:[a-z-]+ ?)+)")
	for _, name := range append(files, "../../README.md") {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range command.FindAllStringSubmatch(string(b), -1) {
			words := strings.Fields(m[1])
			var out, msg bytes.Buffer
			if words[0] == "help" {
				continue
			}
			if code := run(t.Context(), []string{words[0], "--help"}, nil, strings.NewReader(""), &out, &msg); code != exitOK {
				t.Errorf("%s: `rollbus %s`: there is no command %s", filepath.Base(name), strings.TrimSpace(m[1]), words[0])
			}
		}
	}
}
