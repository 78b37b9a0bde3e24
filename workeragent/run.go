package workeragent

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// phase of a run:
//
//	pending --handed to the engine--> running --outcome--> settling
//	   '---------- rejected, cancelled --------------------'
type phase int

const (
	pending phase = iota
	running
	settling
)

// run is one reservation that the agent works on.
type run struct {
	res      kvstate.Reservation
	id       string // at the engine
	received time.Time
	ctx      context.Context
	cancel   context.CancelCauseFunc

	// Under the unit's mu.
	phase  phase
	handed time.Time    // to the engine
	moved  time.Time    // last output
	since  time.Time    // silence counts from here, or from moved
	weight *int64       // the engine's weight version when it was handed over
	made   int          // tokens so far, of this attempt
	synced []weightSync // changes of the weights since then, as they were noticed

	checkpointed bool // something stands in partials
}

// weightSync is a change of the engine's weights during a run.
type weightSync struct {
	at      int   // tokens of the attempt until then
	version int64 // from then on
}

// maxSyncs bounds those that one run tells apart; later ones are one.
const maxSyncs = 64

// newRunID names a run at its engine: unique over all attempts, of one length,
// so that no id is a prefix of another.
func newRunID() string { return rand.Text() }

// left is the time to the deadline, counted here since the key was received.
func (r *run) left() time.Duration {
	return time.Duration(r.res.LeftMS)*time.Millisecond - time.Since(r.received)
}

// attempt runs a reservation to a verdict. It writes nothing.
func (u *unit) attempt(r *run) verdict {
	req, v := u.admit(r)
	if v != nil {
		return *v
	}
	left, why := r.left(), errExpired
	if most := u.attemptTimeout(r); most < left {
		left, why = most, errAttemptTimeout
	}
	ctx, stop := context.WithTimeoutCause(r.ctx, left, why)
	defer stop()

	if cause := context.Cause(ctx); cause != nil {
		return u.judge(r, req, engine.Outcome{Kind: engine.Aborted}, cause)
	}
	out := u.deltas(r, req)
	defer out.close()
	match := u.match(req)
	u.hand(r)
	o, err := u.cfg.Adapter.Generate(ctx, req, engine.Run{ID: r.id, Rank: r.res.Rank}, out.take)
	u.leave(r, o, err)
	u.cached(req, &o)
	u.compared(match, &o)
	cause := context.Cause(ctx)
	if err != nil && cause == nil {
		// The adapter was misused or is closed: nothing is known of the request.
		o.Kind, o.Code, o.Message = engine.Failed, "adapter_error", err.Error()
	}
	if u.life.Err() != nil && o.Kind != engine.Completed {
		return verdict{drop: true}
	}
	if o.Kind == engine.Completed {
		cause = nil
	}
	return u.judge(r, req, o, cause)
}

// admit checks a request before anything is sent: its body, its size, and
// whether it was cancelled meanwhile.
func (u *unit) admit(r *run) (*subjects.Request, *verdict) {
	req, err := subjects.DecodeRequest(r.res.Body)
	if err == nil && (req.ID != r.res.ID || req.Job != r.res.Job) {
		err = fmt.Errorf("the body says job %.140q and id %.140q: submit it under the names in it", req.Job, req.ID)
	}
	if err != nil {
		return nil, u.rejected(r, req, "invalid_request", err.Error())
	}
	if why := u.tooLarge(req); why != "" {
		return nil, u.rejected(r, req, "too_large", why)
	}
	if why := u.noSuchRank(r.res.Rank); why != "" {
		return nil, u.rejected(r, req, "no_such_rank", why)
	}
	if req.Return != nil && req.Return.Logprobs && req.Sampling.Logprobs == nil {
		chosen := 0 // those of the chosen tokens
		req.Sampling.Logprobs = &chosen
	}
	u.mu.Lock()
	r.weight = u.caps.WeightVersion
	u.mu.Unlock()
	if reason, ok := u.a.cancels.hit(&r.res, r.weight); ok {
		r.cancel(&cancelledError{reason})
	}
	return req, nil
}

func (u *unit) attemptTimeout(r *run) time.Duration {
	if ms := r.res.AttemptTimeoutMS; ms > 0 {
		return time.Duration(ms) * time.Millisecond
	}
	return u.a.settings.Load().AttemptTimeout.D()
}

// tooLarge says why the engine can never hold a request, "" when it can
// (scenario P22). Of a text only the output's size is certain.
func (u *unit) tooLarge(req *subjects.Request) string {
	u.mu.Lock()
	model, total := u.maxModelLenLocked(), int64(0)
	if n, _ := u.capacityLocked(); n > 0 {
		total = n / int64(u.ranksLocked()) // a request lives on one rank
	}
	u.mu.Unlock()
	prompt := len(req.PromptTokenIDs) // resumed tokens count into max_tokens
	need := int64(prompt) + int64(req.Sampling.MaxTokens)
	what := fmt.Sprintf("the request needs %d tokens (prompt %d + max_tokens %d)", need, prompt, req.Sampling.MaxTokens)
	if prompt == 0 {
		what = fmt.Sprintf("the request needs more than %d tokens (max_tokens)", need)
		need++
	}
	switch {
	case model > 0 && need > int64(model):
		return fmt.Sprintf("%s, engine %s holds %d (its max_model_len): shorten the prompt or max_tokens", what, u.name, model)
	case total > 0 && need > total:
		return fmt.Sprintf("%s, engine %s holds %d (its KV cache): shorten the prompt or max_tokens", what, u.name, total)
	}
	return ""
}

// noSuchRank checks a pinned data-parallel rank before the engine could ignore
// it in silence (scenario P23).
func (u *unit) noSuchRank(rank *int) string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n := u.ranksLocked(); rank != nil && (*rank < 0 || *rank >= n) {
		return fmt.Sprintf("data-parallel rank %d is pinned, engine %s has ranks 0 to %d", *rank, u.name, n-1)
	}
	return ""
}

// hand marks a run as given to the engine.
func (u *unit) hand(r *run) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	r.phase, r.handed, r.since = running, now, now
	w := telemetry.WorkOf(&r.res.Held, r.res.Revision)
	w.Free = u.backlog.Own() < u.slotsLocked() && u.queued == 0 && !u.kvFull
	u.backlog.Begin(r.id, now.Sub(u.born), w)
	kick(u.kickLoad)
}

// leave ends a run at the engine. One that was ended from here is aborted by
// name too, and counts as load until that is answered (scenario R20).
func (u *unit) leave(r *run, o engine.Outcome, err error) {
	var prompt int
	var cached *int
	if o.Usage != nil {
		prompt, cached = o.Usage.PromptTokens, o.Usage.CachedTokens
	}
	u.mu.Lock()
	r.phase = settling
	u.backlog.End(r.id, prompt, cached)
	// Output that was given up in the middle may go on there as well as a run
	// that was ended from here.
	givenUp := err != nil || o.Kind == engine.Failed || o.Kind == engine.DataError && len(o.TokenIDs) > 0
	cut := givenUp && !r.handed.IsZero() && u.life.Err() == nil
	if cut {
		u.ghosts++
	}
	if o.Kind == engine.Completed || o.Kind == engine.DataError || len(o.TokenIDs) > 0 {
		u.backoff, u.wedgeHold = 0, 0 // it took the request
	}
	u.mu.Unlock()
	kick(u.kickLoad)
	switch {
	case cut:
		u.wg.Go(func() {
			ctx, cancel := context.WithTimeout(u.life, u.a.t.AbortTimeout)
			defer cancel()
			if err := u.cfg.Adapter.Abort(ctx, engine.Run{ID: r.id, Rank: r.res.Rank}); err != nil && u.life.Err() == nil {
				u.log.Warn("an abort at the engine failed", "rollout", r.res.Key(), "error", err)
			}
			u.mu.Lock()
			u.ghosts--
			u.mu.Unlock()
			kick(u.kickLoad)
		})
	case o.Kind == engine.NotAccepted:
		u.rest()
		kick(u.kickLook)
	case o.Kind == engine.Aborted:
		kick(u.kickLook) // somebody may have paused it, or put it to sleep
	}
}

// deltas carries a run's output to the watchdog, to the tokens subject and to
// the checkpoints.
type deltas struct {
	u      *unit
	r      *run
	seq    int
	pieces int // of output, each at least a token
	tell   bool
	check  *checkpoints
}

func (u *unit) deltas(r *run, req *subjects.Request) *deltas {
	return &deltas{u: u, r: r, tell: req.Stream, check: u.checkpoints(r, req)}
}

// take is called by the adapter for each piece of output, in order.
func (d *deltas) take(x engine.Delta) {
	u := d.u
	now := time.Now()
	u.mu.Lock()
	d.r.moved, u.lastMove = now, now
	d.r.made += len(x.TokenIDs)
	if len(x.TokenIDs) > 0 || x.Text != "" || x.Silent {
		d.pieces++
		u.backlog.Made(d.r.id, now.Sub(u.born), max(d.r.made, d.pieces))
	}
	u.mu.Unlock()
	u.a.metrics.tokens.WithLabelValues(u.name).Add(float64(len(x.TokenIDs)))
	if len(x.TokenIDs) == 0 && x.Text == "" {
		return
	}
	d.check.add(x.TokenIDs)
	if d.tell {
		d.publish(subjects.Delta{TokenIDs: x.TokenIDs, Text: x.Text})
	}
}

// publish sends a delta. They are not kept: over an outage they are lost, and
// the gap in the sequence tells.
func (d *deltas) publish(x subjects.Delta) {
	x.SchemaVersion, x.Bind, x.Seq = subjects.SchemaVersion, d.r.res.Bind, d.seq
	d.seq++
	if !d.u.a.nc.IsConnected() {
		return
	}
	b, err := json.Marshal(x)
	if err == nil {
		err = d.u.a.nc.Publish(d.u.a.pool.Tokens(d.r.res.Job, d.r.res.ID), b)
	}
	if err != nil {
		d.u.log.Debug("a delta was not sent", "rollout", d.r.res.Key(), "error", err)
	}
}

func (d *deltas) close() {
	if d.tell {
		d.publish(subjects.Delta{Last: true})
	}
	d.check.close()
}

// weightText spells a weight version for a segment, "" when it is unknown.
func weightText(v *int64) string {
	if v == nil {
		return ""
	}
	return strconv.FormatInt(*v, 10)
}

// isCancelled gives a cancel's reason.
func isCancelled(err error) (*cancelledError, bool) { return errors.AsType[*cancelledError](err) }
