package core

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/dispatcher/prefix"
)

// Restore makes the core that a checkpoint was taken of. cfg is what that core
// was made with; Explain may differ. What it asked for and was not answered is
// still to be answered.
func Restore(cfg Config, p *Checkpoint) (*Core, error) {
	bad := func(format string, args ...any) (*Core, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{ErrCheckpoint}, args...)...)
	}
	if p.Version < 1 || p.Version > CheckpointVersion {
		return bad("version %d, this program reads 1 to %d", p.Version, CheckpointVersion)
	}
	c := New(cfg)
	if err := c.restoreSettings(p); err != nil {
		return bad("settings: %w", err)
	}
	index, err := prefix.RestoreIndex(prefix.Options{MaxBytes: cfg.MaxIndexBytes}, p.Index)
	if err != nil {
		return bad("%w", err)
	}
	c.index = index
	c.now, c.stepped, c.stopped = p.Now, p.Stepped, p.Stopped
	c.server = serverClock{p.Server.Sample, p.Server.At, p.Server.Floor}
	c.contact.total, c.contact.last = p.Contact.Total, p.Contact.Last
	for _, v := range p.Proof {
		c.proof[v.View] = v.At
	}
	for _, v := range p.Ready {
		c.ready[v] = true
	}
	for _, o := range p.Others {
		c.others[o.Dispatcher] = o.At
	}
	for _, x := range p.Cancels {
		c.cancels[x.Key()] = x
	}
	c.live = slices.Clone(p.Live)
	c.lengths, c.sticky = p.Lengths.Lengths(), p.Sticky.Sticky()
	c.picks, c.frozen, c.freezeFor, c.swept, c.idle = p.Picks, p.Frozen, slices.Clone(p.FreezeFor), p.Swept, p.Idle
	c.atOnce = p.AtOnce
	if !c.answered.restore(p.Answered) {
		return bad("the answered ids")
	}
	c.retired.restore(p.Retired)
	for i := range p.Hand {
		if err := c.restoreItem(&p.Hand[i]); err != nil {
			return bad("%w", err)
		}
	}
	if err := c.restoreEngines(p); err != nil {
		return bad("%w", err)
	}
	for i := range p.Held {
		h := &p.Held[i]
		e := c.engines[h.Put.Engine]
		why, acting := slices.Index(causeNames, h.Cause), slices.Index(actingNames, h.Acting)
		if e == nil || e.held[h.Put.Key()] != nil || why < 0 || acting < 0 {
			return bad("reservation %s on %s", h.Put.Key(), h.Put.Engine)
		}
		x := &held{h.Put, h.Counted, h.Ended, h.Unseen, cause(why), h.Since, stage(acting), h.Next}
		e.held[h.Put.Key()] = x
		c.held[h.Put.Key()] = append(c.held[h.Put.Key()], x)
	}
	if err := c.restoreQueues(p); err != nil {
		return bad("%w", err)
	}
	if err := c.restoreOwners(&p.Owners); err != nil {
		return bad("%w", err)
	}
	c.reindex()
	c.dirty, c.out = p.Dirty, nil
	return c, nil
}

func (c *Core) restoreSettings(p *Checkpoint) error {
	set, err := policy.Resolve(p.Settings)
	if err != nil {
		return err
	}
	d, err := policy.NewDecider(set)
	if err != nil {
		return err
	}
	c.settings, c.policy, c.decider, c.revision = p.Settings, set, d, p.Revision
	return nil
}

func (c *Core) restoreItem(s *ItemState) error {
	it := &item{
		h: Handle(s.Handle), queue: s.Queue, facts: s.Facts, seq: s.Seq, stored: s.Stored,
		lane: s.Lane, at: s.At, ttl: s.TTL, bind: s.Bind, tokens: s.Tokens,
		engine: s.Engine, expected: s.Expected, busy: s.Busy, reason: s.Reason, policy: s.Policy, predict: s.Predict,
		holdUntil: s.HoldUntil, waitSeq: s.WaitSeq, waitUntil: s.WaitUntil, askAt: s.AskAt, held: s.Held, result: s.Result,
		seed: s.Seed, sown: s.Sown, seedAt: s.SeedAt, kept: s.Kept,
	}
	st := slices.Index(itemStageNames[:], s.Stage)
	if c.hand[it.h] != nil || st < 0 || it.lane < 0 || it.lane >= laneCount {
		return fmt.Errorf("message %d in hand", s.Handle)
	}
	c.hand[it.h] = it
	if s.Named {
		c.byKey[it.key()] = it
	}
	c.set(it, itemStage(st))
	if it.stage == itemBinding && it.waitSeq != 0 {
		c.lagging++
	}
	return nil
}

func (c *Core) restoreEngines(p *Checkpoint) error {
	if p.Tags < 0 || p.Tags > len(p.Engines)*64+1<<16 {
		return fmt.Errorf("%d tags", p.Tags)
	}
	clear(c.engines) // servers of the default settings: none
	c.tags = make([]*engine, p.Tags)
	for i := range p.Engines {
		s := &p.Engines[i]
		e := &engine{
			name: s.Name, tag: s.Tag, askAt: s.AskAt, reg: s.Reg, revision: s.Revision,
			known: s.Known, gone: s.Gone, external: s.External, renewed: s.Renewed, past: s.Past,
			seq: s.Seq, held: map[string]*held{}, sum: s.Sum, awaited: s.Awaited, picked: s.Picked, decode: s.Decode, prefill: s.Prefill,
		}
		l := &s.Load
		e.view = loadView{
			load: l.Load, until: l.Until, usable: l.Usable, why: l.Why, newer: l.Newer, fuser: l.Fuser.Fuser(),
			kvBlocked: l.KVBlocked, preempted: l.Preempted, preemptSum: l.PreemptSum, counted: l.Counted,
		}
		healthy := false
		for h, n := range stateNames {
			if n == s.Health {
				e.health, healthy = h, true
			}
		}
		if !healthy || c.engines[e.name] != nil || e.tag < 0 || e.tag >= len(c.tags) || c.tags[e.tag] != nil {
			return fmt.Errorf("engine %s", e.name)
		}
		c.engines[e.name], c.tags[e.tag] = e, e
		var err error
		if s.Binding != 0 {
			if e.binding, err = c.inHand(s.Binding, e.name); err != nil {
				return err
			}
		}
		if e.assigned, err = c.allInHand(s.Assigned, e.name); err != nil {
			return err
		}
	}
	return nil
}

func (c *Core) inHand(h uint64, of string) (*item, error) {
	if it := c.hand[Handle(h)]; it != nil {
		return it, nil
	}
	return nil, fmt.Errorf("%s has message %d, which is not in hand", of, h)
}

func (c *Core) allInHand(hs []uint64, of string) (out []*item, err error) {
	for _, h := range hs {
		it, err := c.inHand(h, of)
		if err != nil {
			return nil, err
		}
		out = append(out, it)
	}
	return out, nil
}

func (c *Core) restoreQueues(p *Checkpoint) error {
	for i := range p.Jobs {
		s := &p.Jobs[i]
		j := &job{name: s.Name, reserved: s.Reserved, count: s.Count, used: s.Used}
		if len(s.Waiting) > laneCount {
			return fmt.Errorf("job %s has %d lanes", s.Name, len(s.Waiting))
		}
		for lane, hs := range s.Waiting {
			var err error
			if j.waiting[lane], err = c.allInHand(hs, "job "+s.Name); err != nil {
				return err
			}
			j.waits += len(hs)
		}
		c.jobs[s.Name] = j
	}
	for i := range p.Queues {
		s := &p.Queues[i]
		c.queues[s.Queue] = &queue{s.Queue, s.Backlog, s.Seen, s.Pulling, s.Next, s.Misfits}
	}
	c.sortQueues()
	return nil
}

func (s *answeredSet) restore(p AnsweredState) bool {
	n := len(p.Ring) / 16
	if len(p.Ring)%16 != 0 || n > s.most || p.Next < 0 || p.Next > 0 && p.Next >= n {
		return false
	}
	s.ring, s.next, s.horizon = make([]entry, n), p.Next, p.Horizon
	for i := range s.ring {
		e := entry{binary.LittleEndian.Uint64(p.Ring[16*i:]), int64(binary.LittleEndian.Uint64(p.Ring[16*i+8:]))}
		s.ring[i] = e
		s.has[e.hash] = e.stored
	}
	return true
}

func (l *retiredLog) restore(p RetiredState) {
	for _, o := range p.Order {
		l.order = append(l.order, retiredAt{o.Key, o.At})
		if o.Current {
			l.byKey[o.Key] = retiredEntry{o.Bind, o.Requeued, o.At}
		}
	}
}
