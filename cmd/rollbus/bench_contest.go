package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
)

// contestFlags are those of every simulated comparison.
type contestFlags struct {
	Seeds      int    `default:"10" help:"Workloads to run everybody on." placeholder:"N"`
	Quick      bool   `help:"A small workload: to see that it works, not to conclude."`
	HTML       string `name:"html" type:"path" help:"Write a report with pictures." placeholder:"FILE"`
	Strict     bool   `help:"Exit 1 when a target is missed."`
	NoProgress bool   `help:"No progress, only the end."`
}

const maxSeeds = 1000

// compare runs one comparison and prints it.
func (c *contestFlags) compare(a *app, name string, run func(context.Context, contest.Config) (*contest.Report, error)) error {
	if c.Seeds < 1 || c.Seeds > maxSeeds {
		return coded(exitUsage, "bench %s: --seeds 1 to %d", name, maxSeeds)
	}
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	cfg := contest.Config{Seeds: c.Seeds, Quick: c.Quick}
	end := c.show(a, &cfg)
	report, err := run(ctx, cfg)
	end()
	switch {
	case ctx.Err() != nil && a.ctx.Err() == nil:
		return fmt.Errorf("bench %s: %w", name, errInterrupted)
	case err != nil:
		return coded(exitNo, "bench %s: %w", name, err)
	}
	if c.HTML != "" {
		if err := writeReport(c.HTML, report); err != nil {
			return fmt.Errorf("bench %s: %w", name, err)
		}
		a.say("report with pictures: %s", c.HTML)
	}
	if err := a.printer().one(report, func() error { return printContest(a.printer(), report) }); err != nil {
		return err
	}
	if missed := report.Missed(); c.Strict && len(missed) > 0 {
		return coded(exitNo, "bench %s: %d of %d targets missed", name, len(missed), len(report.Targets))
	}
	return nil
}

// show sets up progress; end takes the bar away.
func (c *contestFlags) show(a *app, cfg *contest.Config) (end func()) {
	switch {
	case c.NoProgress:
		return func() {}
	case !onTerminal(a.stderr):
		last := time.Now()
		cfg.Progress = func(done, total int, what string) {
			if time.Since(last) >= lineEvery {
				last = time.Now()
				a.say("%d of %d runs done; the last: %s", done, total, what)
			}
		}
		return func() {}
	}
	bar := progressbar.NewOptions(1, progressbar.OptionSetWriter(a.stderr), progressbar.OptionSetWidth(32),
		progressbar.OptionShowCount(), progressbar.OptionClearOnFinish(), progressbar.OptionSetPredictTime(false))
	cfg.Progress = func(done, total int, what string) {
		bar.ChangeMax(total)
		bar.Describe(what)
		_ = bar.Set(min(done, total-1)) // a bar that cannot be drawn is no reason to stop, and a full one closes itself
	}
	return func() { _ = bar.Finish() }
}

func writeReport(path string, r *contest.Report) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(r.WriteHTML(f), f.Close())
}

func printContest(p printer, r *contest.Report) error {
	fmt.Fprintf(p.w, "%s\n\n", strings.ToUpper(r.Workload[:1])+r.Workload[1:])
	head := []string{"CONTENDER", "KIND", "SETTING"}
	for _, c := range r.Columns {
		head = append(head, ">"+strings.ToUpper(contest.FigureName(c)))
	}
	var rows [][]string
	for _, row := range r.Contenders {
		cells := []string{row.Name, row.Kind, row.Setting}
		for _, c := range r.Columns {
			cells = append(cells, contest.FigureText(c, row.Figures[c]))
		}
		rows = append(rows, cells)
	}
	if err := p.table(head, rows); err != nil {
		return err
	}
	rows = rows[:0]
	for _, t := range r.Targets {
		verdict := "holds"
		if !t.Met {
			verdict = "MISSED: " + t.Why
		}
		got := strconv.FormatFloat(t.Got, 'g', 4, 64)
		if t.CI95 > 0 {
			got += " ±" + strconv.FormatFloat(t.CI95, 'g', 2, 64)
		}
		rows = append(rows, []string{t.Name, t.Want, got, verdict})
	}
	if len(rows) > 0 {
		fmt.Fprintln(p.w)
		if err := p.table([]string{"TARGET", "WANT", ">MEASURED", "VERDICT"}, rows); err != nil {
			return err
		}
	}
	for _, n := range r.Notes {
		fmt.Fprintf(p.w, "\n%s", n)
	}
	_, err := fmt.Fprintf(p.w, "\n%s\n", r.Conclusion)
	return err
}

// BenchHot51 and its like are one comparison each.
type (
	BenchHot51   struct{ contestFlags }
	BenchTail    struct{ contestFlags }
	BenchAgentic struct{ contestFlags }
	BenchBurst   struct{ contestFlags }
	BenchFaults  struct{ contestFlags }
	BenchWeights struct{ contestFlags }
)

// contestHelp is what all of them say.
const contestHelp = `Simulated in virtual time: the production core and a model of the bus for our policies, public routers for the baselines
(each in the best of three settings, chosen on other seeds), one engine model under all. Every figure is a mean over the
seeds with its 95 % interval. The same seeds give the same figures. docs/bench.md has what was seen.`

// Help shows examples.
func (BenchHot51) Help() string {
	return "Examples:\n  rollbus bench hot51\n  rollbus bench hot51 -o json\n  rollbus bench hot51 --html hot51.html\n" + contestHelp
}

// Run compares and prints.
func (c *BenchHot51) Run(a *app) error { return c.compare(a, "hot51", contest.Hot51) }

// Help shows examples.
func (BenchTail) Help() string {
	return "Examples:\n  rollbus bench tail\n  rollbus bench tail --html tail.html\n" + contestHelp
}

// Run compares and prints.
func (c *BenchTail) Run(a *app) error { return c.compare(a, "tail", contest.Tail) }

// Help shows examples.
func (BenchAgentic) Help() string {
	return "Examples:\n  rollbus bench agentic\n  rollbus bench agentic --seeds 3 -o json\n" + contestHelp
}

// Run compares and prints.
func (c *BenchAgentic) Run(a *app) error { return c.compare(a, "agentic", contest.Agentic) }

// Help shows examples.
func (BenchBurst) Help() string {
	return "Examples:\n  rollbus bench burst\n  rollbus bench burst -o json\n" + contestHelp
}

// Run compares and prints.
func (c *BenchBurst) Run(a *app) error { return c.compare(a, "burst", contest.Burst) }

// Help shows examples.
func (BenchFaults) Help() string {
	return "Examples:\n  rollbus bench faults\n  rollbus bench faults --html faults.html\n" + contestHelp
}

// Run compares and prints.
func (c *BenchFaults) Run(a *app) error { return c.compare(a, "faults", contest.Faults) }

// Help shows examples.
func (BenchWeights) Help() string {
	return "Examples:\n  rollbus bench weights\n  rollbus bench weights -o json\n" + contestHelp
}

// Run compares and prints.
func (c *BenchWeights) Run(a *app) error { return c.compare(a, "weights", contest.Weights) }

// BenchTrace compares on a recorded trace.
type BenchTrace struct {
	contestFlags
	File    string `type:"existingfile" help:"Trace, Mooncake JSON Lines; without one a generated sample." placeholder:"FILE"`
	Format  string `default:"mooncake" enum:"mooncake,episodes" help:"Format of the file: mooncake, or episodes ({group, stream, prompt_len, out_lens, obs_lens})." placeholder:"NAME"`
	Engines int    `default:"8" help:"Simulated engines." placeholder:"N"`
	Rows    int    `default:"2000" help:"Rollouts of each seed, a stretch of the trace." placeholder:"N"`
	KV      int    `name:"kv-tokens" default:"400000" help:"Cache of an engine, tokens: an 8B model on 80 GB; more stands for a larger machine, or a second tier." placeholder:"N"`
}

// Help shows examples.
func (BenchTrace) Help() string {
	return "Examples:\n  rollbus bench trace\n  rollbus bench trace --file mooncake_trace.jsonl\n  rollbus bench trace --file episodes.jsonl --format episodes\n" + contestHelp
}

// Run compares and prints.
func (c *BenchTrace) Run(a *app) error {
	if c.Engines < 1 || c.Engines > 256 || c.Rows < 1 || c.Rows > workload.MaxRows || c.KV < 1<<18 || c.KV > model.MaxKVTokens {
		return coded(exitUsage, "bench trace: --engines 1 to 256, --rows 1 to %d, --kv-tokens %d to %d", workload.MaxRows, 1<<18, model.MaxKVTokens)
	}
	t := contest.Trace{Name: "sample", Episodes: c.Format == "episodes", Engines: c.Engines, Rows: c.Rows, KVTokens: c.KV,
		Open: func() (io.ReadCloser, error) { return io.NopCloser(workload.Sample()), nil }}
	if c.File != "" {
		t.Name, t.Open = filepath.Base(c.File), func() (io.ReadCloser, error) { return os.Open(c.File) }
	}
	return c.compare(a, "trace", t.Bench)
}
