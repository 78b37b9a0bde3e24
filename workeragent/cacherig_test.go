package workeragent

import (
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// vllm makes the agent drive its engine by the adapter for vLLM.
func vllm(t *testing.T, url string, change ...func(*engine.VLLMConfig)) func(*Config) {
	t.Helper()
	cfg := engine.VLLMConfig{OpenAIConfig: engine.OpenAIConfig{URL: url}}
	for _, f := range change {
		f(&cfg)
	}
	a, err := engine.NewVLLM(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return func(c *Config) { c.Engines[0].Adapter = a }
}

// controlled is a controller beside the agent: what is done with it is done
// behind the agent's back.
func controlled(t *testing.T, url string) *engine.VLLM {
	t.Helper()
	a, err := engine.NewVLLM(engine.VLLMConfig{OpenAIConfig: engine.OpenAIConfig{URL: url}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// registered waits for a registration.
func (r *rig) registered(what string, cond func(subjects.Engine) bool) subjects.Engine {
	r.t.Helper()
	var last subjects.Engine
	r.t.Cleanup(func() {
		if r.t.Failed() {
			b, _ := json.Marshal(last)
			r.t.Logf("waiting until %s; the last registration: %s", what, b)
		}
	})
	r.eventually(what, func() bool {
		e, ok := r.engine("e1")
		last = e
		return ok && cond(e)
	})
	return last
}

func inState(s subjects.EngineState) func(subjects.Engine) bool {
	return func(e subjects.Engine) bool { return e.State == s }
}

func withEvents(events string) func(subjects.Engine) bool {
	return func(e subjects.Engine) bool { return e.Events == events && e.State == subjects.EngineReady }
}

// chain are the pool blocks of a prompt.
func chain(tokens []uint32) []uint64 {
	return blockhash.Chain(nil, blockhash.Namespace("m", "", ""), tokens, subjects.DefaultBlockTokens)
}

func prompt(seed, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(seed*100_000 + i)
	}
	return out
}

func requestOf(id string, tokens []uint32, maxTokens int) *subjects.Request {
	q := request(id, maxTokens)
	q.PromptTokenIDs = tokens
	return q
}

// snapshot asks the agent for its whole view, as a dispatcher does. ok is false
// when nobody answers yet.
func (r *rig) snapshot() (epoch string, held map[uint64]bool, ok bool) {
	r.t.Helper()
	inbox := r.nc.NewInbox()
	sub, err := r.nc.SubscribeSync(inbox)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := r.nc.PublishRequest(r.pool.Snapshot("e1"), inbox, nil); err != nil {
		r.t.Fatal(err)
	}
	held = map[uint64]bool{}
	for {
		m, err := sub.NextMsg(time.Second)
		if err != nil || len(m.Data) == 0 {
			return "", nil, false
		}
		p, err := kvevents.DecodePart(m.Data, nil)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, b := range p.Blocks {
			held[b] = true
		}
		if p.Last {
			return p.Epoch, held, true
		}
	}
}

// holds waits until the view holds exactly the first n blocks of a prompt.
func (r *rig) holds(what string, tokens []uint32, n int) {
	r.t.Helper()
	blocks := chain(tokens)
	r.eventually(what, func() bool {
		_, held, ok := r.snapshot()
		if !ok {
			return false
		}
		for i, b := range blocks {
			if held[b] != (i < n) {
				return false
			}
		}
		return true
	})
}

// heard is what was published on the cache subject, from its start on.
type heard struct {
	mu      sync.Mutex
	changes []kvevents.Change
}

func (r *rig) listen() *heard {
	r.t.Helper()
	h := &heard{}
	_, err := r.nc.Subscribe(r.pool.Cache("e1"), func(m *nats.Msg) {
		c, err := kvevents.DecodeChange(m.Data, nil)
		if err != nil {
			r.t.Error(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.changes = append(h.changes, c)
	})
	if err == nil {
		err = r.nc.Flush()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

func (h *heard) has(cond func(kvevents.Change) bool) bool { return h.count(cond) > 0 }

func (h *heard) count(cond func(kvevents.Change) bool) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, c := range h.changes {
		if cond(c) {
			n++
		}
	}
	return n
}

func cleared(c kvevents.Change) bool { return c.Kind == kvevents.Cleared }

// loads gives every load that is published from now on.
func (r *rig) loads() <-chan subjects.Load {
	r.t.Helper()
	out := make(chan subjects.Load, 4096)
	_, err := r.nc.Subscribe(r.pool.Load("e1"), func(m *nats.Msg) {
		var l subjects.Load
		if err := json.Unmarshal(m.Data, &l); err != nil {
			r.t.Error(err)
		}
		select {
		case out <- l:
		default:
		}
	})
	if err == nil {
		err = r.nc.Flush()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

// load waits for one.
func (r *rig) load(from <-chan subjects.Load, what string, cond func(subjects.Load) bool) subjects.Load {
	r.t.Helper()
	late := time.After(within)
	var last subjects.Load
	for {
		select {
		case last = <-from:
			if cond(last) {
				return last
			}
		case <-late:
			b, _ := json.Marshal(last)
			r.t.Fatalf("no load with %s; the last: %s", what, b)
		}
	}
}
