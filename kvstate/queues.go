package kvstate

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// Requeue is a rollout on its way back into the queue.
type Requeue struct {
	Job, ID, Reader string
	Lane            subjects.Lane
	Bind            int // the number of its next bind, at least 2
	Burnt           int
	Tried           []string
	LeftMS          int64 // now
	Accepted        int64 // server time, unix ns
	Body            []byte
}

// Requeue writes to RETRY under the id of the next bind. DuplicateError: it
// stands there already, or stood there within the window; the hand-over is done.
func (s *Store) Requeue(ctx context.Context, r Requeue) (seq uint64, err error) {
	if r.Reader == "" {
		r.Reader = subjects.DefaultReader
	}
	if err := refuse(checkRollout(r.Job, r.ID), subjects.CheckToken("reader", r.Reader)); err != nil {
		return 0, fmt.Errorf("requeue: %w", err)
	}
	what := fmt.Sprintf("requeue %s#%d", subjects.RolloutKey(r.Job, r.ID), r.Bind)
	switch {
	case !r.Lane.Valid():
		return 0, fmt.Errorf("%s: %w: lane is %q: give urgent, continue, normal or batch", what, ErrRefused, r.Lane)
	case r.Bind < 2:
		return 0, fmt.Errorf("%s: %w: its next bind is at least the second", what, ErrRefused)
	case len(r.Body) == 0:
		return 0, fmt.Errorf("%s: %w: the body is missing: read it with Reservation first", what, ErrRefused)
	}
	seq, err = s.publish(ctx, s.pool.RetrySubject(r.Job), r.header(), r.Body)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return seq, nil
}

// header says what the queue has to know; prompt and output sizes are left to
// the body, so that the facts are never half old and half new.
func (r Requeue) header() nats.Header {
	f := subjects.Facts{
		Job: r.Job, ID: r.ID, Reader: r.Reader, Lane: r.Lane, Bind: r.Bind, Burnt: r.Burnt,
		Tried: r.Tried, LeftMS: max(1, r.LeftMS), Accepted: r.Accepted,
	}
	h := f.Header()
	h.Del(subjects.HdrPromptTokens)
	h.Del(subjects.HdrMaxTokens)
	h.Set(subjects.HdrMsgID, msgID(r.Job, r.ID, r.Bind))
	return h
}

// Dead is what could not be served.
type Dead struct {
	Job, ID      string // an id that no subject could hold is kept out of the message id
	Code, Reason string // in HdrError as "code: reason"
	Body         []byte
	Header       nats.Header // of rollbus, kept beside it; Nats- and KV- headers are left out
}

// maxReason bounds the text of HdrError, bytes.
const maxReason = 512

// Bury keeps a request whole in DEAD. Buried again within the window (same job,
// id and bind number) it stands there once, and that is no error.
func (s *Store) Bury(ctx context.Context, d Dead) error {
	if err := refuse(subjects.CheckToken("job", d.Job)); err != nil {
		return fmt.Errorf("bury: %w", err)
	}
	_, err := s.publish(ctx, s.pool.DeadSubject(d.Job), d.header(), d.Body)
	if err != nil && !errors.Is(err, ErrDuplicate) {
		return fmt.Errorf("bury %s: %w", subjects.RolloutKey(d.Job, d.ID), err)
	}
	return nil
}

// strayJob is where DEAD keeps what was submitted to no job.
const strayJob = "_stray"

// BuryStray keeps in DEAD what was submitted to a subject that names no job; seq
// is its place in ROLLOUTS, under which it stands there once.
func (s *Store) BuryStray(ctx context.Context, seq uint64, d Dead) error {
	h := d.header()
	h.Set(subjects.HdrMsgID, msgID(strayJob, strconv.FormatUint(seq, 10), 0))
	if _, err := s.publish(ctx, s.pool.DeadSubject(strayJob), h, d.Body); err != nil && !errors.Is(err, ErrDuplicate) {
		return fmt.Errorf("bury the stray at %d: %w", seq, err)
	}
	return nil
}

func (d Dead) header() nats.Header {
	h := nats.Header{}
	for k, v := range d.Header {
		// A copied guard, time to live or delete would be obeyed.
		low := strings.ToLower(k)
		if !strings.HasPrefix(low, "nats-") && !strings.HasPrefix(low, "kv-") {
			h[k] = v
		}
	}
	text := d.Code
	if d.Reason != "" {
		text += ": " + d.Reason
	}
	h.Set(subjects.HdrError, headerText(text))
	if subjects.CheckToken("id", d.ID) == nil {
		bind, _ := strconv.Atoi(h.Get(subjects.HdrBind))
		h.Set(subjects.HdrMsgID, msgID(d.Job, d.ID, bind))
	}
	return h
}

// headerText makes any text one line that people can read, of at most maxReason bytes.
func headerText(s string) string {
	if len(s) > maxReason {
		s = strings.ToValidUTF8(s[:maxReason], "")
	}
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	return strings.TrimSpace(s)
}
