package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Results reads answers.
type Results struct {
	IDs []string `arg:"" optional:"" name:"id" help:"Only these rollouts."`

	Job     string        `short:"j" default:"cli" help:"Job." placeholder:"NAME"`
	Reader  string        `default:"main" help:"Which process of the job the answers are for." placeholder:"NAME"`
	Follow  bool          `short:"f" help:"Go on with answers as they come, until interrupted, --count or --for."`
	Count   int           `short:"c" help:"End after this many; 0 = no limit." placeholder:"N"`
	For     time.Duration `help:"End after this long; 0 = no limit." placeholder:"DURATION"`
	Receive bool          `help:"Mark what was printed as received: no reader is handed it again. Without it nothing changes."`
}

// Help shows examples.
func (Results) Help() string {
	return `Examples:
  rollbus results --job math                      what is there, unread
  rollbus results --job math 0001 0002 -o json    two of them, whole
  rollbus results --job math --follow -o jsonl    as they come
  rollbus results --job math --receive -o jsonl >> answers.jsonl
Looking changes nothing and takes nothing away from the trainer. --receive does.
Exit 3 when a rollout that was named has no answer.`
}

// Run prints them.
func (c *Results) Run(a *app) error {
	for _, f := range [][2]string{{"job", c.Job}, {"reader", c.Reader}} {
		if err := subjects.CheckToken(f[0], f[1]); err != nil {
			return err
		}
	}
	pool, err := a.pool()
	if err != nil {
		return err
	}
	s, done, err := a.store()
	if err != nil {
		return err
	}
	defer done()
	r := &reading{a: a, pool: pool, store: s, receive: c.Receive, out: a.printer(), stream: c.Follow || a.opts.Output == formatJSONL}
	if err := c.exists(a, s, pool); err != nil {
		return err
	}
	ctx, cancel := a.ctx, context.CancelFunc(func() {})
	switch {
	case c.For > 0:
		ctx, cancel = context.WithTimeout(ctx, c.For)
	case !c.Follow:
		ctx, cancel = a.within()
	}
	defer cancel()
	filters := []string{pool.ResultFilter(c.Job, c.Reader)}
	if len(c.IDs) > 0 {
		filters = nil
		for _, id := range c.IDs {
			if err := subjects.CheckToken("id", id); err != nil {
				return err
			}
			filters = append(filters, pool.Result(c.Job, c.Reader, id))
		}
	}
	missing := slices.Clone(c.IDs)
	for m, err := range following(ctx, s.JS(), pool.Results(), filters, func() bool { return c.Follow && (len(c.IDs) == 0 || len(missing) > 0) }) {
		if err != nil {
			return a.noPool(err)
		}
		id, err := r.take(ctx, m)
		if err != nil {
			return err
		}
		missing = slices.DeleteFunc(missing, func(v string) bool { return v == id })
		if c.Count > 0 && r.n >= c.Count || len(c.IDs) > 0 && len(missing) == 0 {
			break
		}
	}
	if err := r.end(); err != nil {
		return err
	}
	if len(missing) > 0 {
		return coded(exitNotFound, "no unread answer of %s in job %s (reader %s) of pool %s: `rollbus describe rollout %s.%s` tells where it is",
			strings.Join(missing, ", "), c.Job, c.Reader, pool, c.Job, missing[0])
	}
	if !c.Follow && ctx.Err() != nil && a.ctx.Err() == nil && c.For == 0 {
		return context.Cause(ctx)
	}
	return nil
}

func (Results) exists(a *app, s *kvstate.Store, pool subjects.Pool) error {
	ctx, cancel := a.within()
	defer cancel()
	return a.exists(ctx, s.JS(), pool)
}

// reading prints answers as they are taken.
type reading struct {
	a       *app
	pool    subjects.Pool
	store   *kvstate.Store
	out     printer
	stream  bool // print at once instead of at the end
	receive bool

	n     int
	all   []*subjects.Result
	taken []kvstate.Registered // received only after they were printed
}

// take handles one message of the register; id is empty when there was nothing to print.
func (r *reading) take(ctx context.Context, m jetstream.Msg) (id string, err error) {
	job, reader, id, ok := r.pool.ParseResultSubject(m.Subject())
	if !ok || len(m.Data()) == 0 {
		return "", nil // received already
	}
	res, err := subjects.DecodeResult(m.Data())
	if err != nil {
		r.a.say("rollbus: the answer of %s.%s cannot be read: %v", job, id, err)
		return "", nil
	}
	r.n++
	if r.receive {
		meta, err := m.Metadata()
		if err != nil {
			return "", fmt.Errorf("answer of %s.%s: %w", job, id, err)
		}
		answer, err := subjects.AnswerFromHeader(job, reader, id, m.Headers())
		if err != nil {
			answer = subjects.Answer{Job: job, Reader: reader, ID: id}
		}
		r.taken = append(r.taken, kvstate.Registered{Answer: answer, Revision: meta.Sequence.Stream, Stored: meta.Timestamp})
	}
	if !r.stream {
		r.all = append(r.all, res)
		return id, nil
	}
	if err := r.printOne(res); err != nil {
		return id, err
	}
	return id, r.mark(ctx)
}

func (r *reading) printOne(res *subjects.Result) error {
	return r.out.each(res, func() error {
		_, err := fmt.Fprintln(r.out.w, strings.Join(resultRow(res), "  "))
		return err
	})
}

func (r *reading) end() error {
	if r.stream {
		return nil
	}
	if err := list(r.out, resultHead, r.all, resultRow); err != nil {
		return err
	}
	ctx, cancel := r.a.within()
	defer cancel()
	return r.mark(ctx)
}

// mark tells the register what was printed. Somebody else may have been faster.
func (r *reading) mark(ctx context.Context) error {
	for _, t := range r.taken {
		if err := r.store.Received(ctx, t); err != nil && !errors.Is(err, kvstate.ErrSuperseded) {
			return fmt.Errorf("mark %s received: %w (it was printed and stays unread)", t.Key(), err)
		}
		heard(ctx)
	}
	r.taken = nil
	return nil
}

var resultHead = []string{"ROLLOUT", "STATUS", "ENGINE", ">PROMPT", ">OUTPUT", ">CACHED", ">RUN", "TEXT"}

func resultRow(r *subjects.Result) []string {
	prompt, output, cached := "-", "-", "-"
	if u := r.Usage; u != nil {
		prompt, output = strconv.Itoa(u.PromptTokens), strconv.Itoa(u.CompletionTokens)
		if u.CachedTokens != nil {
			cached = strconv.Itoa(*u.CachedTokens)
		}
	}
	text := r.Text
	if r.Error != nil {
		text = r.Error.Code + ": " + r.Error.Message
	}
	if text == "" && len(r.TokenIDs) > 0 {
		text = fmt.Sprintf("%d token ids", len(r.TokenIDs))
	}
	return []string{
		subjects.RolloutKey(r.Job, r.ID), string(r.Status), dash(r.Route.Engine), prompt, output, cached,
		(time.Duration(r.Timing.RunMS * float64(time.Millisecond))).Round(time.Millisecond).String(), oneLine(text, 60),
	}
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// oneLine cuts text to so many characters of one line.
func oneLine(s string, most int) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return s
}
