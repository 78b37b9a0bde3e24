package dispatcher

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// Headers that a direct get adds to a stored message.
const (
	hdrGetSubject  = "Nats-Subject"
	hdrGetSequence = "Nats-Sequence"
	hdrGetTime     = "Nats-Time-Stamp"
)

// batch reads up to n stored messages under filter from seq on, and no more than
// about most bytes, by direct get: any replica may answer, so that the newest
// may be missing and the consumed still be there. Nothing is decided on that
// alone. An empty batch = there is none.
func (a api) batch(ctx context.Context, stream, filter string, seq uint64, n, most int) ([]*stored, error) {
	body, err := json.Marshal(struct {
		Seq      uint64 `json:"seq"`
		NextFor  string `json:"next_by_subj"`
		Batch    int    `json:"batch"`
		MaxBytes int    `json:"max_bytes"`
	}{seq, filter, n, most})
	if err != nil {
		return nil, err
	}
	inbox := a.nc.NewInbox()
	in := make(chan *nats.Msg, n+8)
	sub, err := a.nc.ChanSubscribe(inbox, in)
	if err != nil {
		return nil, fmt.Errorf("read from %s: %w", stream, err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := a.nc.PublishRequest(a.subject("DIRECT.GET", stream), inbox, body); err != nil {
		return nil, fmt.Errorf("read from %s: %w", stream, err)
	}
	var out []*stored
	for {
		var m *nats.Msg
		select {
		case m = <-in:
		case <-ctx.Done():
			return nil, fmt.Errorf("read from %s: %w", stream, context.Cause(ctx))
		}
		// Stored messages carry where they stand; a status does not. A stored
		// Status header does not make a status of a message.
		if m.Header.Get(hdrGetSequence) == "" {
			switch m.Header.Get("Status") {
			case "204", "404":
				return out, nil
			default:
				return nil, fmt.Errorf("read from %s: %w", stream, statusOf(m))
			}
		}
		s, err := readStored(m)
		if err != nil {
			return nil, fmt.Errorf("read from %s: %w", stream, err)
		}
		if out = append(out, s); len(out) > n {
			return nil, fmt.Errorf("read from %s: more messages than asked for", stream)
		}
	}
}

// readStored takes the last value of what the server adds: a header of the same
// name in the message itself stands before it.
func readStored(m *nats.Msg) (*stored, error) {
	last := func(name string) string {
		vs := m.Header[name]
		if len(vs) == 0 {
			return ""
		}
		return vs[len(vs)-1]
	}
	seq, err := strconv.ParseUint(last(hdrGetSequence), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("sequence of a stored message: %w", err)
	}
	at, err := time.Parse(time.RFC3339Nano, last(hdrGetTime))
	if err != nil {
		return nil, fmt.Errorf("time of a stored message: %w", err)
	}
	return &stored{subject: last(hdrGetSubject), seq: seq, at: at.UnixNano(), header: m.Header, data: m.Data}, nil
}
