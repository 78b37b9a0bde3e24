package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/bench/affinity"
	"github.com/rollbus/rollbus/bench/demo/local"
	"github.com/rollbus/rollbus/subjects"
)

// Validate checks requests, or that placement by prefix works on live engines.
type Validate struct {
	File string `arg:"" optional:"" help:"Check these requests and send none: JSON Lines, one each; - is standard input."`
	Job  string `short:"j" help:"Job of requests that name none; of the requests sent to engines, validate when not given." placeholder:"NAME"`

	Engine       []string      `short:"e" sep:"," help:"Validate affinity on these engines of the pool, all that take work: name=url." placeholder:"NAME=URL"`
	Local        bool          `help:"Validate affinity on simulated engines, in a pool of this process."`
	Engines      int           `default:"2" help:"Simulated engines of --local." placeholder:"N"`
	Policy       string        `default:"projected_time" help:"Policy of the arm with affinity." placeholder:"NAME"`
	Requests     int           `default:"12" help:"Requests of each kind in each arm." placeholder:"N"`
	PromptTokens int           `default:"1152" help:"Tokens of a prompt." placeholder:"N"`
	Settle       time.Duration `default:"100ms" help:"Pause after each answer, when every engine has told that it is idle, for news of the caches to travel." placeholder:"DURATION"`
	Report       string        `type:"path" help:"Write the whole report here, as JSON." placeholder:"FILE"`
	NoProgress   bool          `help:"No progress, only the end."`
}

// Help shows examples.
func (Validate) Help() string {
	return `Examples:
  rollbus validate --local
  rollbus validate --engine e1=http://10.0.0.7:8000 --engine e2=http://10.0.0.8:8000 --report affinity.json
  rollbus validate rollouts.jsonl
  generate | rollbus validate --job math -
With engines: sends one prompt repeated, one conversation and prompts that share nothing, first with affinity off, then on, and holds every
decision against the engines' own cache counters. The pool's settings are switched for that and put back, also on Ctrl-C; send nothing else
meanwhile. Exit 1 when hits do not concentrate with affinity, do not scatter without, or differ from the answers' usage by more than a
block a request.
With a file: needs no NATS. Each problem is a line: file:line: field: what is wrong. Exit 2 when there is one.`
}

// Run checks a file or engines.
func (c *Validate) Run(a *app) error {
	ways := 0
	for _, given := range []bool{c.File != "", len(c.Engine) > 0, c.Local} {
		if given {
			ways++
		}
	}
	switch {
	case ways != 1:
		return coded(exitUsage, "validate: give a file of requests, or engines of the pool (--engine name=url, each), or --local")
	case c.File != "":
		return c.requests(a)
	}
	return c.affinity(a)
}

func (c *Validate) requests(a *app) error {
	n, err := (&Submit{File: c.File, Job: c.Job}).checkFile(a)
	if err != nil {
		return err
	}
	v := struct {
		Rollouts int `json:"rollouts"`
	}{n}
	return a.printer().one(v, func() error {
		a.say("%s: %d rollouts, all as they should be", c.File, n)
		return nil
	})
}

func (c *Validate) affinity(a *app) error {
	job := c.Job
	if job == "" {
		job = "validate"
	}
	cfg := affinity.Config{Engines: map[string]string{}, Policy: c.Policy, Job: job, Requests: c.Requests, PromptTokens: c.PromptTokens,
		Settle: c.Settle, Seed: rand.Uint64()}
	for _, spec := range c.Engine {
		name, at, ok := strings.Cut(spec, "=")
		if _, twice := cfg.Engines[name]; !ok || name == "" || twice || !strings.HasPrefix(at, "http://") && !strings.HasPrefix(at, "https://") {
			return coded(exitUsage, "validate: --engine %s: write name=url, each engine once", spec)
		}
		cfg.Engines[name] = at
	}
	// A signal ends it in order: the settings are put back.
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	nc, pool, done, err := c.pool(ctx, a, &cfg)
	if err != nil {
		return err
	}
	defer done()
	if !c.NoProgress {
		cfg.Progress = func(arm, kind string, n, of int) {
			if n == 1 || n == of {
				a.say("affinity %s, %s: %d of %d", arm, kind, n, of)
			}
		}
	}
	report, err := affinity.Run(ctx, nc, pool, cfg)
	switch {
	case ctx.Err() != nil && a.ctx.Err() == nil && err != nil:
		left := "the settings are as they were"
		if !report.Restored {
			left = err.Error()
		}
		err = fmt.Errorf("validate: %w: %s", errInterrupted, left)
	case err != nil && len(report.Arms) == 0:
		return coded(exitUsage, "validate: %w", err)
	}
	return errors.Join(c.tell(a, &report), err)
}

// pool is the pool to drive and a connection to it.
func (c *Validate) pool(ctx context.Context, a *app, cfg *affinity.Config) (*nats.Conn, subjects.Pool, func(), error) {
	if !c.Local {
		pool, err := a.pool()
		if err != nil {
			return nil, pool, nil, err
		}
		nc, err := a.connect()
		if err != nil {
			return nil, pool, nil, err
		}
		return nc, pool, nc.Close, nil
	}
	if c.Engines < 2 || c.Engines > 64 {
		return nil, subjects.Pool{}, nil, coded(exitUsage, "validate: --engines is %d: give 2 to 64", c.Engines)
	}
	settings := recommended()
	settings.Model, settings.Record = demoModel, false
	lc := local.Config{Pool: "validate", Settings: settings, Dispatchers: 1, Explain: true, Version: programVersion(),
		Log: newLog(a.stderr, logging{LogLevel: "warn"}), Layout: subjects.Layout{Budget: 1 << 30}}
	for i := range c.Engines {
		sim := simFlags{TimeScale: 5}.config(demoModel, "")
		lc.Engines = append(lc.Engines, local.Engine{Name: ordinal(i, nil), Sim: &sim})
	}
	dir, err := os.MkdirTemp("", "rollbus-validate-")
	if err != nil {
		return nil, subjects.Pool{}, nil, fmt.Errorf("folder for the streams: %w", err)
	}
	lc.NATS.Dir = dir
	p, err := local.Start(ctx, lc)
	if err != nil {
		return nil, subjects.Pool{}, nil, errors.Join(coded(exitUnavailable, "validate: %w", err), os.RemoveAll(dir))
	}
	end := func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), handBack)
		defer cancel()
		if err := errors.Join(p.Stop(stop), os.RemoveAll(dir)); err != nil {
			a.say("validate: %v", err)
		}
	}
	maps.Copy(cfg.Engines, p.Addresses())
	nc, err := p.NATS.Conn("rollbus validate")
	if err != nil {
		end()
		return nil, p.Name, nil, err
	}
	return nc, p.Name, func() { nc.Close(); end() }, nil
}

// tell writes the report and prints it.
func (c *Validate) tell(a *app, r *affinity.Report) error {
	if c.Report != "" {
		f, err := os.Create(c.Report)
		if err != nil {
			return fmt.Errorf("report: %w", err)
		}
		if err := errors.Join(printer{w: f}.json(r), f.Close()); err != nil {
			return fmt.Errorf("report %s: %w", c.Report, err)
		}
	}
	if err := a.printer().one(r, func() error { return printAffinity(a.printer(), r) }); err != nil {
		return err
	}
	if !r.OK {
		return &codedError{exitNo, errSaid}
	}
	return nil
}

func printAffinity(p printer, r *affinity.Report) error {
	n := func(v int64) string { return strconv.FormatInt(v, 10) }
	var rows [][]string
	for i := range r.Arms {
		arm := &r.Arms[i]
		for j := range arm.Phases {
			ph := &arm.Phases[j]
			for _, e := range ph.Engines {
				rows = append(rows, []string{arm.Affinity, ph.Kind, e.Engine, strconv.Itoa(e.Requests), "+" + n(e.Hits), n(e.Usage), n(e.Difference), arm.Policy, arm.Mode})
			}
		}
	}
	if err := p.table([]string{"AFFINITY", "PROMPTS", "ENGINE", ">REQUESTS", ">HIT TOKENS", ">BY USAGE", ">DIFFERENCE", "+POLICY", "+MODE"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(p.w)
	for _, e := range r.Engines {
		fmt.Fprintf(p.w, "%s  hits are from %s\n", e.Name, e.Source)
	}
	failed := r.Failed()
	for _, f := range failed {
		fmt.Fprintf(p.w, "NO  %s\n", f)
	}
	verdict := fmt.Sprintf("affinity works: with %s hits concentrate, without it they scatter, and counters agree with usage", r.Policy)
	switch {
	case r.Problem != "":
		verdict = "not finished: " + strings.ReplaceAll(r.Problem, "\n", "; ")
	case len(failed) > 0:
		verdict = "NOT AS IT SHOULD BE: see above"
	}
	_, err := fmt.Fprintf(p.w, "checked  %s\n", verdict)
	return err
}
