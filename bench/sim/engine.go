package sim

import (
	"fmt"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
)

// Work is what a rollout asks of an engine.
type Work struct {
	PromptTokens int
	OutputTokens int
	Blocks       []uint64               // names of the prompt's whole blocks, of the model's block size
	Output       func(i int) uint64     // names block i of prompt and output; nil = output is not cached
	Started      func(at time.Duration) // its first token exists; may be nil
}

// Engine is the engine model on a World's time. Nodes run one after SetModel;
// what routes without a bus runs it bare.
type Engine struct {
	Model *model.Model

	w      *World
	at     time.Duration // of the timer that is set; -1 = none
	nth    int
	cached map[string]int // tokens found at admission
	ends   map[string]func(tokens, cached int)
	starts map[string]func(time.Duration)

	// Changed, when set, is told after something started, ended or moved in the
	// cache, with what happened; valid during the call.
	Changed func([]model.Event)
}

// NewEngine makes an idle engine.
func (w *World) NewEngine(c model.Config) (*Engine, error) {
	m, err := model.New(c)
	if err != nil {
		return nil, fmt.Errorf("simulated engine: %w", err)
	}
	return &Engine{Model: m, w: w, at: -1, cached: map[string]int{}, ends: map[string]func(int, int){}, starts: map[string]func(time.Duration){}}, nil
}

// Add starts a request; end is told when it is complete.
func (e *Engine) Add(id string, x Work, end func(tokens, cached int)) error {
	err := e.Model.Add(e.w.Now, model.Request{ID: id, PromptTokens: x.PromptTokens, OutputTokens: x.OutputTokens, Blocks: x.Blocks, Output: x.Output})
	if err != nil {
		return err
	}
	e.ends[id] = end
	if x.Started != nil {
		e.starts[id] = x.Started
	}
	e.poll()
	return nil
}

// Abort takes a request out, wherever it is. An unknown one changes nothing.
func (e *Engine) Abort(id string) {
	if _, ok := e.ends[id]; !ok {
		return
	}
	e.forget(id)
	e.Model.Abort(e.w.Now, id)
	e.poll()
}

// Flush forgets the cache, Freeze stops the engine or lets it go on.
func (e *Engine) Flush() {
	e.Model.Flush(e.w.Now)
	e.poll()
}

// Freeze stops the engine after the step in flight, or lets it go on.
func (e *Engine) Freeze(on bool) {
	e.Model.Freeze(e.w.Now, on)
	e.poll()
}

// retire ends an engine whose process is gone: nothing comes of it any more.
func (e *Engine) retire() {
	e.Changed = nil
	e.nth++
	clear(e.ends)
}

func (e *Engine) forget(id string) {
	delete(e.ends, id)
	delete(e.cached, id)
	delete(e.starts, id)
}

// poll takes what has happened by now and sets the timer for what comes next.
func (e *Engine) poll() {
	events := e.Model.Advance(e.w.Now)
	var ended []func()
	changed := false
	for _, ev := range events {
		changed = true
		switch ev.Kind {
		case model.Started:
			if _, ok := e.cached[ev.ID]; !ok {
				e.cached[ev.ID] = ev.Tokens // the first admission counts; a preempted one finds its own blocks
			}
		case model.FirstToken:
			if fn := e.starts[ev.ID]; fn != nil {
				fn(ev.At)
				delete(e.starts, ev.ID)
			}
		case model.Finished:
			if fn := e.ends[ev.ID]; fn != nil {
				tokens, cached := ev.Tokens, e.cached[ev.ID]
				ended = append(ended, func() { fn(tokens, cached) })
			}
			e.forget(ev.ID)
		}
	}
	if changed && e.Changed != nil {
		e.Changed(events)
	}
	next, ok := e.Model.Next()
	if ok && next != e.at {
		e.nth++
		e.at = next
		nth := e.nth
		e.w.at(next, func() {
			if nth == e.nth {
				e.at = -1
				e.poll()
			}
		})
	}
	if !ok {
		e.nth++
		e.at = -1
	}
	for _, fn := range ended {
		fn()
	}
}
