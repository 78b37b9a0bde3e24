package explore

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// world is a scene being explored: states, and the functions between them.
type world struct {
	scene  Scene
	cores  *cores
	made   map[makeKey]uint32
	broken string // the rule that the move in hand has broken, a sentence
}

func newWorld(sc Scene) *world {
	sc.Keys, sc.Jump = max(1, sc.Keys), cmp.Or(sc.Jump, 6*time.Second)
	return &world{scene: sc, cores: newCores(sc.Jump), made: map[makeKey]uint32{}}
}

func (x *world) breaks(format string, args ...any) {
	if x.broken == "" {
		x.broken = fmt.Sprintf(format, args...)
	}
}

// makeKey saves making the same event again: it follows from what it is made of.
type makeKey struct {
	what uint8
	of   uint32
	with uint32
	seq  uint16
	now  uint8
}

func (x *world) make(k makeKey, build func() core.Event) uint32 {
	id, ok := x.made[k]
	if !ok {
		id = x.cores.event(build())
		x.made[k] = id
	}
	return id
}

// tell puts an entry into a lane; those alive will see it, in order.
func (s *state) tell(l lane, ev uint32) { s.lanes[l] = append(s.lanes[l], ev) }

// trim drops what everybody alive has seen.
func (s *state) trim() {
	for l := range s.lanes {
		least := uint8(len(s.lanes[l]))
		for d := range s.cores {
			if s.cores[d] >= 0 {
				least = min(least, s.pos[d][l])
			}
		}
		s.lanes[l] = s.lanes[l][least:]
		for d := range s.cores {
			if s.cores[d] < 0 {
				s.pos[d][l] = 0
			} else {
				s.pos[d][l] -= least
			}
		}
	}
}

// step hands an event to a dispatcher and takes what follows from it at once.
func (x *world) step(s *state, d int, ev uint32) {
	e := x.cores.step(int8(d), s.cores[d], ev, s.now)
	s.cores[d] = e.to
	x.took(s, d, e.effects)
}

func (x *world) took(s *state, d int, effects []uint32) {
	for _, id := range effects {
		switch e := x.cores.effects.all[id].(type) {
		case core.Ack:
			s.letGo(x, d, e.Handle, false)
		case core.NakDelay:
			s.letGo(x, d, e.Handle, true)
		case core.GetFromLeader:
			x.step(s, d, x.cores.event(x.leader(s, e)))
		case core.PublishDead:
			x.step(s, d, x.cores.event(core.DeadAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID, Answer: core.OK}))
		default:
			s.writes[d] = append(s.writes[d], write{effect: id})
		}
	}
}

// letGo ends a dispatcher's hold of a message.
func (s *state) letGo(x *world, d int, h core.Handle, back bool) {
	for i := range s.messages {
		m := &s.messages[i]
		if m.holders&(1<<d) == 0 || x.one(m.fetched).(core.Fetched).Handle != h {
			continue
		}
		m.holders &^= 1 << d
		if back {
			m.waits = !m.gone
		} else {
			m.gone, m.waits = true, false
		}
	}
}

func engineIndex(name string) int { return int(name[1] - '0') }
func rolloutIndex(id string) int  { n, _ := strconv.Atoi(id); return n }
func (x *world) keyIndex(k string) int {
	if k == x.scene.ownerKey(0) {
		return 0
	}
	return 1
}

func (x *world) put(ev uint32) *core.ReservationPut {
	p := x.one(ev).(core.ReservationPut)
	return &p
}

// find is the key of a rollout on an engine; -1 = none.
func (x *world) find(s *state, engine string, id string) int {
	for i, k := range s.keys {
		if p := x.one(k).(core.ReservationPut); p.Engine == engine && p.ID == id {
			return i
		}
	}
	return -1
}

// runs tells whether a reservation is at work: bound in its engine's life, and
// not answered.
func (x *world) runs(s *state, p *core.ReservationPut) bool {
	return p.State == subjects.StateBound && p.Epoch == epochName(engineIndex(p.Engine), s.epoch[engineIndex(p.Engine)]) && s.answers[rolloutIndex(p.ID)] == 0
}

// carry executes a write at the bus. The answer is nil when nobody waits for it.
func (x *world) carry(s *state, w write) core.Event {
	switch e := x.cores.effects.all[w.effect].(type) {
	case core.Bind:
		return x.bindAgain(s, w.doubt, e.Held, x.bind(s, w.effect, e))
	case core.SeedBind:
		return x.bindAgain(s, w.doubt, e.Held, x.seedBind(s, w.effect, e))
	case core.WriteSeed:
		return x.writeSeed(s, w.effect, e)
	case core.WriteOwners:
		return x.writeOwners(s, w.effect, e)
	case core.Retry:
		return core.RetryAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision, Answer: x.retry(s, e)}
	case core.DeleteKey:
		a, seq := x.remove(s, e.Released, e.Revision, 10, w.effect)
		return core.DeleteAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision, Answer: a, Seq: seq}
	case core.PublishResult:
		a := x.commit(s, subjects.Answer{Job: e.Job, ID: e.ID, Status: e.Status, Bind: e.Attempt})
		return core.ResultAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID, Answer: a}
	}
	return nil
}

// seenID is the sequence of a message id of the bucket, 0 when it is new.
func (s *state) seenID(rollout, bind int) uint16 {
	for _, b := range s.ids {
		if int(b.rollout) == rollout && int(b.bind) == bind {
			return b.seq
		}
	}
	return 0
}

func (x *world) bind(s *state, id uint32, e core.Bind) core.BindAnswer {
	h := &e.Held
	a := core.BindAnswer{Handle: e.Handle, Engine: h.Engine, Job: h.Job, ID: h.ID, Bind: h.Bind, Stored: x.cores.stamp(s.now)}
	if x.moved(s, h.Engine, e.Expected) {
		a.Answer, a.Actual = core.Conflict, uint64(s.last[engineIndex(h.Engine)])
		return a
	}
	if seq := s.seenID(rolloutIndex(h.ID), h.Bind); seq != 0 {
		a.Answer, a.Seq = core.Duplicate, uint64(seq)
		return a
	}
	a.Answer, a.Seq = core.OK, x.store(s, id, e.Held, e.TTL.Milliseconds())
	return a
}

func (x *world) moved(s *state, engine string, expected uint64) bool {
	return uint64(s.last[engineIndex(engine)]) != expected && x.scene.Mutation != NoWildcardGuard
}

// seedBind is an atomic batch: both guards hold, or nothing is written.
func (x *world) seedBind(s *state, id uint32, e core.SeedBind) core.BindAnswer {
	h, k := &e.Held, x.keyIndex(e.Seed.Key)
	a := core.BindAnswer{Handle: e.Handle, Engine: h.Engine, Job: h.Job, ID: h.ID, Bind: h.Bind, Stored: x.cores.stamp(s.now)}
	if uint64(s.seeds[k].rev) != e.SeedAt && x.scene.Mutation != NoExactGuard {
		a.Answer, a.Actual, a.Seed = core.Conflict, uint64(s.seeds[k].rev), true
		return a
	}
	if s.seenID(rolloutIndex(h.ID), h.Bind) != 0 {
		a.Answer = core.Duplicate // a batch tells no sequence
		return a
	}
	if x.moved(s, h.Engine, e.Expected) {
		a.Answer, a.Actual = core.Conflict, uint64(s.last[engineIndex(h.Engine)])
		return a
	}
	x.judgeSeed(s, k, h)
	s.seq++
	seed := x.make(makeKey{1, id, 0, s.seq, s.now}, func() core.Event {
		return core.SeedPut{Seed: e.Seed, Revision: uint64(s.seq), Stored: x.cores.stamp(s.now), TTLMS: e.TTL.Milliseconds()}
	})
	s.seeds[k] = stored{seed, s.seq, s.now}
	s.tell(laneReservations, seed)
	s.sown[rolloutIndex(h.ID)] |= 1 << h.Bind
	a.Answer, a.Seq = core.OK, x.store(s, id, e.Held, e.TTL.Milliseconds())
	return a
}

// store writes a reservation.
func (x *world) store(s *state, id uint32, h subjects.Held, ttlMS int64) uint64 {
	s.seq++
	ev := x.make(makeKey{2, id, 0, s.seq, s.now}, func() core.Event {
		return core.ReservationPut{Held: h, Revision: uint64(s.seq), Stored: x.cores.stamp(s.now), TTLMS: ttlMS}
	})
	s.ids = append(s.ids, bindID{uint8(rolloutIndex(h.ID)), uint8(h.Bind), s.seq})
	x.set(s, ev)
	x.judgeWindow(s, engineIndex(h.Engine))
	return uint64(s.seq)
}

// set makes an entry the one at its subject.
func (x *world) set(s *state, ev uint32) {
	p := x.put(ev)
	if i := x.find(s, p.Engine, p.ID); i >= 0 {
		s.keys = slices.Delete(s.keys, i, i+1)
	}
	s.keys = append(s.keys, ev)
	s.unmark(x, p.Engine, p.ID)
	s.last[engineIndex(p.Engine)] = uint16(p.Revision)
	s.tell(laneReservations, ev)
}

func (s *state) unmark(x *world, engine, id string) {
	s.markers = slices.DeleteFunc(s.markers, func(m uint32) bool {
		g := x.one(m).(core.ReservationGone)
		return g.Engine == engine && g.ID == id
	})
}

// bindAgain is what the shell makes of an answer after one was lost.
func (x *world) bindAgain(s *state, doubt bool, h subjects.Held, a core.BindAnswer) core.BindAnswer {
	if !(doubt && a.Answer == core.Conflict || a.Answer == core.Duplicate) {
		return a
	}
	i := x.find(s, h.Engine, h.ID)
	if i < 0 {
		return a
	}
	switch p := x.put(s.keys[i]); {
	case p.Bind != h.Bind:
	case p.Dispatcher == h.Dispatcher && p.State == h.State:
		a.Answer, a.Seq, a.Actual, a.Seed = core.OK, p.Revision, 0, false
	default:
		a.Answer, a.Seq, a.Actual, a.Seed = core.Duplicate, p.Revision, 0, false
	}
	return a
}

// remove deletes a key at exactly its revision.
func (x *world) remove(s *state, r subjects.Released, revision uint64, what uint8, of uint32) (core.Answer, uint64) {
	i := x.find(s, r.Engine, r.ID)
	if i < 0 {
		return core.Gone, 0
	}
	if x.put(s.keys[i]).Revision != revision {
		return core.Superseded, 0
	}
	s.seq++
	if x.scene.Mutation == NoProof {
		n := blockTokens
		r.Outcome, r.Status, r.CompletionTokens, r.PromptTokens = subjects.OutcomeAnswered, subjects.Completed, &n, 2*blockTokens+1
	}
	ev := x.make(makeKey{what, of, s.keys[i], s.seq, s.now}, func() core.Event {
		return core.ReservationGone{Released: r, Revision: uint64(s.seq), Stored: x.cores.stamp(s.now)}
	})
	s.keys = slices.Delete(s.keys, i, i+1)
	s.unmark(x, r.Engine, r.ID)
	s.markers = append(s.markers, ev)
	s.last[engineIndex(r.Engine)] = s.seq
	s.tell(laneReservations, ev)
	return core.OK, uint64(s.seq)
}

// commit writes a terminal answer; everybody alive hears of it at once.
func (x *world) commit(s *state, a subjects.Answer) core.Answer {
	r := rolloutIndex(a.ID)
	if s.answers[r] != 0 {
		return core.Superseded
	}
	ev := x.cores.event(core.Answered{Answer: a, Revision: uint64(r + 1), Stored: x.cores.stamp(s.now)})
	s.answers[r] = ev
	for d := range s.cores {
		if s.cores[d] >= 0 {
			x.step(s, d, ev)
		}
	}
	return core.OK
}

func (x *world) retry(s *state, e core.Retry) core.Answer {
	i := x.find(s, e.Engine, e.ID)
	if i < 0 || x.put(s.keys[i]).Revision != e.Revision {
		return core.Gone
	}
	r := rolloutIndex(e.ID)
	if s.retries[r]&(1<<e.Bind) != 0 {
		return core.Duplicate
	}
	s.retries[r] |= 1 << e.Bind
	f := x.scene.facts(r)
	f.Bind, f.Burnt, f.Tried, f.LeftMS, f.Accepted, f.Lane = e.Bind, e.Burnt, e.Tried, e.LeftMS, e.Accepted, e.Lane
	x.queue(s, r, f, true)
	return core.OK
}

func (x *world) leader(s *state, e core.GetFromLeader) core.LeaderAnswer {
	a := core.LeaderAnswer{Handle: e.Handle, Engine: e.Engine, Job: e.Job, ID: e.ID}
	if e.Engine != "" {
		if i := x.find(s, e.Engine, e.ID); i >= 0 {
			a.Reservation = x.put(s.keys[i])
		}
	}
	if ev := s.answers[rolloutIndex(e.ID)]; ev != 0 {
		p := x.one(ev).(core.Answered)
		a.Answered = &p
	}
	return a
}

// writeSeed ends a seed at exactly its revision.
func (x *world) writeSeed(s *state, id uint32, e core.WriteSeed) core.SeedAnswer {
	k := x.keyIndex(e.Seed.Key)
	a := core.SeedAnswer{Key: e.Seed.Key, Revision: e.Revision}
	switch at := s.seeds[k]; {
	case at.ev == 0:
		a.Answer = core.Gone
		return a
	case uint64(at.rev) != e.Revision && x.scene.Mutation != LateSeedEnd:
		a.Answer = core.Superseded
		return a
	}
	x.judgeEnd(s, k)
	s.seq++
	gone := e.GiveBack || x.scene.Mutation == NoCooldown
	if !e.GiveBack {
		s.proved[k] = int8(s.now)
	}
	ev := x.make(makeKey{3, id, uint32(bit(gone)), s.seq, s.now}, func() core.Event {
		if gone {
			return core.SeedGone{Key: e.Seed.Key, Revision: uint64(s.seq), Stored: x.cores.stamp(s.now), TTLMS: markerTTL.Milliseconds()}
		}
		return core.SeedPut{Seed: e.Seed, Revision: uint64(s.seq), Stored: x.cores.stamp(s.now), TTLMS: e.TTL.Milliseconds()}
	})
	s.seeds[k] = stored{ev, s.seq, s.now}
	s.tell(laneReservations, ev)
	a.Answer, a.Seq = core.OK, uint64(s.seq)
	return a
}

// writeOwners compares and sets an entry of the owner map.
func (x *world) writeOwners(s *state, id uint32, e core.WriteOwners) core.OwnersAnswer {
	k := x.keyIndex(e.Key)
	a := core.OwnersAnswer{Key: e.Key, Revision: e.Revision}
	if uint64(s.ownerAt[k]) != e.Revision {
		a.Answer, a.Actual = core.Conflict, uint64(s.ownerAt[k])
		return a
	}
	x.judgeOwners(s, k, e.Owners)
	s.ownerRev++
	s.ownerAt[k] = s.ownerRev
	ev := x.make(makeKey{4, id, 0, s.ownerRev, s.now}, func() core.Event {
		if len(e.Owners) == 0 {
			return core.OwnersGone{Key: e.Key, Revision: uint64(s.ownerRev)}
		}
		return core.OwnerPut{Ownership: e.Ownership, Revision: uint64(s.ownerRev), Stored: x.cores.stamp(s.now), TTLMS: e.TTL.Milliseconds()}
	})
	s.owners[k] = stored{rev: s.ownerRev, now: s.now}
	if len(e.Owners) > 0 {
		s.owners[k].ev = ev
	}
	s.tell(laneOwners, ev)
	a.Answer, a.Seq = core.OK, uint64(s.ownerRev)
	return a
}

// pass lets time go on: what has outlived its TTL is gone, and nobody is told.
func (x *world) pass(s *state) {
	s.now++
	for k := range s.seeds {
		switch p := x.one(s.seeds[k].ev).(type) {
		case core.SeedPut:
			if x.over(s.seeds[k].now, s.now, p.TTLMS) {
				s.seeds[k] = stored{}
			}
		case core.SeedGone:
			if x.over(s.seeds[k].now, s.now, p.TTLMS) {
				s.seeds[k] = stored{}
			}
		}
		if p, ok := x.one(s.owners[k].ev).(core.OwnerPut); ok && x.over(s.owners[k].now, s.now, p.TTLMS) {
			s.owners[k], s.ownerAt[k] = stored{}, 0
		}
	}
	x.expireMarkers(s)
	for i := range x.scene.Engines {
		x.report(s, i)
	}
}

// expireMarkers lets the last sequence under an engine fall back, as it does on a
// server.
func (x *world) expireMarkers(s *state) {
	n := len(s.markers)
	s.markers = slices.DeleteFunc(s.markers, func(m uint32) bool {
		return x.cores.stamp(s.now)-x.one(m).(core.ReservationGone).Stored > markerTTL.Nanoseconds()
	})
	if len(s.markers) == n {
		return
	}
	s.last = [maxEngines]uint16{}
	for _, k := range s.keys {
		p := x.put(k)
		s.last[engineIndex(p.Engine)] = max(s.last[engineIndex(p.Engine)], uint16(p.Revision))
	}
	for _, m := range s.markers {
		g := x.one(m).(core.ReservationGone)
		s.last[engineIndex(g.Engine)] = max(s.last[engineIndex(g.Engine)], uint16(g.Revision))
	}
}

const markerTTL = time.Minute

// report is a fresh load report, heard by everybody alive.
func (x *world) report(s *state, engine int) {
	ev := x.cores.event(x.scene.load(engine, s.epoch[engine], uint64(s.now)+1))
	for d := range s.cores {
		if s.cores[d] >= 0 {
			x.step(s, d, ev)
		}
	}
}

func (x *world) over(stored, now uint8, ttlMS int64) bool {
	return ttlMS > 0 && (x.cores.at(now)-x.cores.at(stored)).Milliseconds() > ttlMS
}
