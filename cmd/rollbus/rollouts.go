package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// GetRollouts lists rollouts.
type GetRollouts struct {
	Job   string `short:"j" help:"Only this job's." placeholder:"NAME"`
	State string `default:"" enum:",queued,retry,bound,returned,answered,stray" help:"Only these: queued, retry, bound, returned, answered, or stray (submitted to no lane)."`
	Limit int    `default:"1000" help:"Look at so many queued ones at most, the oldest." placeholder:"N"`
	watchFlags
}

// rolloutRow is one place where a rollout stands.
type rolloutRow struct {
	Job     string          `json:"job"`
	ID      string          `json:"id"`
	State   string          `json:"state"` // queued, retry, bound, returned, answered, stray
	Lane    subjects.Lane   `json:"lane,omitempty"`
	Engine  string          `json:"engine,omitempty"`
	Bind    int             `json:"bind,omitempty"`
	Tokens  int             `json:"tokens,omitempty"` // reserved
	Status  subjects.Status `json:"status,omitempty"`
	Reason  string          `json:"reason,omitempty"` // why this engine, or why it came back
	Seq     uint64          `json:"seq"`              // in the stream that holds it
	Stored  time.Time       `json:"stored"`           // NATS server's clock
	LeftMS  int64           `json:"left_ms,omitempty"`
	Tried   []string        `json:"tried,omitempty"`
	Bytes   int             `json:"bytes,omitempty"`
	Attempt int             `json:"attempt,omitempty"` // bind number that answered
	reader  string
}

// Run lists them.
func (c GetRollouts) Run(a *app) error {
	head := []string{"ROLLOUT", "STATE", "LANE", "ENGINE", ">BIND", ">TOKENS", "STATUS", ">AGE", "REASON", "+>SEQ", "+STORED", "+>LEFT", "+TRIED"}
	said := false
	find := func(l *look) ([]rolloutRow, error) {
		rows, cut, err := c.find(l)
		if cut && !said {
			said = true
			a.say("rollbus: only the oldest %d queued rollouts were looked at, --limit looks at more", c.Limit)
		}
		return rows, err
	}
	return listing(a, c.watchFlags, head, find, func(r rolloutRow) []string {
		left := "-"
		if r.LeftMS > 0 {
			left = (time.Duration(r.LeftMS) * time.Millisecond).Round(time.Second).String()
		}
		return []string{subjects.RolloutKey(r.Job, r.ID), r.State, dash(string(r.Lane)), dash(r.Engine), number(r.Bind), number(r.Tokens),
			dash(string(r.Status)), time.Since(r.Stored).Round(100 * time.Millisecond).String(), dash(r.Reason),
			strconv.FormatUint(r.Seq, 10), stamp(r.Stored), left, dash(strings.Join(r.Tried, ","))}
	})
}

func number(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

func (c GetRollouts) find(l *look) (rows []rolloutRow, cut bool, err error) {
	want := func(states ...string) bool { return c.State == "" || slices.Contains(states, c.State) }
	if want("queued", "stray") {
		filter := l.pool.SubmitFilter()
		if c.Job != "" {
			filter = strings.TrimSuffix(filter, ">") + c.Job + ".*"
		}
		if rows, cut, err = l.queued(l.pool.Rollouts(), filter, "queued", c.Limit); err != nil {
			return nil, false, err
		}
		if c.State != "" {
			rows = slices.DeleteFunc(rows, func(r rolloutRow) bool { return r.State != c.State })
		}
	}
	if want("retry") {
		filter := l.pool.RetryFilter()
		if c.Job != "" {
			filter = l.pool.RetrySubject(c.Job)
		}
		again, more, err := l.queued(l.pool.Retry(), filter, "retry", c.Limit)
		if err != nil {
			return nil, false, err
		}
		rows, cut = append(rows, again...), cut || more
	}
	if want("bound", "returned") {
		held, err := l.reservations("")
		if err != nil {
			return nil, false, err
		}
		for _, h := range held {
			if c.Job != "" && h.Job != c.Job || c.State != "" && string(h.State) != c.State {
				continue
			}
			rows = append(rows, rolloutRow{Job: h.Job, ID: h.ID, State: string(h.State), Lane: h.Lane, Engine: h.Engine, Bind: h.Bind, Tokens: h.Tokens,
				Reason: cmp.Or(h.ReturnReason, h.Reason), Seq: h.Revision, Stored: h.Stored, LeftMS: h.LeftMS, Tried: h.Tried, reader: h.Reader})
		}
	}
	if want("answered") {
		for m, err := range latest(l.ctx, l.js, l.pool.Results(), l.pool.ResultFilter(c.Job, ""), true) {
			if err != nil {
				return nil, false, err
			}
			if r, ok := l.answered(m); ok {
				rows = append(rows, r)
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b rolloutRow) int {
		return cmp.Or(cmp.Compare(a.Job, b.Job), cmp.Compare(a.ID, b.ID), a.Stored.Compare(b.Stored))
	})
	return rows, cut, nil
}

func (l *look) answered(m jetstream.Msg) (rolloutRow, bool) {
	job, reader, id, ok := l.pool.ParseResultSubject(m.Subject())
	meta, err := m.Metadata()
	if !ok || err != nil || m.Headers().Get(subjects.HdrStatus) == "" {
		return rolloutRow{}, false
	}
	a, _ := subjects.AnswerFromHeader(job, reader, id, m.Headers()) // what can be read is shown
	return rolloutRow{Job: job, ID: id, State: "answered", Engine: a.Engine, Attempt: a.Bind, Bind: a.Bind, Status: a.Status,
		Seq: meta.Sequence.Stream, Stored: meta.Timestamp, LeftMS: a.LeftMS, reader: reader}, true
}

// queued walks a WorkQueue stream by direct gets: a consumer there would block
// the dispatchers'.
func (l *look) queued(stream, filter, state string, limit int) (rows []rolloutRow, cut bool, err error) {
	s, err := l.js.Stream(l.ctx, stream)
	if err != nil {
		return nil, false, fmt.Errorf("read stream %s: %w", stream, err)
	}
	for seq := uint64(1); ; seq++ {
		m, err := s.GetMsg(l.ctx, seq, jetstream.WithGetMsgSubject(filter))
		heard(l.ctx) // silence has ended the context by now
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return rows, false, nil
		}
		if err != nil {
			return nil, false, fmt.Errorf("read stream %s: %w", stream, err)
		}
		if len(rows) == limit {
			return rows, true, nil
		}
		seq = m.Sequence
		key, _, _ := strings.Cut(m.Header.Get(subjects.HdrMsgID), "#")
		job, id, _ := subjects.SplitRolloutKey(key)
		r := rolloutRow{Job: job, ID: id, State: state, Seq: m.Sequence, Stored: m.Time, Bytes: len(m.Data)}
		var lane subjects.Lane
		if state == "queued" {
			named, in, ok := l.pool.ParseSubmitSubject(m.Subject)
			if r.Job, lane = named, in; !ok || subjects.CheckToken("job", named) != nil {
				r.Job, r.State, r.Reason = job, "stray", "no job and lane in "+m.Subject
				rows = append(rows, r)
				continue
			}
		} else {
			r.Job, _ = l.pool.ParseRetrySubject(m.Subject)
		}
		if f, _, err := subjects.FactsFromHeader(r.Job, id, lane, m.Header); err == nil {
			r.Lane, r.Bind, r.Tried, r.LeftMS, r.reader = f.Lane, f.Bind, f.Tried, f.LeftMS, f.Reader
		}
		rows = append(rows, r)
	}
}
