package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// ErrNoControl is a control call that this server does not serve; vLLM needs
// VLLM_SERVER_DEV_MODE=1 for most of them.
var ErrNoControl = errors.New("the engine does not serve this control call")

// PauseMode says what becomes of the runs in flight.
type PauseMode string

// Pause modes.
const (
	PauseAbort PauseMode = "abort" // they end with partial output
	PauseWait  PauseMode = "wait"  // they finish first
	PauseKeep  PauseMode = "keep"  // they freeze with their cache and go on at Resume
)

// State is what an engine says of itself beside its load. Nil = not told.
type State struct {
	Paused        *bool
	Sleeping      *bool
	WeightVersion string // "" = not told
}

// Controller is what adapters of servers with control calls implement too. A
// call that the server does not have fails with ErrNoControl. Flush, Sleep and
// new weights empty the engine's cache: whoever calls them tells the feed of
// cache events, since the engine may say so late or never.
type Controller interface {
	Pause(ctx context.Context, mode PauseMode) error
	Resume(ctx context.Context) error
	// Sleep frees memory: level 1 keeps the weights on the host, 2 drops them.
	Sleep(ctx context.Context, level int) error
	Wake(ctx context.Context) error
	Flush(ctx context.Context) error
	// SetWeightVersion labels the weights that are loaded. It aborts nothing
	// (scenario R9).
	SetWeightVersion(ctx context.Context, version string) error
	State(ctx context.Context) (State, error)
}

// post sends a control call and reads its small answer.
func (a *OpenAI) post(ctx context.Context, path string, body any) ([]byte, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.base+path, r)
	if err != nil {
		return nil, err
	}
	a.headers(req)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%s: %s", path, cause(err))
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	switch {
	case resp.StatusCode == http.StatusNotFound, resp.StatusCode == http.StatusMethodNotAllowed:
		return nil, fmt.Errorf("%s: %w", path, ErrNoControl)
	case resp.StatusCode >= 300:
		return nil, fmt.Errorf("%s: HTTP %d: %s", path, resp.StatusCode, refusal(resp.StatusCode, b).Message)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}

// flag reads {"name": true} of an endpoint that may be absent.
func (a *OpenAI) flag(ctx context.Context, path, name string) *bool {
	b, ok := a.optional(ctx, path)
	if !ok {
		return nil
	}
	var o map[string]json.RawMessage
	var v bool
	if json.Unmarshal(b, &o) != nil || json.Unmarshal(o[name], &v) != nil {
		return nil
	}
	return &v
}
