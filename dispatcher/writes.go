package dispatcher

import (
	"context"
	"errors"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// answerOf turns an error of kvstate into what the core can do differently.
func answerOf(err error) (a core.Answer, seq, actual uint64) {
	if err == nil {
		return core.OK, 0, 0
	}
	if c, ok := errors.AsType[*kvstate.ConflictError](err); ok {
		return core.Conflict, 0, c.Actual
	}
	if d, ok := errors.AsType[*kvstate.DuplicateError](err); ok {
		return core.Duplicate, d.Seq, 0
	}
	for _, k := range [...]struct {
		err error
		a   core.Answer
	}{
		{kvstate.ErrConflict, core.Conflict}, {kvstate.ErrBusy, core.Busy},
		{kvstate.ErrDuplicate, core.Duplicate}, {kvstate.ErrSuperseded, core.Superseded},
		{kvstate.ErrFull, core.Full}, {kvstate.ErrGone, core.Gone},
		{kvstate.ErrUnknown, core.Unknown},
	} {
		if errors.Is(err, k.err) {
			return k.a, 0, 0
		}
	}
	return core.Unavailable, 0, 0
}

// settles tells whether an answer also speaks of earlier, unanswered attempts of
// the same write. The others say only that this attempt had no effect.
func settles(a core.Answer) bool {
	switch a {
	case core.Unknown, core.Unavailable, core.Busy, core.Full:
		return false
	}
	return true
}

// untilAnswered writes, and repeats the identical write once its outcome is
// unknown, with jittered, growing pauses. What is not answered within
// Timings.AttemptsFor is reported as unavailable: the core gives the message
// back, and whoever fetches it next finds in the view whether the write
// happened. doubt tells that the answer came after an unanswered attempt.
func (d *Dispatcher) untilAnswered(ctx context.Context, what string, write func(context.Context) (uint64, error)) (w wrote) {
	until := time.Now().Add(d.cfg.Timings.AttemptsFor)
	again := newPause(d.cfg.Timings.RepeatMin, d.cfg.Timings.RepeatMax)
	for {
		try, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
		seq, err := write(try)
		cancel()
		w.answer, w.seq, w.actual = answerOf(err)
		if w.err = err; err == nil {
			w.seq = seq
		}
		if settles(w.answer) || !w.doubt && w.answer != core.Unknown {
			break
		}
		if !w.doubt {
			w.doubt = true
			d.log.Debug("no answer; the identical write is repeated", "write", what, "err", err)
		}
		d.metrics.repeats.WithLabelValues(what).Inc()
		if time.Now().After(until) || !again.wait(ctx) {
			w.answer = core.Unavailable
			break
		}
	}
	d.metrics.writes.WithLabelValues(what, string(w.answer)).Inc()
	d.ready.wrote(w.answer)
	return w
}

// wrote is how a write ended.
type wrote struct {
	answer      core.Answer
	seq, actual uint64
	doubt       bool
	err         error // of the last attempt
}

// bind writes a reservation. On R1 the guard is checked before the message id,
// so that a repetition of a bind that did happen meets a conflict: then the
// leader is asked whether the key is ours.
func (d *Dispatcher) bind(ctx context.Context, b core.Bind, m *held) core.BindAnswer {
	out := core.BindAnswer{
		Handle: b.Handle, Engine: b.Held.Engine, Job: b.Held.Job, ID: b.Held.ID, Bind: b.Held.Bind,
		Answer: core.Unavailable,
	}
	write := kvstate.Bind{Held: b.Held, Expected: b.Expected, TTL: b.TTL}
	switch {
	case m != nil:
		write.Body = m.msg.Data
	case b.Held.State != subjects.StateExternal:
		return out // the message has left the hand: there is nothing to bind
	}
	w := d.untilAnswered(ctx, "bind", func(ctx context.Context) (uint64, error) {
		return d.bindKey(ctx, write)
	})
	if w.doubt && w.answer == core.Conflict {
		d.whose(ctx, b.Held, &w)
	}
	if errors.Is(w.err, kvstate.ErrRefused) {
		d.log.Warn("a bind is refused for what it is", "rollout", b.Held.Key(), "engine", b.Held.Engine, "err", w.err)
	}
	d.bound(&out, w, m)
	return out
}

// whose asks the leader for the key of a bind that was refused as one that may
// have happened; true says that the key is of that bind.
func (d *Dispatcher) whose(ctx context.Context, h subjects.Held, w *wrote) bool {
	r, a := d.key(ctx, h.Engine, h.Job, h.ID)
	if a != core.OK || r.Bind != h.Bind {
		return false
	}
	w.answer, w.seq = core.Duplicate, r.Revision
	if r.Dispatcher == h.Dispatcher && r.State == h.State {
		w.answer = core.OK
	}
	return true
}

// bound fills in how a bind ended.
func (d *Dispatcher) bound(out *core.BindAnswer, w wrote, m *held) {
	out.Answer, out.Seq, out.Actual = w.answer, w.seq, w.actual
	out.Stored = d.clock.now()
	if out.Answer == core.OK && m != nil {
		d.dispatched(m, out.Stored)
	}
}

// askLeader reads a key and the register where reads are never stale.
func (d *Dispatcher) askLeader(ctx context.Context, g core.GetFromLeader) core.LeaderAnswer {
	out := core.LeaderAnswer{Handle: g.Handle, Engine: g.Engine, Job: g.Job, ID: g.ID}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	if g.Engine != "" {
		r, err := d.store.Reservation(ctx, g.Engine, g.Job, g.ID)
		switch {
		case err == nil:
			put := reservationPut(r)
			out.Reservation = &put
		case !errors.Is(err, kvstate.ErrGone):
			out.Err = err.Error()
			return out
		}
	}
	r, err := d.store.Result(ctx, g.Job, readerOr(g.Reader), g.ID)
	switch {
	case err == nil:
		put := answered(r)
		out.Answered = &put
	case !errors.Is(err, kvstate.ErrGone):
		out.Reservation, out.Err = nil, err.Error()
	}
	return out
}

func readerOr(reader string) string {
	if reader == "" {
		return subjects.DefaultReader
	}
	return reader
}

// key is what a key holds now, from the leader.
func (d *Dispatcher) key(ctx context.Context, engine, job, id string) (kvstate.Reservation, core.Answer) {
	var r kvstate.Reservation
	w := d.untilAnswered(ctx, "read_key", func(ctx context.Context) (uint64, error) {
		var err error
		r, err = d.store.Reservation(ctx, engine, job, id)
		return 0, err
	})
	return r, w.answer
}

// body is what a key holds at exactly that revision.
func (d *Dispatcher) body(ctx context.Context, engine, job, id string, revision uint64) (kvstate.Reservation, core.Answer) {
	r, a := d.key(ctx, engine, job, id)
	if a == core.OK && r.Revision != revision {
		a = core.Gone
	}
	return r, a
}

func (d *Dispatcher) requeue(ctx context.Context, e core.Retry) core.RetryAnswer {
	out := core.RetryAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision}
	r, a := d.body(ctx, e.Engine, e.Job, e.ID, e.Revision)
	if a != core.OK {
		out.Answer = a
		return out
	}
	w := kvstate.Requeue{
		Job: e.Job, ID: e.ID, Reader: readerOr(r.Reader), Lane: e.Lane, Bind: e.Bind, Burnt: e.Burnt,
		Tried: e.Tried, LeftMS: e.LeftMS, Accepted: e.Accepted, Body: d.resumed(ctx, &r),
	}
	out.Answer = d.untilAnswered(ctx, "requeue", func(ctx context.Context) (uint64, error) {
		return d.store.Requeue(ctx, w)
	}).answer
	return out
}

// resumed is a reservation's body with the output that its agent's checkpoint
// kept, when the agent could not give it back itself (scenario R15). Without a
// checkpoint, or contact for one attempt at it, what was made is made again.
func (d *Dispatcher) resumed(ctx context.Context, r *kvstate.Reservation) []byte {
	if r.State != subjects.StateBound || d.settings.Load().PartialsEvery == 0 {
		return r.Body // given back by its agent with all it had, or nothing is kept
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	p, err := d.store.Checkpoint(ctx, r.Engine, r.Job, r.ID)
	if err != nil {
		if !errors.Is(err, kvstate.ErrGone) {
			d.log.Warn("a checkpoint cannot be read; its rollout begins anew", "rollout", r.Key(), "engine", r.Engine, "err", err)
		}
		return r.Body
	}
	if body, _, ok := p.Resumed(&r.Held, r.Body); ok {
		return body
	}
	return r.Body
}

func (d *Dispatcher) deleteKey(ctx context.Context, e core.DeleteKey) core.DeleteAnswer {
	out := core.DeleteAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision}
	w := d.untilAnswered(ctx, "delete_key", func(ctx context.Context) (uint64, error) {
		return d.store.Release(ctx, e.Released, e.Revision)
	})
	out.Answer, out.Seq = w.answer, w.seq
	return out
}

// publishResult writes the answer of what never ran, with what a result echoes.
func (d *Dispatcher) publishResult(ctx context.Context, e core.PublishResult, m *held) core.ResultAnswer {
	out := core.ResultAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID}
	var body []byte
	switch {
	case m != nil:
		body = m.msg.Data
	case e.Engine != "":
		r, a := d.body(ctx, e.Engine, e.Job, e.ID, e.Revision)
		if a != core.OK {
			out.Answer = a
			return out
		}
		body = r.Body
	}
	out.Answer, out.Seq = d.commit(ctx, e, body)
	return out
}

// commit writes a terminal answer at the register unless there is one.
func (d *Dispatcher) commit(ctx context.Context, e core.PublishResult, body []byte) (core.Answer, uint64) {
	e.Reader = readerOr(e.Reader)
	res := resultOf(e, body)
	facts := subjects.Answer{
		Job: e.Job, ID: e.ID, Reader: e.Reader, Status: e.Status, Bind: e.Attempt,
		Engine: e.Engine, Group: e.Group, LeftMS: e.LeftMS,
	}
	commit := func(ctx context.Context) (uint64, error) { return d.store.Commit(ctx, res, facts) }
	w := d.untilAnswered(ctx, "result", commit)
	if errors.Is(w.err, kvstate.ErrRefused) {
		// An echo that cannot be written must not cost the answer.
		d.log.Warn("a result cannot echo its request; it goes without", "rollout", subjects.RolloutKey(e.Job, e.ID), "err", w.err)
		e.Group, facts.Group = "", ""
		res = resultOf(e, nil)
		w = d.untilAnswered(ctx, "result", commit)
	}
	return w.answer, w.seq
}

// resultOf builds the answer, echoing whatever of the request can be read: a
// request may be refused for its body, and is answered all the same.
func resultOf(e core.PublishResult, body []byte) *subjects.Result {
	why := e.Error
	res := &subjects.Result{
		SchemaVersion: subjects.SchemaVersion, ID: e.ID, Job: e.Job, Attempt: e.Attempt,
		Status: e.Status, Error: &why, Route: subjects.Route{Engine: e.Engine},
	}
	if r, err := subjects.DecodeRequest(body); r != nil {
		res.Group, res.Trajectory, res.Labels = r.Group, r.Trajectory, r.Labels
		res.ReplyKey, res.Meta = r.ReplyKey, r.Meta
		if err == nil {
			res.Extra = r.Extra
		}
	}
	if res.Group == nil && e.Group != "" {
		res.Group = &subjects.Group{ID: e.Group}
	}
	return res
}

// bury keeps a whole request in DEAD.
func (d *Dispatcher) bury(ctx context.Context, e core.PublishDead, m *held) core.DeadAnswer {
	out := core.DeadAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID}
	w := kvstate.Dead{Job: e.Job, ID: e.ID, Code: e.Code, Reason: e.Reason}
	switch {
	case m != nil:
		w.Body, w.Header = m.msg.Data, m.msg.Header
	case e.Engine != "":
		r, a := d.body(ctx, e.Engine, e.Job, e.ID, e.Revision)
		if a != core.OK {
			out.Answer = a
			return out
		}
		w.Body, w.Header = r.Body, r.Held.Header()
	}
	x := d.untilAnswered(ctx, "bury", func(ctx context.Context) (uint64, error) {
		return 0, d.store.Bury(ctx, w)
	})
	if errors.Is(x.err, kvstate.ErrRefused) {
		// Headers or a size that DEAD does not take: keep what it does take.
		d.log.Warn("a request cannot be kept whole in DEAD", "job", e.Job, "bytes", len(w.Body), "err", x.err)
		w.Header = nil
		if len(w.Body) > subjects.MaxRequestBytes {
			w.Body = w.Body[:subjects.MaxRequestBytes]
		}
		x = d.untilAnswered(ctx, "bury", func(ctx context.Context) (uint64, error) {
			return 0, d.store.Bury(ctx, w)
		})
	}
	out.Answer = x.answer
	return out
}
