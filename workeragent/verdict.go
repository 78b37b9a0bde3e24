package workeragent

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// verdict is what a run comes to: exactly one of an answer, a return, or nothing.
type verdict struct {
	drop bool // the key is not ours any more, or the agent was killed

	answer  *subjects.Result
	outcome subjects.Outcome // of the release after it

	reason string // of a return
	burn   int    // attempts that the return counts
	resume *subjects.Resume
	req    *subjects.Request // of a return with resume
}

// judge maps what the engine said, and why the run was ended from here if it
// was, to a verdict. One cause has one outcome, whenever it strikes (scenario
// R18); a complete sample stands whatever happened beside it.
//
//	completed: stop -> completed, length -> truncated
//	cancelled, deadline -> an answer with the partial output
//	no progress, attempt timeout, failed -> returned, one attempt burnt
//	engine restarted -> returned, one attempt burnt
//	stopping -> returned with the output so far, nothing burnt
//	aborted by the engine -> the same; one attempt burnt if it brought nothing on
//	refused -> returned, nothing burnt
//	data error -> returned once to be tried elsewhere, else failed
//
// judge reads r's reservation and times only: call it without mu.
func (u *unit) judge(r *run, req *subjects.Request, o engine.Outcome, cause error) verdict {
	if o.Kind == engine.Completed {
		return u.completed(r, req, o)
	}
	if c, ok := isCancelled(cause); ok {
		return verdict{outcome: subjects.OutcomeCancelled, answer: u.partial(r, req, o, subjects.Cancelled,
			subjects.ResultError{Class: subjects.ClassData, Code: "cancelled", Message: c.Error()})}
	}
	switch {
	case errors.Is(cause, errDropped):
		return verdict{drop: true}
	case errors.Is(cause, errExpired):
		return verdict{outcome: subjects.OutcomeExpired, answer: u.partial(r, req, o, subjects.Expired,
			subjects.ResultError{Class: subjects.ClassInfra, Code: "deadline", Message: "the deadline passed while it ran on engine " + u.name, Retryable: true})}
	case errors.Is(cause, errNoProgress):
		return u.goBack(r, req, o, returnNoProgress, 1, false)
	case errors.Is(cause, errAttemptTimeout):
		return u.goBack(r, req, o, returnTimeout, 1, false)
	case errors.Is(cause, errRestarted):
		return u.goBack(r, req, o, returnRestarted, 1, false)
	case errors.Is(cause, errHandBack):
		return u.goBack(r, req, o, returnDraining, 0, true)
	}
	switch o.Kind {
	case engine.Aborted:
		burn := 1
		if len(o.TokenIDs) > 0 && resumable(req, o) {
			burn = 0 // each such round brings it nearer to its end
		}
		return u.goBack(r, req, o, because(returnAborted, o.Code), burn, true)
	case engine.NotAccepted:
		return u.goBack(r, req, o, because(returnNotAccepted, o.Code), 0, false)
	case engine.DataError:
		// Scenario R7: one retry at most, on another engine.
		if len(r.res.Tried) == 0 && r.res.Burnt+1 < u.maxAttempts(r) {
			return u.goBack(r, req, o, because(returnDataError, o.Code), 1, false)
		}
		return verdict{outcome: subjects.OutcomeAnswered, answer: u.partial(r, req, o, subjects.Failed,
			subjects.ResultError{Class: subjects.ClassData, Code: o.Code, Message: o.Message})}
	}
	return u.goBack(r, req, o, because(returnFailed, o.Code), 1, false)
}

func because(word, code string) string {
	if code == "" {
		return word
	}
	return word + ":" + code
}

func (u *unit) maxAttempts(r *run) int {
	if n := r.res.MaxAttempts; n > 0 {
		return n
	}
	return u.a.settings.Load().MaxAttempts
}

func (u *unit) completed(r *run, req *subjects.Request, o engine.Outcome) verdict {
	status := subjects.Completed
	if o.FinishReason == "length" {
		status = subjects.Truncated
	}
	return verdict{answer: u.output(r, req, o, status), outcome: subjects.OutcomeAnswered}
}

// rejected answers what can never run. req may be partly read or nil.
func (u *unit) rejected(r *run, req *subjects.Request, code, message string) *verdict {
	const most = 4096
	if len(message) > most {
		message = message[:most] + "..."
	}
	res := u.blank(r, req, subjects.Rejected)
	res.Error = &subjects.ResultError{Class: subjects.ClassData, Code: code, Message: message}
	return &verdict{answer: res, outcome: subjects.OutcomeAnswered}
}

// goBack returns a run. What was generated goes with it where that is safe:
// always when the engine or the agent cut it on purpose, else only when the pool
// keeps partial output at all.
func (u *unit) goBack(r *run, req *subjects.Request, o engine.Outcome, reason string, burn int, keep bool) verdict {
	v := verdict{reason: reason, burn: burn}
	if (keep || u.a.settings.Load().PartialsEvery > 0) && len(o.TokenIDs) > 0 && resumable(req, o) {
		v.resume, v.req = u.resume(r, req, o), req
		if left := req.Sampling.MaxTokens - len(v.resume.TokenIDs); left < 1 {
			// Every token is there; only the finish reason is not.
			o.FinishReason = "length"
			return u.completed(r, req, o)
		}
	}
	return v
}

// resumable tells whether a run can go on elsewhere from its tokens: it speaks
// in tokens, and nothing that it must bring back would be lost.
func resumable(req *subjects.Request, o engine.Outcome) bool {
	return len(req.PromptTokenIDs) > 0 && (req.Sampling.Logprobs == nil || len(o.Logprobs) > 0)
}

// resume is what was generated until now, of earlier attempts too.
func (u *unit) resume(r *run, req *subjects.Request, o engine.Outcome) *subjects.Resume {
	out := &subjects.Resume{TokenIDs: u.tokenIDs(req, o), Segments: u.segments(r, req, o)}
	if req.Sampling.Logprobs != nil {
		out.Logprobs = u.logprobs(req, o)
	}
	return out
}

// blank is a result with everything but output. req may be nil.
func (u *unit) blank(r *run, req *subjects.Request, status subjects.Status) *subjects.Result {
	h := &r.res.Held
	out := &subjects.Result{
		SchemaVersion: subjects.SchemaVersion, ID: h.ID, Job: h.Job, Attempt: h.Bind, Status: status,
		Route: subjects.Route{
			Engine: u.name, Epoch: h.Epoch, Policy: h.Policy, Reason: h.Reason,
			Dispatcher: h.Dispatcher, PredictedCachedTokens: h.PredictedCached,
		},
	}
	if h.Accepted > 0 && !r.res.Stored.IsZero() {
		// Both stamps are of the NATS server's clock.
		if queued := r.res.Stored.Sub(time.Unix(0, h.Accepted)); queued > 0 {
			out.Timing.QueuedMS = float64(queued) / float64(time.Millisecond)
		}
	}
	if req != nil {
		out.Group, out.Trajectory, out.Labels = req.Group, req.Trajectory, req.Labels
		out.ReplyKey, out.Meta, out.Extra = req.ReplyKey, req.Meta, req.Extra
	}
	return out
}

// partial is an answer that is no sample, with the output until then.
func (u *unit) partial(r *run, req *subjects.Request, o engine.Outcome, status subjects.Status, why subjects.ResultError) *subjects.Result {
	out := u.output(r, req, o, status)
	if why.Code == "" {
		why.Code = string(o.Kind)
	}
	if why.Message == "" {
		why.Message = fmt.Sprintf("engine %s said %s", u.name, o.Kind)
	}
	out.Error = &why
	return out
}

// output is an answer with what was generated, by earlier attempts too.
func (u *unit) output(r *run, req *subjects.Request, o engine.Outcome, status subjects.Status) *subjects.Result {
	out := u.blank(r, req, status)
	out.FinishReason = o.FinishReason
	out.TokenIDs, out.Segments = u.tokenIDs(req, o), u.segments(r, req, o)
	out.Text = o.Text
	if req.Resume != nil {
		// The text of the resumed tokens is not known here, and half a text would
		// pass for a whole one: the tokens are the answer.
		out.Text = ""
	}
	if req.Sampling.Logprobs != nil || req.Return != nil && req.Return.Logprobs {
		out.Logprobs = u.logprobs(req, o)
	}
	out.Usage = usage(req, o)
	out.Timing.TTFTMS, out.Timing.RunMS = o.TTFTMS, o.RunMS
	if len(o.Extra) > 0 {
		extra := make(map[string]json.RawMessage, len(out.Extra)+len(o.Extra))
		for _, m := range [...]map[string]json.RawMessage{out.Extra, o.Extra} {
			for k, v := range m {
				extra[k] = v
			}
		}
		out.Extra = extra
	}
	return out
}

// usage of the whole rollout: what was resumed from counts as output.
func usage(req *subjects.Request, o engine.Outcome) *subjects.Usage {
	resumed := 0
	if req.Resume != nil {
		resumed = len(req.Resume.TokenIDs)
	}
	if o.Usage == nil {
		if len(req.PromptTokenIDs) == 0 || len(o.TokenIDs)+resumed == 0 {
			return nil // unknown
		}
		return &subjects.Usage{PromptTokens: len(req.PromptTokenIDs), CompletionTokens: len(o.TokenIDs) + resumed}
	}
	return &subjects.Usage{
		PromptTokens:     max(0, o.Usage.PromptTokens-resumed),
		CompletionTokens: o.Usage.CompletionTokens + resumed,
		CachedTokens:     o.Usage.CachedTokens,
	}
}

func (u *unit) tokenIDs(req *subjects.Request, o engine.Outcome) []uint32 {
	if req.Resume == nil {
		return o.TokenIDs
	}
	out := make([]uint32, 0, len(req.Resume.TokenIDs)+len(o.TokenIDs))
	return append(append(out, req.Resume.TokenIDs...), o.TokenIDs...)
}

func (u *unit) logprobs(req *subjects.Request, o engine.Outcome) json.RawMessage {
	if req.Resume == nil || len(req.Resume.Logprobs) == 0 {
		return o.Logprobs
	}
	return engine.JoinLogprobs(req.Resume.Logprobs, o.Logprobs)
}

// segments says which engine made which tokens under which weights (scenario R9).
// Where the engine does not tell, its version at the start stands until another
// one was noticed, which may be one look of the agent late.
func (u *unit) segments(r *run, req *subjects.Request, o engine.Outcome) []subjects.Segment {
	var out []subjects.Segment
	at := 0
	if req.Resume != nil {
		out = append(out, req.Resume.Segments...)
		at = len(req.Resume.TokenIDs)
	}
	if len(o.Segments) > 0 {
		for _, s := range o.Segments {
			s.Engine, s.Epoch, s.Start, s.End = u.name, r.res.Epoch, s.Start+at, s.End+at
			out = append(out, s)
		}
		return out
	}
	n := len(o.TokenIDs)
	if n == 0 && o.Usage != nil {
		n = o.Usage.CompletionTokens
	}
	u.mu.Lock()
	version, synced := weightText(r.weight), slices.Clone(r.synced)
	u.mu.Unlock()
	if len(o.TokenIDs) == 0 {
		synced = nil // nobody counted where in the text it was
	}
	if len(synced) == 0 {
		version = or(o.WeightVersion, version)
	}
	begin := 0
	add := func(end int) {
		if end = min(end, n); end > begin {
			out = append(out, subjects.Segment{Engine: u.name, Epoch: r.res.Epoch, WeightVersion: version, Start: at + begin, End: at + end})
			begin = end
		}
	}
	for _, s := range synced {
		add(s.at)
		version = weightText(&s.version)
	}
	add(n)
	return out
}
