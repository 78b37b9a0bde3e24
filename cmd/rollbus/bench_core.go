package main

import (
	"fmt"
	"strconv"

	"github.com/rollbus/rollbus/bench/decide"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// BenchDecide measures one placement.
type BenchDecide struct {
	Engines []int  `default:"50,1000,10000" help:"Fleet sizes." placeholder:"N,..."`
	Tokens  int    `default:"2048" help:"Length of the prompt." placeholder:"N"`
	Policy  string `help:"Policy that decides; without one the recommended." placeholder:"NAME"`
}

// Help shows examples.
func (BenchDecide) Help() string {
	return `Examples:
  rollbus bench decide
  rollbus bench decide --policy kv_tokens --engines 200 -o json
One placement as a dispatcher takes it: hash the prompt, match it against every engine's cache, filter, score, pick, record.
CPU time of one goroutine, best of five, beside a fixed loop of the same run.`
}

// Run measures and prints.
func (c *BenchDecide) Run(a *app) error {
	r, err := decide.Run(decide.Config{Engines: c.Engines, Tokens: c.Tokens, Policy: c.Policy})
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	p := a.printer()
	return p.one(r, func() error {
		var rows [][]string
		for _, x := range r.Results {
			rows = append(rows, []string{
				strconv.Itoa(x.Engines), x.Policy, fmt.Sprintf("%.1f", x.NSPerDecision/1000),
				fmt.Sprintf("%.1f", x.AllocsPerDecision), fmt.Sprintf("%.1f", x.Calibrations),
			})
		}
		return p.table([]string{"ENGINES", "POLICY", "CPU US", "ALLOCATIONS", "CALIBRATION LOOPS"}, rows)
	})
}

// BenchIndex measures the block index.
type BenchIndex struct{}

// Help shows an example.
func (BenchIndex) Help() string {
	return `Example:
  rollbus bench index -o json
A hundred engines share 64,000 blocks: inserts, lookups walked block by block, and bytes for a block at an engine.`
}

// Run measures and prints.
func (c *BenchIndex) Run(a *app) error {
	r, err := decide.Index()
	if err != nil {
		return coded(exitNo, "%w", err)
	}
	p := a.printer()
	return p.one(r, func() error {
		return p.fields(
			"inserts per CPU second", fmt.Sprintf("%.1f M", r.InsertsPerCPUS/1e6),
			"lookups per CPU second", fmt.Sprintf("%.1f M", r.LookupsPerCPUS/1e6),
			"bytes a (block, engine)", fmt.Sprintf("%.2f", r.BytesPerHolding),
		)
	})
}

// BenchIngest measures what an agent does with cache events.
type BenchIngest struct{}

// Help shows an example.
func (BenchIngest) Help() string {
	return `Example:
  rollbus bench cache-ingest -o json
Frames taken apart, decoded, put in order, mapped to pool blocks and encoded for publishing, at 16 blocks an event.`
}

// Run measures and prints.
func (c *BenchIngest) Run(a *app) error {
	r, err := kvevents.IngestBench(kvevents.IngestConfig{})
	if err != nil {
		return coded(exitNo, "bench cache-ingest: %w", err)
	}
	p := a.printer()
	return p.one(r, func() error {
		return p.fields(
			"blocks per CPU second", fmt.Sprintf("%.2f M", r.BlocksPerCPUSecond/1e6),
			"allocations an event", fmt.Sprintf("%.2f", r.AllocsPerEvent),
		)
	})
}
