package engine

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// stubborn is a server that shows a number of running requests.
type stubborn struct {
	url     string
	running atomic.Int32
	looks   atomic.Int32
	aborted atomic.Value // string: the last abort's body
	obeys   bool
	onLook  func(n int32)
}

func newStubborn(t *testing.T) *stubborn {
	t.Helper()
	s := &stubborn{obeys: true, onLook: func(int32) {}}
	s.aborted.Store("")
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/metrics":
			s.onLook(s.looks.Add(1))
			fmt.Fprintf(w, "vllm:num_requests_running{engine=\"0\"} %d\nvllm:num_requests_waiting{engine=\"0\"} 0\n", s.running.Load())
		case "/v1/loads":
			s.onLook(s.looks.Add(1))
			fmt.Fprintf(w, `{"loads":[{"dp_rank":0,"num_running_reqs":%d,"num_waiting_reqs":0,"max_total_num_tokens":100}]}`, s.running.Load())
		case "/abort_requests", "/abort_request":
			b, _ := io.ReadAll(q.Body)
			s.aborted.Store(string(b))
			if s.obeys {
				s.running.Store(0)
			}
		default:
			http.NotFound(w, q)
		}
	}))
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

// scenario R20: that the client left is no proof that the engine stopped.
func TestAnAbortReturnsWhenTheEngineHasStopped(t *testing.T) {
	for kind, named := range map[string]string{"vllm": `"cmpl-x"`, "sglang": `"rid":"x"`, "openai": ""} {
		t.Run(kind, func(t *testing.T) {
			s := newStubborn(t)
			a, _, err := Open(t.Context(), kind+"="+s.url, Options{OpenAI: OpenAIConfig{StopCheck: 2 * time.Millisecond}})
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			if err := a.Abort(t.Context(), Run{ID: "x"}); err != nil {
				t.Errorf("the engine stopped by itself: %v", err)
			}
			s.running.Store(1)
			if named == "" { // nobody can be told: it stops when it sees that its client left
				seen := s.looks.Load()
				s.onLook = func(n int32) {
					if n > seen+3 {
						s.running.Store(0)
					}
				}
			}
			if err := a.Abort(t.Context(), Run{ID: "x"}); err != nil || s.running.Load() != 0 {
				t.Errorf("%v, %d still run", err, s.running.Load())
			}
			if got := s.aborted.Load().(string); !strings.Contains(got, named) {
				t.Errorf("aborted %q", got)
			}
			s.obeys, s.onLook = false, func(int32) {}
			s.running.Store(1)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := a.Abort(ctx, Run{ID: "y"}); err == nil {
				t.Error("an engine that goes on counts as stopped")
			}
			if named != "" && a.Abort(t.Context(), Run{}) == nil {
				t.Error("an abort without a name would abort everything")
			}
		})
	}
}
