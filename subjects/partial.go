package subjects

import "encoding/json"

// Partial is a checkpoint of unfinished output: partials/<engine>.<job>.<id>. It holds
// the whole output so far, of earlier attempts too (scenario R15).
type Partial struct {
	SchemaVersion int       `json:"schema_version"`
	Engine        string    `json:"engine"`
	Epoch         string    `json:"epoch"`
	Bind          int       `json:"bind"` // attempt that made it
	TokenIDs      []uint32  `json:"token_ids"`
	Segments      []Segment `json:"segments,omitempty"`
}

// Resumed is the body of the attempt that the checkpoint is of, to go on from its
// output, and the request that it was. ok is false when it is of another attempt,
// or nothing can go on from it.
func (p *Partial) Resumed(h *Held, body []byte) (next []byte, req *Request, ok bool) {
	if p.Bind != h.Bind || p.Epoch != h.Epoch || len(p.TokenIDs) == 0 {
		return nil, nil, false
	}
	req, err := DecodeRequest(body)
	if err != nil || len(req.PromptTokenIDs) == 0 || len(p.TokenIDs) >= req.Sampling.MaxTokens {
		return nil, nil, false
	}
	next, ok = WithResume(req, &Resume{TokenIDs: p.TokenIDs, Segments: p.Segments})
	return next, req, ok
}

// WithResume is a request's body with what was generated; ok is false when that
// is too large.
func WithResume(req *Request, resume *Resume) (body []byte, ok bool) {
	next := *req
	next.Resume = resume
	b, err := json.Marshal(next)
	if err != nil || len(b) > MaxRequestBytes {
		return nil, false
	}
	return b, true
}
