package core

import (
	"encoding/binary"
)

// CheckpointBytes is about what a checkpoint takes now, so that a caller can do
// without one that is too large.
func (c *Core) CheckpointBytes() int64 {
	return c.index.StateBytes() + int64(len(c.answered.ring))*16 + int64(len(c.retired.order))*64 +
		int64(len(c.held)+len(c.hand)+2*len(c.keys))*300 + int64(len(c.engines))*600
}

// Checkpoint takes the core's state. It shares memory with the core: it is
// valid until the next Step, and is not to be changed.
func (c *Core) Checkpoint() *Checkpoint {
	p := &Checkpoint{
		Version: CheckpointVersion, Core: Version,
		Now: c.now, Stepped: c.stepped, Stopped: c.stopped, Dirty: c.dirty,
		Server: ServerClock{c.server.sample, c.server.at, c.server.floor}, Contact: ContactClock{c.contact.total, c.contact.last},
		Settings: c.settings, Revision: c.revision, Tags: len(c.tags), Live: c.live,
		Answered: c.answered.state(), Retired: c.retired.state(),
		Lengths: c.lengths.State(), Sticky: c.sticky.State(), Index: c.index.AppendState(nil),
		Picks: c.picks, Frozen: c.frozen, FreezeFor: c.freezeFor, Swept: c.swept, AtOnce: c.atOnce, Idle: c.idle,
	}
	for _, v := range sortedKeys(c.proof) {
		p.Proof = append(p.Proof, ViewProof{v, c.proof[v]})
	}
	for _, v := range sortedKeys(c.ready) {
		if c.ready[v] {
			p.Ready = append(p.Ready, v)
		}
	}
	for _, n := range c.names {
		p.Engines = append(p.Engines, c.engines[n].checkpoint())
	}
	for _, d := range sortedKeys(c.others) {
		p.Others = append(p.Others, OtherState{d, c.others[d]})
	}
	for _, k := range sortedKeys(c.cancels) {
		p.Cancels = append(p.Cancels, c.cancels[k])
	}
	for _, k := range sortedKeys(c.held) {
		for _, h := range c.held[k] {
			p.Held = append(p.Held, HeldState{h.ReservationPut, h.counted, h.ended, h.unseen, causeNames[h.cause], h.since, actingNames[h.acting], h.next})
		}
	}
	for _, n := range sortedKeys(c.jobs) {
		j := c.jobs[n]
		s := JobState{Name: n, Reserved: j.reserved, Count: j.count, Used: j.used}
		if j.waits > 0 {
			for _, lane := range j.waiting {
				s.Waiting = append(s.Waiting, handles(lane))
			}
		}
		p.Jobs = append(p.Jobs, s)
	}
	for _, h := range sortedKeys(c.hand) {
		p.Hand = append(p.Hand, c.itemState(c.hand[h]))
	}
	for _, k := range c.order {
		q := c.queues[k]
		p.Queues = append(p.Queues, QueueState{q.Queue, q.backlog, q.seen, q.pulling, q.next, q.misfits})
	}
	p.Owners = c.ownerBook.state()
	return p
}

func handles(items []*item) []uint64 {
	out := make([]uint64, 0, len(items))
	for _, it := range items {
		out = append(out, uint64(it.h))
	}
	return out
}

func (e *engine) checkpoint() EngineState {
	v := &e.view
	s := EngineState{
		Name: e.name, Tag: e.tag, AskAt: e.askAt, Reg: e.reg, Revision: e.revision,
		Known: e.known, Gone: e.gone, External: e.external, Renewed: e.renewed, Health: stateNames[e.health], Past: e.past,
		Seq: e.seq, Sum: e.sum, Assigned: handles(e.assigned), Awaited: e.awaited, Picked: e.picked, Decode: e.decode, Prefill: e.prefill,
		Load: LoadState{
			Load: v.load, Until: v.until, Usable: v.usable, Why: v.why, Newer: v.newer, Fuser: v.fuser.State(),
			KVBlocked: v.kvBlocked, Preempted: v.preempted, PreemptSum: v.preemptSum, Counted: v.counted,
		},
	}
	if e.binding != nil {
		s.Binding = uint64(e.binding.h)
	}
	return s
}

func (c *Core) itemState(it *item) ItemState {
	return ItemState{
		Handle: uint64(it.h), Queue: it.queue, Facts: it.facts, Seq: it.seq, Stored: it.stored,
		Lane: it.lane, At: it.at, Stage: itemStageNames[it.stage], TTL: it.ttl, Bind: it.bind, Tokens: it.tokens,
		Engine: it.engine, Expected: it.expected, Busy: it.busy, Reason: it.reason, Policy: it.policy, Predict: it.predict,
		HoldUntil: it.holdUntil, WaitSeq: it.waitSeq, WaitUntil: it.waitUntil, AskAt: it.askAt,
		Held: it.held, Result: it.result, Named: c.byKey[it.key()] == it,
		Seed: it.seed, Sown: it.sown, SeedAt: it.seedAt, Kept: it.kept,
	}
}

func (s *answeredSet) state() AnsweredState {
	b := make([]byte, 0, 16*len(s.ring))
	for _, e := range s.ring {
		b = binary.LittleEndian.AppendUint64(b, e.hash)
		b = binary.LittleEndian.AppendUint64(b, uint64(e.stored))
	}
	return AnsweredState{b, s.next, s.horizon}
}

func (l *retiredLog) state() RetiredState {
	s := RetiredState{Order: make([]RetiredBind, 0, len(l.order))}
	for _, o := range l.order {
		b := RetiredBind{Key: o.key, At: o.at}
		if e, ok := l.byKey[o.key]; ok && e.at == o.at {
			b.Current, b.Bind, b.Requeued = true, e.bind, e.requeued
		}
		s.Order = append(s.Order, b)
	}
	return s
}
