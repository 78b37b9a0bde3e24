package kvstate

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// ReservationView is the reservations of a pool as a map, for tools and agents;
// a dispatcher keeps its own inside its core. Feed it with the Handler of one
// FollowReservations or FollowOwn. Its methods may be called from any goroutine.
//
// An entry ends at its stored time + its time to live, on the clock's estimate
// of server time: that an entry expired reaches no follower.
type ReservationView struct {
	clock *ServerClock

	mu      sync.Mutex
	engines map[string]*engineKeys
	ends    time.Time // of the entry that ends first; zero = none does
	contact time.Time
	changed chan struct{} // closed at every change
	ready   chan struct{} // closed at the first Swap
}

type engineKeys struct {
	keys map[string]viewEntry // by rollout
	load EngineLoad
}

type viewEntry struct {
	r    Reservation // of a marker: key and revision only
	gone bool
	ends time.Time // zero = never
}

// EngineLoad sums one engine's reservations.
type EngineLoad struct {
	Bound    int // states bound and external
	Returned int
	Tokens   int64 // reserved, of Bound
	// Last is the highest sequence that stands under the engine's keys, markers
	// included: what the next bind expects.
	Last uint64
}

// NewReservationView makes an empty view; clock is the store's.
func NewReservationView(clock *ServerClock) *ReservationView {
	return &ReservationView{
		clock: clock, engines: map[string]*engineKeys{},
		changed: make(chan struct{}), ready: make(chan struct{}),
	}
}

// Handler feeds the view.
func (v *ReservationView) Handler() Handler[Reservation, Marker] {
	return Handler[Reservation, Marker]{
		Swap:  v.swap,
		Put:   func(r Reservation) { v.change(func() { v.put(entryOf(r)) }) },
		Gone:  func(m Marker) { v.change(func() { v.put(markerOf(m)) }) },
		Alive: v.alive,
	}
}

// Ready is closed when the view is complete for the first time.
func (v *ReservationView) Ready() <-chan struct{} { return v.ready }

// Contact is when the follower last proved that the view is current.
func (v *ReservationView) Contact() time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.contact
}

// Get is one reservation.
func (v *ReservationView) Get(engine, job, id string) (Reservation, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expire()
	if e := v.engines[engine]; e != nil {
		if x, ok := e.keys[subjects.RolloutKey(job, id)]; ok && !x.gone {
			return x.r, true
		}
	}
	return Reservation{}, false
}

// Find is every reservation of one rollout, oldest first.
func (v *ReservationView) Find(job, id string) []Reservation {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expire()
	var out []Reservation
	for _, e := range v.engines {
		if x, ok := e.keys[subjects.RolloutKey(job, id)]; ok && !x.gone {
			out = append(out, x.r)
		}
	}
	slices.SortFunc(out, func(a, b Reservation) int { return cmp.Compare(a.Revision, b.Revision) })
	return out
}

// Snapshot is every reservation, oldest first.
func (v *ReservationView) Snapshot() []Reservation {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expire()
	out := []Reservation{}
	for _, e := range v.engines {
		for _, x := range e.keys {
			if !x.gone {
				out = append(out, x.r)
			}
		}
	}
	slices.SortFunc(out, func(a, b Reservation) int { return cmp.Compare(a.Revision, b.Revision) })
	return out
}

// Engine sums one engine's reservations; zero when it has none.
func (v *ReservationView) Engine(engine string) EngineLoad {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expire()
	if e := v.engines[engine]; e != nil {
		return e.load
	}
	return EngineLoad{}
}

// Engines sums every engine that has reservations or markers.
func (v *ReservationView) Engines() map[string]EngineLoad {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expire()
	out := make(map[string]EngineLoad, len(v.engines))
	for name, e := range v.engines {
		out[name] = e.load
	}
	return out
}

// WaitFor waits until the view has applied that sequence of an engine's keys, as
// a bind does after a conflict, or until ctx ends.
func (v *ReservationView) WaitFor(ctx context.Context, engine string, seq uint64) error {
	for {
		v.mu.Lock()
		var last uint64
		if e := v.engines[engine]; e != nil {
			last = e.load.Last
		}
		changed := v.changed
		v.mu.Unlock()
		if last >= seq {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the view of %s stands at %d, not %d: %w", engine, last, seq, context.Cause(ctx))
		}
	}
}

func (v *ReservationView) alive() {
	v.mu.Lock()
	v.contact = time.Now()
	v.mu.Unlock()
}

func (v *ReservationView) change(apply func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	apply()
	close(v.changed)
	v.changed = make(chan struct{})
}

func (v *ReservationView) swap(rs []Reservation, ms []Marker) {
	v.change(func() {
		v.engines, v.ends = map[string]*engineKeys{}, time.Time{}
		for _, r := range rs {
			v.put(entryOf(r))
		}
		for _, m := range ms {
			v.put(markerOf(m))
		}
		select {
		case <-v.ready:
		default:
			close(v.ready)
		}
	})
}

func entryOf(r Reservation) viewEntry { return viewEntry{r: r, ends: endOf(r.Stored, r.TTL)} }

func markerOf(m Marker) viewEntry {
	held := subjects.Held{Engine: m.Engine, Job: m.Job, ID: m.ID}
	return viewEntry{r: Reservation{Held: held, Revision: m.Revision}, gone: true, ends: endOf(m.Stored, m.TTL)}
}

func endOf(stored time.Time, ttl time.Duration) time.Time {
	if ttl <= 0 {
		return time.Time{}
	}
	return stored.Add(ttl)
}

func (v *ReservationView) put(x viewEntry) {
	e := v.engines[x.r.Engine]
	if e == nil {
		e = &engineKeys{keys: map[string]viewEntry{}}
		v.engines[x.r.Engine] = e
	}
	key := x.r.Key()
	if old, ok := e.keys[key]; ok {
		e.count(old, -1)
	}
	e.keys[key] = x
	e.count(x, 1)
	e.load.Last = max(e.load.Last, x.r.Revision)
	if !x.ends.IsZero() && (v.ends.IsZero() || x.ends.Before(v.ends)) {
		v.ends = x.ends
	}
}

// count adds or takes away exactly what an entry says itself, so that sums
// return to zero and never pass it.
func (e *engineKeys) count(x viewEntry, sign int) {
	switch {
	case x.gone:
	case x.r.State == subjects.StateReturned:
		e.load.Returned += sign
	default:
		e.load.Bound += sign
		e.load.Tokens += int64(sign * x.r.Tokens)
	}
}

// expire drops what has ended. It looks at everything only when something has.
func (v *ReservationView) expire() {
	now, ok := v.clock.Now()
	if !ok || v.ends.IsZero() || now.Before(v.ends) {
		return
	}
	v.ends = time.Time{}
	for name, e := range v.engines {
		e.load.Last = 0
		for key, x := range e.keys {
			if !x.ends.IsZero() && !now.Before(x.ends) {
				e.count(x, -1)
				delete(e.keys, key)
				continue
			}
			e.load.Last = max(e.load.Last, x.r.Revision)
			if !x.ends.IsZero() && (v.ends.IsZero() || x.ends.Before(v.ends)) {
				v.ends = x.ends
			}
		}
		if len(e.keys) == 0 {
			delete(v.engines, name)
		}
	}
}
