package fakes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// Fake is a simulated engine behind the wire of a real one. Its life is the
// server's: Server.Die and Restart are those of a process.
type Fake struct {
	*engine.Server
	ranks []*rank
}

// rank is one data-parallel rank's events.
type rank struct {
	n      int
	events *publisher
	load   *publisher // SGLang's load messages, nil = none
	spell  func(dst *kvevents.Event, e *engine.KVEvent)

	mu      sync.Mutex
	encoder kvevents.Encoder
	forget  func() // at a restart
}

// Close ends the server and its sockets.
func (f *Fake) Close() error {
	err := f.Server.Close()
	for _, r := range f.ranks {
		r.events.close()
		if r.load != nil {
			r.load.close()
		}
	}
	return err
}

// Subscribers to the events of a rank, to wait for one.
func (f *Fake) Subscribers(rank int) int { return f.ranks[rank].events.subscribers() }

// Lose keeps the next n batches of a rank's events from its subscribers; the
// ring has them.
func (f *Fake) Lose(rank, n int) { f.ranks[rank].events.loseNext(n) }

// MuteLoad ends a rank's load messages; its port stays open.
func (f *Fake) MuteLoad(rank int) { f.ranks[rank].load.loseNext(math.MaxInt) }

// Endpoint and Replay are where a rank publishes and replays, "" = not.
func (f *Fake) Endpoint(rank int) string { return f.ranks[rank].events.endpoint() }

// Replay is a rank's replay endpoint, "" = none.
func (f *Fake) Replay(rank int) string { return f.ranks[rank].events.replayEndpoint() }

// Sources are the ranks' event sources, as an agent is configured with them.
func (f *Fake) Sources() []kvevents.Source {
	out := make([]kvevents.Source, len(f.ranks))
	for i, r := range f.ranks {
		out[i] = kvevents.Source{Rank: i, Endpoint: r.events.endpoint(), Replay: r.events.replayEndpoint(), Topic: r.events.topic}
	}
	return out
}

// onKV publishes what one step did to a rank's cache. It runs on the engine's
// goroutine and does not block.
func (f *Fake) onKV(n int, step []engine.KVEvent) {
	if n >= len(f.ranks) {
		return
	}
	r := f.ranks[n]
	r.mu.Lock()
	defer r.mu.Unlock()
	r.encoder.Begin(float64(step[0].At.Microseconds())/1e6, len(step))
	for i := range step {
		var e kvevents.Event
		r.spell(&e, &step[i])
		r.encoder.Event(&e)
	}
	r.events.send(append([]byte(nil), r.encoder.End(n)...))
}

// onLife begins a life: publishers restart with the process.
func (f *Fake) onLife(n int) {
	if n <= 1 {
		return
	}
	for _, r := range f.ranks {
		r.events.restart()
		r.mu.Lock()
		r.forget()
		r.mu.Unlock()
		if r.load != nil {
			r.load.restart()
		}
	}
}

// plain spells an event with the engine's own block hashes, as vLLM's are of no
// use to anybody else.
func plain(e *kvevents.Event, k *engine.KVEvent) {
	*e = kvevents.Event{Group: 0, Hashes: k.Hashes, Parent: k.Parent, HasParent: k.HasParent, Tokens: k.Tokens, BlockSize: k.BlockTokens,
		Kind: map[model.Kind]kvevents.Kind{model.Stored: kvevents.Stored, model.Removed: kvevents.Removed, model.Cleared: kvevents.Cleared}[k.Kind]}
	if k.LoRA != "" {
		e.LoRA, e.LoRAID, e.HasLoRAID = []byte(k.LoRA), 1, true
	}
	if k.Salt != "" {
		e.Salt = []byte(k.Salt)
	}
}

// startInto makes the publishers and the server of a fake. into is set before
// the server takes its first request.
func startInto(into **Fake, cfg engine.Config, ev *EventsConfig, loads bool, prepare func(*rank)) (*Fake, error) {
	f := &Fake{}
	*into = f
	if ev != nil {
		c := ev.withDefaults()
		for n := range max(1, cfg.Ranks) {
			p, err := newPublisher(c, c.Topic, n, !c.NoReplay)
			if err != nil {
				return nil, errors.Join(err, f.closeRanks())
			}
			r := &rank{n: n, events: p, spell: plain, forget: func() {}}
			f.ranks = append(f.ranks, r)
			if loads {
				if r.load, err = newPublisher(EventsConfig{}.withDefaults(), "load", n, false); err != nil {
					return nil, errors.Join(err, f.closeRanks())
				}
			}
			prepare(r)
		}
		cfg.OnKV, cfg.OnLife = f.onKV, f.onLife
	}
	s, err := engine.New(cfg)
	if err != nil {
		return nil, errors.Join(err, f.closeRanks())
	}
	f.Server = s
	if err := s.Start(); err != nil {
		return nil, errors.Join(err, f.closeRanks())
	}
	return f, nil
}

func (f *Fake) closeRanks() error {
	for _, r := range f.ranks {
		r.events.close()
		if r.load != nil {
			r.load.close()
		}
	}
	return nil
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// inner calls one of the server's own endpoints, for a fake that spells it
// another way.
func inner(mux *http.ServeMux, method, target string, body any) (int, string) {
	b, err := json.Marshal(body)
	if err != nil {
		return http.StatusInternalServerError, err.Error()
	}
	q := httptest.NewRequestWithContext(context.Background(), method, target, strings.NewReader(string(b)))
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, q)
	return w.Code, w.Body.String()
}

func badRequest(w http.ResponseWriter, format string, a ...any) {
	writeJSON(w, http.StatusBadRequest, map[string]any{"error": map[string]any{"message": fmt.Sprintf(format, a...), "type": "BadRequestError", "code": 400}})
}
