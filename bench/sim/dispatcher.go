package sim

import (
	"strconv"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Dispatcher is a shell without NATS: it carries the effects of a real core to
// the Bus and brings the answers back.
type Dispatcher struct {
	w    *World
	Name string
	Core *core.Core

	started time.Duration
	alive   bool
	paused  bool // SIGSTOP: events wait
	backlog []core.Event
	msgs    map[core.Handle]*message
	handle  core.Handle
	next    map[stream]time.Duration // earliest delivery of the next entry: each stream comes in order, and no two together
	blind   map[string]time.Duration // engines of which an event was lost, until the next is there
	Log     func(ev core.Event, now time.Duration, out []core.Effect)
	// Old makes it one of before owners and seeds: it hears nothing of them, and
	// knows no such policy. Set it before the World runs.
	Old bool
	// Die, when set, is asked before each effect is carried out; true kills it there.
	Die func(core.Effect) bool
}

// AddDispatcher starts a dispatcher: its views come whole first.
func (w *World) AddDispatcher(name string) *Dispatcher {
	d := &Dispatcher{w: w, Name: name, started: w.Now, alive: true, msgs: map[core.Handle]*message{}, next: map[stream]time.Duration{}, blind: map[string]time.Duration{}}
	d.Core = core.New(core.Config{Dispatcher: name, Timings: w.opts.Timings, Explain: w.opts.Explain})
	w.Cores[name] = d
	d.step(core.ServerTime{UnixNano: w.stamp()})
	w.after(w.delay(), d.rebuild)
	w.after(0, d.register)
	w.after(0, d.tick)
	w.after(0, d.contact)
	w.after(5*time.Millisecond, d.census)
	return d
}

// Kill ends it without a word.
func (d *Dispatcher) Kill() {
	d.alive = false
	delete(d.w.Cores, d.Name)
}

// Pause is SIGSTOP; Resume lets it go on with all that came meanwhile.
func (d *Dispatcher) Pause() { d.paused = true }

// Resume ends a pause.
func (d *Dispatcher) Resume() {
	d.paused = false
	backlog := d.backlog
	d.backlog = nil
	for _, ev := range backlog {
		d.step(ev)
	}
}

func (d *Dispatcher) rebuild() {
	if !d.alive {
		return
	}
	for _, s := range d.w.Bus.swaps() {
		d.step(s)
	}
}

// lane is one thing that is followed, or a subject that is heard.
type lane uint8

const (
	laneReservations lane = iota
	laneResults
	laneEngines
	laneDispatchers
	laneCancels
	lanePools
	laneOwners
	laneLoad
	laneCache
	laneSnapshot
)

// stream is what keeps its order on the way to a dispatcher: a followed stream,
// or a subject of one engine.
type stream struct {
	lane   lane
	engine string
}

func laneOf(ev core.Event) lane {
	switch ev.(type) {
	case core.ReservationPut, core.ReservationGone, core.SeedPut, core.SeedGone:
		return laneReservations
	case core.OwnerPut, core.OwnersGone:
		return laneOwners
	case core.Answered:
		return laneResults
	case core.EnginePut, core.EngineGone:
		return laneEngines
	case core.DispatcherPut, core.DispatcherGone:
		return laneDispatchers
	case core.CancelPut:
		return laneCancels
	}
	return lanePools
}

// follow delivers a change after a delay, never before an earlier one of its stream.
func (d *Dispatcher) follow(ev core.Event) {
	l, extra := laneOf(ev), time.Duration(0)
	if most := d.w.opts.OwnerDelay; l == laneOwners && most > 0 {
		extra = time.Duration(d.w.rng.Int64N(int64(most)))
	}
	d.deliver(ev, stream{lane: l}, extra)
}

// hear delivers a report that nobody keeps: lost when the dispatcher cannot hear.
func (d *Dispatcher) hear(ev core.Event, l lane, engine string, extra time.Duration) {
	d.deliver(ev, stream{l, engine}, extra)
}

func (d *Dispatcher) deliver(ev core.Event, s stream, extra time.Duration) {
	at := max(d.next[s], d.w.Now+d.w.delay()+extra)
	d.next[s] = at
	d.w.at(at, func() { d.step(ev) })
}

func (d *Dispatcher) every(period time.Duration, again func()) {
	if d.alive {
		d.w.after(period, again)
	}
}

func (d *Dispatcher) tick() {
	d.step(core.Tick{})
	d.every(d.w.opts.Timings.Tick, d.tick)
}

func (d *Dispatcher) contact() {
	d.step(core.Contact{Proven: true})
	d.step(core.ServerTime{UnixNano: d.w.stamp()})
	d.every(min(500*time.Millisecond, d.w.opts.Timings.ContactFresh/4), d.contact)
}

func (d *Dispatcher) census() {
	d.step(d.w.Bus.census())
	d.every(min(time.Second, d.w.opts.Timings.Suspect/15), d.census)
}

func (d *Dispatcher) register() {
	if !d.alive {
		return
	}
	if !d.paused {
		b := d.w.Bus
		b.valueSeq++
		p := &core.DispatcherPut{Dispatcher: d.Name, Revision: b.valueSeq, Stored: d.w.stamp()}
		b.dispatchers[d.Name] = p
		d.w.tell(*p)
	}
	d.every(d.w.opts.Timings.Suspect/3, d.register)
}

func (d *Dispatcher) step(ev core.Event) {
	if !d.alive {
		return
	}
	if d.paused {
		switch ev.(type) {
		case core.Tick, core.Contact, core.ServerTime, core.Jobs:
		default:
			d.backlog = append(d.backlog, ev)
		}
		return
	}
	if d.Old {
		if ev = before(ev); ev == nil {
			return
		}
	}
	now := d.w.Now - d.started
	out := d.Core.Step(ev, now)
	if d.Log != nil {
		d.Log(ev, now, out)
	}
	for _, e := range append([]core.Effect(nil), out...) {
		if d.Die != nil && d.Die(e) {
			d.Kill()
			return
		}
		d.carry(e)
	}
}

// answer brings an event after the way back.
func (d *Dispatcher) answer(ev core.Event) {
	d.w.after(d.w.opts.Latency, func() { d.step(ev) })
}

// write does something at the bus after the way there.
func (d *Dispatcher) write(fn func()) {
	late := d.w.opts.Latency
	if p := d.w.opts.SlowWrites; p > 0 && d.w.rng.Float64() < p {
		late += time.Duration(d.w.rng.Int64N(int64(5 * time.Second)))
	}
	d.w.after(late, fn)
}

func (d *Dispatcher) carry(e core.Effect) {
	b := d.w.Bus
	switch e := e.(type) {
	case core.Fetch:
		d.write(func() { d.fetch(e, d.w.Now+e.Wait) })
	case core.Bind:
		d.w.auditCache(d, e.Held)
		d.write(func() {
			a := b.bind(e)
			if b.Lost > 0 && a.Answer == core.OK {
				// Stored, and the answer lost: the shell repeats the identical publish.
				b.Lost--
				d.w.after(100*time.Millisecond, func() { d.answer(d.repeat(e)) })
				return
			}
			d.answer(a)
		})
	case core.SeedBind:
		d.write(func() { d.seedBind(e) })
	case core.WriteSeed:
		d.write(func() { d.answer(b.writeSeed(e)) })
	case core.WriteOwners:
		d.write(func() { d.answer(b.writeOwners(e)) })
	case core.Transition:
		if d.w.OnTransition != nil {
			d.w.OnTransition(e)
		}
	case core.GetFromLeader:
		d.write(func() { d.answer(d.leader(e)) })
	case core.Retry:
		d.write(func() {
			d.answer(core.RetryAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision, Answer: b.retry(e)})
		})
	case core.DeleteKey:
		d.write(func() {
			a, seq := b.remove(e.Released, e.Revision)
			d.answer(core.DeleteAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision, Answer: a, Seq: seq})
		})
	case core.PublishResult:
		d.write(func() {
			a, seq := b.commit(subjects.Answer{Job: e.Job, ID: e.ID, Status: e.Status, Bind: e.Attempt, Group: e.Group})
			d.answer(core.ResultAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID, Answer: a, Seq: seq})
		})
	case core.PublishDead:
		d.write(func() {
			b.Dead = append(b.Dead, e)
			d.answer(core.DeadAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID, Answer: core.OK})
		})
	case core.Ack:
		m := d.msgs[e.Handle]
		delete(d.msgs, e.Handle)
		d.write(func() { b.ack(m) })
	case core.NakDelay:
		m := d.msgs[e.Handle]
		delete(d.msgs, e.Handle)
		d.write(func() {
			if m != nil && m.holder == d.Name {
				m.holder, m.ready = "", d.w.Now+e.Delay
				b.wakeIn(e.Delay, m.queue)
			}
		})
	case core.Rebuild:
		d.w.after(d.w.delay(), d.rebuild)
	case core.AskSnapshot:
		d.write(func() { d.w.Nodes[e.Engine].snapshot(d, e.Epoch) })
	case core.Decision:
		d.w.auditBasis(e)
		d.w.Decisions = append(d.w.Decisions, e)
		if d.w.OnDecision != nil {
			d.w.OnDecision(e)
		}
	}
}

// repeat is the identical publish of a bind that was stored: on R1 the guard is
// checked first, so it reads as a conflict, and the leader is asked whose it is.
func (d *Dispatcher) repeat(e core.Bind) core.BindAnswer {
	a := d.w.Bus.bind(e)
	if a.Answer != core.Conflict {
		return a
	}
	return d.w.Bus.whose(e.Held, a)
}

// whose finds out what became of a bind that was refused as one that may have
// happened.
func (b *Bus) whose(h subjects.Held, a core.BindAnswer) core.BindAnswer {
	if p := b.keys[keyOf(h.Engine, h.Job, h.ID)]; p != nil && p.Bind == h.Bind && p.Dispatcher == h.Dispatcher {
		a.Answer, a.Seq, a.Actual, a.Seed = core.OK, p.Revision, 0, false
	} else if old, ok := b.ids[h.Key()+"#"+strconv.Itoa(h.Bind)]; ok {
		a.Answer, a.Seq, a.Seed = core.Duplicate, old.seq, false
	}
	return a
}

func (d *Dispatcher) leader(e core.GetFromLeader) core.LeaderAnswer {
	a := core.LeaderAnswer{Handle: e.Handle, Engine: e.Engine, Job: e.Job, ID: e.ID}
	if e.Engine != "" {
		if p := d.w.Bus.keys[keyOf(e.Engine, e.Job, e.ID)]; p != nil {
			c := *p
			a.Reservation = &c
		}
	}
	if r := d.w.Bus.register[subjects.RolloutKey(e.Job, e.ID)]; r != nil {
		c := *r
		a.Answered = &c
	}
	return a
}

// fetch delivers what is there, and waits for the first message until then.
func (d *Dispatcher) fetch(e core.Fetch, until time.Duration) {
	if !d.alive {
		return
	}
	got, pending := d.w.Bus.fetch(e.Queue, e.N, d.Name)
	if len(got) == 0 && d.w.Now < until {
		d.w.Bus.park(e.Queue, until, func() { d.fetch(e, until) })
		return
	}
	for i, m := range got {
		d.handle++
		d.msgs[d.handle] = m
		d.answer(core.Fetched{Handle: d.handle, Queue: e.Queue, Facts: m.facts, Seq: m.seq, Stored: m.stored,
			Pending: pending + uint64(len(got)-i-1), Bad: m.bad})
	}
	d.answer(core.FetchDone{Queue: e.Queue, Asked: e.N, Delivered: len(got)})
}
