package main

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/rollbus/rollbus/bench/bus"
)

// BenchBus compares the bus with what it cannot do without.
type BenchBus struct {
	All    bool          `help:"Memory, three servers, 16 KiB and 400 engines too (four minutes)."`
	Rounds int           `default:"3" help:"Turns of each side." placeholder:"N"`
	Slice  time.Duration `default:"3s" help:"Length of a turn." placeholder:"DURATION"`
	Dir    string        `type:"existingdir" help:"Where streams go; without one a temporary folder." placeholder:"DIR"`

	CPUProfile string `type:"path" help:"Write a CPU profile of the whole run, for go tool pprof." placeholder:"FILE"`
}

// Help shows examples.
func (BenchBus) Help() string {
	return `Examples:
  rollbus bench bus
  rollbus bench bus --all -o json
NATS servers, dispatchers, agents and a trainer run in this process, over TCP; engines answer at once. A bare chain makes
the same writes under the same guards with the same headers and decides nothing; the two take turns. Latencies are taken at half of the bus's
own throughput, from a request stored to its reservation stored, on the NATS server's clock.`
}

// busReport is the document of -o json.
type busReport struct {
	Results []bus.Result `json:"results"`
}

// Run measures and prints.
func (c *BenchBus) Run(a *app) error {
	if c.Rounds < 1 || c.Rounds > 100 || c.Slice < 100*time.Millisecond || c.Slice > time.Minute {
		return coded(exitUsage, "bench bus: --rounds 1 to 100, --slice 100ms to 1m")
	}
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	cfg := bus.Config{
		Cases: bus.Default(), Rounds: c.Rounds, Slice: c.Slice, Half: 3 * c.Slice / 10, Dir: c.Dir,
		Progress: func(text string) { a.say("%s", text) },
	}
	if c.All {
		cfg.Cases = bus.All()
	}
	end, err := profile(c.CPUProfile)
	if err != nil {
		return err
	}
	results, err := bus.Run(ctx, cfg)
	end()
	if len(results) > 0 {
		report := busReport{results}
		if perr := a.printer().one(report, func() error { return printBus(a.printer(), results) }); perr != nil {
			return perr
		}
	}
	switch {
	case ctx.Err() != nil && a.ctx.Err() == nil:
		return fmt.Errorf("bench bus: %w", errInterrupted)
	case err != nil:
		return coded(exitNo, "bench bus: %w", err)
	}
	return nil
}

func printBus(p printer, results []bus.Result) error {
	whole := func(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }
	two := func(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) }
	var rows [][]string
	for _, r := range results {
		rows = append(rows, []string{
			r.Transport, r.Storage, strconv.Itoa(r.Replicas), strconv.Itoa(r.Payload), strconv.Itoa(r.Dispatchers), strconv.Itoa(r.Engines),
			whole(r.Rollouts), whole(r.Bare), two(r.Ratio), two(r.P50), two(r.P99), two(r.BareP50), two(r.BareP99),
			whole(r.CPU), whole(r.BareCPU), whole(r.HalfLoad), two(r.Refused), two(r.BareRefused),
		})
	}
	return p.table([]string{
		"TRANSPORT", "STORAGE", "R", "BYTES", "D", "ENGINES", "ROLLOUTS/S", "BARE/S", "RATIO",
		"P50 MS", "P99 MS", "BARE P50", "+BARE P99", "CPU US", "+BARE CPU", "+HALF LOAD/S", "+REFUSED", "+BARE REFUSED",
	}, rows)
}
