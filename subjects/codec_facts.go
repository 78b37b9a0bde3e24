package subjects

import (
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
)

// Header is the accounting side of a binding: everything but the guard, the TTL
// and the message id, which whoever writes adds.
func (h *Held) Header() nats.Header {
	w := headers(24)
	w.set(HdrState, string(h.State))
	w.num(HdrBind, int64(h.Bind))
	w.nonzero(HdrBurnt, int64(h.Burnt))
	w.text(HdrEpoch, h.Epoch)
	w.num(HdrLeft, max(0, h.LeftMS))
	w.num(HdrTokens, int64(h.Tokens))
	w.num(HdrPromptTokens, int64(h.PromptTokens))
	w.nonzero(HdrMaxTokens, int64(h.MaxTokens))
	w.text(HdrLane, string(h.Lane))
	w.text(HdrReader, h.Reader)
	w.text(HdrGroup, h.Group)
	w.text(HdrTrajectory, h.Trajectory)
	w.nonzero(HdrTurn, int64(h.Turn))
	w.text(HdrAffinity, h.Affinity)
	w.tried(h.Tried)
	w.text(HdrDispatcher, h.Dispatcher)
	w.text(HdrPolicy, h.Policy)
	w.text(HdrReason, h.Reason)
	w.text(HdrReturnReason, h.ReturnReason)
	w.nonzero(HdrAccepted, h.Accepted)
	w.nonzero(HdrMaxAttempts, int64(h.MaxAttempts))
	w.nonzero(HdrAttemptTimeout, h.AttemptTimeoutMS)
	if h.Weights != "" {
		w.set(HdrWeights, h.Weights)
	}
	w.ptr(HdrRank, h.Rank)
	w.ptr(HdrPredictedCached, h.PredictedCached)
	if h.OwnerKey != "" {
		w.set(HdrOwnerKey, h.OwnerKey)
	}
	w.hash(HdrAnchor, h.Anchor)
	w.ptr64(HdrWeightVersion, h.WeightVersion)
	return w.Header
}

// HeldFromHeader reads a reservation's facts; engine, job and id are those of
// its subject. A reservation without a state is no reservation; a bound or
// returned one has a bind number and a time left.
func HeldFromHeader(engine, job, id string, h nats.Header) (Held, error) {
	r := headerReader{h: h}
	out := Held{Engine: engine, Job: job, ID: id}
	v, _ := r.raw(HdrState)
	out.State = State(v)
	switch out.State {
	case StateBound, StateReturned:
		r.require(HdrBind, HdrLeft)
	case StateExternal:
	default:
		r.bad(HdrState, "%s is no state: want bound, returned or external", quote(v))
	}
	out.Bind = int(r.num(HdrBind, 0, MaxBind))
	out.Burnt = int(r.num(HdrBurnt, 0, MaxBind))
	out.Epoch = r.text(HdrEpoch)
	out.LeftMS = r.ms(HdrLeft)
	out.Tokens = r.count(HdrTokens)
	out.PromptTokens = r.count(HdrPromptTokens)
	out.MaxTokens = r.count(HdrMaxTokens)
	out.Lane = r.lane()
	out.Reader = r.token(HdrReader)
	out.Group = r.text(HdrGroup)
	out.Trajectory = r.text(HdrTrajectory)
	out.Turn = int(r.num(HdrTurn, 0, MaxBind))
	out.Affinity = r.text(HdrAffinity)
	out.Tried = r.tried()
	out.Dispatcher = r.text(HdrDispatcher)
	out.Policy = r.text(HdrPolicy)
	out.Reason = r.text(HdrReason)
	out.ReturnReason = r.text(HdrReturnReason)
	out.Accepted = r.num(HdrAccepted, 0, 1<<63-1)
	out.MaxAttempts = int(r.num(HdrMaxAttempts, 0, MaxBind))
	out.AttemptTimeoutMS = r.ms(HdrAttemptTimeout)
	out.Weights, _ = r.weights()
	if r.has(HdrRank) {
		n := int(r.num(HdrRank, 0, maxRank))
		out.Rank = &n
	}
	out.PredictedCached = r.countPtr(HdrPredictedCached)
	out.OwnerKey = r.ownerKey()
	out.Anchor = r.hash(HdrAnchor)
	out.WeightVersion = r.ptr64(HdrWeightVersion)
	return out, r.err()
}

// Header is a delete marker with its outcome.
func (m *Released) Header() nats.Header {
	w := headers(16)
	w.set(HdrKVOperation, KVOperationDelete)
	w.text(HdrOutcome, string(m.Outcome))
	w.nonzero(HdrBind, int64(m.Bind))
	w.text(HdrEpoch, m.Epoch)
	w.nonzero(HdrTokens, int64(m.Tokens))
	w.nonzero(HdrPromptTokens, int64(m.PromptTokens))
	w.ptr(HdrCompletionTokens, m.CompletionTokens)
	w.ptr(HdrCachedTokens, m.CachedTokens)
	w.text(HdrGroup, m.Group)
	w.text(HdrStatus, string(m.Status))
	return w.Header
}

// ReleasedFromHeader reads a delete marker. Everything may be missing: a plain
// NATS KV delete is a release without an outcome.
func ReleasedFromHeader(engine, job, id string, h nats.Header) (Released, error) {
	r := headerReader{h: h}
	out := Released{Engine: engine, Job: job, ID: id}
	if v, ok := r.raw(HdrOutcome); ok {
		switch o := Outcome(v); o {
		case OutcomeAnswered, OutcomeSuperseded, OutcomeRequeued, OutcomeExpired, OutcomeFailed, OutcomeCancelled:
			out.Outcome = o
		default:
			r.bad(HdrOutcome, "%s is no outcome", quote(v))
		}
	}
	out.Bind = int(r.num(HdrBind, 0, MaxBind))
	out.Epoch = r.text(HdrEpoch)
	out.Tokens = r.count(HdrTokens)
	out.PromptTokens = r.count(HdrPromptTokens)
	out.CompletionTokens = r.countPtr(HdrCompletionTokens)
	out.CachedTokens = r.countPtr(HdrCachedTokens)
	out.Group = r.text(HdrGroup)
	out.Status = r.status()
	return out, r.err()
}

func (r *headerReader) status() Status {
	v, ok := r.raw(HdrStatus)
	if !ok {
		return ""
	}
	s := Status(v)
	if !s.Valid() {
		r.bad(HdrStatus, "%s is no status", quote(v))
		return ""
	}
	return s
}

// Header is the accounting side of a result. A received answer has no status.
func (a *Answer) Header() nats.Header {
	w := headers(16)
	w.text(HdrStatus, string(a.Status))
	w.nonzero(HdrBind, int64(a.Bind))
	w.text(HdrEpoch, a.Epoch)
	w.text(HdrEngine, a.Engine)
	w.ptr(HdrPromptTokens, a.PromptTokens)
	w.ptr(HdrCompletionTokens, a.CompletionTokens)
	w.ptr(HdrCachedTokens, a.CachedTokens)
	w.text(HdrGroup, a.Group)
	w.nonzero(HdrLeft, max(0, a.LeftMS))
	return w.Header
}

// AnswerFromHeader reads a register entry; job, reader and id are those of its
// subject. No status = received.
func AnswerFromHeader(job, reader, id string, h nats.Header) (Answer, error) {
	r := headerReader{h: h}
	out := Answer{Job: job, ID: id, Reader: reader}
	out.Status = r.status()
	out.Bind = int(r.num(HdrBind, 0, MaxBind))
	out.Epoch = r.text(HdrEpoch)
	out.Engine = r.token(HdrEngine)
	out.PromptTokens = r.countPtr(HdrPromptTokens)
	out.CompletionTokens = r.countPtr(HdrCompletionTokens)
	out.CachedTokens = r.countPtr(HdrCachedTokens)
	out.Group = r.text(HdrGroup)
	out.LeftMS = r.ms(HdrLeft)
	return out, r.err()
}

// Header is what a submit or a requeue carries. The message id is not in it.
// Reader, prompt and output tokens are always written: with these three a
// dispatcher need not decode the body.
func (f *Facts) Header() nats.Header {
	w := headers(16)
	reader := f.Reader
	if reader == "" {
		reader = DefaultReader
	}
	w.text(HdrReader, reader)
	w.text(HdrLane, string(f.Lane))
	w.text(HdrModel, f.Model)
	w.text(HdrLoRA, f.LoRA)
	w.num(HdrPromptTokens, int64(f.PromptTokens))
	w.num(HdrMaxTokens, int64(f.MaxTokens))
	w.nonzero(HdrExpectedTokens, int64(f.ExpectedTokens))
	if f.Namespace != 0 {
		w.set(HdrNamespace, fmt.Sprintf("%016x", f.Namespace))
	}
	w.nonzero(HdrBlockTokens, int64(f.BlockTokens))
	w.blocks(f.Blocks)
	w.text(HdrAffinity, f.Affinity)
	w.text(HdrGroup, f.Group)
	w.text(HdrTrajectory, f.Trajectory)
	w.nonzero(HdrTurn, int64(f.Turn))
	w.nonzero(HdrStep, f.Step)
	weights := FormatWeights(&WeightVersion{Min: f.WeightMin, Exact: f.WeightExact, MaxStaleness: f.WeightStaleness})
	if weights != "" {
		w.set(HdrWeights, weights)
	}
	w.ptr(HdrRank, f.Rank)
	w.nonzero(HdrDeadline, f.DeadlineMS)
	w.nonzero(HdrAttemptTimeout, f.AttemptTimeoutMS)
	w.nonzero(HdrMaxAttempts, int64(f.MaxAttempts))
	w.nonzero(HdrBind, int64(f.Bind))
	w.nonzero(HdrBurnt, int64(f.Burnt))
	w.tried(f.Tried)
	w.nonzero(HdrLeft, max(0, f.LeftMS))
	w.nonzero(HdrAccepted, f.Accepted)
	return w.Header
}

// FactsFromHeader reads the facts of a queued message. Job and id are those of
// its Nats-Msg-Id; lane is that of a submit subject, and empty for a message of
// RETRY: only there are lane, bind, burnt, tried, left and accepted believed,
// since only dispatchers write there. complete tells that the body need not be
// decoded to place it. A submit that carries a guard of its own is refused.
func FactsFromHeader(job, id string, lane Lane, h nats.Header) (f Facts, complete bool, err error) {
	r := headerReader{h: h}
	f = Facts{Job: job, ID: id, Lane: lane}
	if lane == "" {
		if f.Lane = r.lane(); f.Lane == "" && !r.has(HdrLane) {
			r.require(HdrLane)
		}
		f.Bind = int(r.num(HdrBind, 0, MaxBind))
		f.Burnt = int(r.num(HdrBurnt, 0, MaxBind))
		f.Tried = r.tried()
		f.LeftMS = r.ms(HdrLeft)
		f.Accepted = r.num(HdrAccepted, 0, 1<<63-1)
	} else {
		for name := range h {
			if len(name) >= len(HdrExpectedPrefix) && strings.EqualFold(name[:len(HdrExpectedPrefix)], HdrExpectedPrefix) {
				r.bad(HdrExpectedPrefix+"*", "is not allowed on a submit")
				break
			}
		}
	}
	f.Reader = r.token(HdrReader)
	f.Model = r.text(HdrModel)
	f.LoRA = r.text(HdrLoRA)
	f.PromptTokens = r.count(HdrPromptTokens)
	f.MaxTokens = r.count(HdrMaxTokens)
	f.ExpectedTokens = r.count(HdrExpectedTokens)
	f.Namespace = r.namespace()
	f.BlockTokens = int(r.num(HdrBlockTokens, 1, MaxBlockTokens))
	f.Blocks = r.blocks()
	f.Affinity = r.text(HdrAffinity)
	f.Group = r.text(HdrGroup)
	f.Trajectory = r.text(HdrTrajectory)
	f.Turn = int(r.num(HdrTurn, 0, MaxBind))
	f.Step = r.num(HdrStep, 0, 1<<62)
	_, w := r.weights()
	f.WeightMin, f.WeightExact, f.WeightStaleness = w.Min, w.Exact, w.MaxStaleness
	if r.has(HdrRank) {
		n := int(r.num(HdrRank, 0, maxRank))
		f.Rank = &n
	}
	f.DeadlineMS = r.num(HdrDeadline, 0, MaxDeadline.D().Milliseconds())
	f.AttemptTimeoutMS = r.ms(HdrAttemptTimeout)
	f.MaxAttempts = int(r.num(HdrMaxAttempts, 0, MaxBind))
	err = r.err()
	complete = err == nil && f.Reader != "" && f.PromptTokens > 0 && f.MaxTokens > 0
	return f, complete, err
}
