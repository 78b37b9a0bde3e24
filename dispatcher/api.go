package dispatcher

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// api asks what the jetstream package does not: the server's clock, batches of
// stored messages, one message with its stamp from the leader.
type api struct {
	nc     *nats.Conn
	prefix string // "$JS.API", or that of a domain
}

func newAPI(nc *nats.Conn, js jetstream.JetStream) api {
	opts := js.Options()
	prefix := jetstream.DefaultAPIPrefix
	switch {
	case opts.APIPrefix != "":
		prefix = opts.APIPrefix
	case opts.Domain != "":
		prefix = "$JS." + opts.Domain + ".API"
	}
	return api{nc: nc, prefix: strings.TrimSuffix(prefix, ".")}
}

func (a api) subject(verb string, tokens ...string) string {
	return a.prefix + "." + verb + "." + strings.Join(tokens, ".")
}

// apiError is a refusal of the JetStream API.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

func (e *apiError) Error() string {
	return fmt.Sprintf("%s (%d, %d)", e.Description, e.Code, e.ErrCode)
}

// streamInfo is what of STREAM.INFO is used here.
type streamInfo struct {
	Error  *apiError `json:"error"`
	TS     time.Time `json:"ts"` // the server's clock when it answered
	Total  int       `json:"total"`
	Offset int       `json:"offset"`
	Limit  int       `json:"limit"`
	State  struct {
		FirstSeq uint64            `json:"first_seq"`
		LastSeq  uint64            `json:"last_seq"`
		Messages uint64            `json:"messages"`
		Subjects map[string]uint64 `json:"subjects"`
	} `json:"state"`
}

// maxPages bounds a look: 100,000 subjects each.
const maxPages = 10

// streamInfo reads a stream's state with the message count of each subject
// under filter, page by page. It never asks a replica: the leader answers.
func (a api) streamInfo(ctx context.Context, stream, filter string) (*streamInfo, error) {
	var all *streamInfo
	for offset, page := 0, 0; page < maxPages; page++ {
		body, err := json.Marshal(struct {
			Filter string `json:"subjects_filter"`
			Offset int    `json:"offset,omitempty"`
		}{filter, offset})
		if err != nil {
			return nil, err
		}
		msg, err := a.nc.RequestWithContext(ctx, a.subject("STREAM.INFO", stream), body)
		if err != nil {
			return nil, fmt.Errorf("look at stream %s: %w", stream, err)
		}
		var info streamInfo
		if err := json.Unmarshal(msg.Data, &info); err != nil {
			return nil, fmt.Errorf("look at stream %s: %w", stream, err)
		}
		if info.Error != nil {
			return nil, fmt.Errorf("look at stream %s: %w", stream, info.Error)
		}
		got := len(info.State.Subjects)
		if all == nil {
			all = &info
		} else {
			maps.Copy(all.State.Subjects, info.State.Subjects)
			all.TS = info.TS
		}
		offset += got
		if got == 0 || offset >= info.Total {
			break
		}
	}
	return all, nil
}

// stored is a message as a stream holds it.
type stored struct {
	subject string
	seq     uint64
	at      int64 // server time, unix ns
	header  nats.Header
	data    []byte
}

// fromLeader reads one message by its sequence from the stream's leader; nil
// when it is not there.
func (a api) fromLeader(ctx context.Context, stream string, seq uint64) (*stored, error) {
	body := fmt.Appendf(nil, `{"seq":%d}`, seq)
	msg, err := a.nc.RequestWithContext(ctx, a.subject("STREAM.MSG.GET", stream), body)
	if err != nil {
		return nil, fmt.Errorf("read message %d of %s: %w", seq, stream, err)
	}
	var r struct {
		Error   *apiError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(msg.Data, &r); err != nil {
		return nil, fmt.Errorf("read message %d of %s: %w", seq, stream, err)
	}
	switch {
	case r.Error != nil && r.Error.Code == 404:
		return nil, nil
	case r.Error != nil:
		return nil, fmt.Errorf("read message %d of %s: %w", seq, stream, r.Error)
	case r.Message == nil:
		return nil, nil
	}
	s := &stored{subject: r.Message.Subject, seq: r.Message.Seq, at: r.Message.Time.UnixNano(), data: r.Message.Data}
	if len(r.Message.Header) > 0 {
		if s.header, err = nats.DecodeHeadersMsg(r.Message.Header); err != nil {
			return nil, fmt.Errorf("read message %d of %s: headers: %w", seq, stream, err)
		}
	}
	return s, nil
}
