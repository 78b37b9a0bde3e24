package engine

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"
)

func (l *life) handleCompletions(w http.ResponseWriter, r *http.Request) { l.generate(w, r, false) }
func (l *life) handleChat(w http.ResponseWriter, r *http.Request)        { l.generate(w, r, true) }

const (
	coreIssue = "EngineCore encountered an issue. See stack trace (above) for the root cause."
	queueFull = "The waiting queue is full. Please try again later."
)

// drop ends the connection without an end of the answer.
func drop() { panic(http.ErrAbortHandler) }

func (l *life) generate(w http.ResponseWriter, r *http.Request, chat bool) {
	c, ok := l.decode(w, r, chat)
	if !ok {
		return
	}
	f := l.s.faults.take()
	if l.s.dead.Load() {
		f = &Fault{Kind: Fault500}
	}
	if l.refuse(w, r, f) {
		return
	}
	j, err := l.submit(c.gen)
	switch {
	case errors.Is(err, ErrQueueFull):
		writeError(w, http.StatusServiceUnavailable, "ServiceUnavailableError", queueFull)
		return
	case isDown(err):
		drop()
	case err != nil:
		badRequest(w, err.Error())
		return
	}
	j.api.Store(&c.id)
	x := &exchange{l: l, w: w, ctx: r.Context(), c: c, j: j, f: f, a: newAnswer(c, j.plan.text)}
	defer x.leave()
	if c.gen.Stream {
		x.stream()
	} else {
		x.whole()
	}
}

// refuse plays the faults that strike before anything is generated.
func (l *life) refuse(w http.ResponseWriter, r *http.Request, f *Fault) bool {
	if f == nil {
		return false
	}
	if f.RetryAfterS > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(f.RetryAfterS))
	}
	switch f.Kind {
	case FaultHang:
		<-r.Context().Done()
		drop()
	case Fault500:
		writeError(w, http.StatusInternalServerError, "InternalServerError", coreIssue)
	case Fault503:
		writeError(w, http.StatusServiceUnavailable, "ServiceUnavailableError", queueFull)
	case Fault429:
		writeError(w, http.StatusTooManyRequests, "RateLimitError", "Failed to enqueue request, waiting requests queue is full")
	case FaultHTML:
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(http.StatusBadGateway)
		_, _ = w.Write([]byte("<html><head><title>502 Bad Gateway</title></head><body>proxy</body></html>\n"))
	default:
		return false
	}
	return true
}

// exchange is one call being answered.
type exchange struct {
	l   *life
	w   http.ResponseWriter
	ctx context.Context // ends when the client leaves or the server goes down
	c   *call
	j   *Stream
	f   *Fault
	a   *answer
	buf bytes.Buffer
}

// leave stops the generation if it still runs, unless it goes on on purpose.
func (x *exchange) leave() {
	if x.j.ended.Load() == nil && !x.l.s.cfg.KeepAbandoned && !x.f.is(FaultKeep) {
		x.j.Abort()
	}
}

var strikesAt = []FaultKind{FaultTruncate, FaultErrorAfter, FaultAbort, FaultAbortSilent, FaultDisconnectAt}

// next is what is to be sent next; strike says that the fault's token is reached.
func (x *exchange) next() (tokens []uint32, end *End, strike bool) {
	upto, strikes := -1, x.f.is(strikesAt...)
	if strikes {
		upto = x.f.AfterTokens
	}
	for {
		var wake chan struct{}
		if x.f.is(FaultDrip) {
			upto, wake = x.drip()
		}
		tokens, end, err := x.j.Next(x.ctx, upto, wake)
		switch {
		case err != nil:
			drop()
		case strikes && (end != nil || tokens == nil):
			return nil, nil, true
		case tokens != nil || end != nil:
			return tokens, end, false
		}
	}
}

// drip waits for the next token's turn.
func (x *exchange) drip() (upto int, wake chan struct{}) {
	t := time.NewTimer(x.f.interval())
	defer t.Stop()
	select {
	case <-t.C:
	case <-x.ctx.Done():
	}
	return x.j.read + 1, nil
}

func (x *exchange) stream() {
	x.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	x.w.WriteHeader(http.StatusOK)
	x.flush() // the status is out long before the first token, as with vLLM
	if x.c.chat && !x.f.is(FaultAbortSilent) {
		x.send(x.a.role())
	}
	for {
		tokens, end, strike := x.next()
		switch {
		case strike:
			x.strike()
			return
		case end == nil:
			x.send(x.a.chunk(tokens, nil))
		default:
			x.finish(end)
			return
		}
	}
}

func (x *exchange) send(v any) {
	if event(&x.buf, v) != nil {
		drop()
	}
	x.flush()
}

func (x *exchange) flush() {
	if _, err := x.w.Write(x.buf.Bytes()); err != nil {
		drop()
	}
	x.buf.Reset()
	if http.NewResponseController(x.w).Flush() != nil {
		drop()
	}
}

const doneLine = "data: [DONE]\n\n"

func (x *exchange) finish(end *End) {
	if end.Reason == ReasonError {
		x.failure()
		return
	}
	if event(&x.buf, x.a.chunk(nil, end)) != nil {
		drop()
	}
	if x.c.usage {
		u := x.a.body(x.a.object(true))
		u.Usage = x.a.usage(end, x.l.s.cfg.OmitZeroCached)
		if event(&x.buf, u) != nil {
			drop()
		}
	}
	x.buf.WriteString(doneLine)
	x.flush()
}

func (x *exchange) failure() {
	e := map[string]apiError{"error": {Message: coreIssue,
		Type: "InternalServerError", Code: http.StatusInternalServerError}}
	if event(&x.buf, e) != nil {
		drop()
	}
	x.buf.WriteString(doneLine)
	x.flush()
}

// strike plays the faults that end a stream.
func (x *exchange) strike() {
	switch x.f.Kind {
	case FaultErrorAfter:
		x.failure()
	case FaultAbort:
		x.finish(&End{Reason: ReasonAbort, Tokens: x.a.sent, Cached: max(0, x.j.Cached())})
	case FaultAbortSilent:
		x.buf.WriteString(doneLine)
		x.flush()
	case FaultDisconnectAt:
		drop()
	}
}

// whole answers a call that does not stream; a fault strikes it when it would
// have been answered, or at its token if that comes sooner.
func (x *exchange) whole() {
	var all []uint32
	for {
		tokens, end, strike := x.next()
		all = append(all, tokens...)
		switch {
		case strike:
			x.strikeWhole(all)
			return
		case end == nil:
		case end.Reason == ReasonError:
			writeError(x.w, http.StatusInternalServerError, "InternalServerError", coreIssue)
			return
		default:
			x.write(all, end)
			return
		}
	}
}

func (x *exchange) write(all []uint32, end *End) {
	writeJSON(x.w, http.StatusOK, x.a.whole(all, end, x.a.usage(end, x.l.s.cfg.OmitZeroCached)))
}

func (x *exchange) strikeWhole(all []uint32) {
	switch x.f.Kind {
	case FaultErrorAfter:
		writeError(x.w, http.StatusInternalServerError, "InternalServerError", coreIssue)
	case FaultAbort, FaultAbortSilent:
		x.write(all, &End{Reason: ReasonAbort, Tokens: len(all), Cached: max(0, x.j.Cached())})
	case FaultTruncate:
		x.w.Header().Set("Content-Type", "application/json")
		_, _ = x.w.Write([]byte(`{"id":"` + x.c.id + `","object":"text_compl`))
	case FaultDisconnectAt:
		drop()
	}
}
