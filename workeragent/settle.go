package workeragent

import (
	"errors"
	"fmt"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// settle carries a verdict out: the result first, then the release; or the
// return. It repeats what is not answered until the agent is killed.
func (u *unit) settle(r *run, v verdict) {
	key := r.res.Key()
	u.mu.Lock()
	r.phase = settling
	u.mu.Unlock()
	switch {
	case v.drop:
		u.a.metrics.ended.WithLabelValues(u.name, "dropped").Inc()
		u.forget(key, r)
	case v.answer != nil:
		u.answer(r, v)
	default:
		u.a.metrics.ended.WithLabelValues(u.name, "returned").Inc()
		res := r.res
		res.LeftMS = max(0, r.left().Milliseconds())
		if v.resume != nil {
			if b, ok := subjects.WithResume(v.req, v.resume); ok {
				res.Body = b
				res.PromptTokens = len(v.req.PromptTokenIDs) + len(v.resume.TokenIDs)
				res.MaxTokens = v.req.Sampling.MaxTokens - len(v.resume.TokenIDs)
			}
		}
		if !u.toHandBack(key, r) {
			return // it has moved on meanwhile
		}
		u.giveBack(res, v.reason, v.burn)
		u.clearCheckpoint(r)
	}
}

// forget takes a run off the list, if it is still the one of that name.
func (u *unit) forget(key string, r *run) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	ours := u.runs[key] == r
	if ours {
		delete(u.runs, key)
	}
	kick(u.changed)
	kick(u.kickLoad)
	return ours
}

// toHandBack moves a key from those that run to those that are released or given
// back; its place is free before that is written, since whoever sees it may bind
// anew at once.
func (u *unit) toHandBack(key string, r *run) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.runs[key] != r {
		return false
	}
	delete(u.runs, key)
	u.handing[key] = r.res.Revision
	kick(u.kickLoad)
	return true
}

// answer stores a result, then releases the key. The place of the run is free
// from the moment the result is stored.
func (u *unit) answer(r *run, v verdict) {
	key := r.res.Key()
	e := &spooled{
		Engine: u.name, Revision: r.res.Revision, Result: v.answer,
		Answer:   answerOf(r, v.answer),
		Released: released(r.res, v.outcome, v.answer.Usage),
	}
	e.Released.Status = v.answer.Status
	u.a.spooling(e, true)
	end := u.commit(e)
	u.a.spooling(e, false)
	// From here to the release the key may be seen again (a view made anew) and
	// must not be run again.
	u.toHandBack(key, r)
	defer u.doneHanding(r.res)
	switch end {
	case commitKilled:
		return
	case commitSuperseded:
		// Another answer was first: this one changes nothing.
		e.Released.Outcome = subjects.OutcomeSuperseded
		u.a.metrics.ended.WithLabelValues(u.name, "superseded").Inc()
		u.log.Info("another answer was first", "rollout", key, "bind", r.res.Bind)
	case commitStored:
		u.a.metrics.ended.WithLabelValues(u.name, string(v.answer.Status)).Inc()
		u.log.Debug("answered", "rollout", key, "bind", r.res.Bind, "status", v.answer.Status)
	}
	u.release(e.Released, e.Revision)
	u.clearCheckpoint(r)
}

func answerOf(r *run, res *subjects.Result) subjects.Answer {
	a := subjects.Answer{
		Job: r.res.Job, ID: r.res.ID, Reader: or(r.res.Reader, subjects.DefaultReader), Status: res.Status,
		Bind: r.res.Bind, Epoch: r.res.Epoch, Engine: r.res.Engine, Group: r.res.Group,
		LeftMS: max(0, r.left().Milliseconds()),
	}
	if u := res.Usage; u != nil {
		a.PromptTokens, a.CompletionTokens, a.CachedTokens = &u.PromptTokens, &u.CompletionTokens, u.CachedTokens
	}
	return a
}

type commitEnd int

const (
	commitStored commitEnd = iota
	commitSuperseded
	commitKilled // the agent was killed first: the key stays
)

// commit writes the answer at the register until it is answered. After an
// attempt of unknown outcome "superseded" may mean ourselves: the register tells.
func (u *unit) commit(e *spooled) commitEnd {
	pause := u.a.pauses()
	unknown, replaced := false, false
	for {
		_, err := u.a.store.Commit(u.life, e.Result, e.Answer)
		switch {
		case err == nil:
			u.a.alive()
			u.a.spool.remove(e)
			return commitStored
		case errors.Is(err, kvstate.ErrSuperseded):
			ours := false
			if unknown {
				var ok bool
				if ours, ok = u.isOurs(e); !ok {
					return commitKilled
				}
			}
			u.a.spool.remove(e)
			if ours {
				return commitStored
			}
			return commitSuperseded
		case errors.Is(err, kvstate.ErrRefused):
			if replaced {
				u.log.Error("an answer is refused whatever it says: the key is left to dispatchers", "rollout", e.Answer.Key(), "error", err)
				u.a.spool.remove(e)
				return commitKilled
			}
			replaced = true
			e.refuse(err)
			continue
		case errors.Is(err, kvstate.ErrUnknown):
			unknown = true
		}
		if u.life.Err() != nil {
			return commitKilled
		}
		u.a.metrics.repeats.WithLabelValues(u.name, "result").Inc()
		if err := u.a.spool.keep(e); err != nil {
			u.log.Warn("an answer could not be spooled on disk and stays in memory", "rollout", e.Answer.Key(), "error", err)
		}
		if !pause.wait(u.life) {
			return commitKilled
		}
	}
}

// isOurs reads the register's entry from its leader and tells whether this very
// attempt wrote it; ok is false when the agent was killed first.
func (u *unit) isOurs(e *spooled) (ours, ok bool) {
	pause := u.a.pauses()
	for {
		got, err := u.a.store.Result(u.life, e.Answer.Job, e.Answer.Reader, e.Answer.ID)
		switch {
		case err == nil:
			return got.Bind == e.Answer.Bind && got.Epoch == e.Answer.Epoch && got.Engine == e.Answer.Engine, true
		case errors.Is(err, kvstate.ErrGone), errors.Is(err, kvstate.ErrRefused):
			return false, true
		}
		if !pause.wait(u.life) {
			return false, false
		}
	}
}

// refuse replaces an answer that the register will never take as it is (too
// large, mostly) by one that says so.
func (e *spooled) refuse(err error) {
	r := *e.Result
	size := sizeOf(&r)
	r.Status, r.FinishReason = subjects.Failed, ""
	r.TokenIDs, r.Text, r.Logprobs, r.Extra = nil, "", nil, nil
	r.Error = &subjects.ResultError{
		Class: subjects.ClassData, Code: "result_too_large",
		Message: fmt.Sprintf("the answer of about %d bytes was refused (an answer may have %d): ask for fewer logprobs or tokens. NATS said: %.300v", size, subjects.MaxPayload, err),
	}
	e.Result, e.Answer.Status = &r, subjects.Failed
}
