package engine_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of these tests.
const patience = 10 * time.Second

// fast is an engine a thousand times as fast as modelled.
func fast() engine.Config { return engine.Config{TimeScale: 1000} }

type rig struct {
	*testing.T
	*engine.Server
	http *http.Client
}

func start(t *testing.T, c engine.Config) *rig {
	t.Helper()
	s, err := engine.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		_ = s.Close()
	})
	return &rig{t, s, client}
}

func (r *rig) request(ctx context.Context, method, path string, body any) *http.Response {
	r.Helper()
	res, err := r.try(ctx, method, path, body)
	if err != nil {
		r.Fatal(err)
	}
	return res
}

func (r *rig) try(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var rd io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		rd = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, r.URL()+path, rd)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Request-Id", "t1")
	return r.http.Do(req)
}

// call answers status and body of a request that must be answered.
func (r *rig) call(method, path string, body any) (int, string) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	res := r.request(ctx, method, path, body)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.Fatal(err)
	}
	return res.StatusCode, string(b)
}

type m = map[string]any

type reply struct {
	ID      string
	Object  string
	Choices []struct {
		Text         string
		Delta        struct{ Role, Content string }
		Message      struct{ Role, Content string }
		FinishReason *string  `json:"finish_reason"`
		StopReason   any      `json:"stop_reason"`
		TokenIDs     []uint32 `json:"token_ids"`
		PromptIDs    []uint32 `json:"prompt_token_ids"`
		Logprobs     json.RawMessage
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error *struct {
		Message, Type string
		Code          int
	}
}

func (r *rig) ok(path string, body any) reply {
	r.Helper()
	status, b := r.call(http.MethodPost, path, body)
	if status != http.StatusOK {
		r.Fatalf("%s: %d %s", path, status, b)
	}
	var out reply
	if err := json.Unmarshal([]byte(b), &out); err != nil {
		r.Fatalf("%s: %v in %s", path, err, b)
	}
	return out
}

// sse is a stream read to its end.
type sse struct {
	chunks []reply
	done   bool
	err    error // how the body ended, nil for a clean end
	tokens []uint32
	text   string
	reason string
}

func read(body io.Reader) (s sse) {
	sc := bufio.NewScanner(body)
	sc.Buffer(nil, 1<<22)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			s.done = true
			continue
		}
		var c reply
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			s.err = err
			return s
		}
		s.chunks = append(s.chunks, c)
		for _, x := range c.Choices {
			s.tokens = append(s.tokens, x.TokenIDs...)
			s.text += x.Text + x.Delta.Content
			if x.FinishReason != nil {
				s.reason = *x.FinishReason
			}
		}
	}
	s.err = sc.Err()
	return s
}

func (r *rig) stream(path string, body m) sse {
	r.Helper()
	body["stream"] = true
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	res := r.request(ctx, http.MethodPost, path, body)
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(res.Body)
		r.Fatalf("%s: %d %s", path, res.StatusCode, b)
	}
	return read(res.Body)
}

func ids(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i % 1000)
	}
	return out
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func (r *rig) stats() model.Stats {
	r.Helper()
	s, err := r.Stats()
	if err != nil {
		r.Fatal(err)
	}
	return s[0]
}

func TestACompletionOfTokenIdsComesBackWhole(t *testing.T) {
	r := start(t, fast())
	got := r.ok("/v1/completions", m{"model": "sim", "prompt": ids(100), "max_tokens": 20, "ignore_eos": true, "return_token_ids": true})
	c := got.Choices[0]
	if got.ID != "cmpl-t1" || *c.FinishReason != "length" || len(c.TokenIDs) != 20 || len(c.PromptIDs) != 100 || len(c.Text) != 80 {
		t.Errorf("got %+v", got)
	}
	if u := got.Usage; u.Prompt != 100 || u.Completion != 20 || u.Details.Cached != 0 {
		t.Errorf("usage %+v", u)
	}
	again := r.ok("/v1/completions", m{"model": "sim", "prompt": ids(100), "max_tokens": 20, "ignore_eos": true, "return_token_ids": true})
	if again.Usage.Details.Cached != 96 {
		t.Errorf("the second time %d tokens were cached, want six blocks of 16", again.Usage.Details.Cached)
	}
	if again.Choices[0].Text != c.Text {
		t.Error("the same request gave another output")
	}
}

func TestAStreamEndsWithAReasonUsageAndDone(t *testing.T) {
	r := start(t, fast())
	body := m{"prompt": ids(100), "max_tokens": 300, "ignore_eos": true, "return_token_ids": true, "stream_options": m{"include_usage": true}}
	got := r.stream("/v1/completions", body)
	last := got.chunks[len(got.chunks)-1]
	if got.err != nil || !got.done || got.reason != "length" || len(got.tokens) != 300 {
		t.Fatalf("done %v reason %q tokens %d err %v", got.done, got.reason, len(got.tokens), got.err)
	}
	if len(last.Choices) != 0 || last.Usage == nil || last.Usage.Completion != 300 {
		t.Errorf("the last chunk is %+v", last)
	}
	if n := len(got.chunks[0].Choices[0].PromptIDs); n != 100 {
		t.Errorf("%d prompt ids in the first chunk", n)
	}
	delete(body, "stream_options")
	body["stream"] = false
	if whole := r.ok("/v1/completions", body); whole.Choices[0].Text != got.text {
		t.Error("streamed and whole text differ")
	}
}
