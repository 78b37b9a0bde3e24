package kvevents

import "time"

// Do is what a Sequencer asks for.
type Do uint8

// The steps, to be carried out in the order given.
const (
	Apply     Do = iota + 1 // apply Batch, which has sequence Seq
	Clear                   // forget all that is known of this rank
	AskReplay               // ask for everything from Seq on
	Degrade                 // nothing of this rank may be credited from here on
	Trust                   // what is known of this rank is true again; Partial says whether it is all
)

// Step is one of them.
type Step[T any] struct {
	Do      Do
	Seq     uint64
	Batch   T
	Partial bool
	Reason  string
}

// SequenceConfig of a rank's stream.
type SequenceConfig struct {
	// Replay tells whether there is an endpoint to ask. Without one, which is
	// the engines' default, a gap degrades at once.
	Replay bool
	// CoolDown after a failed recovery. Default 30 s.
	CoolDown time.Duration
	// MaxBuffered batches that wait for a replay. Default 4,096.
	MaxBuffered int
}

// Sequencer decides what each numbered batch of one rank means: apply, drop,
// wait for a replay, or believe nothing. It is a pure state machine: no clock,
// no socket; its caller carries out the steps.
//
//	             seq <= applied: drop        gap, replay endpoint
//	            +---------+                 +----------------------+
//	            v         |                 |                      v
//	Start -> following ---+ --- seq+1: apply      AskReplay -> replaying
//	  ^         |   ^                                        |     |
//	  |         |   +---------- end, no gap left: Trust -----+     |
//	  |         | gap, no endpoint                  hole, timeout  |
//	  |         v                                                  v
//	  |      degraded <-------------------- Degrade ---------------+
//	  |         |  cool-down: once more from applied+1
//	  +---------+  then: Clear, and begin anew with what is seen from here on
//
// A lower live sequence, another process behind the socket, or a batch that
// clears the cache end every state: what was known is gone, what follows is
// whole. The engine sends no cleared event when it restarts.
type Sequencer[T any] struct {
	cfg      SequenceConfig
	clears   func(T) bool
	state    seqState
	first    bool // the replay under way is that of a first contact
	live     number
	applied  number
	partial  bool
	buffer   []numbered[T]
	asked    int           // replays for the gap at hand
	retry    time.Duration // when a degraded stream is tried again
	tries    int           // recoveries since it degraded
	distrust bool          // what is known is wrong, not only incomplete
	noRing   bool          // begin anew without a replay
	steps    []Step[T]
}

type seqState uint8

const (
	idle seqState = iota
	following
	replaying
	degraded
)

type number struct {
	v  uint64
	ok bool
}

func (n *number) set(v uint64) { n.v, n.ok = v, true }

type numbered[T any] struct {
	seq   uint64
	batch T
}

// NewSequencer makes one. clears tells whether a batch empties the cache; it is
// asked only while the stream is degraded.
func NewSequencer[T any](cfg SequenceConfig, clears func(T) bool) *Sequencer[T] {
	if cfg.CoolDown <= 0 {
		cfg.CoolDown = 30 * time.Second
	}
	if cfg.MaxBuffered <= 0 {
		cfg.MaxBuffered = 4096
	}
	return &Sequencer[T]{cfg: cfg, clears: clears}
}

// maxAsked bounds the replays for one gap: what arrives meanwhile can leave
// another one behind it.
const maxAsked = 3

func (s *Sequencer[T]) step(st Step[T]) { s.steps = append(s.steps, st) }

// open begins a call: the steps that it returns are valid until the next one.
func (s *Sequencer[T]) open() {
	clear(s.steps)
	s.steps = s.steps[:0]
}

// Start begins with a new connection to a process of which nothing is known.
func (s *Sequencer[T]) Start() []Step[T] {
	s.open()
	if s.state != idle {
		s.forget("another process, or one that cannot be told from another")
	}
	s.begin()
	return s.steps
}

// Resume goes on after a connection was lost and the process behind it is known
// to be the same.
func (s *Sequencer[T]) Resume() []Step[T] {
	s.open()
	switch {
	case s.state == idle || !s.applied.ok:
		return s.Start()
	case s.state == following && s.cfg.Replay:
		s.ask(s.applied.v + 1)
	case s.state == replaying:
		s.ask(s.applied.v + 1)
	}
	return s.steps
}

// begin is rule 1: with an endpoint ask for everything, without one believe
// what comes. Nothing is known, which is true.
func (s *Sequencer[T]) begin() {
	s.live, s.applied, s.partial, s.buffer = number{}, number{}, false, nil
	s.asked, s.tries, s.distrust, s.noRing = 0, 0, false, false
	if s.cfg.Replay {
		s.first = true
		s.ask(0)
		return
	}
	s.state = following
	s.partial = true
	s.step(Step[T]{Do: Trust, Partial: true})
}

func (s *Sequencer[T]) forget(reason string) {
	s.step(Step[T]{Do: Clear, Reason: reason})
	s.applied, s.buffer, s.asked, s.tries, s.distrust, s.first = number{}, nil, 0, 0, false, false
	s.partial = false
}

func (s *Sequencer[T]) ask(from uint64) {
	s.state = replaying
	s.asked++
	s.step(Step[T]{Do: AskReplay, Seq: from})
}

// Live takes a batch of the subscription.
func (s *Sequencer[T]) Live(now time.Duration, seq uint64, b T) []Step[T] {
	s.open()
	if s.live.ok && seq < s.live.v {
		s.forget("the sequence fell: the publisher restarted")
		s.live.set(seq)
		if seq > 0 && s.cfg.Replay {
			s.first = true
			s.ask(0)
			s.hold(seq, b)
			return s.steps
		}
		s.state, s.partial = following, seq > 0
		s.step(Step[T]{Do: Trust, Partial: s.partial})
		s.apply(seq, b)
		return s.steps
	}
	if s.live.ok && seq == s.live.v {
		return s.steps
	}
	s.live.set(seq)
	switch s.state {
	case degraded:
		if s.clears(b) {
			s.forget("the engine cleared its cache")
			s.state = following
			s.step(Step[T]{Do: Trust})
			s.apply(seq, b)
		}
	case replaying:
		s.hold(seq, b)
	default:
		s.follow(now, seq, b)
	}
	return s.steps
}

func (s *Sequencer[T]) follow(now time.Duration, seq uint64, b T) {
	switch {
	case !s.applied.ok && (seq == 0 || !s.cfg.Replay || s.state == following && s.partial):
		if s.state == idle || s.partial != (seq > 0) {
			s.state, s.partial = following, seq > 0
			s.step(Step[T]{Do: Trust, Partial: s.partial})
		}
		s.apply(seq, b)
	case !s.applied.ok:
		s.first = true
		s.ask(0)
		s.hold(seq, b)
	case seq <= s.applied.v:
	case seq == s.applied.v+1:
		s.apply(seq, b)
	case s.cfg.Replay:
		s.asked = 0
		s.ask(s.applied.v + 1)
		s.hold(seq, b)
	default:
		s.degrade(now, "a gap, and no replay endpoint to ask")
	}
}

func (s *Sequencer[T]) apply(seq uint64, b T) {
	s.applied.set(seq)
	s.step(Step[T]{Do: Apply, Seq: seq, Batch: b})
}

// hold keeps a live batch for after the replay. When there are too many the
// oldest goes: the replay has it, or the gap is found again.
func (s *Sequencer[T]) hold(seq uint64, b T) {
	if len(s.buffer) >= s.cfg.MaxBuffered {
		n := copy(s.buffer, s.buffer[1:])
		clear(s.buffer[n:])
		s.buffer = s.buffer[:n]
	}
	s.buffer = append(s.buffer, numbered[T]{seq, b})
}

// Replayed takes a batch of the replay that was asked for last.
func (s *Sequencer[T]) Replayed(now time.Duration, seq uint64, b T) []Step[T] {
	s.open()
	if s.state != replaying {
		return s.steps
	}
	switch {
	case !s.applied.ok:
		s.partial = seq > 0
		s.apply(seq, b)
	case seq <= s.applied.v:
	case seq == s.applied.v+1:
		s.apply(seq, b)
	default:
		s.degrade(now, "a hole in the replay")
	}
	return s.steps
}

// ReplayEnd says that the replay was answered to its end.
func (s *Sequencer[T]) ReplayEnd(now time.Duration) []Step[T] {
	s.open()
	if s.state == replaying {
		s.drain(now, true)
	}
	return s.steps
}

// ReplayFailed says that it was not: no answer, or a lost connection.
func (s *Sequencer[T]) ReplayFailed(now time.Duration) []Step[T] {
	s.open()
	if s.state != replaying {
		return s.steps
	}
	if s.first && !s.applied.ok { // as if there were no endpoint
		s.drain(now, false)
		return s.steps
	}
	s.degrade(now, "the replay failed")
	return s.steps
}

// drain applies what was held while a replay ran.
func (s *Sequencer[T]) drain(now time.Duration, again bool) {
	held := s.buffer
	s.buffer = nil
	if !s.applied.ok {
		s.partial = len(held) == 0 && !again || len(held) > 0 && held[0].seq > 0
	}
	for i, h := range held {
		switch {
		case s.applied.ok && h.seq <= s.applied.v:
		case !s.applied.ok || h.seq == s.applied.v+1:
			s.apply(h.seq, h.batch)
		case again && s.asked < maxAsked:
			s.buffer = held[i:]
			s.ask(s.applied.v + 1)
			return
		default:
			s.degrade(now, "a gap that the replay did not fill")
			return
		}
	}
	s.state, s.first, s.asked, s.tries = following, false, 0, 0
	s.step(Step[T]{Do: Trust, Partial: s.partial})
}

func (s *Sequencer[T]) degrade(now time.Duration, reason string) {
	s.state, s.buffer, s.first, s.asked = degraded, nil, false, 0
	s.retry = now + s.cfg.CoolDown
	s.step(Step[T]{Do: Degrade, Reason: reason})
}

// Distrust says that what is known may be wrong, not only incomplete: an event
// was unreadable, or a parent never came. After the cool-down everything is
// forgotten and begun anew; from the ring if replay is set, else, since the
// same bytes would come out of it again, with what is seen from then on.
func (s *Sequencer[T]) Distrust(now time.Duration, reason string, replay bool) []Step[T] {
	s.open()
	if s.state != degraded {
		s.degrade(now, reason)
	}
	s.distrust, s.noRing = true, !replay
	return s.steps
}

// Confirm asks for what came after the last batch applied, though no number is
// missing yet: a subscription takes a moment to reach a publisher, and what it
// sent in that moment shows only when it sends again.
func (s *Sequencer[T]) Confirm() []Step[T] {
	s.open()
	if s.state == following && s.cfg.Replay {
		from := uint64(0)
		if s.applied.ok {
			from = s.applied.v + 1
		}
		s.first = !s.applied.ok
		s.asked = 0
		s.ask(from)
	}
	return s.steps
}

// Lost says that live messages were dropped on the way here, the last ones
// perhaps among them: no later number may ever show the gap.
func (s *Sequencer[T]) Lost(now time.Duration) []Step[T] {
	s.open()
	if s.state != following || !s.applied.ok {
		return s.steps
	}
	if s.cfg.Replay {
		s.asked = 0
		s.ask(s.applied.v + 1)
	} else {
		s.degrade(now, "messages were dropped, and no replay endpoint to ask")
	}
	return s.steps
}

// Emptied says that the cache was emptied by a command of ours: the event may
// come late or, from a sleeping engine, never. Nothing is known, truly.
func (s *Sequencer[T]) Emptied() []Step[T] {
	s.open()
	applied, state := s.applied, s.state
	if s.live.ok && (!applied.ok || s.live.v > applied.v) {
		applied = s.live // what came so far was before the command
	}
	s.forget("the cache was emptied by a command")
	s.applied = applied
	if state != idle {
		s.state = following
		s.step(Step[T]{Do: Trust})
	}
	return s.steps
}

// Tick lets time pass.
func (s *Sequencer[T]) Tick(now time.Duration) []Step[T] {
	s.open()
	if s.state != degraded || now < s.retry {
		return s.steps
	}
	if s.tries == 0 && s.cfg.Replay && !s.distrust && s.applied.ok {
		s.tries++
		s.ask(s.applied.v + 1)
		return s.steps
	}
	live, ring := s.live, s.cfg.Replay
	s.cfg.Replay = ring && !s.noRing
	s.forget("recovery failed: beginning anew with what is seen from here on")
	s.begin()
	s.live, s.cfg.Replay = live, ring
	return s.steps
}

// Degraded tells whether nothing of the rank may be credited.
func (s *Sequencer[T]) Degraded() bool { return s.state == degraded }

// Following tells whether nothing is being recovered.
func (s *Sequencer[T]) Following() bool { return s.state == following }

// Partial tells whether something from before the first contact is missing.
func (s *Sequencer[T]) Partial() bool { return s.partial }

// Applied is the last sequence applied.
func (s *Sequencer[T]) Applied() (uint64, bool) { return s.applied.v, s.applied.ok }
