package main

import (
	"fmt"
	"time"

	"github.com/rollbus/rollbus/bench/journaling"
)

// BenchJournal measures recording and replaying.
type BenchJournal struct {
	Engines  int           `default:"50" help:"Engines." placeholder:"N"`
	Rollouts int           `default:"20000" help:"Rollouts of the replayed run." placeholder:"N"`
	Rounds   int           `default:"5" help:"Turns of each arm." placeholder:"N"`
	Slice    time.Duration `default:"3s" help:"Length of a turn on the real server." placeholder:"DURATION"`
	Dir      string        `type:"existingdir" help:"Where streams go; without one a temporary folder." placeholder:"DIR"`

	CPUProfile string `type:"path" help:"Write a CPU profile of the whole run, for go tool pprof." placeholder:"FILE"`
}

// Help shows an example.
func (BenchJournal) Help() string {
	return `Example:
  rollbus bench journal -o json
A run of the real core in virtual time, with load reports and cache events of every engine, is replayed beside the same steps
taken by a core alone. Then a pool on a real NATS server runs with and without journals, in turns (40 s).`
}

// Run measures and prints.
func (c *BenchJournal) Run(a *app) error {
	if c.Engines < 1 || c.Engines > 1024 || c.Rollouts < 100 || c.Rounds < 1 || c.Slice < 100*time.Millisecond {
		return coded(exitUsage, "bench journal: --engines 1 to 1024, --rollouts 100 or more, --rounds 1 or more, --slice 100ms or more")
	}
	end, err := profile(c.CPUProfile)
	if err != nil {
		return err
	}
	r, err := journaling.Run(a.ctx, journaling.Config{Engines: c.Engines, Rollouts: c.Rollouts, Rounds: c.Rounds, Slice: c.Slice, Dir: c.Dir,
		Progress: func(text string) { a.say("%s", text) }})
	end()
	if err != nil {
		return coded(exitNo, "bench journal: %w", err)
	}
	p := a.printer()
	return p.one(r, func() error {
		return p.fields(
			"replayed decisions per CPU second", fmt.Sprintf("%.0f of %d, %.0f events", r.PerCPU, r.Decisions, r.EventsCPU),
			"replay to live CPU", fmt.Sprintf("%.2f", r.ToLive),
			"differences", number(r.Differences),
			"recording costs", fmt.Sprintf("%.1f %% of %.0f us a rollout", 100*r.Overhead, r.PlainCPUMicros),
			"bytes a rollout", fmt.Sprintf("%.0f, with %d new blocks", r.BytesPerRollout, r.BlocksPer),
			"load reports", fmt.Sprintf("%.0f bytes/s of %d engines", r.LoadBytesPerS-r.IdleBytesPerS, r.Engines),
			"checkpoint", fmt.Sprintf("%.1f ms, %d bytes, restored in %.1f ms", r.CheckpointMS, r.CheckpointBytes, r.RestoreMS),
		)
	})
}
