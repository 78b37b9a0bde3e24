package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/rollbus/rollbus/dispatcher"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/workeragent"
	"github.com/rollbus/rollbus/workeragent/engine"
)

var updateDocs = flag.Bool("update", false, "write docs/metrics.md anew")

// metricRow is one family of a registry.
type metricRow struct{ name, kind, unit, labels, help string }

var descForm = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: "(.*)", unit: "[^"]*", constLabels: \{[^}]*\}, variableLabels: \{([^}]*)\}\}$`)

// described lists what a collector describes, whether it has samples or not.
func described(t *testing.T, c interface{ Describe(chan<- *prometheus.Desc) }) []metricRow {
	t.Helper()
	descs := make(chan *prometheus.Desc, 1024)
	c.Describe(descs)
	close(descs)
	var rows []metricRow
	for d := range descs {
		m := descForm.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("a description that is not understood: %s", d)
		}
		if strings.HasPrefix(m[1], "go_") || strings.HasPrefix(m[1], "process_") {
			continue
		}
		rows = append(rows, metricRow{name: m[1], labels: strings.ReplaceAll(m[3], ",", ", "), help: strings.ReplaceAll(m[2], `\"`, `"`)})
	}
	return rows
}

// typed adds kinds, from samples where there are some, and units, from names.
func typed(t *testing.T, rows []metricRow, g prometheus.Gatherer) []metricRow {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]string{}
	for _, f := range families {
		kinds[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	units := []string{"seconds", "bytes", "messages", "tokens", "answers"}
	for i := range rows {
		r := &rows[i]
		if r.kind = kinds[r.name]; r.kind == "" {
			r.kind = "gauge"
			if strings.HasSuffix(r.name, "_total") {
				r.kind = "counter"
			}
		}
		if (r.kind == "counter") != strings.HasSuffix(r.name, "_total") {
			t.Errorf("%s is a %s: counters, and only they, end in _total", r.name, r.kind)
		}
		base := strings.TrimSuffix(r.name, "_total")
		r.unit = "count"
		for _, u := range units {
			if strings.HasSuffix(base, "_"+u) {
				r.unit = u
			}
		}
		if r.help == "" || !strings.HasSuffix(r.help, ".") {
			t.Errorf("%s: help %q is no sentence", r.name, r.help)
		}
	}
	slices.SortFunc(rows, func(a, b metricRow) int { return strings.Compare(a.name, b.name) })
	return rows
}

// coreRows are the counters of the decision core: a family comes to be when it
// is first counted, so that they are found in its source.
func coreRows(t *testing.T) []metricRow {
	t.Helper()
	shell, err := os.ReadFile("../../dispatcher/metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	help := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\t"([a-z_]+)":\s+"(.*)",$`).FindAllStringSubmatch(string(shell), -1) {
		help[m[1]] = m[2]
	}
	files, err := filepath.Glob("../../dispatcher/core/*.go")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]metricRow{}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\bcount\("([a-z_]+)"`).FindAllStringSubmatch(string(b), -1) {
			h := help[m[1]]
			if h == "" {
				h = "Counted by the decision core: " + m[1] + "."
			}
			seen[m[1]] = metricRow{name: "rollbus_dispatcher_core_" + m[1] + "_total", kind: "counter", unit: "count", labels: "label", help: h}
		}
	}
	if len(seen) < 5 {
		t.Fatalf("only %d counters of the core were found", len(seen))
	}
	var rows []metricRow
	for _, r := range seen {
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b metricRow) int { return strings.Compare(a.name, b.name) })
	return rows
}

func table(rows []metricRow) string {
	var b strings.Builder
	b.WriteString("| name | type | unit | labels | what |\n|---|---|---|---|---|\n")
	for _, r := range rows {
		labels := r.labels
		if labels == "" {
			labels = "-"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", r.name, r.kind, r.unit, labels, strings.ReplaceAll(r.help, "|", "\\|"))
	}
	return b.String()
}

// docs/metrics.md is what the registries say. After a change:
//
//	go test ./cmd/rollbus -run MetricsPage -update
func TestTheMetricsPageIsWhatTheRegistriesSay(t *testing.T) {
	nc := natstest.Server(t).Conn(t)
	recorder, err := journal.NewWriter(journal.Options{Pool: "default", Core: core.Config{Dispatcher: "d1"}, SelfCheck: &journal.SelfCheck{},
		Publish: func(context.Context, string, []byte) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	d, err := dispatcher.New(dispatcher.Config{Pool: "default", Name: "d1", Recorder: recorder}, nc)
	if err != nil {
		t.Fatal(err)
	}
	adapter, err := engine.NewOpenAI(engine.OpenAIConfig{URL: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	a, err := workeragent.New(workeragent.Config{Pool: "default", Name: "a1", Engines: []workeragent.EngineConfig{{Name: "e1", Adapter: adapter}}}, nc)
	if err != nil {
		t.Fatal(err)
	}
	ofAgent := prometheus.NewPedanticRegistry()
	if err := ofAgent.Register(a.Collector()); err != nil {
		t.Fatal(err)
	}
	reg := d.Registry()
	ofCore := func(r metricRow) bool { return strings.HasPrefix(r.name, "rollbus_dispatcher_core_") } // in a table of their own
	page := `# Metrics

Generated from the registries of the programs; a test keeps it in step. Each daemon serves them at /metrics on --http, beside
those of the Go runtime (go_*) and the process (process_*). Labels take values of closed lists, and names of the agent's own engines.

## Dispatcher

` + table(slices.DeleteFunc(typed(t, described(t, reg), reg), ofCore)) + `
### Its decision core

A family appears when it is counted for the first time, but requeues, which is there at once. The label says why, or how it was answered.

` + table(coreRows(t)) + `
## Agent

` + table(typed(t, described(t, a.Collector()), ofAgent))
	const name = docsDir + "/metrics.md"
	if *updateDocs {
		if err := os.WriteFile(name, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(have), page); diff != "" {
		t.Errorf("docs/metrics.md is not what the registries say (-page +registries), write it anew with -update:\n%s", diff)
	}
}

// What the operating page tells people to watch exists.
func TestEveryMetricThatTheDocumentationNamesExists(t *testing.T) {
	known, err := os.ReadFile(docsDir + "/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(docsDir + "/*.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, name := range pages {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		// rollbus_x_{a,b}_total are two; {label="value"} is none.
		for _, m := range regexp.MustCompile("`(rollbus_(?:dispatcher|agent)_[a-z_]+)(?:\\{([a-z_,]+)\\}([a-z_]*))?").FindAllStringSubmatch(string(b), -1) {
			for word := range strings.SplitSeq(m[2], ",") {
				n++
				if metric := m[1] + word + m[3]; !strings.Contains(string(known), "`"+metric+"`") {
					t.Errorf("%s: there is no metric %s", filepath.Base(name), metric)
				}
			}
		}
	}
	if n < 50 {
		t.Errorf("only %d metrics were found in the pages", n)
	}
}
