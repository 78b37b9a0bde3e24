package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// DeadCmd looks after what could not be served.
type DeadCmd struct {
	List    DeadList    `cmd:"" help:"List what could not be served, oldest first, with the reason."`
	Show    DeadShow    `cmd:"" help:"Print one: headers, reason and the bytes as they came."`
	Requeue DeadRequeue `cmd:"" help:"Submit them again, as new rollouts."`
}

// Help shows examples.
func (DeadCmd) Help() string {
	return `Examples:
  rollbus dead list --job math
  rollbus dead show 17
  rollbus dead show 17 --body > request.json     mend it, then: rollbus submit request.json
  rollbus dead requeue 17 18
Entries stay 30 days whatever is done with them.`
}

// deadRow is one entry of DEAD.
type deadRow struct {
	Seq    uint64            `json:"seq"`
	Job    string            `json:"job"`
	ID     string            `json:"id,omitempty"` // empty: it had no usable one
	Code   string            `json:"code"`
	Reason string            `json:"reason"`
	Answer string            `json:"answer,omitempty"` // what the register says: a status, or received; empty = nothing
	Bytes  int               `json:"bytes"`
	Stored time.Time         `json:"stored"` // NATS server's clock
	Header map[string]string `json:"header,omitempty"`
	Body   json.RawMessage   `json:"body,omitempty"`       // when it is JSON
	Raw    []byte            `json:"body_bytes,omitempty"` // else, base64
}

func deadOf(pool subjects.Pool, subject string, h nats.Header, seq uint64, bytes int, stored time.Time) deadRow {
	r := deadRow{Seq: seq, Job: strings.TrimPrefix(subject, pool.DeadSubject("")), Bytes: bytes, Stored: stored}
	key, _, _ := strings.Cut(h.Get(subjects.HdrMsgID), "#")
	_, r.ID, _ = subjects.SplitRolloutKey(key)
	r.Code, r.Reason, _ = strings.Cut(h.Get(subjects.HdrError), ": ")
	return r
}

func (r deadRow) name() string {
	if r.ID == "" {
		return r.Job + ".?"
	}
	return subjects.RolloutKey(r.Job, r.ID)
}

// DeadList lists them.
type DeadList struct {
	Job   string `short:"j" help:"Only this job's." placeholder:"NAME"`
	Limit int    `default:"1000" help:"The latest so many." placeholder:"N"`
}

// Run lists them.
func (c DeadList) Run(a *app) error {
	if c.Limit < 1 {
		return coded(exitUsage, "--limit is %d: give 1 or more", c.Limit)
	}
	return a.looking(func(l *look) error {
		rows, err := c.find(l)
		if err != nil {
			return err
		}
		return list(a.printer(), []string{">SEQ", "ROLLOUT", "CODE", "ANSWER", ">BYTES", ">AGE", "REASON"}, rows, func(r deadRow) []string {
			reason := r.Reason
			if a.opts.Output != formatWide {
				reason = oneLine(reason, 90)
			}
			return []string{strconv.FormatUint(r.Seq, 10), r.name(), dash(r.Code), dash(r.Answer), strconv.Itoa(r.Bytes), time.Since(r.Stored).Round(time.Second).String(), dash(reason)}
		})
	})
}

// find walks DEAD. Sizes are of the whole entry: bodies are not fetched.
func (c DeadList) find(l *look) ([]deadRow, error) {
	filter := l.pool.DeadSubject(">")
	if c.Job != "" {
		if err := subjects.CheckToken("job", c.Job); err != nil {
			return nil, err
		}
		filter = l.pool.DeadSubject(c.Job)
	}
	cons, err := l.js.OrderedConsumer(l.ctx, l.pool.Dead(), jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}, HeadersOnly: true})
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", l.pool.Dead(), err)
	}
	var rows []deadRow
	for pending := cons.CachedInfo().NumPending; pending > 0; {
		m, err := cons.Next(jetstream.FetchContext(l.ctx))
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", l.pool.Dead(), err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", l.pool.Dead(), err)
		}
		pending = meta.NumPending
		size, _ := strconv.Atoi(m.Headers().Get(nats.MsgSize)) // the server's own header
		if rows = append(rows, deadOf(l.pool, m.Subject(), m.Headers(), meta.Sequence.Stream, size, meta.Timestamp)); len(rows) > c.Limit {
			rows = rows[1:]
		}
	}
	return rows, l.answers(rows)
}

// received is what the register says of an answer that its reader has taken.
const received = "received"

// answers tells what the register says of dead rollouts: a late answer of an
// agent may have been first, and the entry is none of a failure then.
func (l *look) answers(rows []deadRow) error {
	s, err := l.js.Stream(l.ctx, l.pool.Results())
	if err != nil {
		return fmt.Errorf("read stream %s: %w", l.pool.Results(), err)
	}
	for i := range rows {
		r := &rows[i]
		if r.ID == "" {
			continue
		}
		m, err := s.GetLastMsgForSubject(l.ctx, l.pool.Result(r.Job, "*", r.ID))
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			continue
		case err != nil:
			return fmt.Errorf("read stream %s: %w", l.pool.Results(), err)
		}
		if r.Answer = m.Header.Get(subjects.HdrStatus); r.Answer == "" {
			r.Answer = received
		}
	}
	return nil
}

// deadAt reads one entry whole.
func (l *look) deadAt(seq uint64) (deadRow, []byte, error) {
	s, err := l.js.Stream(l.ctx, l.pool.Dead())
	if err != nil {
		return deadRow{}, nil, fmt.Errorf("read stream %s: %w", l.pool.Dead(), err)
	}
	m, err := s.GetMsg(l.ctx, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return deadRow{}, nil, coded(exitNotFound, "no dead rollout at %d in pool %s: `rollbus dead list` shows those there are", seq, l.pool)
	}
	if err != nil {
		return deadRow{}, nil, fmt.Errorf("read stream %s: %w", l.pool.Dead(), err)
	}
	r := deadOf(l.pool, m.Subject, m.Header, m.Sequence, len(m.Data), m.Time)
	r.Header = map[string]string{}
	for k := range m.Header {
		r.Header[k] = m.Header.Get(k)
	}
	if json.Valid(m.Data) {
		r.Body = m.Data
	} else {
		r.Raw = m.Data
	}
	return r, m.Data, nil
}

// DeadShow prints one.
type DeadShow struct {
	Seq  uint64 `arg:"" help:"Its number, as in the list."`
	Body bool   `help:"Only the bytes as they came."`
}

// Run prints it.
func (c DeadShow) Run(a *app) error {
	return a.looking(func(l *look) error {
		r, body, err := l.deadAt(c.Seq)
		if err != nil {
			return err
		}
		one := []deadRow{r}
		if err := l.answers(one); err != nil {
			return err
		}
		r = one[0]
		if c.Body {
			_, err := a.stdout.Write(body)
			return err
		}
		return a.printer().one(r, func() error {
			pairs := []string{"rollout", r.name(), "code", r.Code, "reason", r.Reason, "answer", dash(r.Answer), "stored", stamp(r.Stored), "bytes", strconv.Itoa(r.Bytes)}
			for _, k := range slices.Sorted(maps.Keys(r.Header)) {
				pairs = append(pairs, k, oneLine(r.Header[k], 120))
			}
			if err := a.printer().fields(pairs...); err != nil {
				return err
			}
			// Bytes that a terminal might obey are quoted; --body gives them as they are.
			text := string(body)
			if !utf8.ValidString(text) || strings.ContainsFunc(text, func(c rune) bool { return c < ' ' && c != '\n' && c != '\t' }) {
				text = strconv.Quote(text)
			}
			if most := 4000; len(text) > most {
				text = text[:most] + fmt.Sprintf("... (--body prints all %d bytes)", len(body))
			}
			_, err := fmt.Fprintf(a.stdout, "\n%s\n", text)
			return err
		})
	})
}

// DeadRequeue submits them again.
type DeadRequeue struct {
	Seqs []uint64 `arg:"" name:"seq" help:"Their numbers, as in the list."`
}

// Help says what a requeue is.
func (DeadRequeue) Help() string {
	return `A dead rollout has had its answer, which stays its answer: what is submitted again is a new rollout,
<id>-dead<seq>, with a deadline of its own. Doing it twice does not run it twice.`
}

// Run submits them.
func (c DeadRequeue) Run(a *app) error {
	return a.looking(func(l *look) error {
		reqs := make([]*subjects.Request, 0, len(c.Seqs))
		for _, seq := range c.Seqs {
			_, body, err := l.deadAt(seq)
			if err != nil {
				return err
			}
			r, err := subjects.DecodeRequest(body)
			if err != nil {
				return coded(exitUsage, "dead %d cannot be submitted as it is: %w (`rollbus dead show %d --body` prints it to be mended; nothing was submitted)", seq, err, seq)
			}
			r.ID = fmt.Sprintf("%s-dead%d", r.ID, seq)
			if err := r.Validate(); err != nil {
				return coded(exitUsage, "dead %d: %w (nothing was submitted)", seq, err)
			}
			reqs = append(reqs, r)
		}
		settings, _, err := l.s.Settings(l.ctx)
		if err != nil {
			return fmt.Errorf("settings of pool %s: %w", l.pool, err)
		}
		out := newSender(l.ctx, l.js.Conn(), a.opts.Pool, settings.WithDefaults(), a.opts.Timeout)
		defer out.close()
		for _, r := range reqs {
			h, err := out.send(l.ctx, r)
			if err != nil {
				return fmt.Errorf("submit %s: %w", r.Key(), err)
			}
			if err := a.printer().stored(h); err != nil {
				return err
			}
		}
		return nil
	})
}
