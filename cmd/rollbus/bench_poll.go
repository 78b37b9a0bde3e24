package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/rollbus/rollbus/bench/poll"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// BenchPoll measures what polling costs an engine.
type BenchPoll struct {
	Duration   time.Duration `default:"50s" help:"How long to measure; 10s to 10m." placeholder:"DURATION"`
	Slice      time.Duration `default:"400ms" help:"Length of a turn with or without polling; 100ms to 10s." placeholder:"DURATION"`
	Streams    int           `default:"32" help:"Streams at once that keep the engine busy." placeholder:"N"`
	TimeScale  float64       `default:"1000" help:"How much faster than its model the engine runs; large enough that its CPU is the limit." placeholder:"X"`
	NoProgress bool          `help:"No progress, only the end."`
}

// Help shows examples.
func (BenchPoll) Help() string {
	return `Examples:
  rollbus bench poll-overhead
  rollbus bench poll-overhead --duration 5m -o json
A simulated engine runs as a process of its own and is asked for its load five times a second over HTTP, as an agent does,
in turns with and without. First it idles: CPU time of its process. Then it is busy: tokens per second of its streams.
It passes if the loss is under 1 % with the upper end of its 95 % interval, or the polls take under 0.5 % of a core. Else
it says inconclusive and exits 1: that is a noisy machine more often than a costly poll.`
}

// Run measures and prints.
func (c *BenchPoll) Run(a *app) error {
	if c.Duration < 10*time.Second || c.Duration > 10*time.Minute || c.Slice < 100*time.Millisecond || c.Slice > 10*time.Second || c.Streams < 1 || c.Streams > 1024 {
		return coded(exitUsage, "bench poll-overhead: --duration 10s to 10m, --slice 100ms to 10s, --streams 1 to 1024")
	}
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := c.measure(ctx, a)
	switch {
	case ctx.Err() != nil && a.ctx.Err() == nil:
		return fmt.Errorf("bench poll-overhead: %w", errInterrupted)
	case errors.Is(err, poll.ErrTooShort):
		return coded(exitUsage, "bench poll-overhead: %w", err)
	case err != nil:
		return coded(exitNo, "bench poll-overhead: %w", err)
	}
	p := a.printer()
	if err := p.one(r, func() error {
		percent := func(v, low, high float64) string { return fmt.Sprintf("%.2f %% (%.2f to %.2f)", v, low, high) }
		return p.fields(
			"verdict", string(r.Verdict), "because", r.Because,
			"output lost", percent(r.LossPercent, r.LossLow, r.LossHigh), "tokens/s", fmt.Sprintf("%.0f without, %.0f with", r.TokensPerSecondOff, r.TokensPerSecondOn),
			"CPU of a core", percent(r.CPUPercent, r.CPULow, r.CPUHigh), "one poll", fmt.Sprintf("%.1f ms, of %d", r.PollMS, r.Polls),
			"pairs", strconv.Itoa(r.Pairs)+" busy, "+strconv.Itoa(r.IdlePairs)+" idle",
		)
	}); err != nil {
		return err
	}
	if r.Verdict != poll.Passed {
		return &codedError{exitNo, errSaid}
	}
	return nil
}

func (c *BenchPoll) measure(ctx context.Context, a *app) (r poll.Result, err error) {
	at, pid, end, err := startEngine(ctx, "--time-scale", strconv.FormatFloat(c.TimeScale, 'g', -1, 64), "--slots", strconv.Itoa(c.Streams))
	if err != nil {
		return r, err
	}
	defer end()
	adapter, err := engine.NewVLLM(engine.VLLMConfig{OpenAIConfig: engine.OpenAIConfig{URL: at.URL}})
	if err != nil {
		return r, err
	}
	defer adapter.Close()
	cfg := poll.Config{Engine: adapter, CPU: poll.ProcessCPU(pid), Duration: c.Duration, Slice: c.Slice, Streams: c.Streams}
	if !c.NoProgress {
		cfg.Progress = turns(a)
	}
	return poll.Run(ctx, cfg)
}

// turns shows how many pairs of turns are done: a bar on a terminal, else a line
// each ten seconds.
func turns(a *app) func(done, all int) {
	if !onTerminal(a.stderr) {
		told := time.Now()
		return func(done, all int) {
			if time.Since(told) > lineEvery || done == all {
				told = time.Now()
				a.say("%d of %d turns", done, all)
			}
		}
	}
	var bar *progressbar.ProgressBar
	return func(done, all int) {
		if bar == nil {
			bar = progressbar.NewOptions(all, progressbar.OptionSetWriter(a.stderr), progressbar.OptionSetWidth(32),
				progressbar.OptionShowCount(), progressbar.OptionClearOnFinish())
		}
		_ = bar.Set(done)
	}
}

// startEngine runs a simulated engine as a process of its own and waits until
// it serves.
func startEngine(ctx context.Context, args ...string) (at engineAddress, pid int, end func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return at, 0, nil, fmt.Errorf("start an engine: %w", err)
	}
	dir, err := os.MkdirTemp("", "rollbus-bench-")
	if err != nil {
		return at, 0, nil, fmt.Errorf("start an engine: %w", err)
	}
	file := filepath.Join(dir, "ready.json")
	life, kill := context.WithCancel(ctx)
	cmd := exec.CommandContext(life, self, append([]string{"engine", "--listen", "127.0.0.1:0", "--ready-file", file, "--log-level", "error"}, args...)...)
	cmd.Env = []string{}
	var said bytes.Buffer
	cmd.Stderr = &said
	end = func() {
		kill()
		_ = cmd.Wait() // killed
		_ = os.RemoveAll(dir)
	}
	if err := cmd.Start(); err != nil {
		kill()
		_ = os.RemoveAll(dir)
		return at, 0, nil, fmt.Errorf("start an engine: %w", err)
	}
	const patience = 15 * time.Second
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	late := time.After(patience)
	for {
		if b, rerr := os.ReadFile(file); rerr == nil {
			if err = json.Unmarshal(b, &at); err == nil {
				return at, cmd.Process.Pid, end, nil
			}
		}
		select {
		case <-tick.C:
		case <-late:
			end()
			return at, 0, nil, fmt.Errorf("start an engine: it did not serve within %v: %s", patience, said.Bytes())
		case <-ctx.Done():
			end()
			return at, 0, nil, context.Cause(ctx)
		}
	}
}
