package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// register reads an answer by direct get on its exact subject, which a
// credential of one job may be allowed. It may lag on R3: an answer found is an
// answer, one not found may come. kvstate.ErrGone when there is none.
func (c *Client) register(ctx context.Context, id string) (kvstate.Registered, error) {
	m, err := c.direct(ctx, c.pool.Results(), c.pool.Result(c.job, c.opt.reader, id))
	if err != nil {
		return kvstate.Registered{}, err
	}
	seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
	if err != nil {
		return kvstate.Registered{}, fmt.Errorf("%w: no sequence in the answer", kvstate.ErrUnavailable)
	}
	// A malformed header says nothing: the body is looked at instead.
	a, _ := subjects.AnswerFromHeader(c.job, c.opt.reader, id, m.Header)
	stored, _ := time.Parse(time.RFC3339Nano, m.Header.Get("Nats-Time-Stamp"))
	return kvstate.Registered{Answer: a, Revision: seq, Stored: stored, Body: m.Data}, nil
}

// poolSettings reads the settings in the same way.
func (c *Client) poolSettings(ctx context.Context) (s subjects.Settings, err error) {
	m, err := c.direct(ctx, subjects.BucketStream(subjects.BucketPools), subjects.BucketSubject(subjects.BucketPools, c.pool.String()))
	switch {
	case err != nil:
		return s, err
	case len(m.Data) == 0: // deleted
		return s, kvstate.ErrGone
	}
	err = json.Unmarshal(m.Data, &s)
	return s, err
}

// direct gets the last message of an exact subject.
func (c *Client) direct(ctx context.Context, stream, subject string) (*nats.Msg, error) {
	ctx, done := c.attempt(ctx, kvstate.DefaultTimeout)
	defer done()
	m, err := c.nc.RequestMsgWithContext(ctx, &nats.Msg{Subject: "$JS.API.DIRECT.GET." + stream + "." + subject})
	if err != nil {
		return nil, fmt.Errorf("%w: read %s: %w", kvstate.ErrUnavailable, subject, err)
	}
	// An entry may bear a header of that name too; the server's own comes
	// without a sequence.
	if status := m.Header.Get("Status"); status != "" && m.Header.Get("Nats-Sequence") == "" {
		if status == "404" {
			return nil, fmt.Errorf("%w: %s", kvstate.ErrGone, subject)
		}
		return nil, fmt.Errorf("%w: read %s: status %s", kvstate.ErrUnavailable, subject, status)
	}
	return m, nil
}

// place is where a rollout was found.
type place string

const (
	nowhere      place = ""
	inQueue      place = "queue"
	inRetry      place = "retry" // or another rollout of this job
	onEngine     place = "reservation"
	inRegister   place = "register"
	notToBeAsked place = "unknown" // NATS did not answer, or the credential may not look
)

// find looks for a rollout everywhere, in the direction in which it moves, and
// in the register last.
func (c *Client) find(ctx context.Context, h Handle) (place, error) {
	seen := nowhere
	note := func(p place, err error) {
		switch {
		case errors.Is(err, kvstate.ErrGone):
		case err != nil:
			if seen == nowhere {
				seen = notToBeAsked
			}
		default:
			seen = p
		}
	}
	note(inQueue, c.queued(ctx, h))
	if seen != inQueue {
		note(onEngine, c.reserved(ctx, h))
	}
	if seen != inQueue && seen != onEngine {
		note(inRetry, c.retrying(ctx))
	}
	_, err := c.store.Result(ctx, h.Job, h.Reader, h.ID)
	switch {
	case err == nil, errors.Is(err, kvstate.ErrRefused): // there, if malformed
		return inRegister, nil
	case errors.Is(err, kvstate.ErrGone):
		return seen, nil
	}
	// The leader may not be asked by everyone; the exact subject may.
	if _, err = c.register(ctx, h.ID); err == nil {
		return inRegister, nil
	} else if errors.Is(err, kvstate.ErrGone) {
		return seen, nil
	}
	return notToBeAsked, err
}

func (c *Client) queued(ctx context.Context, h Handle) error {
	ctx, done := c.attempt(ctx, kvstate.DefaultTimeout)
	defer done()
	var answer struct {
		Error *struct {
			ErrCode int `json:"err_code"`
		} `json:"error"`
		Message struct {
			Headers []byte `json:"hdrs"`
		} `json:"message"`
	}
	err := c.api(ctx, "STREAM.MSG.GET."+c.pool.Rollouts(), map[string]any{"seq": h.Seq}, &answer)
	switch {
	case err != nil:
		return err
	case answer.Error != nil && answer.Error.ErrCode == 10037:
		return kvstate.ErrGone
	case answer.Error != nil:
		return kvstate.ErrUnavailable
	}
	headers, err := nats.DecodeHeadersMsg(answer.Message.Headers)
	if err != nil || headers.Get(subjects.HdrMsgID) != h.Key() {
		return kvstate.ErrGone // a stream made anew counts from 1 again
	}
	return nil
}

// reserved looks for the rollout's keys at every engine. The last message under
// a wildcard may be an old key's delete marker: each key is read.
func (c *Client) reserved(ctx context.Context, h Handle) error {
	names, err := c.subjectsOf(ctx, subjects.BucketStream(c.pool.Bucket(subjects.Reservations)), c.pool.ReservationSubject("*", h.Job, h.ID))
	if err != nil {
		return err
	}
	for name := range names {
		engine, job, id, ok := c.pool.ParseReservationSubject(name)
		if !ok {
			continue
		}
		if _, err := c.store.Reservation(ctx, engine, job, id); !errors.Is(err, kvstate.ErrGone) {
			return err
		}
	}
	return kvstate.ErrGone
}

func (c *Client) retrying(ctx context.Context) error {
	names, err := c.subjectsOf(ctx, c.pool.Retry(), c.pool.RetrySubject(c.job))
	if err == nil && len(names) == 0 {
		err = kvstate.ErrGone
	}
	return err
}

func (c *Client) subjectsOf(ctx context.Context, stream, filter string) (map[string]uint64, error) {
	ctx, done := c.attempt(ctx, kvstate.DefaultTimeout)
	defer done()
	var answer struct {
		Error *struct{} `json:"error"`
		State struct {
			Subjects map[string]uint64 `json:"subjects"`
		} `json:"state"`
	}
	if err := c.api(ctx, "STREAM.INFO."+stream, map[string]any{"subjects_filter": filter}, &answer); err != nil {
		return nil, err
	}
	if answer.Error != nil {
		return nil, kvstate.ErrUnavailable
	}
	return answer.State.Subjects, nil
}
