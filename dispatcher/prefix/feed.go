package prefix

import (
	"slices"
	"time"
)

// Op is what a cache event says.
type Op uint8

// Ops.
const (
	Stored Op = iota
	Removed
	Cleared
)

// Event is one cache event of an engine.
type Event struct {
	Engine string
	Epoch  string
	Seq    uint64 // one more for each event of an epoch
	Op     Op
	Tier   Tier
	// Parent of the first stored block; equal to Namespace when that begins a
	// prompt. HasParent is false when the engine did not say: it is not checked.
	Parent    uint64
	HasParent bool
	Namespace uint64
	Blocks    []uint64 // stored: parents before children
}

// Verdict is what became of an event or a snapshot.
type Verdict struct {
	Did    Did
	Why    Why  // of Resync
	Resync bool // ask the engine's agent for a snapshot
}

// Did is the closed list of fates.
type Did uint8

// Fates.
const (
	Ignored  Did = iota // of nobody, or of another life
	Applied             // counts, or is in a snapshot that will
	Buffered            // waits for the snapshot
	Old                 // the snapshot has it
	Lost                // the engine's view is worth nothing any more
)

// Why a view was lost.
type Why string

// Reasons of a resync.
const (
	WhyNone     Why = ""
	WhyNew      Why = "new"            // first registered, or a new epoch
	WhyGap      Why = "gap"            // events are missing
	WhyRestart  Why = "restart"        // the sequence fell
	WhyEpoch    Why = "epoch"          // an event of a life that is not registered yet
	WhyParent   Why = "unknown_parent" // a block under one we never heard of
	WhyOverflow Why = "overflow"       // the snapshot does not reach what the buffer had to drop
)

// engine is one engine's feed.
type engine struct {
	name      string
	id        uint32
	epoch     string
	version   int64
	versioned bool
	past      []string // epochs that are over, newest last
	state     feedState

	gpu   uint32
	lower [tiers - 1][periods]uint32

	heard    uint64 // last sequence received, 0 = none
	asOf     uint64 // of the snapshot: what is not later is in it
	evicted  uint64 // Index.evicted when trust began
	relaxed  bool   // we emptied it ourselves: its next blocks may hang on what we dropped
	asked    bool   // a verdict has asked for a snapshot
	buffer   []Event
	buffered int    // block hashes in buffer
	dropped  uint64 // last sequence the buffer had no room for
}

type feedState uint8

const (
	unknown feedState = iota // nothing counts, events are buffered
	loading                  // a snapshot is coming in
	trusted
	deaf // has no events at all: nothing ever counts
)

// Registration is what an index needs to know of an engine.
type Registration struct {
	Engine        string
	Epoch         string
	Events        bool   // it has cache events, exact or approximate
	WeightVersion *int64 // nil = unknown
	Tag           int    // given back in Hit: the caller's own index of the engine
}

// maxPast is how many ended epochs of an engine are told from new ones.
const maxPast = 8

// Put registers an engine or renews it. A new epoch or another weight version
// empties it at once (scenarios C2, C5). It says when a snapshot is needed.
func (x *Index) Put(r Registration) Verdict {
	e := x.engines[r.Engine]
	if e == nil {
		e = &engine{name: r.Engine, epoch: r.Epoch, id: uint32(len(x.byID)), gpu: noSlot}
		e.forget()
		if i := slices.Index(x.byID, nil); i >= 0 {
			e.id = uint32(i)
		}
		if int(e.id) == len(x.byID) {
			x.byID, x.tags = append(x.byID, nil), append(x.tags, 0)
		}
		x.byID[e.id] = e
		x.engines[r.Engine] = e
		e.setVersion(r.WeightVersion)
		x.tags[e.id] = r.Tag
		return x.expect(e, r.Events)
	}
	x.tags[e.id] = r.Tag
	if e.epoch != r.Epoch {
		x.lose(e)
		e.past = append(e.past, e.epoch)
		if len(e.past) > maxPast {
			e.past = e.past[1:]
		}
		e.past = slices.DeleteFunc(e.past, func(p string) bool { return p == r.Epoch })
		e.epoch, e.heard, e.asOf, e.dropped = r.Epoch, 0, 0, 0
		e.buffer, e.buffered = nil, 0
		e.setVersion(r.WeightVersion)
		return x.expect(e, r.Events)
	}
	if r.WeightVersion != nil && e.versioned && e.version != *r.WeightVersion {
		x.empty(e)
		e.relaxed = true
	}
	e.setVersion(r.WeightVersion)
	if r.Events == (e.state == deaf) || e.state == unknown && !e.asked {
		x.lose(e)
		return x.expect(e, r.Events)
	}
	return Verdict{Did: Applied}
}

func (e *engine) setVersion(v *int64) {
	if v != nil {
		e.version, e.versioned = *v, true
	}
}

func (x *Index) expect(e *engine, events bool) Verdict {
	if !events {
		e.state = deaf
		return Verdict{Did: Ignored}
	}
	e.state, e.asked = unknown, true
	x.stats.Resyncs++
	return Verdict{Did: Lost, Why: WhyNew, Resync: true}
}

// Remove takes an engine out at once, whatever is still in the pipe (scenario
// C3); a snapshot on its way is given up with it (C9).
func (x *Index) Remove(name string) {
	if e := x.engines[name]; e != nil {
		x.lose(e)
		x.byID[e.id] = nil
		delete(x.engines, name)
	}
}

// forget resets what belongs to one life of the cache.
func (e *engine) forget() {
	e.gpu = noSlot
	for t := range e.lower {
		for p := range e.lower[t] {
			e.lower[t][p] = noSlot
		}
	}
}

// empty takes an engine's blocks away.
func (x *Index) empty(e *engine) {
	x.kill(&e.gpu)
	for t := range e.lower {
		for p := range e.lower[t] {
			x.kill(&e.lower[t][p])
		}
	}
}

// lose ends the trust in an engine's view.
func (x *Index) lose(e *engine) {
	x.empty(e)
	if e.state != deaf {
		e.state = unknown
	}
	e.relaxed, e.asked = false, false
}

// resync is lose, and asks for a snapshot. The event that showed the loss is
// kept for it.
func (x *Index) resync(e *engine, why Why, ev *Event) Verdict {
	x.lose(e)
	e.buffer, e.buffered, e.dropped, e.asked = nil, 0, 0, true
	if ev != nil {
		x.keep(e, *ev)
	}
	x.stats.Resyncs++
	return Verdict{Did: Lost, Why: why, Resync: true}
}

// Trusted tells whether the engine's view counts.
func (x *Index) Trusted(name string) bool {
	e := x.engines[name]
	return e != nil && e.state == trusted
}

// Apply takes one event in. now is the time on the caller's clock.
func (x *Index) Apply(now time.Duration, ev Event) Verdict {
	x.setNow(now)
	x.step(2 * len(ev.Blocks))
	e := x.engines[ev.Engine]
	if e == nil || e.state == deaf {
		return Verdict{Did: Ignored}
	}
	if ev.Epoch != e.epoch {
		if e.state == unknown || slices.Contains(e.past, ev.Epoch) {
			return Verdict{Did: Ignored}
		}
		// The next life, ahead of its registration: this one is over.
		x.lose(e)
		return Verdict{Did: Lost, Why: WhyEpoch}
	}
	if ev.Seq == e.heard && ev.Seq != 0 {
		return Verdict{Did: Old} // delivered twice
	}
	if ev.Seq < e.heard {
		// The publisher began anew in place (scenario C2).
		e.heard, e.asOf = ev.Seq, 0
		return x.resync(e, WhyRestart, &ev)
	}
	before := e.heard
	e.heard = ev.Seq
	if e.state != trusted {
		if before != 0 && ev.Seq > before+1 {
			e.buffer, e.buffered, e.dropped = nil, 0, ev.Seq-1
		}
		x.keep(e, ev)
		return Verdict{Did: Buffered}
	}
	switch known := max(before, e.asOf); {
	case ev.Seq <= e.asOf:
		return Verdict{Did: Old}
	case ev.Seq > known+1:
		return x.resync(e, WhyGap, &ev)
	}
	return x.apply(e, ev)
}

// keep buffers an event until the snapshot is there; the event's blocks are
// copied, since the caller may use them again.
func (x *Index) keep(e *engine, ev Event) {
	if e.buffered+len(ev.Blocks)+1 > x.opt.MaxBuffered {
		// Only a snapshot that is later than all of this can help now.
		e.buffer, e.buffered, e.dropped = nil, 0, ev.Seq
		return
	}
	ev.Blocks = slices.Clone(ev.Blocks)
	e.buffer = append(e.buffer, ev)
	e.buffered += len(ev.Blocks) + 1
}

func (x *Index) apply(e *engine, ev Event) Verdict {
	switch ev.Op {
	case Cleared:
		x.empty(e)
	case Removed:
		x.drop(e, ev.Tier, ev.Blocks)
	case Stored:
		if !x.parentKnown(e, &ev) {
			return x.resync(e, WhyParent, &ev)
		}
		x.store(e, ev.Tier, ev.Blocks)
	}
	return Verdict{Did: Applied}
}

// parentKnown tells whether a stored block hangs on one that the engine holds
// (scenario C4). A lower tier keeps blocks whose parents have gone, and after an
// eviction for the budget it is us who forgot: neither proves a loss.
func (x *Index) parentKnown(e *engine, ev *Event) bool {
	return !ev.HasParent || ev.Tier != GPU || ev.Parent == ev.Namespace || len(ev.Blocks) == 0 ||
		e.relaxed || e.evicted != x.evicted || x.holds(e, ev.Parent)
}

// Begin starts taking in an engine's snapshot, as of a sequence. What was known
// of it goes.
func (x *Index) Begin(name, epoch string, asOf uint64) Verdict {
	e := x.engines[name]
	if e == nil || e.state == deaf || e.epoch != epoch {
		return Verdict{Did: Ignored}
	}
	x.lose(e)
	e.state, e.asOf, e.asked = loading, asOf, true
	return Verdict{Did: Applied}
}

// Part takes in a part of the snapshot, parents before children.
func (x *Index) Part(now time.Duration, name, epoch string, t Tier, blocks []uint64) Verdict {
	x.setNow(now)
	x.step(2 * len(blocks))
	e := x.engines[name]
	if e == nil || e.state != loading || e.epoch != epoch {
		return Verdict{Did: Ignored}
	}
	x.store(e, t, blocks)
	return Verdict{Did: Applied}
}

// End completes the snapshot: what was buffered and is later is applied, and
// from here on the engine's view counts (scenario C1).
func (x *Index) End(now time.Duration, name, epoch string) Verdict {
	x.setNow(now)
	e := x.engines[name]
	if e == nil || e.state != loading || e.epoch != epoch {
		return Verdict{Did: Ignored}
	}
	if e.dropped > e.asOf {
		return x.resync(e, WhyOverflow, nil)
	}
	first := slices.IndexFunc(e.buffer, func(ev Event) bool { return ev.Seq > e.asOf })
	if first >= 0 && e.buffer[first].Seq != e.asOf+1 {
		return x.resync(e, WhyGap, nil)
	}
	e.state, e.evicted = trusted, x.evicted
	x.reveal(e)
	later := e.buffer
	e.buffer, e.buffered, e.dropped = nil, 0, 0
	for i := range later {
		if later[i].Seq <= e.asOf {
			continue
		}
		if v := x.apply(e, later[i]); v.Resync {
			return v
		}
	}
	return Verdict{Did: Applied}
}

// Failed gives up a snapshot that did not come. The engine stays without
// credit; events go on being buffered for the next one.
func (x *Index) Failed(name, epoch string) Verdict {
	e := x.engines[name]
	if e == nil || e.state == deaf || e.epoch != epoch || e.state == trusted {
		return Verdict{Did: Ignored}
	}
	x.lose(e)
	e.asked = true
	x.stats.Resyncs++
	return Verdict{Did: Lost, Resync: true}
}

// reveal makes what a snapshot brought count.
func (x *Index) reveal(e *engine) {
	show := func(s uint32) {
		if s != noSlot {
			x.slots[s].state = slotLive
		}
	}
	show(e.gpu)
	for t := range e.lower {
		for _, s := range e.lower[t] {
			show(s)
		}
	}
}
