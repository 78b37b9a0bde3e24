package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Submit sends rollouts.
type Submit struct {
	File string `arg:"" optional:"" help:"JSON Lines, one request each; - is standard input."`

	Job         string        `short:"j" help:"Job of requests that name none." placeholder:"NAME"`
	Prompt      *string       `help:"Submit this prompt instead of a file." placeholder:"TEXT"`
	N           int           `short:"n" default:"1" help:"Samples of --prompt, as one group." placeholder:"N"`
	MaxTokens   int           `default:"128" help:"Output tokens of --prompt, at most." placeholder:"N"`
	Temperature *float64      `help:"Sampling temperature of --prompt." placeholder:"T"`
	Seed        *int64        `help:"Sampling seed of --prompt; sample k of a group gets seed + k." placeholder:"N"`
	Model       string        `help:"Model of requests that name none." placeholder:"NAME"`
	ID          string        `name:"id" help:"Id of --prompt; without one it is drawn. Repeating an id never runs it twice." placeholder:"ID"`
	Reader      string        `help:"Which process of the job reads the answers." placeholder:"NAME"`
	Wait        bool          `short:"w" help:"Wait for the answers and print them; exit 1 unless all are samples."`
	For         time.Duration `help:"With --wait: end with exit code 5 after this long, whatever is missing then; 0 = no limit." placeholder:"DURATION"`
	Concurrency int           `default:"64" help:"Requests on their way to NATS at once." placeholder:"N"`
}

// Help shows examples.
func (Submit) Help() string {
	return `Examples:
  rollbus submit --prompt "2+2=" --wait --for 1m
  rollbus submit --job math --prompt "2+2=" -n 8
  rollbus submit rollouts.jsonl
  generate | rollbus submit --job math -

A line:
  {"id":"0001","job":"math","prompt":"2+2=","sampling_params":{"max_tokens":16}}
A file is checked as a whole before anything is sent.`
}

// maxLine is a request and its quoting.
const maxLine = 2 * subjects.MaxRequestBytes

// maxSaid is how many bad lines are printed before the rest is only counted.
const maxSaid = 20

// check refuses flags that do not go together.
func (c *Submit) check() error {
	switch {
	case c.File != "" && c.Prompt != nil:
		return coded(exitUsage, "submit: a FILE and --prompt: give one of them, not both")
	case c.File == "" && c.Prompt == nil:
		return coded(exitUsage, "submit: give a FILE (- is standard input) or --prompt, see `rollbus submit --help`")
	case c.Prompt != nil && *c.Prompt == "":
		return coded(exitUsage, "submit: --prompt: the prompt is empty, give it at least one character")
	case c.N < 1 || c.N > 1024 || c.Concurrency < 1 || c.Concurrency > 4096:
		return coded(exitUsage, "submit: --n must be 1 to 1024, --concurrency 1 to 4096")
	case c.For < 0:
		return coded(exitUsage, "submit: --for is %v: give a positive duration, or 0 for no limit", c.For)
	case c.For > 0 && !c.Wait:
		return coded(exitUsage, "submit: --for needs --wait: without it nothing is waited for")
	}
	return nil
}

// Run sends them and prints where each was stored, or its answer.
func (c *Submit) Run(a *app) error {
	if err := c.check(); err != nil {
		return err
	}
	if c.File != "" && c.File != "-" {
		if _, err := c.checkFile(a); err != nil {
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
	settings, err := c.settings(a, s, pool)
	if err != nil {
		return err
	}
	out := newSender(a.ctx, s.JS().Conn(), a.opts.Pool, settings, a.opts.Timeout)
	defer out.close()
	job := &submission{a: a, pool: pool, js: s.JS(), out: out, store: s}
	err = job.send(c)
	job.sayDuplicates()
	if err != nil {
		return err
	}
	if c.Wait {
		return job.await(c.For)
	}
	return nil
}

func (c *Submit) settings(a *app, s *kvstate.Store, pool subjects.Pool) (subjects.Settings, error) {
	ctx, cancel := a.within()
	defer cancel()
	if err := a.exists(ctx, s.JS(), pool); err != nil {
		return subjects.Settings{}, err
	}
	settings, _, err := s.Settings(ctx)
	if errors.Is(err, kvstate.ErrGone) {
		return subjects.Settings{}.WithDefaults(), nil
	}
	if err != nil {
		return settings, err
	}
	return settings.WithDefaults(), nil
}

// checkFile reads the whole file once without sending anything, and counts the
// rollouts in it.
func (c *Submit) checkFile(a *app) (int, error) {
	r, done, err := a.stdinOrFile(c.File)
	if err != nil {
		return 0, err
	}
	defer done()
	bad, first := 0, map[string]int{}
	err = eachLine(r, func(n int, line []byte) error {
		req, err := c.decode(line)
		if err == nil {
			key := subjects.RolloutKey(req.Job, req.ID)
			if at, again := first[key]; again {
				err = fmt.Errorf("id: rollout %s stands in line %d already: give each line its own", key, at)
			} else {
				first[key] = n
			}
		}
		if err != nil {
			bad++
			c.sayBad(a, c.File, n, bad, err)
		}
		return nil
	})
	switch {
	case err != nil:
		return 0, coded(exitUsage, "%s: %w", c.File, err)
	case bad > 0:
		return 0, coded(exitUsage, "%s: %d of its lines cannot be rollouts; nothing was sent", c.File, bad)
	case len(first) == 0:
		return 0, coded(exitUsage, "%s: no line in it: give one JSON request a line", c.File)
	}
	return len(first), nil
}

func (c *Submit) sayBad(a *app, name string, line, bad int, err error) {
	if bad > maxSaid {
		return
	}
	problems := subjects.FieldErrors(err)
	if len(problems) == 0 {
		a.say("%s:%d: %v", name, line, err)
	}
	for _, p := range problems {
		a.say("%s:%d: %s: %s", name, line, p.Field, p.Problem)
	}
	if bad == maxSaid {
		a.say("%s: further bad lines are only counted", name)
	}
}

// decode reads a line and fills in what flags say.
func (c *Submit) decode(line []byte) (*subjects.Request, error) {
	r, err := subjects.DecodeRequest(line)
	if r == nil {
		return nil, err
	}
	filled := false
	fill := func(p *string, v string) {
		if *p == "" && v != "" {
			*p, filled = v, true
		}
	}
	fill(&r.Job, c.Job)
	fill(&r.Model, c.Model)
	fill(&r.Reader, c.Reader)
	if !filled {
		return r, err
	}
	// What was missing may be there now; what could not be decoded still is not.
	var left []error
	for _, p := range subjects.FieldErrors(err) {
		if p.Field != "job" {
			left = append(left, p)
		}
	}
	if len(left) > 0 {
		return r, errors.Join(left...)
	}
	return r, r.Validate()
}

// fromFlags makes the requests of --prompt.
func (c *Submit) fromFlags() ([]*subjects.Request, error) {
	id := c.ID
	if id == "" {
		id = strings.ReplaceAll(uuid.NewString(), "-", "")[:12]
	}
	job := c.Job
	if job == "" {
		job = "cli"
	}
	out := make([]*subjects.Request, 0, c.N)
	for k := range c.N {
		r := &subjects.Request{
			SchemaVersion: subjects.SchemaVersion, Job: job, ID: id, Model: c.Model, Prompt: *c.Prompt, Reader: c.Reader,
			Sampling: subjects.SamplingParams{MaxTokens: c.MaxTokens, Temperature: c.Temperature},
		}
		if c.Seed != nil {
			r.Sampling.Seed = new(*c.Seed + int64(k))
		}
		if c.N > 1 {
			r.ID = fmt.Sprintf("%s-%d", id, k)
			r.Group = &subjects.Group{ID: id, Index: k, Size: c.N}
		}
		if err := r.Validate(); err != nil {
			return nil, coded(exitUsage, "submit: %w", err)
		}
		out = append(out, r)
	}
	return out, nil
}

// submission is one run of the command.
type submission struct {
	a     *app
	pool  subjects.Pool
	js    jetstream.JetStream
	out   *sender
	store *kvstate.Store

	mu   sync.Mutex
	sent []client.Handle // what --wait waits for

	differ, gone int // of what was there already
}

func (s *submission) send(c *Submit) error {
	group, ctx := errgroup.WithContext(s.a.ctx)
	group.SetLimit(c.Concurrency)
	one := func(r *subjects.Request) {
		group.Go(func() error {
			try, cancel := context.WithTimeoutCause(ctx, s.a.opts.Timeout, coded(exitUnavailable, "no answer within %v", s.a.opts.Timeout))
			defer cancel()
			h, err := s.out.send(try, r)
			if err != nil {
				return s.a.noPool(err)
			}
			if h.Duplicate {
				s.compare(try, r, h)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.sent = append(s.sent, h)
			if c.Wait {
				return nil
			}
			return s.a.printer().stored(h)
		})
	}
	if c.Prompt != nil {
		reqs, err := c.fromFlags()
		if err != nil {
			return err
		}
		for _, r := range reqs {
			one(r)
		}
		return group.Wait()
	}
	r, done, err := s.a.stdinOrFile(c.File)
	if err != nil {
		return err
	}
	defer done()
	bad, lines := 0, 0
	err = eachLine(r, func(n int, line []byte) error {
		lines++
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		req, err := c.decode(line)
		if err != nil {
			bad++
			c.sayBad(s.a, c.File, n, bad, err)
			return nil
		}
		one(req)
		return nil
	})
	if sendErr := group.Wait(); sendErr != nil {
		return sendErr
	}
	if err != nil {
		return coded(exitUsage, "%s: %w", c.File, err)
	}
	if lines == 0 {
		return coded(exitUsage, "%s: no line in it: give one JSON request a line", c.File)
	}
	s.a.say("%d rollouts submitted to pool %s", len(s.sent), s.pool)
	if bad > 0 {
		return coded(exitUsage, "%s: %d lines cannot be rollouts and were not sent", c.File, bad)
	}
	return nil
}

// compare warns of a request that was not stored because another one has its
// id. What left the queue already cannot be compared.
func (s *submission) compare(ctx context.Context, r *subjects.Request, h client.Handle) {
	same, found := false, false
	if q, err := s.js.Stream(ctx, s.pool.Rollouts()); err == nil {
		if m, err := q.GetMsg(ctx, h.Seq); err == nil && m.Header.Get(subjects.HdrMsgID) == h.Key() {
			found = true
			old, err := subjects.DecodeRequest(m.Data)
			same = err == nil && sameRequest(old, r)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !found:
		s.gone++
	case !same:
		if s.differ++; s.differ <= maxSaid {
			s.a.say("rollbus: warning: %s differs from what is stored under that id and was not stored: the request stored first is the one that counts (give a new --id or id to run this one)", h.Key())
		}
	}
}

// sayDuplicates tells in a line each what compare told not, or could not tell.
func (s *submission) sayDuplicates() {
	if more := s.differ - maxSaid; more > 0 {
		s.a.say("rollbus: warning: %d more differ from what is stored under their ids", more)
	}
	if s.gone > 0 {
		s.a.say("rollbus: warning: %d were submitted before and have left the queue, so that they could not be compared: the requests stored first are the ones that count", s.gone)
	}
}

// sameRequest compares what was asked for, without what submitting fills in.
func sameRequest(a, b *subjects.Request) bool {
	plain := func(r *subjects.Request) []byte {
		c := *r
		c.SchemaVersion, c.Reader, c.ReplyKey = subjects.SchemaVersion, c.ReaderOrDefault(), ""
		out, err := c.MarshalJSON()
		if err != nil {
			return nil
		}
		return out
	}
	x, y := plain(a), plain(b)
	return x != nil && bytes.Equal(x, y)
}

func (p printer) stored(h client.Handle) error {
	return p.each(h, func() error {
		dup := ""
		if h.Duplicate {
			dup = "  (was there already)"
		}
		_, err := fmt.Fprintf(p.w, "%s  stored at %d%s\n", h.Key(), h.Seq, dup)
		return err
	})
}

// each is one, with a single line for JSON too: for values that come one by one.
func (p printer) each(v any, text func() error) error {
	if p.format == formatJSON || p.format == formatJSONL {
		return p.line(v)
	}
	return text()
}

// eachLine calls f with each line that is not blank, numbered from 1.
func eachLine(r io.Reader, f func(n int, line []byte) error) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 64<<10), maxLine)
	for n := 1; ; n++ {
		if !sc.Scan() {
			if errors.Is(sc.Err(), bufio.ErrTooLong) {
				return fmt.Errorf("line %d is longer than %d bytes: shorten the prompt or the meta field", n, maxLine)
			}
			if errors.Is(sc.Err(), os.ErrClosed) {
				return nil
			}
			return sc.Err()
		}
		line := bytes.TrimSpace(sc.Bytes())
		if len(line) == 0 {
			continue
		}
		if err := f(n, line); err != nil {
			return err
		}
	}
}
