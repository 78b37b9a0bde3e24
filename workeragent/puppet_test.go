package workeragent

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
)

// puppet is an engine whose every answer a test writes.
type puppet struct {
	t     *testing.T
	url   string
	calls chan *call

	mu    sync.Mutex
	model string
	down  int    // status of everything, 0 = up
	page  string // of /metrics, "" = none
	total int
}

// call is one generation at a puppet.
type call struct {
	header http.Header
	body   map[string]any
	write  chan string
	gone   chan struct{} // the agent has closed the connection
	t      *testing.T
	said   int // tokens so far
}

func newPuppet(t *testing.T) *puppet {
	p := &puppet{t: t, calls: make(chan *call, 1024), model: `{"id":"m","max_model_len":4096}`}
	s := httptest.NewServer(http.HandlerFunc(p.serve))
	t.Cleanup(s.Close)
	p.url = s.URL
	return p
}

func (p *puppet) serve(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	down, model, page := p.down, p.model, p.page
	p.mu.Unlock()
	switch {
	case down != 0:
		w.WriteHeader(down)
		return
	case r.URL.Path == "/v1/models":
		fmt.Fprintf(w, `{"data":[%s]}`, model)
		return
	case r.URL.Path == "/metrics" && page != "":
		_, _ = io.WriteString(w, page)
		return
	case r.URL.Path != "/v1/completions":
		http.NotFound(w, r)
		return
	}
	b, _ := io.ReadAll(r.Body)
	c := &call{header: r.Header, write: make(chan string), gone: make(chan struct{}), t: p.t}
	_ = json.Unmarshal(b, &c.body)
	p.mu.Lock()
	p.total++
	p.mu.Unlock()
	defer close(c.gone)
	p.calls <- c
	for {
		select {
		case s := <-c.write:
			if s == "" {
				return
			}
			if _, err := io.WriteString(w, s); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (p *puppet) setDown(status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = status
}

func (p *puppet) setMetrics(page string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.page = page
}

func (p *puppet) arrivals() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.total
}

// next waits for a generation.
func (p *puppet) next() *call {
	p.t.Helper()
	select {
	case c := <-p.calls:
		return c
	case <-time.After(within):
		p.t.Fatal("no request came to the engine")
		return nil
	}
}

func (c *call) say(s string) {
	c.t.Helper()
	select {
	case c.write <- s:
	case <-c.gone:
		c.t.Fatal("the agent has closed the connection")
	case <-time.After(within):
		c.t.Fatal("the engine cannot write")
	}
}

// tokens streams token ids; each one's text is a letter.
func (c *call) tokens(ids ...uint32) {
	c.t.Helper()
	b, _ := json.Marshal(ids)
	c.said += len(ids)
	text := ""
	for _, id := range ids {
		text += string(rune('a' + id%26))
	}
	c.say(fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":%q,\"token_ids\":%s}]}\n\n", text, b))
}

// finish ends the answer well.
func (c *call) finish(reason string) {
	c.t.Helper()
	c.say(fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":\"\",\"token_ids\":[],\"finish_reason\":%q}],"+
		"\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":%d}}\n\ndata: [DONE]\n\n", reason, c.said))
	c.end()
}

func (c *call) end() {
	select {
	case c.write <- "":
	case <-c.gone:
	}
}

// left waits until the agent has closed the connection.
func (c *call) left() {
	c.t.Helper()
	select {
	case <-c.gone:
	case <-time.After(within):
		c.t.Fatal("the engine still runs it")
	}
}
