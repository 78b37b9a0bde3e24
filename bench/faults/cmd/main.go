// Command cmd kills the processes of a pool for some minutes and reports: see
// package faults. Its last line is one JSON object.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/rollbus/rollbus/bench/faults"
)

func main() {
	faults.Reexec()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var cfg faults.Config
	flags := flag.NewFlagSet("faults", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&cfg.Bin, "rollbus", "", "the rollbus program (default: it is built)")
	flags.StringVar(&cfg.Dir, "dir", "", "keep data, logs and history here (default: a temporary directory, kept on failure)")
	flags.Uint64Var(&cfg.Seed, "seed", 0, "seed of the schedule (default: a random one)")
	flags.IntVar(&cfg.Kills, "kills", 100, "SIGKILLs")
	flags.IntVar(&cfg.Rollouts, "rollouts", 5000, "rollouts submitted meanwhile")
	flags.Float64Var(&cfg.Scale, "scale", 0.2, "of every liveness timing")
	flags.BoolVar(&cfg.Sync, "sync", false, "NATS syncs every write to disk")
	flags.DurationVar(&cfg.Within, "within", 0, "bound of the whole run (default 9m)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if cfg.Seed == 0 {
		cfg.Seed = uint64(rand.Uint32()) //nolint:gosec // any seed will do
	}
	own := cfg.Dir == ""
	if own {
		dir, err := os.MkdirTemp("", "rollbus-faults-")
		if err != nil {
			return err
		}
		cfg.Dir = dir
	}
	if cfg.Bin == "" {
		cfg.Bin = filepath.Join(cfg.Dir, "rollbus")
		build := exec.CommandContext(ctx, "go", "build", "-o", cfg.Bin, "github.com/rollbus/rollbus/cmd/rollbus")
		build.Stdout, build.Stderr = stderr, stderr
		if err := build.Run(); err != nil {
			return fmt.Errorf("build rollbus: %w (or name one with --rollbus)", err)
		}
	}
	cfg.Log = stderr
	fmt.Fprintf(stderr, "seed %d: the same schedule again with --seed %d\n", cfg.Seed, cfg.Seed)
	r, err := faults.Run(ctx, cfg)
	r.Text(stdout)
	line, jerr := json.Marshal(r)
	if jerr != nil {
		return jerr
	}
	fmt.Fprintf(stdout, "%s\n", line)
	switch {
	case err != nil:
		return fmt.Errorf("%w (logs and history in %s)", err, cfg.Dir)
	case !r.OK():
		return fmt.Errorf("promises were broken (logs and history in %s)", cfg.Dir)
	case own:
		return os.RemoveAll(cfg.Dir)
	}
	return nil
}
