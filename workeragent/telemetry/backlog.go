package telemetry

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Work is what a run brings to its engine.
type Work struct {
	Revision uint64 // of its reservation
	Prompt   int    // tokens
	Cached   int    // of them, expected in the cache
	Output   int    // tokens expected
	// Siblings, when set, is common to runs of one prompt: it is computed once.
	Siblings string
	// Free says that the engine was ready for it: a slot, no queue and KV enough.
	Free bool
}

// WorkOf is what a reservation says of it.
func WorkOf(h *subjects.Held, revision uint64) Work {
	w := Work{Revision: revision, Prompt: h.PromptTokens, Output: max(0, h.Tokens-h.PromptTokens)}
	if h.PredictedCached != nil {
		w.Cached = *h.PredictedCached
	}
	if h.Group != "" && h.Turn <= 1 { // later turns of a group have prompts of their own
		w.Siblings = subjects.RolloutKey(h.Job, h.Group)
	}
	return w
}

// uncached is what of the prompt is to be computed.
func (w *Work) uncached() int64 { return int64(max(0, w.Prompt-w.Cached)) }

// Backlog is what the runs of an agent still have to do at their engine. No
// engine tells it: what of its prompts a running request has yet to compute, and
// how far it is from its end. It also learns how fast prompts are computed, from
// runs that waited for nothing and had nobody before or beside them until their
// first token. The caller brings the time, a duration since any fixed point; not
// safe for concurrent use.
type Backlog struct {
	runs   map[string]*ahead
	begun  int    // runs, ever
	silent int    // runs without a first token
	alone  string // the one of them that nobody was beside, if any
	rates  []float64
	next   int // place in rates of the next one

	order  []*ahead         // scratch
	shared map[string]int64 // scratch: what was counted of siblings' prompts
}

type ahead struct {
	Work
	nth         int // of those that were handed over
	at, first   time.Duration
	made        int
	started     bool // it has a first token
	undisturbed bool // nobody was before or beside it until then
}

// NewBacklog starts with no run.
func NewBacklog() *Backlog {
	return &Backlog{runs: map[string]*ahead{}, shared: map[string]int64{}}
}

// Begin takes in a run that is handed to the engine.
func (b *Backlog) Begin(id string, at time.Duration, w Work) {
	b.End(id, 0, nil)
	b.begun++
	b.runs[id] = &ahead{Work: w, nth: b.begun, at: at}
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
		r.undisturbed = r.Free && b.alone == id
		b.quiet(id)
	}
}

// leastPrefill is how many tokens must have been computed for the time to tell
// a rate: of a short prompt it is the request's way and the step in flight.
const leastPrefill = 1024

// maxRates is how many runs are remembered for it.
const maxRates = 16

// End takes a run out. prompt and cached are what the engine counted of its
// prompt; cached nil = it did not say.
func (b *Backlog) End(id string, prompt int, cached *int) {
	r := b.runs[id]
	if r == nil {
		return
	}
	delete(b.runs, id)
	if !r.started {
		b.quiet(id)
		return
	}
	if cached == nil || !r.undisturbed || r.first <= r.at {
		return
	}
	if computed := cmp.Or(prompt, r.Prompt) - *cached; computed >= leastPrefill {
		rate := float64(computed) / (r.first - r.at).Seconds()
		if len(b.rates) < maxRates {
			b.rates = append(b.rates, rate)
			return
		}
		b.rates[b.next] = rate
		b.next = (b.next + 1) % maxRates
	}
}

// quiet ends a run's wait for its first token.
func (b *Backlog) quiet(id string) {
	b.silent--
	if b.alone == id {
		b.alone = ""
	}
}

// Restarted forgets how fast the engine was: it may be another one.
func (b *Backlog) Restarted() { b.rates, b.next = nil, 0 }

// KVRoom is the KV use up to which a prompt is taken not to have waited for KV.
const KVRoom = 0.8

// TellPrefill writes the rate that was seen into a rank's report, where the engine
// shows no more itself: both are the least that it can do.
func (b *Backlog) TellPrefill(r *subjects.RankLoad) {
	if seen := b.PrefillTokS(); seen != nil && (r.PrefillTokS == nil || *r.PrefillTokS < *seen) {
		r.PrefillTokS = seen
	}
}

// PrefillTokS is what one rank computes of a prompt a second; nil = not seen.
// Every run shows the least that it can do, since something else may have been
// in the way; so it is the upper quartile that counts.
func (b *Backlog) PrefillTokS() *float64 {
	if len(b.rates) == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(b.rates))
	return &sorted[len(sorted)*3/4]
}

// Own is how many runs are at the engine.
func (b *Backlog) Own() int { return len(b.runs) }

// Waiting is what of their prompts is to be computed for n requests that the
// engine shows waiting: it takes them in order, so they are the runs without a
// first token that were handed over last. Of them those of reservations up to a
// revision count: later ones are for whoever reads it to add.
func (b *Backlog) Waiting(n int, applied uint64) (prefill int64) {
	if n <= 0 || b.silent == 0 {
		return 0
	}
	b.order = b.order[:0]
	for _, r := range b.runs {
		if !r.started {
			b.order = append(b.order, r)
		}
	}
	slices.SortFunc(b.order, func(x, y *ahead) int { return cmp.Compare(y.nth, x.nth) })
	clear(b.shared)
	for _, r := range b.order[:min(n, len(b.order))] {
		if r.Revision <= applied {
			prefill += b.more(r)
		}
	}
	clear(b.order)
	return prefill
}

// more is what a run adds to what is to be computed: of siblings the one with
// the most counts.
func (b *Backlog) more(r *ahead) int64 {
	n := r.uncached()
	if r.Siblings == "" {
		return n
	}
	known := b.shared[r.Siblings]
	b.shared[r.Siblings] = max(known, n)
	return max(0, n-known)
}

// residual is the least that a run is expected to make yet, as a share of what
// was expected of it: those that are longer than expected are often much longer.
const residual = 0.5

// Left is what reservations up to a revision still have to do: tokens of prompts
// to compute, and of output to make. Later ones are for whoever reads it to add.
func (b *Backlog) Left(applied uint64) (prefill, output int64) {
	clear(b.shared)
	for _, r := range b.runs { // sums and maxima: order plays no part
		if r.Revision > applied {
			continue
		}
		if !r.started {
			prefill += b.more(r)
		}
		output += int64(max(r.Output-r.made, int(residual*float64(r.Output))))
	}
	return prefill, output
}
