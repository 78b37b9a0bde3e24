package main

import (
	"errors"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/bench/whatif"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

// Record writes a bundle, or a trace.
type Record struct {
	journalSource
	span
	Out    string `required:"" type:"path" help:"File to write; it must not exist." placeholder:"FILE"`
	Format string `enum:"bundle,mooncake" default:"bundle" help:"bundle: all that replay, why and what-if need. mooncake: the traffic alone, as JSON lines."`

	Import  string `type:"existingfile" help:"Make a bundle of this Mooncake trace instead: it runs in virtual time, its answers are modelled." placeholder:"FILE"`
	Engines int    `default:"4" help:"Engines of an imported trace." placeholder:"N"`
	Policy  string `help:"Policy of an imported trace; without one the recommended settings." placeholder:"NAME"`
	Limit   int    `help:"Take the first rows of an imported trace only; 0 = all." placeholder:"N"`
}

// Help shows examples.
func (Record) Help() string {
	return `Examples:
  rollbus record --pool math --out math.bundle
  rollbus record --file math.bundle --format mooncake --out math.jsonl
  rollbus record --import trace.jsonl --engines 8 --out trace.bundle
Prompts are in it as the hashes of their blocks only.`
}

// Run writes what the stream, or a file, holds now.
func (c *Record) Run(a *app) error {
	switch {
	case c.Import != "" && (c.Format != "bundle" || c.File != ""):
		return coded(exitUsage, "--import makes a bundle of a trace: leave --format and --file out")
	case c.Import != "":
		return c.imported(a)
	case c.Format == "mooncake":
		return c.exported(a)
	case c.File != "":
		return coded(exitUsage, "--file is a bundle already: give --format mooncake")
	case c.From != "" || c.Until != "":
		return coded(exitUsage, "a bundle holds whole journals: --from and --until are for --format mooncake, and for what reads it")
	}
	pool, err := a.pool()
	if err != nil {
		return err
	}
	nc, err := a.connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	frames, err := a.journalFrames(nc, pool, c.Dispatcher, time.Time{}, time.Time{})
	if err != nil {
		return err
	}
	return c.write(a, manifest(pool.String()), frames)
}

// create makes the file; half a one is taken away.
func (c *Record) create(put func(io.Writer) error) error {
	f, err := os.OpenFile(filepath.Clean(c.Out), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return coded(exitUsage, "%w (give another --out)", err)
	}
	if err := errors.Join(put(f), f.Close()); err != nil {
		return errors.Join(err, os.Remove(c.Out))
	}
	return nil
}

// write makes a bundle and prints what is in it.
func (c *Record) write(a *app, m journal.Manifest, frames iter.Seq2[[]byte, error]) error {
	var s journal.BundleSummary
	err := c.create(func(w io.Writer) (err error) {
		s, err = journal.WriteBundle(w, m, frames)
		return err
	})
	if err != nil {
		return err
	}
	p := a.printer()
	return p.one(s, func() error {
		return p.fields("file", c.Out, "frames", number(s.Frames), "bytes", strconv.FormatInt(s.Bytes, 10), "sha256", dash(s.SHA256))
	})
}

// exported writes the traffic of journals as a Mooncake trace.
func (c *Record) exported(a *app) error {
	from, until, err := c.bounds()
	if err != nil {
		return err
	}
	journals, _, err := c.readTold(a, from, until)
	if err != nil {
		return err
	}
	t, err := whatif.Extract(journals, from, until)
	if err != nil {
		return coded(exitNotFound, "%w", err)
	}
	rows := t.Rows()
	if t.Unfinished+t.Unplaced > 0 {
		a.say("%d rollouts are not in it: %d not whole within the span, %d never bound", t.Unfinished+t.Unplaced, t.Unfinished, t.Unplaced)
	}
	if err := c.create(func(w io.Writer) error { return workload.Write(w, rows) }); err != nil {
		return err
	}
	p := a.printer()
	return p.one(map[string]any{"file": c.Out, "rows": len(rows)}, func() error { return p.fields("file", c.Out, "rows", number(len(rows))) })
}

// imported runs a trace in virtual time and writes its journals.
func (c *Record) imported(a *app) error {
	f, err := os.Open(c.Import)
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	defer f.Close()
	w, err := workload.ReadTrace(f, workload.TraceOptions{Name: filepath.Base(c.Import), Job: "trace", Limit: c.Limit, Chained: true})
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	settings := recommended()
	if c.Policy != "" {
		settings = subjects.Settings{Policy: c.Policy, Mode: subjects.ModeEnforce}
	}
	frames, err := whatif.Import(w, settings, c.Engines)
	if err != nil {
		return coded(exitUsage, "import %s: %w", c.Import, err)
	}
	m := manifest("imported")
	m.Modelled = true
	return c.write(a, m, journal.Slice(frames))
}

func manifest(pool string) journal.Manifest {
	return journal.Manifest{Pool: pool, Program: programVersion(), Made: time.Now().UTC().Format(time.RFC3339)}
}
