package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/rollbus/rollbus/bench/explore"
)

// BenchExplore checks the protocol of owners and seeds exhaustively.
type BenchExplore struct {
	States     int    `default:"130000" help:"Different states of each scene, 1000 to 20000000; what is beyond is not looked at." placeholder:"N"`
	Scene      string `help:"Only this scene." placeholder:"NAME"`
	NoProgress bool   `help:"No progress, only the end."`
}

// exploration is what bench explore tells.
type exploration struct {
	Scenes  []explore.Result `json:"scenes"`
	Mutants []explore.Result `json:"mutants"` // each with a guard or a check taken away: broken is what it should be
	Passed  bool             `json:"passed"`
}

// Help shows examples.
func (BenchExplore) Help() string {
	return `Examples:
  rollbus bench explore
  rollbus bench explore --states 1500000 --scene dying
  rollbus bench explore -o json
Every order in which a few production cores, engines and rollouts can act, with crashes, lost and late messages, returned and
failed runs, restarts, evictions and TTLs, breadth first up to the bound; then the same with one guard or check taken away at
a time, which must be found. Exit code 1 when a rule is broken, or when a mutant is not found. docs/owners.md has the rules.`
}

// Run explores and prints.
func (c *BenchExplore) Run(a *app) error {
	if c.States < 1000 || c.States > 20_000_000 {
		return coded(exitUsage, "bench explore: --states 1000 to 20000000")
	}
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	x := exploration{Passed: true}
	for _, sc := range explore.Scenes() {
		if c.Scene == "" || c.Scene == sc.Name {
			sc.MaxStates = c.States
			if err := c.add(ctx, a, sc, &x.Scenes); err != nil {
				return err
			}
		}
	}
	if len(x.Scenes) == 0 {
		return coded(exitUsage, "bench explore: there is no scene %q", c.Scene)
	}
	for _, sc := range explore.Mutants() {
		if c.Scene == "" {
			if err := c.add(ctx, a, sc, &x.Mutants); err != nil {
				return err
			}
		}
	}
	for _, r := range x.Scenes {
		x.Passed = x.Passed && r.Broken == ""
	}
	for _, r := range x.Mutants {
		x.Passed = x.Passed && r.Broken != ""
	}
	if err := a.printer().one(x, func() error { return printExploration(a.printer(), x) }); err != nil {
		return err
	}
	if !x.Passed {
		return &codedError{exitNo, errSaid}
	}
	return nil
}

func (c *BenchExplore) add(ctx context.Context, a *app, sc explore.Scene, to *[]explore.Result) error {
	name := sc.Name
	if sc.Mutation != "" {
		name = string(sc.Mutation)
	}
	r, err := explore.Run(ctx, sc, func(depth, states, _ int) {
		if !c.NoProgress && depth > 0 && sc.Mutation == "" {
			a.say("%s: %d states within %d moves", name, states, depth)
		}
	})
	switch {
	case ctx.Err() != nil && a.ctx.Err() == nil:
		return fmt.Errorf("bench explore: %w", errInterrupted)
	case err != nil:
		return coded(exitNo, "bench explore: %s: %w", name, err)
	}
	*to = append(*to, r)
	return nil
}

func printExploration(p printer, x exploration) error {
	var rows [][]string
	row := func(name, world, verdict string, r explore.Result) {
		rows = append(rows, []string{name, world, strconv.Itoa(r.States), strconv.Itoa(r.Transitions), strconv.Itoa(r.Depth), strconv.Itoa(r.Rested), verdict})
	}
	for _, r := range x.Scenes {
		verdict := "holds"
		if r.Whole {
			verdict = "holds, nothing left"
		}
		if r.Broken != "" {
			verdict = "BROKEN: " + r.Broken
		}
		row(r.Scene, worldOf(r), verdict, r)
	}
	for _, r := range x.Mutants {
		verdict := "NOT FOUND"
		if r.Broken != "" {
			verdict = "found: " + r.Broken
		}
		row(string(r.Mutation), worldOf(r), verdict, r)
	}
	if err := p.table([]string{"SCENE", "DISPATCHERS X ENGINES X KEYS", ">STATES", ">MOVES", ">DEPTH", ">LEFT ALONE", "VERDICT"}, rows); err != nil {
		return err
	}
	for _, r := range x.Scenes {
		for i, m := range r.Trace {
			fmt.Fprintf(p.w, "%3d. %s\n", i+1, m)
		}
	}
	return nil
}

func worldOf(r explore.Result) string {
	return fmt.Sprintf("%d x %d x %d, %d rollouts", r.Dispatchers, r.Engines, r.Keys, r.Rollouts)
}
