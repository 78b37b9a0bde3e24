package dispatcher

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Codes of messages that can never run (scenario F14).
const (
	badMsgID   = "bad_message_id" // no usable name: only DEAD keeps it
	badHeader  = "bad_header"
	badRequest = "invalid_request"
	badSize    = "too_large"
	badName    = "name_mismatch" // the body names another rollout than its message id
)

// maxBadText bounds what is said of a bad message, bytes.
const maxBadText = 1024

func bad(code string, err error) *core.Bad {
	text := err.Error()
	if len(text) > maxBadText {
		text = strings.ToValidUTF8(text[:maxBadText], "") + "..."
	}
	return &core.Bad{Code: code, Message: text}
}

func goodToken(s string) bool { return subjects.CheckToken("token", s) == nil }

// decode reads the facts of a queued message. Job, lane and id are those of its
// subject and message id; a body that says otherwise is refused. The body is
// decoded only when the headers do not say enough; otherwise it is searched for
// its name, which clients write first.
func (d *Dispatcher) decode(h nats.Header, body []byte, q core.Queue) (subjects.Facts, *core.Bad) {
	id, err := messageID(h.Get(subjects.HdrMsgID), q)
	if err != nil {
		return subjects.Facts{Job: q.Job, Lane: q.Lane, Reader: subjects.DefaultReader}, bad(badMsgID, err)
	}
	f, complete, err := subjects.FactsFromHeader(q.Job, id, q.Lane, h)
	if f.Reader == "" {
		f.Reader = subjects.DefaultReader
	}
	switch {
	case len(body) > subjects.MaxRequestBytes:
		return f, bad(badSize, fmt.Errorf("the body is %d bytes long: at most %d are allowed", len(body), subjects.MaxRequestBytes))
	case err != nil:
		return f, bad(badHeader, err)
	case complete:
		if code, err := checkName(body, q.Job, id); err != nil {
			return f, bad(code, err)
		}
		return f, nil
	}
	r, err := subjects.DecodeRequest(body)
	if r != nil && r.Reader != "" && goodToken(r.Reader) {
		f.Reader = r.Reader // so that its refusal reaches who waits for it
	}
	if err != nil {
		return f, bad(badRequest, err)
	}
	if r.Job != q.Job || r.ID != id {
		return f, bad(badName, nameMismatch(r.Job, r.ID, q.Job, id))
	}
	return merge(f, subjects.FactsFromRequest(r, *d.settings.Load())), nil
}

// merge takes the facts of the body and, of the headers, what only they say.
func merge(head, body subjects.Facts) subjects.Facts {
	body.Lane = head.Lane // of the subject, or of the requeue
	body.Bind, body.Burnt, body.Tried = head.Bind, head.Burnt, head.Tried
	body.LeftMS, body.Accepted = head.LeftMS, head.Accepted
	body.Rank = head.Rank
	return body
}

func nameMismatch(job, id, wantJob, wantID string) error {
	return fmt.Errorf("the body names rollout %.150q and its message id %q: give both the same job and id",
		subjects.RolloutKey(job, id), subjects.RolloutKey(wantJob, wantID))
}

// messageID reads the id from <job>.<id>, or on RETRY from <job>.<id>#<bind>.
func messageID(v string, q core.Queue) (string, error) {
	key := v
	if q.Retry {
		var bind string
		var ok bool
		if key, bind, ok = strings.Cut(v, "#"); !ok {
			return "", fmt.Errorf("message id %.150q of a requeued request has no bind number", v)
		}
		if n, err := strconv.ParseUint(bind, 10, 31); err != nil || n == 0 {
			return "", fmt.Errorf("message id %.150q of a requeued request has no bind number", v)
		}
	}
	job, id, ok := subjects.SplitRolloutKey(key)
	switch {
	case v == "":
		return "", fmt.Errorf("the message has no %s header: set it to <job>.<id>", subjects.HdrMsgID)
	case !ok || job != q.Job:
		return "", fmt.Errorf("message id %.150q does not name a rollout of job %s: set it to <job>.<id>", v, q.Job)
	}
	if err := subjects.CheckToken("id", id); err != nil {
		return "", err
	}
	return id, nil
}

var errNotObject = errors.New("the body is not a JSON object")

// beginsWithName tells whether a body begins as our clients write it, with this
// name. job and id are tokens: nothing in them is escaped.
func beginsWithName(body []byte, job, id string) bool {
	for _, part := range [...]string{`{"schema_version":1,"id":"`, id, `","job":"`, job, `"`} {
		if len(body) < len(part) || string(body[:len(part)]) != part {
			return false
		}
		body = body[len(part):]
	}
	return true
}

// checkName looks for the top-level members job and id of a body that is not
// decoded, and stops when it has seen both. A body that names neither is not
// contradicted.
func checkName(body []byte, job, id string) (code string, err error) {
	if beginsWithName(body, job, id) {
		return "", nil
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return badRequest, errNotObject
	}
	seen := 0
	for seen < 2 && dec.More() {
		t, err := dec.Token()
		if err != nil {
			return badRequest, fmt.Errorf("the body is not valid JSON: %w", err)
		}
		var want string
		switch t {
		case "id":
			want = id
		case "job":
			want = job
		default:
			var skip json.RawMessage
			if err := dec.Decode(&skip); err != nil {
				return badRequest, fmt.Errorf("the body is not valid JSON: %w", err)
			}
			continue
		}
		var got string
		if err := dec.Decode(&got); err != nil {
			return badRequest, fmt.Errorf("the body's %s is not a string: %w", t, err)
		}
		if got != want {
			return badName, fmt.Errorf("the body's %s is %.150q and its message id says %q: give both the same", t, got, want)
		}
		seen++
	}
	if seen < 2 && !dec.More() {
		if _, err := dec.Token(); err != nil {
			return badRequest, fmt.Errorf("the body is not valid JSON: %w", err)
		}
	}
	return "", nil
}
