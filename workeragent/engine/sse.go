package engine

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// SSELimits bound a stream of server-sent events. Zero fields take the default.
type SSELimits struct {
	MaxEvent int   // bytes of one event's data; 8 MiB: the first chunk may carry a whole prompt's ids
	MaxTotal int64 // bytes of the whole stream; 256 MiB
}

func (l SSELimits) withDefaults() SSELimits {
	if l.MaxEvent <= 0 {
		l.MaxEvent = 8 << 20
	}
	if l.MaxTotal <= 0 {
		l.MaxTotal = 256 << 20
	}
	return l
}

// SSEEvent is one event of a stream. Data is valid only during the call that
// gets it. Cut means that the stream ended inside this event.
type SSEEvent struct {
	Name    string // of an "event:" line, else ""
	Data    []byte
	Comment bool // a line that starts with ':': the connection lives, nothing more
	Cut     bool
}

// Done tells whether the event is the end mark of the OpenAI API.
func (e *SSEEvent) Done() bool { return string(bytes.TrimSpace(e.Data)) == "[DONE]" }

// Errors of ReadSSE.
var (
	// ErrSSETooLarge: a line, an event or the stream is over its limit.
	ErrSSETooLarge = errors.New("event stream over its limit")
	// ErrStopSSE is returned by a handler to end the reading without an error.
	ErrStopSSE = errors.New("stop reading events")
)

// ReadSSE reads events until r ends (nil), the handler returns ErrStopSSE (nil)
// or another error, or a limit is passed. Lines end with LF or CRLF, the space
// after "data:" is optional. Servers that leave out the empty line between two
// complete JSON objects are understood; a stream may end without an empty line.
func ReadSSE(r io.Reader, lim SSELimits, handle func(SSEEvent) error) error {
	lim = lim.withDefaults()
	s := sseReader{br: bufio.NewReaderSize(r, 4<<10), lim: lim, handle: handle}
	err := s.run()
	if errors.Is(err, ErrStopSSE) {
		return nil
	}
	return err
}

type sseReader struct {
	br     *bufio.Reader
	lim    SSELimits
	handle func(SSEEvent) error
	line   []byte // reused
	data   []byte // of the event that is being collected
	name   string
	lines  int // data lines since the last event
	total  int64
}

func (s *sseReader) run() error {
	for {
		whole, err := s.readLine()
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(s.line) > 0 || whole {
			if herr := s.take(s.line); herr != nil {
				return herr
			}
		}
		if err != nil {
			return s.flush(!whole && len(s.line) > 0)
		}
	}
}

// readLine fills s.line without its end; whole is false when r ended first.
func (s *sseReader) readLine() (whole bool, err error) {
	s.line = s.line[:0]
	for {
		part, err := s.br.ReadSlice('\n')
		s.total += int64(len(part))
		if s.total > s.lim.MaxTotal {
			return false, fmt.Errorf("%w: more than %d bytes", ErrSSETooLarge, s.lim.MaxTotal)
		}
		if len(s.line)+len(part) > s.lim.MaxEvent+64 {
			return false, fmt.Errorf("%w: a line of more than %d bytes", ErrSSETooLarge, s.lim.MaxEvent)
		}
		s.line = append(s.line, part...)
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return false, err
		}
		s.line = bytes.TrimSuffix(s.line[:len(s.line)-1], []byte{'\r'})
		return true, nil
	}
}

func (s *sseReader) take(line []byte) error {
	if len(line) == 0 {
		return s.flush(false)
	}
	if line[0] == ':' {
		return s.handle(SSEEvent{Comment: true})
	}
	field, value, _ := bytes.Cut(line, []byte{':'})
	value = bytes.TrimPrefix(value, []byte{' '})
	switch string(field) {
	case "event":
		s.name = string(value[:min(len(value), 256)])
	case "data":
		// Looking at each of very many lines would take quadratic time.
		const most = 16
		if s.lines > 0 && s.lines < most && s.complete() {
			if err := s.flush(false); err != nil {
				return err
			}
		}
		if s.lines > 0 {
			s.data = append(s.data, '\n')
		}
		s.lines++
		if len(s.data)+len(value) >= s.lim.MaxEvent {
			return fmt.Errorf("%w: an event of more than %d bytes", ErrSSETooLarge, s.lim.MaxEvent)
		}
		s.data = append(s.data, value...)
	}
	return nil // id, retry and what is no field are of no use here
}

// complete tells whether the data so far stands alone.
func (s *sseReader) complete() bool {
	return string(bytes.TrimSpace(s.data)) == "[DONE]" || json.Valid(s.data)
}

func (s *sseReader) flush(cut bool) error {
	if s.lines == 0 {
		s.name = ""
		return nil
	}
	ev := SSEEvent{Name: s.name, Data: s.data, Cut: cut}
	s.lines, s.name = 0, ""
	err := s.handle(ev)
	s.data = s.data[:0]
	return err
}
