package dispatcher

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// part is something that a dispatcher cannot serve without.
type part string

// The parts that report of themselves.
const (
	partStreams      part = "streams"
	partConnection   part = "connection"
	partQueues       part = "queues"
	partRegistration part = "registration"
	partWrites       part = "writes"
)

// needed are the views without which the core decides nothing.
var needed = [...]core.ViewKind{
	core.ViewReservations, core.ViewResults, core.ViewEngines,
	core.ViewDispatchers, core.ViewCancels, core.ViewPools,
}

// Missing is one reason why a dispatcher is not ready.
type Missing struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// readiness gathers what is missing. Every complaint ends by itself: it is
// withdrawn by the next success of its part, and a complaint about a write
// expires, since nothing may be written meanwhile.
type readiness struct {
	age time.Duration

	mu       sync.Mutex
	seen     map[core.ViewKind]bool
	last     time.Time // proof of contact
	faults   map[part]error
	wroteBad time.Time
	stopping bool
}

var errNotYet = errors.New("not yet")

func newReadiness(age time.Duration) *readiness {
	return &readiness{
		age: age, seen: map[core.ViewKind]bool{},
		faults: map[part]error{partStreams: errNotYet, partQueues: errNotYet, partRegistration: errNotYet},
	}
}

func (r *readiness) views(seen map[core.ViewKind]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.seen)
	maps.Copy(r.seen, seen)
}

func (r *readiness) contact(at time.Time) {
	r.mu.Lock()
	if at.After(r.last) {
		r.last = at
	}
	r.mu.Unlock()
}

func (r *readiness) report(p part, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.faults, p)
		return
	}
	r.faults[p] = err
}

var (
	errFull        = errors.New("a stream is full: raise its max_bytes or take away what fills it")
	errUnavailable = errors.New("NATS refuses writes or does not answer them: look at its disk and its JetStream leaders")
)

// wrote notes how a write was answered (scenario B9).
func (r *readiness) wrote(a core.Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch a {
	case core.Full:
		r.faults[partWrites], r.wroteBad = errFull, time.Now()
	case core.Unavailable:
		r.faults[partWrites], r.wroteBad = errUnavailable, time.Now()
	case core.OK:
		delete(r.faults, partWrites)
	}
}

func (r *readiness) stop() {
	r.mu.Lock()
	r.stopping = true
	r.mu.Unlock()
}

// missing lists what keeps the dispatcher from serving, in a fixed order.
func (r *readiness) missing() []Missing {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Missing
	if r.stopping {
		out = append(out, Missing{"dispatcher", "it is stopping"})
	}
	if r.faults[partWrites] != nil && time.Since(r.wroteBad) > r.age {
		delete(r.faults, partWrites)
	}
	for _, p := range [...]part{partConnection, partStreams, partRegistration, partQueues, partWrites} {
		if err := r.faults[p]; err != nil {
			out = append(out, Missing{string(p), err.Error()})
		}
	}
	for _, v := range needed {
		if !r.seen[v] {
			out = append(out, Missing{"view " + string(v), "not complete yet"})
		}
	}
	if since := time.Since(r.last); !r.last.IsZero() && since > r.age {
		out = append(out, Missing{"contact", "nothing heard from NATS for " + since.Round(time.Millisecond).String()})
	}
	return slices.Clip(out)
}

// Ready lists what the dispatcher still misses; empty = it serves.
func (d *Dispatcher) Ready() []Missing { return d.ready.missing() }
