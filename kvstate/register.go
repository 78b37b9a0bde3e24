package kvstate

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// ReceivedGrace is how long a received answer is remembered beyond its deadline:
// longer than any reservation of it can live, since a NATS server that crashed
// may bring a deleted key back (docs/decisions/0009).
const ReceivedGrace = subjects.ReservationGraceMS*time.Millisecond + time.Hour

// Commit writes a rollout's one terminal answer, if there is none: the commit
// point. Job, id, status and reader of a may be left empty. ErrSuperseded:
// another answer was first (or this very one, when an earlier attempt was
// ErrUnknown: Result tells). ErrFull and ErrUnknown: keep it and try again, the
// reservation stays.
func (s *Store) Commit(ctx context.Context, res *subjects.Result, a subjects.Answer) (seq uint64, err error) {
	if res == nil {
		return 0, fmt.Errorf("commit: %w: there is no result", ErrRefused)
	}
	fill := func(v *string, with string) {
		if *v == "" {
			*v = with
		}
	}
	fill(&a.Job, res.Job)
	fill(&a.ID, res.ID)
	fill(&a.Reader, subjects.DefaultReader)
	if a.Status == "" {
		a.Status = res.Status
	}
	if err := refuse(checkRollout(a.Job, a.ID), subjects.CheckToken("reader", a.Reader)); err != nil {
		return 0, fmt.Errorf("commit: %w", err)
	}
	if a.Job != res.Job || a.ID != res.ID || a.Status != res.Status || !a.Status.Valid() {
		return 0, fmt.Errorf("commit %s: %w: the result says %s.%s %q, its headers %q: make them agree",
			a.Key(), ErrRefused, res.Job, res.ID, res.Status, a.Status)
	}
	return s.commit(ctx, res, a)
}

func (s *Store) commit(ctx context.Context, res *subjects.Result, a subjects.Answer) (seq uint64, err error) {
	body, err := json.Marshal(res)
	if err != nil {
		return 0, fmt.Errorf("commit %s: %w: %w", a.Key(), ErrRefused, err)
	}
	header := a.Header()
	guard(header, 0)
	seq, err = s.publish(ctx, s.pool.Result(a.Job, a.Reader, a.ID), header, body)
	if err != nil {
		return 0, fmt.Errorf("commit %s: %w", a.Key(), superseded(err))
	}
	return seq, nil
}

// CommitStray is Commit for a rollout whose job is no name of ours: its
// submitter does not know that, and reads its answers under that name.
func (s *Store) CommitStray(ctx context.Context, res *subjects.Result, reader string) (seq uint64, err error) {
	if err := refuse(subjects.CheckToken("id", res.ID), subjects.CheckToken("reader", reader)); err != nil {
		return 0, fmt.Errorf("commit: %w", err)
	}
	return s.commit(ctx, res, subjects.Answer{Job: res.Job, ID: res.ID, Reader: reader, Status: res.Status})
}

// Result reads the register from its leader: an answer, or with an empty Status
// one that was received. ErrGone when there is none.
func (s *Store) Result(ctx context.Context, job, reader, id string) (Registered, error) {
	if reader == "" {
		reader = subjects.DefaultReader
	}
	if err := refuse(checkRollout(job, id), subjects.CheckToken("reader", reader)); err != nil {
		return Registered{}, fmt.Errorf("read result: %w", err)
	}
	d, err := s.last(ctx, s.pool.Results(), s.pool.Result(job, reader, id))
	if err != nil {
		return Registered{}, err
	}
	return registeredOf(d, job, reader, id)
}

func registeredOf(d delivery, job, reader, id string) (Registered, error) {
	a, err := subjects.AnswerFromHeader(job, reader, id, d.header)
	if err != nil {
		return Registered{}, fmt.Errorf("%w: %s at sequence %d: %w", ErrRefused, d.subject, d.seq, err)
	}
	return Registered{Answer: a, Revision: d.seq, Stored: d.stored, Body: d.data}, nil
}

// Received marks an answer as read by its reader: the body goes, the entry stays
// for the time left and an hour, so that no second answer can be written
// meanwhile. ErrSuperseded: it was marked before, perhaps by an earlier attempt
// of this very call. ErrGone: the entry has expired.
func (s *Store) Received(ctx context.Context, r Registered) error {
	if err := refuse(checkRollout(r.Job, r.ID), subjects.CheckToken("reader", r.Reader)); err != nil {
		return fmt.Errorf("received: %w", err)
	}
	a := r.Answer
	a.Status = "" // usage stays: estimates are rebuilt from it
	header := a.Header()
	guard(header, r.Revision)
	left := min(max(0, a.LeftMS), subjects.MaxDeadline.D().Milliseconds())
	setTTL(header, time.Duration(left)*time.Millisecond+ReceivedGrace)
	if _, err := s.publish(ctx, s.pool.Result(a.Job, a.Reader, a.ID), header, nil); err != nil {
		return fmt.Errorf("received %s: %w", a.Key(), superseded(err))
	}
	return nil
}

// FollowResults follows the register, without bodies unless f.Values. The filter
// is what stands behind "rollout.<pool>.result.": "j.>", "j.main.*".
func (s *Store) FollowResults(ctx context.Context, f FollowConfig, h Handler[Registered, struct{}]) error {
	sp, err := s.spec(f, "results", s.pool.Results(), strings.TrimSuffix(s.pool.ResultFilter("", ""), ">"))
	if err != nil {
		return err
	}
	sp.headersOnly = !f.Values
	return follow(ctx, s, sp, h, func(d delivery) (r Registered, g struct{}, k kind, err error) {
		job, reader, id, ok := s.pool.ParseResultSubject(d.subject)
		if !ok {
			return r, g, kindNone, nil
		}
		if r, err = registeredOf(d, job, reader, id); err != nil {
			// Whatever its headers say, the register is taken: nobody else's
			// answer will be. It counts as an answer of unknown status.
			a := subjects.Answer{Job: job, Reader: reader, ID: id, Status: subjects.Failed}
			return Registered{Answer: a, Revision: d.seq, Stored: d.stored, Body: d.data}, g, kindPut, err
		}
		return r, g, kindPut, nil
	})
}
