package kvstate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// Error codes of JetStream that mean something here.
const (
	codeAccountResources = 10002 // resource limits exceeded for account
	codeNoMessage        = 10037
	codeStorage          = 10047 // insufficient storage resources
	codeResources        = 10023 // insufficient resources
	codeStreamNotFound   = 10059
	codeWrongSequence    = 10071 // "wrong last sequence: N"
	codeStoreFailed      = 10077 // maximum bytes, messages; too large
	codeInProcess        = 10158 // duplicate message id is in process
	codeBusy             = 10164 // "wrong last sequence", no number: another guarded write in flight
	codeTooMany          = 10167 // the stream's queue is full
	codeBatchIncomplete  = 10176 // a part of it was lost: nothing is written
	codeBatchDuplicate   = 10201
	codeBatchInflight    = 10210 // too many batches on their way
)

// apiError is the error part of every answer of JetStream.
type apiError struct {
	Error *struct {
		Code        int    `json:"code"`
		ErrCode     int    `json:"err_code"`
		Description string `json:"description"`
	} `json:"error"`
}

// read maps the error of a read: it had no effect, so that it is either gone or
// unavailable.
func (e apiError) read(what string) error {
	switch {
	case e.Error == nil:
		return nil
	case e.Error.ErrCode == codeNoMessage:
		return fmt.Errorf("%w: %s", ErrGone, what)
	case e.Error.ErrCode == codeStreamNotFound:
		return fmt.Errorf("%w: %s: there is no such stream: make the pool first (subjects.Ensure)", ErrUnavailable, what)
	}
	return fmt.Errorf("%w: %s: %s (%d)", ErrUnavailable, what, e.Error.Description, e.Error.ErrCode)
}

// write maps the error of a write.
func (e apiError) write() error {
	if e.Error == nil {
		return nil
	}
	text := fmt.Sprintf("%s (%d)", e.Error.Description, e.Error.ErrCode)
	switch e.Error.ErrCode {
	case codeWrongSequence:
		if n, ok := actualSequence(e.Error.Description); ok {
			return &ConflictError{Actual: n}
		}
		// Without a number nothing is known but that it was refused.
		return fmt.Errorf("%w: %s", ErrBusy, text)
	case codeBusy:
		return fmt.Errorf("%w: %s", ErrBusy, text)
	case codeBatchIncomplete, codeBatchInflight:
		return fmt.Errorf("%w: %s", ErrUnavailable, text)
	case codeBatchDuplicate:
		return &DuplicateError{}
	case codeInProcess:
		return fmt.Errorf("%w: %s", ErrUnknown, text)
	case codeTooMany, codeStorage, codeResources, codeAccountResources:
		return fmt.Errorf("%w: %s", ErrFull, text)
	case codeStoreFailed:
		// The stream, or its disk.
		for _, full := range [...]string{"maximum bytes", "maximum messages", "no space left"} {
			if strings.Contains(e.Error.Description, full) {
				return fmt.Errorf("%w: %s", ErrFull, text)
			}
		}
		return fmt.Errorf("%w: %s", ErrRefused, text)
	case codeStreamNotFound:
		return fmt.Errorf("%w: %s", ErrUnavailable, text)
	}
	if e.Error.Code == 503 {
		return fmt.Errorf("%w: %s", ErrUnknown, text)
	}
	if e.Error.Code >= 500 {
		return fmt.Errorf("%w: %s", ErrUnavailable, text)
	}
	return fmt.Errorf("%w: %s", ErrRefused, text)
}

// actualSequence reads N of "wrong last sequence: N". The number is nowhere else.
func actualSequence(description string) (uint64, bool) {
	_, num, ok := strings.Cut(description, ": ")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(num), 10, 64)
	return n, err == nil
}

// publish writes one message and waits for its acknowledgement, once. A
// duplicate acknowledgement is an error: nothing was written now.
func (s *Store) publish(ctx context.Context, subject string, h nats.Header, body []byte) (uint64, error) {
	if end, ok := ctx.Deadline(); !ok || time.Until(end) > s.opt.timeout {
		timed, cancel := context.WithTimeout(ctx, s.opt.timeout)
		defer cancel()
		ctx = timed
	}
	if err := s.connected(ctx); err != nil {
		return 0, err
	}
	return s.request(ctx, &nats.Msg{Subject: subject, Header: h, Data: body})
}

// publishPair writes two messages of one stream as one atomic batch: both are
// stored, in this order and nothing between, or none. The acknowledgement is the
// second one's. A repetition is a batch of its own: half a batch that was lost
// on the way ends at the server by itself.
func (s *Store) publishPair(ctx context.Context, first, second *nats.Msg) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opt.timeout)
	defer cancel()
	if err := s.connected(ctx); err != nil {
		return 0, err
	}
	id := nats.NewInbox()[len(nats.InboxPrefix):]
	for i, m := range []*nats.Msg{first, second} {
		m.Header.Set(subjects.HdrBatchID, id)
		m.Header.Set(subjects.HdrBatchSequence, strconv.Itoa(i+1))
	}
	second.Header.Set(subjects.HdrBatchCommit, "1")
	if err := s.nc.PublishMsg(first); err != nil {
		return 0, sendError(err)
	}
	return s.request(ctx, second)
}

// request sends one message and reads its acknowledgement.
func (s *Store) request(ctx context.Context, m *nats.Msg) (uint64, error) {
	reply, err := s.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		return 0, sendError(err)
	}
	if seq, ok := plainAck(reply.Data); ok {
		return seq, nil
	}
	var ack struct {
		apiError
		Stream    string `json:"stream"`
		Seq       uint64 `json:"seq"`
		Duplicate bool   `json:"duplicate"`
	}
	if err := json.Unmarshal(reply.Data, &ack); err != nil {
		return 0, fmt.Errorf("%w: the acknowledgement does not decode: %w", ErrUnknown, err)
	}
	if err := ack.write(); err != nil {
		return 0, err
	}
	switch {
	case ack.Stream == "" || ack.Seq == 0:
		return 0, fmt.Errorf("%w: the acknowledgement names no sequence", ErrUnknown)
	case ack.Duplicate:
		return 0, &DuplicateError{Seq: ack.Seq}
	}
	return ack.Seq, nil
}

// plainAck reads an acknowledgement that tells a stream and a sequence and
// nothing else, `{"stream":"S","seq":7}`, as nearly all do; the others are for
// the decoder.
func plainAck(b []byte) (seq uint64, ok bool) {
	rest, ok := bytes.CutPrefix(b, []byte(`{"stream":"`))
	if !ok {
		return 0, false
	}
	name, number, ok := bytes.Cut(rest, []byte(`","seq":`))
	if !ok || len(name) == 0 || bytes.IndexByte(name, '"') >= 0 {
		return 0, false
	}
	for i, c := range number {
		if c == '}' && i == len(number)-1 {
			return seq, seq > 0
		}
		if c < '0' || c > '9' || i > 18 { // 19 digits do not overflow
			return 0, false
		}
		seq = 10*seq + uint64(c-'0')
	}
	return 0, false
}

// sendError maps what the client library says of a request. Whatever may have
// left the machine is unknown; no responders too: a cluster that is electing
// answers so while an earlier attempt is still on its way.
func sendError(err error) error {
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject),
		errors.Is(err, nats.ErrHeadersNotSupported):
		return fmt.Errorf("%w: %w", ErrRefused, err)
	case errors.Is(err, nats.ErrReconnectBufExceeded):
		return fmt.Errorf("%w: not sent, the connection is down: %w", ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// connected waits for the connection, so that a write is never left in the
// client's buffer, to be sent after an outage. What fails here was not sent.
func (s *Store) connected(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: not sent: %w", ErrUnavailable, context.Cause(ctx))
	}
	if s.nc.IsConnected() {
		return nil
	}
	changed := s.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer s.nc.RemoveStatusListener(changed)
	for !s.nc.IsConnected() {
		if s.nc.IsClosed() {
			return fmt.Errorf("%w: not sent: %w", ErrUnavailable, nats.ErrConnectionClosed)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: not sent, not connected to NATS: %w", ErrUnavailable, context.Cause(ctx))
		}
	}
	return nil
}

// ask sends one request to the JetStream API. No answer is ErrUnavailable: only
// what has no effect is asked this way.
func (s *Store) ask(ctx context.Context, subject string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opt.timeout)
	defer cancel()
	if err := s.connected(ctx); err != nil {
		return nil, err
	}
	reply, err := s.nc.RequestWithContext(ctx, subject, body)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return reply.Data, nil
}

// stored is a message as STREAM.MSG.GET returns it.
type stored struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Headers []byte    `json:"hdrs"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
}

// last reads the last message of a subject from the stream's leader. A Direct
// Get may be stale on R3, and nats.go uses one wherever the stream allows it:
// hence the bare request. Nothing there is ErrGone.
func (s *Store) last(ctx context.Context, stream, subject string) (delivery, error) {
	m, err := s.messageGet(ctx, stream, subject, map[string]any{"last_by_subj": subject})
	if err != nil {
		return delivery{}, err
	}
	d := delivery{subject: m.Subject, seq: m.Seq, stored: m.Time, data: m.Data}
	if len(m.Headers) > 0 {
		if d.header, err = nats.DecodeHeadersMsg(m.Headers); err != nil {
			return delivery{}, fmt.Errorf("%w: %s: headers of sequence %d do not decode: %w", ErrRefused, subject, m.Seq, err)
		}
	}
	s.opt.clock.Observe(m.Time)
	return d, nil
}

func (s *Store) messageGet(ctx context.Context, stream, what string, request map[string]any) (stored, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return stored{}, fmt.Errorf("%w: %s: %w", ErrRefused, what, err)
	}
	data, err := s.ask(ctx, "$JS.API.STREAM.MSG.GET."+stream, body)
	if err != nil {
		return stored{}, fmt.Errorf("read %s: %w", what, err)
	}
	var answer struct {
		apiError
		Message stored `json:"message"`
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return stored{}, fmt.Errorf("%w: read %s: the answer does not decode: %w", ErrUnavailable, what, err)
	}
	if err := answer.read(what); err != nil {
		return stored{}, err
	}
	return answer.Message, nil
}

// guard expects the subject's last message at that sequence, 0 = none.
func guard(h nats.Header, expected uint64) {
	h.Set(subjects.HdrExpectLastSeq, strconv.FormatUint(expected, 10))
}

// setTTL writes a time to live in whole seconds (the server's grain), rounded
// up, at least one.
func setTTL(h nats.Header, d time.Duration) {
	sec := int64(d / time.Second)
	if d%time.Second > 0 {
		sec++
	}
	h.Set(subjects.HdrTTL, strconv.FormatInt(max(1, sec), 10))
}

// ttlOf reads a time to live as servers and other clients write it: seconds or
// a duration; 0 = none.
func ttlOf(h nats.Header) time.Duration {
	v := h.Get(subjects.HdrTTL)
	if n, err := strconv.ParseInt(v, 10, 64); err == nil {
		if n < 0 || n > int64((1<<63-1)/time.Second) {
			return 0
		}
		return time.Duration(n) * time.Second
	}
	d, err := time.ParseDuration(v)
	if err != nil || d < time.Second {
		return 0
	}
	return d.Truncate(time.Second)
}

// superseded turns a conflict on a key or register entry into what it means for
// its holder.
func superseded(err error) error {
	c, ok := errors.AsType[*ConflictError](err)
	switch {
	case !ok:
		return err
	case c.Actual == 0:
		return fmt.Errorf("%w: nothing is there", ErrGone)
	}
	return fmt.Errorf("%w: it stands at sequence %d", ErrSuperseded, c.Actual)
}
