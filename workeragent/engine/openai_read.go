package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/rollbus/rollbus/subjects"
)

// readAnswer reads a body, whatever its Content-Type claims: a stream of events
// or one JSON object. It tells how the body ended; errors are of the connection,
// of a limit, or say that this is no answer at all.
func readAnswer(body io.Reader, lim SSELimits, a *answer) (end, error) {
	lim = lim.withDefaults()
	head := make([]byte, 0, 64)
	var err error
	for err == nil && len(bytes.TrimLeft(head, " \t\r\n")) == 0 && len(head) < cap(head) {
		var n int
		n, err = body.Read(head[len(head):min(cap(head), len(head)+16)])
		head = head[:len(head)+n]
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return endCut, err
	}
	if start := bytes.TrimLeft(head, " \t\r\n"); len(start) > 0 {
		switch start[0] {
		case '<':
			return endEOF, errHTML
		case '{', '[':
			return readWhole(io.MultiReader(bytes.NewReader(head), body), lim, a)
		}
	}
	how := endEOF
	err = ReadSSE(io.MultiReader(bytes.NewReader(head), body), lim, func(e SSEEvent) error {
		switch {
		case e.Comment:
			return nil // the HTTP server lives; nothing is said of this request
		case e.Done():
			how = endMark
			return ErrStopSSE
		}
		err := a.chunk(e.Data)
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

var errHTML = errors.New("the answer is a web page")

func readWhole(r io.Reader, lim SSELimits, a *answer) (end, error) {
	most := min(lim.MaxTotal, 2*maxHeld)
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	switch {
	case err != nil:
		return endCut, err
	case int64(len(b)) > most:
		return endCut, ErrSSETooLarge
	}
	return endMark, a.chunk(b)
}

// broken turns an error of readAnswer into an outcome with what came before it.
func (a *answer) broken(err error) Outcome {
	if a.fault != nil {
		return a.outcome(endCut, false)
	}
	o := a.outcome(endCut, false)
	o.Kind = Failed
	switch {
	case errors.Is(err, errHTML):
		o.Code, o.Message = codeHTML, "the answer is a web page, not of an engine: check the address"
	case errors.Is(err, errHeld):
		o.Kind = DataError
		o.Code, o.Message = codeTooLarge, fmt.Sprintf("more than %d bytes of output: an answer carries %d: ask for fewer logprobs or tokens", maxHeld, subjects.MaxPayload)
	case errors.Is(err, ErrSSETooLarge):
		o.Code, o.Message = codeTooLarge, err.Error()
	case errors.Is(err, errRunaway):
		o.Code, o.Message = codeRunaway, fmt.Sprintf("the engine sent more than %d tokens", a.maxTokens)
	case errors.Is(err, errMalformed):
		o.Code, o.Message = codeMalformed, clip(err.Error())
	case a.reason == "":
		o.Code, o.Message = codeTruncated, "the connection broke before a finish reason: "+clip(err.Error())
	}
	return o
}
