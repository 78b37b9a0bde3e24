package explore

import (
	"fmt"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

type moveKind uint8

// Moves, in the order in which a world that is left alone makes them.
const (
	moveFollow  moveKind = iota // the next entry of lane nth reaches dispatcher who
	moveWrite                   // of dispatcher who, number nth, reaches the bus and is answered
	moveFetch                   // message nth reaches dispatcher who
	moveTick                    // dispatcher who does what only time brings about
	moveFinish                  // the run of key nth is complete, with usage
	moveBegin                   // dispatcher who starts, with views of now
	movePass                    // time passes
	quiet                       // those from here on are troubles
	moveLose                    // as moveWrite, and the answer is lost
	moveOrphan                  // a write of a dispatcher that died arrives after all
	moveNoUsage                 // the run of key nth is complete, without usage
	moveFail                    // it is answered as failed
	moveReturn                  // it is given back by its agent
	moveAnswer                  // it is answered; its agent dies before it releases
	moveCrash                   // dispatcher who dies; what it had sent is lost (nth = 0) or still on its way (1)
	moveRestart                 // engine who begins a new life
	moveEvict                   // engine who loses its cache
	moveAgain                   // message nth is delivered again although somebody has it
)

type move struct {
	kind moveKind
	who  uint8
	nth  uint8
}

// moves are all that may happen in a state.
func (x *world) moves(s *state, out []move) []move {
	for d, c := range s.cores[:x.scene.Dispatchers] {
		if c < 0 {
			out = append(out, move{moveBegin, uint8(d), 0})
			continue
		}
		for i, w := range s.writes[d] {
			out = append(out, move{moveWrite, uint8(d), uint8(i)})
			if s.left.Lost > 0 && !w.doubt {
				out = append(out, move{moveLose, uint8(d), uint8(i)})
			}
		}
		for l := range s.lanes {
			if int(s.pos[d][l]) < len(s.lanes[l]) {
				out = append(out, move{moveFollow, uint8(d), uint8(l)})
			}
		}
		for i, m := range s.messages {
			if m.waits && m.holders&(1<<d) == 0 {
				out = append(out, move{moveFetch, uint8(d), uint8(i)})
			}
		}
		out = append(out, move{moveTick, uint8(d), 0})
		if s.left.Crash > 0 {
			out = append(out, move{moveCrash, uint8(d), 0})
			if len(s.writes[d]) > 0 {
				out = append(out, move{moveCrash, uint8(d), 1})
			}
		}
	}
	for i := range s.writes[maxDispatchers] {
		out = append(out, move{moveOrphan, maxDispatchers, uint8(i)})
	}
	for i := range s.messages {
		if m := &s.messages[i]; s.left.Redeliver > 0 && m.holders != 0 && !m.waits && !m.gone {
			out = append(out, move{moveAgain, 0, uint8(i)})
		}
	}
	out = x.engineMoves(s, out)
	if s.left.Jump > 0 {
		out = append(out, move{kind: movePass})
	}
	return out
}

func (x *world) engineMoves(s *state, out []move) []move {
	l := &s.left
	for i, k := range s.keys {
		if !x.runs(s, x.put(k)) {
			continue
		}
		n := uint8(i)
		out = append(out, move{moveFinish, 0, n})
		for _, t := range []struct {
			left uint8
			kind moveKind
		}{{l.NoUsage, moveNoUsage}, {l.Fail, moveFail}, {l.Return, moveReturn}, {l.Unreleased, moveAnswer}} {
			if t.left > 0 {
				out = append(out, move{t.kind, 0, n})
			}
		}
	}
	for e := range uint8(x.scene.Engines) {
		if l.Restart > 0 {
			out = append(out, move{moveRestart, e, 0})
		}
		if l.Evict > 0 {
			out = append(out, move{moveEvict, e, 0})
		}
	}
	return out
}

// make makes a move in a copy of the state.
func (x *world) after(old *state, m move) *state {
	s := old.clone()
	d := int(m.who)
	switch m.kind {
	case moveWrite, moveLose, moveOrphan:
		x.arrive(s, d, int(m.nth), m.kind)
	case moveFollow:
		ev := s.lanes[m.nth][s.pos[d][m.nth]]
		s.pos[d][m.nth]++
		x.step(s, d, ev)
	case moveFetch:
		p := &s.messages[m.nth]
		p.holders |= 1 << d
		p.waits = false
		x.step(s, d, p.fetched)
	case moveTick:
		x.step(s, d, x.cores.event(core.Tick{}))
	case moveBegin:
		x.start(s, d)
	case movePass:
		s.left.Jump -= min(1, s.left.Jump)
		x.pass(s)
	case moveCrash:
		x.crash(s, d, m.nth == 1)
	case moveRestart:
		s.left.Restart--
		x.newLife(s, d)
	case moveEvict:
		s.left.Evict--
		s.cacheSeq[d]++
		s.tell(laneEngines, x.cores.event(core.Cache{Engine: engineName(d), Epoch: epochName(d, s.epoch[d]), Seq: uint64(s.cacheSeq[d]), Op: "cleared"}))
	case moveAgain:
		s.left.Redeliver--
		s.messages[m.nth].waits = true
	default:
		x.end(s, int(m.nth), m.kind)
	}
	s.trim()
	return s
}

func (x *world) arrive(s *state, d, i int, kind moveKind) {
	w := s.writes[d][i]
	if kind == moveLose {
		s.left.Lost--
		s.writes[d][i].doubt = true
		x.carry(s, w)
		return
	}
	s.writes[d] = append(s.writes[d][:i:i], s.writes[d][i+1:]...)
	a := x.carry(s, w)
	if kind == moveWrite {
		x.step(s, d, x.cores.event(a))
	}
}

func (x *world) crash(s *state, d int, late bool) {
	s.left.Crash--
	s.cores[d] = -1
	if late {
		s.writes[maxDispatchers] = append(s.writes[maxDispatchers], s.writes[d]...)
	}
	s.writes[d] = nil
	for i := range s.messages {
		if m := &s.messages[i]; m.holders&(1<<d) != 0 {
			m.holders &^= 1 << d
			m.waits = !m.gone
		}
	}
}

// newLife restarts an engine: what ran there is lost, nothing is cached.
func (x *world) newLife(s *state, e int) {
	s.epoch[e]++
	s.cacheSeq[e] = 0
	revision := uint64(int(s.epoch[e])*maxEngines + e + 1)
	s.regs[e] = x.cores.event(x.scene.registration(e, s.epoch[e], revision, x.cores.stamp(s.now)))
	s.tell(laneEngines, x.cores.event(x.one(s.regs[e]), x.scene.load(e, s.epoch[e], uint64(s.now)+1)))
}

// end ends the run of a key, as its agent tells it.
func (x *world) end(s *state, i int, kind moveKind) {
	id := s.keys[i]
	p := x.put(id)
	if kind == moveReturn {
		s.left.Return--
		s.seq++
		ev := x.make(makeKey{5, id, 0, s.seq, s.now}, func() core.Event {
			h := *p
			h.State, h.ReturnReason, h.Burnt, h.Revision, h.Stored = subjects.StateReturned, "failed", p.Burnt+1, uint64(s.seq), x.cores.stamp(s.now)
			return h
		})
		x.set(s, ev)
		return
	}
	status, tokens := subjects.Completed, blockTokens
	usage := &tokens
	switch kind {
	case moveNoUsage:
		s.left.NoUsage--
		usage = nil
	case moveFail:
		s.left.Fail--
		status = subjects.Failed
	case moveAnswer:
		s.left.Unreleased--
	}
	x.commit(s, subjects.Answer{Job: p.Job, ID: p.ID, Reader: p.Reader, Status: status, Bind: p.Bind, Epoch: p.Epoch, Engine: p.Engine,
		PromptTokens: &p.PromptTokens, CompletionTokens: usage})
	if kind == moveAnswer {
		return
	}
	x.remove(s, subjects.Released{Engine: p.Engine, Job: p.Job, ID: p.ID, Outcome: subjects.OutcomeAnswered, Status: status, Bind: p.Bind, Epoch: p.Epoch,
		Tokens: p.Tokens, PromptTokens: p.PromptTokens, CompletionTokens: usage}, p.Revision, 20+uint8(kind), 0)
}

// describe says a move in words, for the trace of a broken rule.
func (x *world) describe(s *state, m move) string {
	d := dispatcherName(int(m.who))
	switch m.kind {
	case moveWrite, moveLose, moveOrphan:
		what := x.describeWrite(s.writes[m.who][m.nth])
		switch m.kind {
		case moveLose:
			return fmt.Sprintf("%s: %s; its answer is lost", d, what)
		case moveOrphan:
			return "of a dead dispatcher: " + what
		}
		return fmt.Sprintf("%s: %s", d, what)
	case moveFollow:
		return fmt.Sprintf("%s hears: %s", d, x.describeEvent(s.lanes[m.nth][s.pos[m.who][m.nth]]))
	case moveFetch:
		return fmt.Sprintf("%s fetches rollout %d", d, s.messages[m.nth].rollout)
	case moveTick:
		return d + " ticks"
	case moveBegin:
		return d + " starts"
	case movePass:
		return fmt.Sprintf("%v pass", x.cores.jump)
	case moveCrash:
		return fmt.Sprintf("%s dies (its writes still under way: %v)", d, m.nth == 1)
	case moveRestart:
		return engineName(int(m.who)) + " begins a new life"
	case moveEvict:
		return engineName(int(m.who)) + " loses its cache"
	case moveAgain:
		return fmt.Sprintf("rollout %d is to be delivered again", s.messages[m.nth].rollout)
	}
	p := x.put(s.keys[m.nth])
	how := map[moveKind]string{moveFinish: "is complete", moveNoUsage: "is complete, without usage", moveFail: "is answered as failed",
		moveReturn: "is given back", moveAnswer: "is answered and not released"}[m.kind]
	return fmt.Sprintf("%s on %s %s", p.Key(), p.Engine, how)
}

func (x *world) describeWrite(w write) string {
	doubt := ""
	if w.doubt {
		doubt = " once more"
	}
	switch e := x.cores.effects.all[w.effect].(type) {
	case core.Bind:
		return fmt.Sprintf("bind %s#%d to %s behind %d (%s)%s", e.Held.Key(), e.Held.Bind, e.Held.Engine, e.Expected, e.Held.Reason, doubt)
	case core.SeedBind:
		return fmt.Sprintf("seed %s with %s#%d behind %d and %d%s", e.Held.Engine, e.Held.Key(), e.Held.Bind, e.Expected, e.SeedAt, doubt)
	case core.WriteSeed:
		return fmt.Sprintf("end the seed at %d, given back: %v%s", e.Revision, e.GiveBack, doubt)
	case core.WriteOwners:
		return fmt.Sprintf("owners at %d: %d of them%s", e.Revision, len(e.Owners), doubt)
	default:
		return fmt.Sprintf("%T%+v%s", e, e, doubt)
	}
}

func (x *world) describeEvent(ev uint32) string {
	switch e := x.one(ev).(type) {
	case core.ReservationPut:
		return fmt.Sprintf("%s#%d %s on %s at %d", e.Key(), e.Bind, e.State, e.Engine, e.Revision)
	case core.ReservationGone:
		return fmt.Sprintf("%s.%s gone from %s (%s) at %d", e.Job, e.ID, e.Engine, e.Outcome, e.Revision)
	case core.SeedPut:
		return fmt.Sprintf("%s of %s at %d", e.State, e.Engine, e.Revision)
	case core.SeedGone:
		return fmt.Sprintf("seed given back at %d", e.Revision)
	case core.OwnerPut:
		return fmt.Sprintf("%d owners at %d", len(e.Owners), e.Revision)
	default:
		return fmt.Sprintf("%T", e)
	}
}
