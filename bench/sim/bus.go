package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Bus is the model of NATS: what is stored, and the guards on it.
type Bus struct {
	w   *World
	seq uint64 // of the reservations stream

	keys      map[string]*core.ReservationPut  // <engine>/<job>.<id>
	markers   map[string]*core.ReservationGone // same; kept MarkerTTL
	engineSeq map[string]uint64
	stands    map[string]map[string]uint64 // keys and markers by engine, with their sequence
	ids       map[string]seen              // Nats-Msg-Id of the bucket, kept 2 min

	queues   map[core.Queue]*fifo // ROLLOUTS and RETRY
	order    []core.Queue         // of their first messages
	queued   int
	queueSeq uint64
	queueIDs map[string]seen

	known map[core.Queue]bool // announced by a ping
	bound map[string]int      // keys that stand bound, by <engine>/<epoch>

	register    map[string]*core.Answered
	registerSeq uint64
	Dead        []core.PublishDead

	engines     map[string]*core.EnginePut
	dispatchers map[string]*core.DispatcherPut
	cancels     map[string]*core.CancelPut
	valueSeq    uint64
	pool        *core.PoolPut

	ownerBus

	// Lost makes the next n binds unanswered although stored, as when a leader
	// dies between storing and answering.
	Lost int
}

type seen struct {
	seq uint64
	at  time.Duration
}

type message struct {
	queue  core.Queue
	facts  subjects.Facts
	seq    uint64
	stored int64
	ready  time.Duration // not delivered before
	holder string        // who has it; empty = nobody
	until  time.Duration // AckWait of the delivery
	copies int           // deliveries
	bad    *core.Bad
}

const (
	window    = 2 * time.Minute
	ackWait   = 30 * time.Second
	markerTTL = time.Minute
)

func newBus(w *World) *Bus {
	return &Bus{
		w: w, keys: map[string]*core.ReservationPut{}, markers: map[string]*core.ReservationGone{},
		engineSeq: map[string]uint64{}, stands: map[string]map[string]uint64{}, ids: map[string]seen{}, queueIDs: map[string]seen{},
		queues: map[core.Queue]*fifo{},
		known:  map[core.Queue]bool{}, bound: map[string]int{},
		register: map[string]*core.Answered{}, engines: map[string]*core.EnginePut{},
		dispatchers: map[string]*core.DispatcherPut{}, cancels: map[string]*core.CancelPut{}, ownerBus: newOwnerBus(),
	}
}

func keyOf(engine, job, id string) string { return engine + "/" + subjects.RolloutKey(job, id) }

// Submit stores a request; a known id within the window stores nothing.
func (b *Bus) Submit(f subjects.Facts) {
	if old, ok := b.queueIDs[f.Key()]; ok && b.w.Now-old.at < window {
		return
	}
	b.queueSeq++
	b.queueIDs[f.Key()] = seen{b.queueSeq, b.w.Now}
	b.store(&message{
		queue: core.Queue{Job: f.Job, Lane: f.Lane}, facts: f, seq: b.queueSeq, stored: b.w.stamp(),
	})
	b.w.Accepted[f.Key()] = f
	if q := (core.Queue{Job: f.Job, Lane: f.Lane}); !b.known[q] {
		// The client's ping on the first submission of a kind.
		b.known[q] = true
		for _, n := range sorted(b.w.Cores) {
			d := b.w.Cores[n]
			b.w.after(b.w.delay(), func() { d.step(b.census()) })
		}
	}
}

// Cancel asks that work is given up.
func (b *Bus) Cancel(x subjects.Cancel) {
	b.valueSeq++
	p := &core.CancelPut{Cancel: x, Revision: b.valueSeq, Stored: b.w.stamp()}
	b.cancels[x.Key()] = p
	b.w.tell(*p)
	for _, n := range b.w.nodeNames() {
		b.w.Nodes[n].cancelled(x)
	}
}

// bind is one publish under both guards.
func (b *Bus) bind(e core.Bind) core.BindAnswer {
	h := e.Held
	a := core.BindAnswer{Handle: e.Handle, Engine: h.Engine, Job: h.Job, ID: h.ID, Bind: h.Bind, Stored: b.w.stamp()}
	if at := b.engineSeq[h.Engine]; at != e.Expected && b.w.opts.Plant != PlantNoGuard {
		a.Answer, a.Actual = core.Conflict, at
		return a
	}
	msgID := fmt.Sprintf("%s#%d", h.Key(), h.Bind)
	if old, ok := b.ids[msgID]; ok && b.w.Now-old.at < window {
		a.Answer, a.Seq = core.Duplicate, old.seq
		return a
	}
	a.Answer, a.Seq = core.OK, b.put(h, e.TTL)
	b.ids[msgID] = seen{a.Seq, b.w.Now}
	b.w.Binds++
	return a
}

func (b *Bus) put(h subjects.Held, ttl time.Duration) uint64 {
	b.seq++
	p := &core.ReservationPut{Held: h, Revision: b.seq, Stored: b.w.stamp(), TTLMS: ttl.Milliseconds()}
	k := keyOf(h.Engine, h.Job, h.ID)
	b.tally(b.keys[k], -1)
	b.tally(p, 1)
	b.keys[k] = p
	delete(b.markers, k)
	b.moved(h.Engine, k, b.seq)
	if ttl > 0 {
		b.w.after(ttl, func() { b.expireKey(k, p) })
	}
	b.w.tell(*p)
	if n := b.w.Nodes[h.Engine]; n != nil {
		n.follow(func() { n.see(*p) })
	}
	return b.seq
}

// remove deletes a key at exactly its revision.
func (b *Bus) remove(r subjects.Released, revision uint64) (core.Answer, uint64) {
	k := keyOf(r.Engine, r.Job, r.ID)
	p := b.keys[k]
	switch {
	case p == nil && b.markers[k] != nil:
		return core.Superseded, 0
	case p == nil:
		return core.Gone, 0
	case p.Revision != revision && b.w.opts.Plant != PlantLateRelease:
		return core.Superseded, 0
	}
	b.seq++
	g := &core.ReservationGone{Released: r, Revision: b.seq, Stored: b.w.stamp()}
	b.tally(p, -1)
	delete(b.keys, k)
	b.markers[k] = g
	b.moved(r.Engine, k, b.seq)
	b.w.tell(*g)
	if n := b.w.Nodes[r.Engine]; n != nil {
		n.follow(func() { n.lost(*g) })
	}
	b.w.after(markerTTL, func() { b.expireMarker(k, g) })
	return core.OK, b.seq
}

// expireMarker lets the last sequence under an engine fall back, as it does on
// a server once the marker's TTL is over.
func (b *Bus) expireMarker(k string, g *core.ReservationGone) {
	if b.markers[k] != g {
		return
	}
	delete(b.markers, k)
	b.vanished(g.Engine, k)
}

// expireKey ends a reservation by its TTL: nobody is told, and no marker stays.
func (b *Bus) expireKey(k string, p *core.ReservationPut) {
	if b.keys[k] != p {
		return
	}
	b.tally(p, -1)
	delete(b.keys, k)
	b.vanished(p.Engine, k)
}

// moved notes the newest entry under an engine.
func (b *Bus) moved(engine, k string, seq uint64) {
	if b.stands[engine] == nil {
		b.stands[engine] = map[string]uint64{}
	}
	b.stands[engine][k], b.engineSeq[engine] = seq, seq
}

// vanished lets the last sequence under an engine fall back to that of what
// still stands there.
func (b *Bus) vanished(engine, k string) {
	delete(b.stands[engine], k)
	var last uint64
	for _, seq := range b.stands[engine] {
		last = max(last, seq)
	}
	b.engineSeq[engine] = last
}

// giveBack writes a reservation again as returned, at exactly its revision.
func (b *Bus) giveBack(h subjects.Held, revision uint64, reason string, burnt int, ttl time.Duration) (core.Answer, uint64) {
	k := keyOf(h.Engine, h.Job, h.ID)
	switch p := b.keys[k]; {
	case p == nil && b.markers[k] != nil:
		return core.Superseded, 0
	case p == nil:
		return core.Gone, 0
	case p.Revision != revision:
		return core.Superseded, 0
	}
	h.State, h.ReturnReason, h.Burnt = subjects.StateReturned, reason, burnt
	return core.OK, b.put(h, ttl)
}

// commit writes a terminal answer with expected sequence 0.
func (b *Bus) commit(a subjects.Answer) (core.Answer, uint64) {
	if _, ok := b.register[a.Key()]; ok && b.w.opts.Plant != PlantNoRegister {
		b.w.Superseded++
		return core.Superseded, 0
	}
	b.registerSeq++
	p := &core.Answered{Answer: a, Revision: b.registerSeq, Stored: b.w.stamp()}
	b.register[a.Key()] = p
	b.w.tell(*p)
	b.w.answered(a)
	return core.OK, p.Revision
}

func (b *Bus) retry(e core.Retry) core.Answer {
	p := b.keys[keyOf(e.Engine, e.Job, e.ID)]
	if p == nil || p.Revision != e.Revision {
		return core.Gone
	}
	msgID := fmt.Sprintf("%s#%d", subjects.RolloutKey(e.Job, e.ID), e.Bind)
	if old, ok := b.queueIDs[msgID]; ok && b.w.Now-old.at < window {
		return core.Duplicate
	}
	b.queueSeq++
	b.queueIDs[msgID] = seen{b.queueSeq, b.w.Now}
	f := b.w.Accepted[subjects.RolloutKey(e.Job, e.ID)]
	f.Bind, f.Burnt, f.Tried, f.LeftMS, f.Accepted, f.Lane = e.Bind, e.Burnt, slices.Clone(e.Tried), e.LeftMS, e.Accepted, e.Lane
	b.store(&message{
		queue: core.Queue{Job: e.Job, Retry: true}, facts: f, seq: b.queueSeq, stored: b.w.stamp(),
	})
	b.w.Requeues++
	return core.OK
}

// swaps are complete views of every kind, as a follower reads them from the start.
func (b *Bus) swaps() []core.ViewSwap {
	r := core.ViewSwap{Kind: core.ViewReservations}
	for _, k := range sorted(b.keys) {
		r.Reservations = append(r.Reservations, *b.keys[k])
	}
	for _, k := range sorted(b.markers) {
		r.Gone = append(r.Gone, *b.markers[k])
	}
	res := core.ViewSwap{Kind: core.ViewResults}
	for _, k := range sorted(b.register) {
		res.Answered = append(res.Answered, *b.register[k])
	}
	eng := core.ViewSwap{Kind: core.ViewEngines}
	for _, k := range sorted(b.engines) {
		eng.Engines = append(eng.Engines, *b.engines[k])
	}
	dis := core.ViewSwap{Kind: core.ViewDispatchers}
	for _, k := range sorted(b.dispatchers) {
		dis.Dispatchers = append(dis.Dispatchers, *b.dispatchers[k])
	}
	can := core.ViewSwap{Kind: core.ViewCancels}
	for _, k := range sorted(b.cancels) {
		can.Cancels = append(can.Cancels, *b.cancels[k])
	}
	own := b.ownerSwaps(&r)
	return []core.ViewSwap{r, res, eng, dis, can, own, {Kind: core.ViewPools, Pool: b.pool}}
}

// another names some other reservation of the engine, if there is one, as gone.
func (b *Bus) another(g core.ReservationGone) core.ReservationGone {
	for _, k := range sorted(b.keys) {
		if p := b.keys[k]; p.Engine == g.Engine && p.Revision < g.Revision {
			g.Job, g.ID = p.Job, p.ID
			break
		}
	}
	return g
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, strings.Compare)
	return keys
}

// Queued names what waits in ROLLOUTS and RETRY, in order.
func (b *Bus) Queued() []string {
	var out []string
	for m := range b.waiting {
		out = append(out, m.facts.Key())
	}
	return out
}

// tally counts a key in or out of what stands bound in one life of its engine.
func (b *Bus) tally(p *core.ReservationPut, by int) {
	if p == nil || p.State != subjects.StateBound {
		return
	}
	life := p.Engine + "/" + p.Epoch
	b.bound[life] += by
	if n := b.w.Nodes[p.Engine]; n != nil && n.Reg.Epoch == p.Epoch {
		n.Offered = max(n.Offered, b.bound[life])
	}
}

// Deliveries is how often a queued rollout was handed out.
func (b *Bus) Deliveries(key string) int {
	for m := range b.waiting {
		if m.facts.Key() == key {
			return m.copies
		}
	}
	return 0
}
