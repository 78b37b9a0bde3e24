package main

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/rollbus/rollbus/bench/demo"
	"github.com/rollbus/rollbus/bench/demo/local"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// Demo shows the whole path.
type Demo struct {
	Trace       string  `type:"existingfile" help:"Trace to replay, Mooncake JSON Lines; without one a generated sample." placeholder:"FILE"`
	Limit       int     `help:"Replay only so many of its requests; 0 = all." placeholder:"N"`
	Shrink      int     `default:"1" help:"Divide every length of the trace by this." placeholder:"N"`
	Speed       float64 `help:"Replay so many times as fast, engines too; 0 = so that it takes --target." placeholder:"X"`
	Target      float64 `default:"15" help:"Seconds that the arrivals may take when --speed is not given." placeholder:"S"`
	Engines     int     `default:"4" help:"Simulated engines." placeholder:"N"`
	Dispatchers int     `default:"1" help:"Dispatchers." placeholder:"N"`
	Policy      string  `help:"Policy instead of the recommended one." placeholder:"NAME"`
	NoProgress  bool    `help:"No progress, only the end."`
	journalFlag
}

// Help shows examples.
func (Demo) Help() string {
	return `Examples:
  rollbus demo
  rollbus demo --dispatchers 3 -o json
  rollbus demo --trace mooncake_trace.jsonl --limit 2000
Everything runs in this process: NATS, dispatchers, agents, simulated engines on HTTP listeners of their own. A checker
follows every stream from outside. Exit 1 when anything was lost, answered twice or failed.`
}

// Run replays the trace and prints what happened.
func (c *Demo) Run(a *app) error {
	cfg, err := c.config(a)
	if err != nil {
		return err
	}
	// A signal ends the demo in order, within seconds; more of them change nothing.
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	end := c.show(a, &cfg)
	report, err := demo.Run(ctx, cfg)
	end()
	if report.Submitted > 0 {
		if perr := a.printer().one(report, func() error { return printDemo(a.printer(), &report) }); perr != nil {
			return perr
		}
	}
	switch {
	case ctx.Err() != nil && a.ctx.Err() == nil:
		return fmt.Errorf("demo: %w: everything was stopped, the folder is gone", errInterrupted)
	case err != nil:
		return coded(exitNo, "%w", err)
	case !report.OK():
		return &codedError{exitNo, errSaid}
	}
	return nil
}

func (c *Demo) config(a *app) (demo.Config, error) {
	if c.Engines < 1 || c.Engines > 256 || c.Dispatchers < 1 || c.Dispatchers > 64 || c.Limit < 0 || c.Speed < 0 || c.Target <= 0 {
		return demo.Config{}, coded(exitUsage, "demo: --engines 1 to 256, --dispatchers 1 to 64, --limit and --speed 0 or more, --target above 0")
	}
	settings := recommended()
	settings.Model = demoModel
	settings.Record = false // nobody looks at a pool that is gone in half a minute
	if c.Policy != "" {
		settings.Policy = c.Policy
	}
	if _, err := policy.Resolve(settings); err != nil {
		return demo.Config{}, coded(exitUsage, "demo: %w", err)
	}
	w, err := c.workload()
	if err != nil {
		return demo.Config{}, coded(exitUsage, "demo: %w", err)
	}
	cfg := demo.Config{Workload: w, Speed: c.Speed}
	if cfg.Speed == 0 {
		last := w.Rollouts[len(w.Rollouts)-1].At
		cfg.Speed = min(max(1, last.Seconds()/c.Target), simengine.MaxTimeScale)
	}
	cfg.Local = local.Config{
		Pool: "demo", Settings: settings, Journal: c.Journal, SelfCheck: c.selfCheck(), Dispatchers: c.Dispatchers, Version: programVersion(), Log: newLog(a.stderr, logging{LogLevel: "warn"}),
		Layout: subjects.Layout{Budget: 4 << 30},
	}
	for i := range c.Engines {
		sim := simFlags{TimeScale: cfg.Speed}.config(demoModel, "")
		sim.MaxModelLen = demoModelLen
		cfg.Local.Engines = append(cfg.Local.Engines, local.Engine{Name: ordinal(i, nil), Sim: &sim})
	}
	return cfg, nil
}

// workload reads the trace. Turns of a trajectory wait for the answer before them.
func (c *Demo) workload() (workload.Workload, error) {
	o := workload.TraceOptions{Name: "sample", Job: "demo", Limit: c.Limit, Scale: c.Shrink, Chained: true}
	r := workload.Sample()
	if c.Trace != "" {
		f, err := os.Open(c.Trace)
		if err != nil {
			return workload.Workload{}, err
		}
		defer f.Close()
		o.Name, r = filepath.Base(c.Trace), f
	}
	w, err := workload.ReadTrace(r, o)
	if err == nil && len(w.Rollouts) == 0 {
		err = fmt.Errorf("trace %s: no row in it", o.Name)
	}
	return w, err
}

// demoModel is named by the settings, so that prompts which name none hash as
// the engines' cache does.
const demoModel = "sim"

// demoModelLen takes the longest prompts of the public traces.
const demoModelLen = 262_144

// lineEvery is how often progress is printed where no bar can be drawn.
const lineEvery = 3 * time.Second

// show sets up progress; end takes the bar away.
func (c *Demo) show(a *app, cfg *demo.Config) (end func()) {
	say := func(format string, args ...any) {
		if !c.NoProgress {
			a.say(format, args...)
		}
	}
	cfg.Started = func(p *local.Pool) {
		say("pool demo: embedded NATS, %d dispatcher(s), %d simulated engines at %gx the speed of an 8B model on an H100",
			len(p.Dispatchers), len(p.Sims), round1(cfg.Speed))
		say("policy %s (%s); replaying %d rollouts of %s", p.Settings.Policy, p.Settings.Mode, len(cfg.Workload.Rollouts), cfg.Workload.Name)
	}
	if c.NoProgress {
		return func() {}
	}
	if !onTerminal(a.stderr) {
		var last time.Time
		cfg.Progress = func(p demo.Progress) {
			if time.Since(last) < lineEvery {
				return
			}
			last = time.Now()
			a.say("%d of %d submitted, %d answered, %d running", p.Submitted, p.Total, p.Answered, p.Running)
		}
		return func() {}
	}
	bar := progressbar.NewOptions(len(cfg.Workload.Rollouts), progressbar.OptionSetWriter(a.stderr), progressbar.OptionSetWidth(32),
		progressbar.OptionShowCount(), progressbar.OptionClearOnFinish(), progressbar.OptionSetPredictTime(false))
	cfg.Progress = func(p demo.Progress) {
		bar.Describe(fmt.Sprintf("%4d running", p.Running))
		_ = bar.Set(min(p.Answered, p.Total)) // a bar that cannot be drawn is no reason to stop
	}
	return func() { _ = bar.Finish() }
}

func round1(v float64) float64 { return float64(int64(v*10+0.5)) / 10 }

func printDemo(p printer, r *demo.Report) error {
	n := func(v int64) string { return strconv.FormatInt(v, 10) }
	percent := func(f float64) string { return fmt.Sprintf("%.1f%%", 100*f) }
	millis := func(v float64) string { return fmt.Sprintf("%.1f ms", v) }
	var rows [][]string
	for _, e := range r.Engines {
		rows = append(rows, []string{e.Name, strconv.Itoa(e.Rollouts), n(e.PromptTokens), n(e.CompletionTokens), percent(e.CachedFraction),
			strconv.Itoa(e.PeakRequests), millis(e.RunP50MS), millis(e.RunP99MS)})
	}
	rows = append(rows, []string{"all", strconv.Itoa(r.Completed + r.Failed), n(r.PromptTokens), n(r.CompletionTokens), percent(r.CachedPromptFraction), "", "", ""})
	if err := p.table([]string{"ENGINE", ">ROLLOUTS", ">PROMPT TOKENS", ">OUTPUT TOKENS", ">CACHED", ">PEAK", ">RUN P50", ">RUN P99"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(p.w)
	if err := p.fields(
		"rollouts", fmt.Sprintf("%d submitted, %d with a sample, %d without, %d lost, %d answered twice", r.Submitted, r.Completed, r.Failed, r.Lost, r.Duplicated),
		"placed within", fmt.Sprintf("p50 %s, p99 %s (stored in the queue to bound, NATS server's clock)", millis(r.DispatchP50MS), millis(r.DispatchP99MS)),
		"output", fmt.Sprintf("%.0f tokens/s over %.1f s, engines at %gx", r.OutputTokPerS, r.Seconds, round1(r.TimeScale)),
		"wasted", fmt.Sprintf("%d tokens; %d rollouts bound again, %d ran twice", r.WastedTokens, r.Requeued, r.DoubleRuns),
		"policy", r.Policy,
	); err != nil {
		return err
	}
	for _, v := range r.Violations {
		fmt.Fprintf(p.w, "VIOLATION  %s\n", v)
	}
	verdict := "every promise was kept"
	switch {
	case !r.OK():
		verdict = "NOT KEPT: see above"
	case r.Interrupted:
		verdict = fmt.Sprintf("every promise was kept until it was interrupted, with %d rollouts unanswered", r.Open)
	}
	_, err := fmt.Fprintf(p.w, "checked    %s\n", verdict)
	return err
}
