package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/rollbus/rollbus/subjects"
)

// app is what every command runs with.
type app struct {
	ctx    context.Context
	stdin  io.Reader
	stdout io.Writer // data
	stderr io.Writer // messages, progress, logs
	kong   *kong.Kong
	opts   *options
	saved  contextFile
	state  string // folder for what daemons remember, "" = none
}

// options are the flags that every command has.
type options struct {
	Pool    string        `default:"default" short:"p" help:"Pool: one model served by interchangeable engines." placeholder:"NAME"`
	Output  string        `default:"table" short:"o" enum:"table,wide,json,jsonl" help:"How to print data: table, wide (more columns), json or jsonl."`
	Timeout time.Duration `default:"10s" help:"How long to wait for each answer of NATS." placeholder:"DURATION"`
	Context string        `help:"Cluster to talk to, of those that rollbus context list names." placeholder:"NAME"`

	connection `group:"Connection"`
	logging    `group:"Logging"`
}

type logging struct {
	LogLevel  string `default:"info" enum:"debug,info,warn,error" help:"Least severe log line of a daemon: debug, info, warn or error."`
	LogFormat string `default:"text" enum:"text,json" help:"Log lines of a daemon: text or json."`
}

// cli is the grammar.
type cli struct {
	options

	Demo Demo `cmd:"" group:"First steps" help:"Replay a trace through a whole pool in this process, and check what happened."`
	Up   Up   `cmd:"" group:"First steps" help:"Run a whole pool in this process: NATS, a dispatcher, agents and engines."`

	Submit   Submit   `cmd:"" group:"Rollouts" help:"Submit rollouts from a file, from standard input, or one prompt from flags."`
	Results  Results  `cmd:"" group:"Rollouts" help:"Read answers, those that are there or as they come."`
	Validate Validate `cmd:"" group:"Rollouts" help:"Check requests without sending them, or affinity on live engines."`
	Cancel   Cancel   `cmd:"" group:"Rollouts" help:"Give up rollouts: one, a group, a trajectory or a whole job."`

	Get      Get      `cmd:"" group:"Looking" help:"List engines, rollouts, dispatchers, jobs or decisions."`
	Describe Describe `cmd:"" group:"Looking" help:"Tell everything about one engine or rollout."`
	Why      Why      `cmd:"" group:"Looking" help:"Tell what happened to one rollout, and why each decision fell as it did."`
	Replay   Replay   `cmd:"" group:"Looking" help:"Re-run the decisions of dispatchers from their journals, and compare."`
	WhatIf   WhatIf   `cmd:"" name:"what-if" group:"Looking" help:"Serve recorded traffic again, modelled, under another policy, settings or fleet."`
	Record   Record   `cmd:"" group:"Looking" help:"Write the journals of a pool to one file, or turn a trace into one and back."`
	Tap      Tap      `cmd:"" group:"Looking" help:"Follow what happens in a pool, one line each."`

	PoolCmd    PoolCmd    `cmd:"" name:"pool" group:"Operating" help:"Make a pool, read or change its settings."`
	Dead       DeadCmd    `cmd:"" group:"Operating" help:"Look at what could not be served, and submit it again."`
	ContextCmd ContextCmd `cmd:"" name:"context" group:"Operating" help:"Keep the addresses of several clusters, and choose one."`
	Auth       AuthCmd    `cmd:"" group:"Operating" help:"Print what a credential of NATS needs, and no more."`

	Dispatcher Dispatcher `cmd:"" group:"Daemons" help:"Run a dispatcher."`
	Agent      AgentCmd   `cmd:"" group:"Daemons" help:"Run an agent beside one or more engines, or look at one as it would."`
	Engine     Engine     `cmd:"" group:"Daemons" help:"Run a simulated engine that speaks the OpenAI API."`

	Bench Bench `cmd:"" group:"Measuring" help:"Measure parts of rollbus on this machine."`

	Completion Completion `cmd:"" group:"This program" help:"Print a completion script for bash, zsh or fish."`
	Version    Version    `cmd:"" group:"This program" help:"Print the version."`
	Complete   Complete   `cmd:"" name:"__complete" hidden:""`
}

const description = `Dispatches the rollouts of reinforcement-learning training over inference engines, on NATS JetStream.

  rollbus demo                                  see it work, in half a minute
  rollbus up                                    a pool with four simulated engines
  rollbus submit --prompt "2+2=" --wait         one rollout and its answer

Topics: rollbus help environment | exit-codes | <command>`

const exitCodes = `Exit codes:
  0    ok
  1    the answer is no: a rollout failed, a guarantee was broken, anything not below
  2    the command line, the environment or an input is wrong
  3    what was named does not exist
  4    NATS refused the credentials, or what they may do
  5    NATS or JetStream cannot be reached in time
  130  ended by a signal before it was done
`

// run is the whole program but its exit. Everything it needs is an argument.
func run(ctx context.Context, args, environ []string, stdin io.Reader, stdout, stderr io.Writer) int {
	err := execute(ctx, args, environ, stdin, stdout, stderr)
	if err != nil && !errors.Is(err, errSaid) {
		fmt.Fprintf(stderr, "rollbus: %v\n", err)
		if parse, ok := errors.AsType[*kong.ParseError](err); ok {
			fmt.Fprintf(stderr, "rollbus: see `%s --help`\n", commandOf(parse.Context))
		}
	}
	return exitCode(err)
}

// errSaid ends a command whose negative answer was printed already.
var errSaid = errors.New("said already")

func execute(ctx context.Context, args, environ []string, stdin io.Reader, stdout, stderr io.Writer) (err error) {
	values, err := readEnvironment(environ)
	if err != nil {
		return err
	}
	var grammar cli
	k, err := kong.New(&grammar,
		kong.Name("rollbus"), kong.Description(description),
		kong.Writers(stdout, stderr), kong.Resolvers(resolver(values, contextsIn(environ))),
		kong.ValueFormatter(withDefault), kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 110}),
		kong.Exit(func(code int) { panic(exitPanic(code)) }),
	)
	if err != nil {
		return fmt.Errorf("grammar: %w", err)
	}
	a := &app{ctx: ctx, stdin: stdin, stdout: stdout, stderr: stderr, kong: k, opts: &grammar.options, saved: contextsIn(environ), state: stateIn(environ)}
	defer func() {
		// kong prints help and exits; here that is a return.
		if p := recover(); p != nil {
			code, ok := p.(exitPanic)
			if !ok {
				panic(p)
			}
			if err = nil; code != 0 {
				err = &codedError{int(code), errSaid}
			}
		}
	}()
	if args, err = a.help(args); err != nil || args == nil {
		return err
	}
	parsed, err := k.Parse(args)
	if err != nil {
		return err
	}
	if err := a.opts.check(); err != nil {
		return err
	}
	return parsed.Run(a)
}

type exitPanic int

// withDefault adds a flag's default to its help, which a placeholder hides.
func withDefault(v *kong.Value) string {
	if v.Flag == nil || v.Default == "" || v.Default == "0" || v.Enum != "" {
		return v.Help
	}
	return v.Help + " Default " + v.Default + "."
}

// help answers `rollbus help <topic>` and turns `rollbus help <command>` and no
// arguments into --help; nil = answered.
func (a *app) help(args []string) ([]string, error) {
	if len(args) == 0 {
		return []string{"--help"}, nil
	}
	if args[0] != "help" {
		return args, nil
	}
	if len(args) == 2 {
		switch args[1] {
		case "environment":
			_, err := fmt.Fprintf(a.stdout, "Variables, each the default of a flag; flags override:\n%s", variables(a.kong.Model))
			return nil, err
		case "exit-codes":
			_, err := io.WriteString(a.stdout, exitCodes)
			return nil, err
		}
	}
	return append(args[1:len(args):len(args)], "--help"), nil
}

// commandOf spells the command that was understood, without aliases.
func commandOf(ctx *kong.Context) string {
	words := []string{"rollbus"}
	if ctx != nil {
		for _, p := range ctx.Path {
			if p.Command != nil {
				words = append(words, p.Command.Name)
			}
		}
	}
	return strings.Join(words, " ")
}

func (a *app) printer() printer { return printer{a.stdout, a.opts.Output} }

func (a *app) say(format string, args ...any) { fmt.Fprintf(a.stderr, format+"\n", args...) }

func (a *app) pool() (subjects.Pool, error) { return subjects.NewPool(a.opts.Pool) }

// within bounds the wait for each answer of NATS by --timeout. It is for what
// connected already: the server is up, and does not answer.
func (a *app) within() (context.Context, context.CancelFunc) {
	return patient(a.ctx, a.opts.Timeout,
		coded(exitUnavailable, "NATS at %s gave no answer for %v: its JetStream may have no leader or be overloaded (--timeout waits longer)", a.opts.Server, a.opts.Timeout))
}

// check refuses flags that no command can work with.
func (o *options) check() error {
	if o.Timeout < minTimeout || o.Timeout > maxTimeout {
		return coded(exitUsage, "--timeout is %v: give %v to %v", o.Timeout, minTimeout, maxTimeout)
	}
	return nil
}

// Bounds of --timeout.
const (
	minTimeout = 10 * time.Millisecond
	maxTimeout = 24 * time.Hour
)

func (a *app) log() *slog.Logger { return newLog(a.stderr, a.opts.logging) }

func newLog(w io.Writer, o logging) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.LogLevel)); err != nil {
		level = slog.LevelInfo
	}
	opts := &slog.HandlerOptions{Level: level}
	if o.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// onTerminal tells whether w is a terminal that a progress bar may redraw.
func onTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb" && !strings.HasPrefix(f.Name(), os.DevNull)
}
