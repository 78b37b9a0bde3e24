package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

// journalFlag is whether dispatchers keep a journal.
type journalFlag struct {
	Journal   bool `default:"true" negatable:"" help:"Record what dispatchers saw and decided, for replay and why."`
	SelfCheck bool `default:"true" negatable:"" help:"Replay samples of the own journal in the background, with at most 1 % of a CPU, and count differences."`
}

// selfCheck is nil when it is off.
func (f journalFlag) selfCheck() *journal.SelfCheck {
	if !f.SelfCheck {
		return nil
	}
	return &journal.SelfCheck{}
}

// journalTail is how long a stop waits for the end of the journal.
const journalTail = 3 * time.Second

// record makes a dispatcher's configuration record; done ends it after Run.
func (f journalFlag) record(a *app, cfg *dispatcher.Config, nc *nats.Conn, log *slog.Logger) (done func(), err error) {
	pool, err := a.pool()
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	w, err := journal.ForPool(js, pool, cfg.CoreConfig(), cfg.Version, f.selfCheck(), log)
	if err != nil {
		return nil, err
	}
	cfg.Recorder = w
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), journalTail)
		defer cancel()
		if err := w.Close(ctx); err != nil {
			log.Warn("the journal's tail is missing", "err", err)
		}
	}, nil
}

// journalSource says where journals are read from.
type journalSource struct {
	Dispatcher string `short:"d" help:"Only this dispatcher's." placeholder:"NAME"`
	File       string `type:"existingfile" help:"A bundle that rollbus record wrote, instead of the pool." placeholder:"FILE"`
}

const (
	// spanLead is how much of a stream is read before a span, for a checkpoint to
	// start at; where none is in it, all is read.
	spanLead = 20 * time.Minute
	// spanTail is how late a frame may have been stored.
	spanTail = 2 * time.Minute
)

// read collects the journals; what cannot be read is said, the rest is returned.
func (s journalSource) read(a *app) ([]*journal.Journal, []error, error) { return s.readSpan(a, 0, 0) }

// readSpan is read of what a replay between two times, unix ns, 0 = open, needs.
func (s journalSource) readSpan(a *app, from, until int64) ([]*journal.Journal, []error, error) {
	if s.File != "" {
		b, err := os.ReadFile(s.File)
		if err != nil {
			return nil, nil, coded(exitUsage, "%w", err)
		}
		_, frames, err := journal.ReadBundle(bytes.NewReader(b))
		if err != nil {
			return nil, nil, coded(exitUsage, "%s: %w", s.File, err)
		}
		return s.split(a, frames)
	}
	pool, err := a.pool()
	if err != nil {
		return nil, nil, err
	}
	nc, err := a.connect()
	if err != nil {
		return nil, nil, err
	}
	defer nc.Close()
	var start, end time.Time
	if until > 0 {
		end = time.Unix(0, until).Add(spanTail)
	}
	if from > 0 {
		start = time.Unix(0, from).Add(-spanLead)
		frames, err := a.journalFrames(nc, pool, s.Dispatcher, start, end)
		if err != nil {
			return nil, nil, err
		}
		out, problems, err := s.split(a, frames)
		if err == nil && !slices.ContainsFunc(out, func(j *journal.Journal) bool { return !j.Reaches(from) }) {
			return out, problems, nil
		}
	}
	frames, err := a.journalFrames(nc, pool, s.Dispatcher, time.Time{}, end)
	if err != nil {
		return nil, nil, err
	}
	return s.split(a, frames)
}

// readTold is readSpan, and says what cannot be read. whole tells that nothing was said.
func (s journalSource) readTold(a *app, from, until int64) (journals []*journal.Journal, whole bool, err error) {
	journals, problems, err := s.readSpan(a, from, until)
	if err != nil {
		return nil, false, err
	}
	for _, e := range problems {
		a.say("rollbus: %v", e)
	}
	return journals, len(problems) == 0, nil
}

func (s journalSource) split(a *app, frames iter.Seq2[[]byte, error]) ([]*journal.Journal, []error, error) {
	all, problems := journal.Split(frames)
	var out []*journal.Journal
	for _, j := range all {
		if s.Dispatcher == "" || j.Dispatcher == s.Dispatcher {
			out = append(out, j)
		}
	}
	if len(out) == 0 {
		if len(problems) > 0 {
			return nil, problems, coded(exitNo, "no journal can be read: %w", errors.Join(problems...))
		}
		return nil, nil, coded(exitNotFound, "pool %s has no journal of such a dispatcher: is it started with --no-journal, or its name another?", a.opts.Pool)
	}
	return out, problems, nil
}

// journalFrames yields what the stream holds now, in order, stored between two
// times; zero = open.
func (a *app) journalFrames(nc *nats.Conn, pool subjects.Pool, of string, start, end time.Time) (iter.Seq2[[]byte, error], error) {
	filter := pool.JournalSubject(">")
	if of != "" {
		if err := subjects.CheckToken("dispatcher", of); err != nil {
			return nil, coded(exitUsage, "%w", err)
		}
		filter = pool.JournalSubject(of)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	cfg := jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}}
	if !start.IsZero() {
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &start
	}
	ctx, cancel := a.within()
	defer cancel()
	cons, err := js.OrderedConsumer(ctx, pool.Journal(), cfg)
	if err != nil {
		return nil, a.noPool(fmt.Errorf("read stream %s: %w", pool.Journal(), err))
	}
	return func(yield func([]byte, error) bool) {
		for pending := cons.CachedInfo().NumPending; pending > 0; {
			ctx, cancel := a.within()
			m, err := cons.Next(jetstream.FetchContext(ctx))
			cancel()
			if err != nil {
				yield(nil, fmt.Errorf("read stream %s: %w", pool.Journal(), err))
				return
			}
			if meta, err := m.Metadata(); err == nil {
				if pending = meta.NumPending; !end.IsZero() && meta.Timestamp.After(end) {
					return
				}
			}
			if !yield(m.Data(), nil) {
				return
			}
		}
	}, nil
}

// Replay re-runs decisions, or republishes what was recorded.
type Replay struct {
	journalSource
	span
	Verify bool   `help:"Compare every decision and effect, stop at the first difference. It is what happens without --step, too."`
	Step   bool   `help:"Print every event and what was decided, one JSON object a line."`
	Break  string `help:"Stop at the first event where this holds, and show it: terms as engine==e1, reason!=x, event==Fetched, id==train.0001, n>=100, joined by &&." placeholder:"EXPR"`

	republish
}

// Help shows examples.
func (Replay) Help() string {
	return `Examples:
  rollbus replay --verify
  rollbus replay --pool math --dispatcher d1 --from 30m --until 10m --verify -o json
  rollbus replay --file math.bundle --step
  rollbus replay --file math.bundle --break 'id==train.0001 && effect==Bind'
  rollbus replay --subjects --to test.math --from 10m --speed 10
Times are RFC 3339, or how long ago. Names in --break: n, at, bind (numbers); event, effect, job, id, engine, reason, policy,
mode, basis, shadow (== != ~). Exit 0 when nothing differs, 1 when something does or could not be compared, 3 when --break holds nowhere.`
}

// stepLine is one line of --step.
type stepLine struct {
	Dispatcher string          `json:"dispatcher"`
	Event      uint64          `json:"event"`
	AtS        float64         `json:"at_s"`
	Type       string          `json:"type"`
	Body       core.Event      `json:"body"`
	Decisions  []core.Decision `json:"decisions,omitempty"`
	Effects    int             `json:"effects"`
}

var replayHead = []string{"DISPATCHER", "START", ">EVENTS", ">DECISIONS", ">DIFFERENCES", "TAIL", "+>FROM EVENT", "+>CHECKPOINTS", "+PROGRAM", "NOTE"}

// Run replays each journal.
func (c *Replay) Run(a *app) error {
	if c.Subjects {
		return c.republish.run(a, c.span)
	}
	brk, err := c.breakAt()
	if err != nil {
		return err
	}
	o, err := c.options()
	if err != nil {
		return err
	}
	journals, ok, err := c.readTold(a, o.From, o.Until)
	if err != nil {
		return err
	}
	if brk != nil {
		return showBreak(a, journals, o, brk)
	}
	reports := make([]*journal.Report, 0, len(journals))
	for _, j := range journals {
		rep, err := c.replay(a, j, o)
		if err != nil {
			return err
		}
		ok = ok && rep.OK()
		reports = append(reports, rep)
	}
	p := a.printer()
	if !c.Step {
		if err := list(p, replayHead, reports, replayRow); err != nil {
			return err
		}
	}
	if ok {
		return nil
	}
	for _, r := range reports {
		if d := r.First; d != nil {
			a.say("%s differs at event %d (%s, %.3f s): %s", r.Dispatcher, d.Event, d.Type, d.AtS, d.What)
			if !c.Step && p.format != formatJSON && p.format != formatJSONL {
				if err := printDifference(p, d); err != nil {
					return err
				}
			}
		}
	}
	return &codedError{exitNo, errSaid}
}

func (c *Replay) breakAt() (journal.Break, error) {
	if c.Break == "" {
		return nil, nil
	}
	b, err := journal.ParseBreak(c.Break)
	if err != nil {
		return nil, coded(exitUsage, "--break: %w", err)
	}
	return b, nil
}

// replay verifies one journal, and prints its steps when asked to. A difference
// is shown with the candidates that the replaying core saw.
func (c *Replay) replay(a *app, j *journal.Journal, o journal.ReplayOptions) (*journal.Report, error) {
	p := a.printer()
	o.Explain = c.Step
	n := 0
	o.Pause = func() error {
		if n++; n%1024 == 0 {
			return a.ctx.Err()
		}
		return nil
	}
	if c.Step {
		o.Step = func(s *journal.Step, effects []core.Effect) error {
			return p.line(stepLine{j.Dispatcher, s.N, s.Now.Seconds(), journal.Name(s.Event), s.Event, journal.Decisions(effects), len(effects)})
		}
	}
	rep, err := journal.Replay(j, o)
	if err != nil && rep != nil {
		return nil, err
	}
	if err != nil {
		return &journal.Report{Dispatcher: j.Dispatcher, Start: j.Start, CoreHere: core.Version, Incomplete: err.Error(), TailMissing: !j.Ended}, nil
	}
	if rep.First != nil && !o.Explain {
		o.Explain = true
		if again, err := journal.Replay(j, o); err == nil && again.First != nil && again.First.Event == rep.First.Event {
			rep.First = again.First
		}
	}
	return rep, nil
}

func replayRow(r *journal.Report) []string {
	tail, note := "whole", r.Incomplete
	if r.TailMissing {
		tail = "open"
	}
	if r.First != nil {
		note = r.First.What
	}
	if r.Core != r.CoreHere && r.Core != 0 {
		note = fmt.Sprintf("recorded by core %d, replayed by core %d; %s", r.Core, r.CoreHere, note)
	}
	return []string{r.Dispatcher, r.Start, number(int(r.Events)), number(int(r.Decisions)), number(r.Differences), tail,
		number(int(r.FromEvent)), number(r.Checkpoints), dash(r.Program), dash(note)}
}
