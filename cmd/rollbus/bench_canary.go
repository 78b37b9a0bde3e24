package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/rollbus/rollbus/bench/canary"
	"github.com/rollbus/rollbus/bench/contest"
)

// BenchCanary plays the canary of owner pressure, in virtual time or over processes.
type BenchCanary struct {
	contestFlags
	Live        bool    `help:"Over real HTTP engines, agents and dispatchers, each a process, instead of in virtual time. One run."`
	TimeScale   float64 `default:"10" help:"With --live: how much faster than their model the engines run, 1 to 100." placeholder:"X"`
	Dispatchers int     `default:"1" help:"With --live: dispatchers, 1 to 8." placeholder:"N"`
	Logs        string  `type:"path" help:"With --live: keep the logs of the processes in this folder." placeholder:"DIR"`
}

// Help shows examples.
func (BenchCanary) Help() string {
	return `Examples:
  rollbus bench canary
  rollbus bench canary --seeds 3 -o json
  rollbus bench canary --live --time-scale 10 --dispatchers 4
The canary of owner pressure: 35 rollouts of one long beginning run on its owner, then 41 more come, and there is an idle
peer. Control stays with the owner, owner_pressure seeds the peer once, projected_time weighs the recomputing. --quick
plays only the scene with two engines and one dispatcher. --live takes some minutes; its times are those of the modelled
engines, and a busy machine shows in them.
` + contestHelp
}

// Run compares and prints.
func (c *BenchCanary) Run(a *app) error {
	if !c.Live {
		return c.compare(a, "canary", contest.Canary)
	}
	if c.TimeScale < 1 || c.TimeScale > canary.MaxScale || c.Dispatchers < 1 || c.Dispatchers > canary.MaxDispatchers {
		return coded(exitUsage, "bench canary: --time-scale 1 to %d, --dispatchers 1 to %d", canary.MaxScale, canary.MaxDispatchers)
	}
	return c.compare(a, "canary", func(ctx context.Context, _ contest.Config) (*contest.Report, error) { return c.live(ctx, a) })
}

func (c *BenchCanary) live(ctx context.Context, a *app) (*contest.Report, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir := c.Logs
	if dir == "" {
		if dir, err = os.MkdirTemp("", "rollbus-canary-"); err != nil {
			return nil, err
		}
		defer func() { _ = os.RemoveAll(dir) }() // temporary, and of no use to anybody
	}
	told := time.Now()
	cfg := canary.Config{Bin: self, Dir: dir, Scale: c.TimeScale, Dispatchers: c.Dispatchers}
	if !c.NoProgress {
		cfg.Progress = func(arm string, answered, of int) {
			if time.Since(told) >= lineEvery || answered == of {
				told = time.Now()
				a.say("%s: %d of %d turns answered", arm, answered, of)
			}
		}
	}
	r, err := canary.Run(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("over processes: %w", err)
	}
	return r, nil
}
