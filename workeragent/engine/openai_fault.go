package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// apiFault is an error as a server spells it.
type apiFault struct {
	status  int // HTTP status, or the code inside a 200; 0 = none given
	code    string
	message string
}

// kind is what an error means: after output it is the engine's failure, whatever
// its status says.
func (f *apiFault) kind(output bool) Kind {
	if output {
		return Failed
	}
	return kindOfStatus(f.status)
}

// faultOf finds an error object in an answer: {"error": {...}}, {"error": "..."}
// or {"object": "error", ...}.
func faultOf(c *apiChunk, whole []byte) *apiFault {
	raw := c.Error
	switch {
	case len(raw) > 0 && string(raw) != "null":
	case c.Object == "error":
		raw = whole
	default:
		return nil
	}
	return parseFault(raw)
}

func parseFault(raw json.RawMessage) *apiFault {
	f := &apiFault{code: "engine_error"}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		f.message = clip(s)
		return f
	}
	var o struct {
		Message json.RawMessage `json:"message"`
		Type    string          `json:"type"`
		Code    json.RawMessage `json:"code"`
	}
	if json.Unmarshal(raw, &o) != nil {
		f.message = "the engine reports an error that is no text and no object"
		return f
	}
	if json.Unmarshal(o.Message, &s) == nil {
		f.message = clip(s)
	}
	code := strings.Trim(string(o.Code), `"`)
	if n, err := strconv.Atoi(code); err == nil {
		f.status = n
		f.code = or(o.Type, "engine_error")
	} else {
		f.code = or(o.Type, or(code, "engine_error"))
		if code == "null" {
			f.code = or(o.Type, "engine_error")
		}
	}
	if len(f.code) > 64 {
		f.code = f.code[:64]
	}
	return f
}

// kindOfStatus maps an HTTP status; what is unknown is the fleet's fault, not
// the request's.
func kindOfStatus(status int) Kind {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return DataError
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return NotAccepted
	}
	return Failed
}

// refusal reads an answer whose HTTP status is not 200.
func refusal(status int, body []byte) Outcome {
	o := Outcome{Kind: kindOfStatus(status), Code: "http_" + strconv.Itoa(status)}
	body = bytes.TrimSpace(body)
	if status >= 300 && status < 400 {
		o.Kind, o.Code = Failed, codeRedirect
		o.Message = fmt.Sprintf("the engine answers HTTP %d: redirects are not followed, configure the address it points to", status)
		return o
	}
	if len(body) > 0 && body[0] == '<' {
		// A proxy in front speaks, and says nothing about the request. Its 503
		// and 429 are refusals all the same.
		if o.Kind == DataError {
			o.Kind = Failed
		}
		o.Code = codeHTML
		o.Message = fmt.Sprintf("HTTP %d with a web page: a proxy answers instead of the engine", status)
		return o
	}
	var c apiChunk
	if json.Unmarshal(body, &c) == nil {
		if f := faultOf(&c, body); f != nil {
			o.Message = f.message
			if f.code != "engine_error" {
				o.Code = f.code
			}
		} else if s := detail(body); s != "" {
			o.Message = s
		}
	} else {
		o.Message = clip(string(body))
	}
	if o.Message == "" {
		o.Message = "HTTP " + strconv.Itoa(status) + " without an explanation"
	}
	// llama.cpp answers 500 to a body that it cannot parse: another engine would too.
	if status == http.StatusInternalServerError && strings.Contains(o.Message, "json.exception.parse_error") {
		o.Kind, o.Code = DataError, codeOwnBug
	}
	return o
}

// detail reads FastAPI's {"detail": ...} and {"message": ...}.
func detail(body []byte) string {
	var o struct {
		Detail  json.RawMessage `json:"detail"`
		Message json.RawMessage `json:"message"`
	}
	if json.Unmarshal(body, &o) != nil {
		return ""
	}
	for _, raw := range [...]json.RawMessage{o.Message, o.Detail} {
		var s string
		if json.Unmarshal(raw, &s) == nil && s != "" {
			return clip(s)
		}
	}
	return clip(string(o.Detail))
}

// clip shortens a server's words, and cuts where validators echo their input:
// a message never carries a prompt.
func clip(s string) string {
	for _, mark := range [...]string{"'input'", `"input"`, "input_value="} {
		if i := strings.Index(s, mark); i >= 0 {
			s = s[:i] + "..."
		}
	}
	const most = 300
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}
