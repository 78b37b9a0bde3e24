package telemetry

import (
	"cmp"
	"slices"
	"time"
)

// Work is what a run brings to its engine.
type Work struct {
	Revision uint64 // of its reservation
	Prompt   int    // tokens
	Cached   int    // of them, expected in the cache
	Output   int    // tokens expected
}

// Backlog is what the runs of an agent still have to do at their engine. No
// engine tells it: what of its prompts a running request has yet to compute, and
// how far it is from its end. It also learns how fast prompts are computed, from
// runs that nobody was before or beside until their first token. The caller
// brings the time, a duration since any fixed point; not safe for concurrent use.
type Backlog struct {
	runs    map[string]*ahead
	silent  int    // runs without a first token
	alone   string // the one of them that nobody was beside, if any
	prefill quotient
	begun   int      // runs, ever
	order   []*ahead // scratch
}

type ahead struct {
	Work
	nth          int // of those that were handed over
	begun, first time.Duration
	made         int
	started      bool // it has a first token
	clean        bool // nobody was before or beside it until then
}

// NewBacklog starts with no run.
func NewBacklog() *Backlog { return &Backlog{runs: map[string]*ahead{}} }

// Begin takes in a run that is handed to the engine.
func (b *Backlog) Begin(id string, at time.Duration, w Work) {
	b.End(id, nil)
	b.begun++
	b.runs[id] = &ahead{Work: w, nth: b.begun, begun: at}
	b.silent++
	if b.alone = ""; b.silent == 1 {
		b.alone = id
	}
}

// Made says how many tokens a run has made.
func (b *Backlog) Made(id string, at time.Duration, tokens int) {
	r := b.runs[id]
	if r == nil || tokens <= 0 {
		return
	}
	r.made = tokens
	if !r.started {
		r.started, r.first = true, at
		r.clean = b.alone == id
		b.quiet(id)
	}
}

// leastPrefill is how many tokens must have been computed for the time to tell
// a rate: of a short prompt it is the request's way and the step in flight.
const leastPrefill = 1024

// fadePrefill is what is left of older runs when another has told its rate.
const fadePrefill = 0.9

// End takes a run out; cached is what the engine found of its prompt, nil = not known.
func (b *Backlog) End(id string, cached *int) {
	r := b.runs[id]
	if r == nil {
		return
	}
	delete(b.runs, id)
	if !r.started {
		b.quiet(id)
		return
	}
	if cached == nil || !r.clean || r.first <= r.begun {
		return
	}
	if computed := r.Prompt - *cached; computed >= leastPrefill {
		b.prefill.tokens = fadePrefill*b.prefill.tokens + float64(computed)
		b.prefill.seconds = fadePrefill*b.prefill.seconds + (r.first - r.begun).Seconds()
		b.prefill.known = true
	}
}

// quiet ends a run's wait for its first token.
func (b *Backlog) quiet(id string) {
	b.silent--
	if b.alone == id {
		b.alone = ""
	}
}

// PrefillTokS is what one rank computes of a prompt a second; nil = not seen.
func (b *Backlog) PrefillTokS() *float64 { return b.prefill.value() }

// Waiting is what of their prompts is to be computed for n requests that the
// engine shows waiting: it takes them in order, so they are the runs without a
// first token that were handed over last.
func (b *Backlog) Waiting(n int) (prefill int64) {
	if n <= 0 || b.silent == 0 {
		return 0
	}
	b.order = b.order[:0]
	for _, r := range b.runs {
		if !r.started {
			b.order = append(b.order, r)
		}
	}
	if n < len(b.order) {
		slices.SortFunc(b.order, func(x, y *ahead) int { return cmp.Compare(y.nth, x.nth) })
	}
	for _, r := range b.order[:min(n, len(b.order))] {
		prefill += int64(max(0, r.Prompt-r.Cached))
	}
	clear(b.order)
	return prefill
}

// residual is the least that a run is expected to make yet, as a share of what
// was expected of it: those that are longer than expected are often much longer.
const residual = 0.5

// Own is how many runs are at the engine, and what is reserved for them, tokens.
func (b *Backlog) Own() (requests int, tokens int64) {
	for _, r := range b.runs {
		tokens += int64(r.Prompt + r.Output)
	}
	return len(b.runs), tokens
}

// Left is what reservations up to a revision still have to do: tokens of prompts
// to compute, and of output to make. Later ones are for whoever reads it to add.
func (b *Backlog) Left(applied uint64) (prefill, output int64) {
	for _, r := range b.runs { // sums: order plays no part
		if r.Revision > applied {
			continue
		}
		if !r.started {
			prefill += int64(max(0, r.Prompt-r.Cached))
		}
		output += int64(max(r.Output-r.made, int(residual*float64(r.Output))))
	}
	return prefill, output
}
