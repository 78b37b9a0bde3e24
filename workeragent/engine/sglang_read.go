package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// read takes a body of /generate, a stream of events or one JSON object,
// whatever its Content-Type claims, and tells how it ended.
func (a *sglangAnswer) read(body io.Reader, lim SSELimits) (end, error) {
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
		b, err := io.ReadAll(io.LimitReader(r, lim.MaxTotal+1))
		switch {
		case err != nil:
			return endCut, err
		case int64(len(b)) > lim.MaxTotal:
			return endCut, ErrSSETooLarge
		}
		return endMark, a.chunk(b)
	}
	how := endEOF
	err = ReadSSE(r, lim, func(e SSEEvent) error {
		switch {
		case e.Comment:
			return nil
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
		how = endCut
	}
	return how, err
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
