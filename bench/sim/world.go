package sim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Options of a World. Zero values give a quiet, quick world.
type Options struct {
	Seed       uint64
	Settings   subjects.Settings
	Timings    core.Timings  // zero = core.DefaultTimings
	Latency    time.Duration // of one write, one way; 200 us
	WatchDelay time.Duration // the most a follower lags, one change to the next in order; 1 ms
	SlowWrites float64       // share of a dispatcher's writes that take up to 5 s
	OwnerDelay time.Duration // the most that the owner map lags beside that: it is a stream of its own
	Telemetry  Telemetry
	Explain    bool  // decisions carry their candidates
	Audit      bool  // decisions are held against the truth; see audit.go
	Plant      Plant // a bug put in on purpose, to see that the checks find it
}

// Plant is a bug put into the model of NATS on purpose.
type Plant string

// Plants.
const (
	PlantNoGuard     Plant = "no guard"     // a bind is stored whatever the engine's sequence is
	PlantLateRelease Plant = "late release" // a delete takes whatever the key holds now
	PlantNoRegister  Plant = "no register"  // a second answer is stored

	// Of what brings the core its events.
	PlantCounted    Plant = "retired by count" // a release takes one of its engine off, whichever
	PlantNoBarrier  Plant = "no barrier"       // a snapshot is as of now and shows what was
	PlantMixedBasis Plant = "basis mixed"      // silent engines are given a report made of counters

	PlantNoSeedGuard Plant = "no seed guard" // a seed is stored whatever stands at its key
)

// World is one simulation.
type World struct {
	Now  time.Duration
	Bus  *Bus
	opts Options
	rng  *rand.Rand
	skew time.Duration // of the NATS server\'s clock

	audited []string

	heap  timers
	nth   uint64
	Nodes map[string]*Node
	Cores map[string]*Dispatcher

	Accepted     map[string]subjects.Facts
	Answers      map[string][]subjects.Answer // stored answers only: more than one = a broken register
	AnsweredAt   map[string]time.Duration
	Ran          map[string]int // runs started, by rollout
	RanOn        map[string][]string
	Binds        int
	Requeues     int
	Superseded   int
	Decisions    []core.Decision
	OnDecision   func(d core.Decision)
	OnTransition func(t core.Transition)
	OnPut        func(h core.ReservationPut)
	OnAnswer     func(a subjects.Answer)
	Work         func(key string) Work // what a rollout asks of the engine model
}

// epoch of server time in a simulation: any number far from zero.
const serverEpoch = int64(1_700_000_000_000_000_000)

// New makes an empty world.
func New(o Options) *World {
	if o.Timings == (core.Timings{}) {
		o.Timings = core.DefaultTimings()
	}
	if o.Latency == 0 {
		o.Latency = 200 * time.Microsecond
	}
	o.Telemetry = o.Telemetry.withDefaults()
	if o.WatchDelay == 0 {
		o.WatchDelay = time.Millisecond
	}
	w := &World{
		opts: o, rng: rand.New(rand.NewPCG(o.Seed, 0x9e3779b97f4a7c15)),
		Nodes: map[string]*Node{}, Cores: map[string]*Dispatcher{},
		Accepted: map[string]subjects.Facts{}, Answers: map[string][]subjects.Answer{},
		AnsweredAt: map[string]time.Duration{}, Ran: map[string]int{}, RanOn: map[string][]string{},
	}
	w.Bus = newBus(w)
	w.Bus.pool = &core.PoolPut{Settings: o.Settings, Revision: 1}
	return w
}

func (w *World) stamp() int64 { return serverEpoch + int64(w.Now+w.skew) }

// StepClock moves the NATS server's clock, as when another server with another
// clock becomes the leader. Nobody else's clock moves.
func (w *World) StepClock(by time.Duration) { w.skew += by }

func (w *World) delay() time.Duration {
	return time.Duration(1 + w.rng.Int64N(int64(w.opts.WatchDelay)))
}

type timer struct {
	at  time.Duration
	nth uint64
	fn  func()
}

type timers []timer

func (t timers) Len() int { return len(t) }
func (t timers) Less(i, j int) bool {
	return t[i].at < t[j].at || t[i].at == t[j].at && t[i].nth < t[j].nth
}
func (t timers) Swap(i, j int) { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)   { *t = append(*t, x.(timer)) }
func (t *timers) Pop() any {
	old := *t
	last := old[len(old)-1]
	*t = old[:len(old)-1]
	return last
}

// After runs fn after d of virtual time.
func (w *World) After(d time.Duration, fn func()) { w.after(d, fn) }

func (w *World) after(d time.Duration, fn func()) { w.at(w.Now+d, fn) }

func (w *World) at(t time.Duration, fn func()) {
	w.nth++
	heap.Push(&w.heap, timer{max(t, w.Now), w.nth, fn})
}

// Run advances until done says so, or for at most d; it reports whether done
// was reached. A nil done runs for d.
func (w *World) Run(d time.Duration, done func() bool) bool {
	end := w.Now + d
	for {
		if done != nil && done() {
			return true
		}
		if len(w.heap) == 0 || w.heap[0].at > end {
			w.Now = end
			return done == nil
		}
		t := heap.Pop(&w.heap).(timer)
		w.Now = t.at
		t.fn()
	}
}

// AllAnswered tells whether every accepted rollout has an answer and no
// reservation is left.
func (w *World) AllAnswered() bool {
	return len(w.Answers) == len(w.Accepted) && len(w.Bus.keys) == 0 && w.Bus.queued == 0
}

func (w *World) answered(a subjects.Answer) {
	w.Answers[a.Key()] = append(w.Answers[a.Key()], a)
	w.AnsweredAt[a.Key()] = w.Now
	if w.OnAnswer != nil {
		w.OnAnswer(a)
	}
}

// tell hands a change to every follower, late, in order for each.
func (w *World) tell(ev core.Event) {
	if p, ok := ev.(core.ReservationPut); ok && w.OnPut != nil {
		w.OnPut(p)
	}
	if g, ok := ev.(core.ReservationGone); ok && w.opts.Plant == PlantCounted {
		ev = w.Bus.another(g)
	}
	for _, n := range sorted(w.Cores) {
		w.Cores[n].follow(ev)
	}
}

func (w *World) nodeNames() []string { return sorted(w.Nodes) }

// Problems lists what the invariants forbid, in sentences; empty is good.
// Call it when AllAnswered, or when it should have been.
func (w *World) Problems() []string {
	var out []string
	for _, k := range sorted(w.Accepted) {
		switch n := len(w.Answers[k]); n {
		case 1:
		case 0:
			out = append(out, fmt.Sprintf("I1: rollout %s was accepted and never answered (%s)", k, w.whereabouts(k)))
		default:
			out = append(out, fmt.Sprintf("I1: rollout %s was answered %d times", k, n))
		}
		if ran, most := w.Ran[k], w.attempts(k); ran > most+1 {
			out = append(out, fmt.Sprintf("I6: rollout %s ran %d times, more than its %d attempts and one doubled", k, ran, most))
		}
	}
	for _, n := range w.nodeNames() {
		if node, most := w.Nodes[n], w.Nodes[n].Reg.Slots+w.prefetch(); node.Offered > most {
			out = append(out, fmt.Sprintf("engine %s was bound %d requests at once in one life, more than its window of %d", n, node.Offered, most))
		}
	}
	for _, k := range sorted(w.Bus.keys) {
		out = append(out, fmt.Sprintf("I3: reservation %s is left over, state %s", k, w.Bus.keys[k].State))
	}
	w.drift()
	return append(append(out, w.audited...), w.Bus.ownerProblems()...)
}

func (w *World) attempts(k string) int {
	if n := w.Accepted[k].MaxAttempts; n > 0 {
		return n
	}
	return subjects.DefaultMaxAttempts
}

func (w *World) whereabouts(key string) string {
	for m := range w.Bus.waiting {
		if m.facts.Key() == key {
			return fmt.Sprintf("in queue %+v, holder %q", m.queue, m.holder)
		}
	}
	for _, k := range sorted(w.Bus.keys) {
		if p := w.Bus.keys[k]; p.Key() == key {
			return "reserved on " + p.Engine + ", state " + string(p.State)
		}
	}
	return "nowhere"
}
