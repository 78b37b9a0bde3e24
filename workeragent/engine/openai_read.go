package engine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/rollbus/rollbus/subjects"
)

// collector takes what a server says about one request, in either API.
type collector interface {
	// chunk takes one JSON object: a piece of a stream, or a whole answer.
	chunk(b []byte) error
	// outcome judges what came. err is what broke the reading, nil if the body
	// ended by itself.
	outcome(how end, err error, believeNoMark bool) Outcome
}

// generate sends one request and follows its answer. When ctx ends it returns
// what came until then, as Aborted, beside ctx's cause.
func (a *OpenAI) generate(ctx context.Context, r *subjects.Request, run Run, path string, body []byte, c collector) (Outcome, error) {
	a.gauges.enter(1)
	out := a.exchange(ctx, path, body, run, c)
	a.gauges.enter(-1)
	if cause := context.Cause(ctx); cause != nil && out.Kind != Completed {
		out.Kind = Aborted
		return out, cause
	}
	a.strip(r, &out)
	return out, nil
}

// unaskable is a request that this adapter cannot spell.
func unaskable(err error) (Outcome, error) {
	return Outcome{Kind: DataError, Code: codeBadRequest, Message: clip(err.Error())}, nil
}

// allowed is how many tokens may come before the server is not believed.
func (a *OpenAI) allowed(r *subjects.Request) int {
	return r.Sampling.MaxTokens - resumed(r) + a.cfg.TokenSlack
}

func (a *OpenAI) exchange(ctx context.Context, path string, body []byte, run Run, c collector) Outcome {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.base+path, bytes.NewReader(body))
	if err != nil {
		o, _ := unaskable(err)
		return o
	}
	a.headers(req)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("X-Request-Id", run.ID)
	if run.Rank != nil {
		req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(*run.Rank))
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return unsent(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		return refusal(resp.StatusCode, b)
	}
	how, err := readAnswer(resp.Body, a.cfg.Limits, c)
	if err == nil && how == endMark {
		drain(resp.Body, cancel)
	}
	return c.outcome(how, err, a.cfg.AcceptMissingDone)
}

// readAnswer reads a body, whatever its Content-Type claims: a stream of events
// or one JSON object. It tells how the body ended; errors are of the connection,
// of a limit, or say that this is no answer at all.
func readAnswer(body io.Reader, lim SSELimits, c collector) (end, error) {
	lim = lim.withDefaults()
	r := bufio.NewReader(body)
	first, err := firstByte(r)
	switch {
	case errors.Is(err, io.EOF):
		return endEOF, nil
	case err != nil:
		return endCut, err
	case first == '<':
		return endEOF, errHTML
	case first == '{' || first == '[':
		return readWhole(r, lim, c)
	}
	how := endEOF
	err = ReadSSE(r, lim, func(e SSEEvent) error {
		switch {
		case e.Comment:
			return nil // the HTTP server lives; nothing is said of this request
		case e.Done():
			how = endMark
			return ErrStopSSE
		}
		err := c.chunk(e.Data)
		if err != nil && e.Cut {
			how = endCut
			return ErrStopSSE
		}
		return err
	})
	if err != nil {
		return endCut, err
	}
	return how, nil
}

// firstByte looks at the first one that is no space, and leaves it there.
func firstByte(r *bufio.Reader) (byte, error) {
	const most = 4096
	for range most {
		b, err := r.ReadByte()
		if err != nil {
			return 0, err
		}
		if bytes.IndexByte([]byte(" \t\r\n"), b) < 0 {
			return b, r.UnreadByte()
		}
	}
	return 0, fmt.Errorf("%w: %d bytes of nothing", errMalformed, most)
}

var errHTML = errors.New("the answer is a web page")

func readWhole(r io.Reader, lim SSELimits, c collector) (end, error) {
	most := min(lim.MaxTotal, 2*maxHeld)
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	switch {
	case err != nil:
		return endCut, err
	case int64(len(b)) > most:
		return endCut, ErrSSETooLarge
	}
	return endMark, c.chunk(b)
}

// breach is what an error in the answer, or a reading that was given up, means,
// whatever came before it; ok is false when only the connection broke, or nothing
// did.
func breach(fault *apiFault, output bool, err error, allowed int) (k Kind, code, message string, ok bool) {
	switch {
	case fault != nil:
		return fault.kind(output), fault.code, fault.message, true
	case errors.Is(err, errHTML):
		return Failed, codeHTML, "the answer is a web page, not of an engine: check the address", true
	case errors.Is(err, errHeld):
		return DataError, codeTooLarge, fmt.Sprintf("more than %d bytes of output: an answer carries %d: ask for fewer logprobs or tokens", maxHeld, subjects.MaxPayload), true
	case errors.Is(err, ErrSSETooLarge):
		return Failed, codeTooLarge, err.Error(), true
	case errors.Is(err, errRunaway):
		return Failed, codeRunaway, fmt.Sprintf("the engine sent more than %d tokens", allowed), true
	case errors.Is(err, errMalformed):
		return Failed, codeMalformed, clip(err.Error()), true
	}
	return "", "", "", false
}

// unfinished is what an answer without a finish reason means.
func unfinished(how end, err error, output bool) (k Kind, code, message string) {
	switch {
	case err != nil:
		return Failed, codeTruncated, "the connection broke before a finish reason: " + clip(err.Error())
	case how == endMark && !output:
		return Aborted, codeNoReason, "the stream ended without a token and without a finish reason: the engine dropped the request"
	case how == endMark:
		return Failed, codeNoReason, "the stream ended without a finish reason"
	}
	return Failed, codeTruncated, "the connection ended before a finish reason"
}

const noEnd = "a finish reason came, the end of the stream did not; accept_missing_done would take it"
