package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// sweepHeld finds what has to be ended by a dispatcher, and ends what is this
// one's turn. Scenarios R1, B11: it looks at the whole view, not at events.
func (c *Core) sweepHeld() {
	if !c.ready[ViewReservations] || !c.ready[ViewEngines] || !c.ready[ViewResults] || c.stopped {
		return
	}
	if !c.freshView(ViewReservations) || !c.freshView(ViewResults) {
		return
	}
	var due []*held
	for _, n := range c.names {
		e := c.engines[n]
		for _, h := range e.held {
			if c.ended(h) {
				due = append(due, h)
				continue
			}
			if h.acting != stageIdle {
				continue
			}
			c.blame(h, c.causeOf(e, h))
			if h.cause != causeNone && c.now >= h.next && c.now >= c.due(h) {
				due = append(due, h)
			}
		}
	}
	slices.SortFunc(due, func(a, b *held) int { return cmp.Compare(a.Revision, b.Revision) })
	for _, h := range due {
		if c.ended(h) {
			c.remove(h) // the server has reclaimed it by its TTL; nobody is told
			c.count("reservations_expired", string(h.State))
			continue
		}
		c.act(h)
	}
}

// ended tells whether the server has dropped the key by its TTL.
func (c *Core) ended(h *held) bool {
	return h.TTLMS > 0 && c.server.since(h.Stored, c.now) > time.Duration(h.TTLMS)*time.Millisecond+2*time.Second
}

func (c *Core) causeOf(e *engine, h *held) cause {
	if h.State == subjects.StateExternal {
		return causeNone // its TTL ends it
	}
	if h.cause == causeAnswered {
		return causeAnswered
	}
	orphan := h.State == subjects.StateReturned || e.lost() || e.known && e.health == policy.Ready && h.Epoch != e.reg.Epoch
	switch {
	case orphan && c.answered.contains(h.Key()):
		return causeAnswered
	case c.left(h.LeftMS, h.Stored) <= 0:
		return causeExpired
	case orphan && c.cancelled(h.Job, h.ID, h.Group, h.Trajectory, h.accepted()):
		return causeCancelled
	case h.State == subjects.StateReturned:
		return causeReturned
	case !orphan:
		return causeNone
	case c.frozen != 0:
		return causeNone // NATS is suspected, not the engines
	case e.lost():
		return causeLost
	}
	return causeEpoch
}

// blame notes why a reservation must end, and since when.
func (c *Core) blame(h *held, why cause) {
	if h.cause != why {
		h.cause, h.since = why, c.now
	}
}

// due is when it is this dispatcher's turn to end it. Where the agent may still
// do it itself (release after the answer, expiry), or its epoch may be one we
// have not heard of yet, there is a grace first.
func (c *Core) due(h *held) time.Duration {
	at := h.since + time.Duration(turn(h.Key(), c.cfg.Dispatcher, c.live))*c.t.RequeueStagger
	unheard := h.cause == causeEpoch && !h.ended
	if h.cause == causeAnswered || h.cause == causeExpired || unheard {
		at += c.t.ReleaseGrace
	}
	return at
}

// act starts ending a reservation: the next place is written first, the key is
// deleted only after that was answered.
func (c *Core) act(h *held) {
	if c.giveBackFirst(h) {
		return
	}
	switch h.cause {
	case causeAnswered:
		c.release(h, subjects.OutcomeSuperseded)
	case causeExpired:
		c.answerFor(h, subjects.Expired, subjects.ResultError{
			Class: subjects.ClassInfra, Code: "deadline",
			Message: "the deadline passed before an engine answered"})
	case causeCancelled:
		c.answerFor(h, subjects.Cancelled, subjects.ResultError{
			Class: subjects.ClassData, Code: "cancelled", Message: "cancelled while its engine was away"})
	case causeReturned:
		c.requeue(h, h.Burnt, "returned")
	case causeEpoch:
		c.requeue(h, h.Burnt+1, "epoch")
	case causeLost:
		c.requeue(h, h.Burnt+1, "lost")
	}
}

func (c *Core) answerFor(h *held, status subjects.Status, why subjects.ResultError) {
	h.acting = stageResult
	c.emit(PublishResult{
		Engine: h.Engine, Revision: h.Revision, Job: h.Job, ID: h.ID, Reader: h.Reader,
		Attempt: h.Bind, Status: status, Error: why, Group: h.Group,
		LeftMS: max(0, c.left(h.LeftMS, h.Stored).Milliseconds()),
	})
}

func (c *Core) requeue(h *held, burnt int, why string) {
	most := h.MaxAttempts
	if most == 0 {
		most = c.settings.MaxAttempts
	}
	if burnt >= most {
		h.acting = stageDead
		c.emit(PublishDead{
			Engine: h.Engine, Revision: h.Revision, Job: h.Job, ID: h.ID,
			Code: "max_attempts", Reason: exhausted(h, burnt),
		})
		return
	}
	h.acting = stageRetry
	tried := slices.Clone(h.Tried)
	if !slices.Contains(tried, h.Engine) {
		tried = append(tried, h.Engine)
	}
	if n := len(tried) - maxTried; n > 0 {
		tried = tried[n:]
	}
	c.count("requeues", why)
	c.emit(Retry{
		Engine: h.Engine, Job: h.Job, ID: h.ID, Revision: h.Revision,
		Bind: h.Bind + 1, Burnt: burnt, Tried: tried,
		LeftMS: max(1, c.left(h.LeftMS, h.Stored).Milliseconds()), Lane: h.Lane, Accepted: h.accepted(),
	})
}

// maxTried bounds the list of engines a request may not go back to; older ones
// are forgotten, since the header that carries it is bounded.
const maxTried = 32

func exhausted(h *held, burnt int) string {
	why := h.ReturnReason
	if why == "" {
		why = "its engine was lost or restarted"
	}
	return "gave up after " + plural(burnt, "attempt") + ", last on engine " + h.Engine + ": " + why
}

// release deletes a key whose next place is written.
func (c *Core) release(h *held, outcome subjects.Outcome) {
	h.acting = stageDelete
	bind := h.Bind
	c.emit(DeleteKey{
		Engine: h.Engine, Job: h.Job, ID: h.ID, Revision: h.Revision,
		Released: subjects.Released{
			Engine: h.Engine, Job: h.Job, ID: h.ID, Outcome: outcome,
			Bind: bind, Epoch: h.Epoch, Tokens: h.Tokens, PromptTokens: h.PromptTokens, Group: h.Group,
		},
	})
}

// at is the reservation an answer speaks of, nil when the view has moved on.
func (c *Core) at(engineName, job, id string, revision uint64) *held {
	h := c.find(engineName, subjects.RolloutKey(job, id))
	if h == nil || h.Revision != revision {
		return nil
	}
	return h
}

// backOff lets a refused effect rest, whole: the cause is judged anew.
func (c *Core) backOff(h *held) {
	h.acting, h.next = stageIdle, c.now+c.t.Backoff
}

func (c *Core) retryAnswer(a RetryAnswer) {
	h := c.at(a.Engine, a.Job, a.ID, a.Revision)
	if h == nil || h.acting != stageRetry {
		return
	}
	switch a.Answer {
	case OK, Duplicate:
		// A duplicate is the same next bind number, written by another dispatcher.
		c.release(h, subjects.OutcomeRequeued)
	case Gone, Superseded:
		c.remove(h) // it stands at that revision no more; what stands instead comes by the view
	default:
		c.backOff(h)
	}
}

func (c *Core) deleteAnswer(a DeleteAnswer) {
	h := c.at(a.Engine, a.Job, a.ID, a.Revision)
	if h == nil {
		return
	}
	switch a.Answer {
	case OK:
	case Gone, Superseded:
		c.remove(h) // somebody else did it; what stands now, if anything, comes by the view
		return
	default:
		c.backOff(h)
		return
	}
	c.unlearn(ReservationGone{Revision: max(a.Seq, a.Revision+1), Released: subjects.Released{
		Engine: a.Engine, Job: a.Job, ID: a.ID, Bind: h.Bind, Outcome: outcomeOf(h),
	}})
}

// outcomeOf is what our own release said; the marker follows in the view.
func outcomeOf(h *held) subjects.Outcome {
	switch h.cause {
	case causeReturned, causeEpoch, causeLost:
		return subjects.OutcomeRequeued
	}
	return subjects.OutcomeSuperseded
}

// heldResult goes on after the answer of what never ran was stored.
func (c *Core) heldResult(h *held, a ResultAnswer) {
	switch a.Answer {
	case OK, Superseded:
		c.answered.add(h.Key(), c.server.estimate(c.now))
		outcome := subjects.OutcomeFailed
		switch h.cause {
		case causeExpired:
			outcome = subjects.OutcomeExpired
		case causeCancelled:
			outcome = subjects.OutcomeCancelled
		}
		h.cause = causeAnswered
		c.release(h, outcome)
	default:
		c.backOff(h)
	}
}

func (c *Core) heldDead(h *held, a DeadAnswer) {
	if a.Answer != OK && a.Answer != Duplicate {
		c.backOff(h)
		return
	}
	c.answerFor(h, subjects.Failed, subjects.ResultError{
		Class: subjects.ClassInfra, Code: "max_attempts", Message: exhausted(h, h.Burnt+1),
	})
}
