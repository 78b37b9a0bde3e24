package sim

import (
	"fmt"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// ownerBus is the part of the Bus that keeps owners and seeds, and judges every
// write of them as it comes.
type ownerBus struct {
	seeds    map[string]*seedAt // by owner key
	owners   map[string]*core.OwnerPut
	ownerSeq map[string]uint64 // last revision of an owner key, marker included
	ownerRev uint64

	Seeded    int            // seeds written
	Proved    int            // owners added by them
	Ended     map[string]int // ends of seeds: cooldown, given back
	MaxOwners int            // of one key, ever
	broken    []string
}

type seedAt struct {
	put  *core.SeedPut // nil = a marker
	gone *core.SeedGone
	rev  uint64
}

func (s *seedAt) live() bool { return s != nil && s.put != nil && s.put.State == subjects.SeedLive }

func newOwnerBus() ownerBus {
	return ownerBus{seeds: map[string]*seedAt{}, owners: map[string]*core.OwnerPut{}, ownerSeq: map[string]uint64{}, Ended: map[string]int{}}
}

func (b *Bus) breaks(format string, args ...any) {
	b.broken = append(b.broken, fmt.Sprintf(format, args...))
}

// seedBind is an atomic batch of two guarded writes: nothing between, or nothing.
func (b *Bus) seedBind(e core.SeedBind) core.BindAnswer {
	h := e.Held
	a := core.BindAnswer{Handle: e.Handle, Engine: h.Engine, Job: h.Job, ID: h.ID, Bind: h.Bind, Stored: b.w.stamp()}
	key := e.Seed.Key
	if at := b.seeds[key]; at.revision() != e.SeedAt && b.w.opts.Plant != PlantNoSeedGuard {
		a.Answer, a.Actual, a.Seed = core.Conflict, at.revision(), true
		return a
	}
	msgID := h.Key() + "#" + strconv.Itoa(h.Bind)
	if old, ok := b.ids[msgID]; ok && b.w.Now-old.at < window {
		a.Answer = core.Duplicate // a batch tells no sequence
		return a
	}
	if at := b.engineSeq[h.Engine]; at != e.Expected && b.w.opts.Plant != PlantNoGuard {
		a.Answer, a.Actual = core.Conflict, at
		return a
	}
	if b.seeds[key].live() {
		b.breaks("I4: a second live seed of key %s, on %s, while %s is seeded", key, h.Engine, b.seeds[key].put.Engine)
	}
	for _, other := range sorted(b.seeds) {
		if s := b.seeds[other]; s.live() && s.put.Engine == h.Engine {
			b.breaks("I4: engine %s is the target of two live seeds, of %s and %s", h.Engine, other, key)
		}
	}
	b.Seeded++
	b.putSeed(e.Seed, e.TTL)
	a.Answer, a.Seq = core.OK, b.put(h, e.TTL)
	b.ids[msgID] = seen{a.Seq, b.w.Now}
	b.w.Binds++
	return a
}

func (s *seedAt) revision() uint64 {
	if s == nil {
		return 0
	}
	return s.rev
}

func (b *Bus) putSeed(s subjects.Seed, ttl time.Duration) uint64 {
	b.seq++
	p := &core.SeedPut{Seed: s, Revision: b.seq, Stored: b.w.stamp(), TTLMS: ttl.Milliseconds()}
	b.setSeed(s.Key, &seedAt{put: p, rev: b.seq}, ttl)
	b.w.tell(*p)
	return b.seq
}

// setSeed lets the server drop the entry after its TTL, without a word.
func (b *Bus) setSeed(key string, at *seedAt, ttl time.Duration) {
	b.seeds[key] = at
	b.w.after(ttl, func() {
		if b.seeds[key] == at {
			delete(b.seeds, key)
		}
	})
}

// writeSeed ends a seed at exactly its revision.
func (b *Bus) writeSeed(e core.WriteSeed) core.SeedAnswer {
	key := e.Seed.Key
	a := core.SeedAnswer{Key: key, Revision: e.Revision}
	at := b.seeds[key]
	switch {
	case at == nil:
		a.Answer = core.Gone
		return a
	case at.rev != e.Revision:
		a.Answer = core.Superseded
		return a
	}
	if at.live() {
		s := at.put
		if p := b.keys[keyOf(s.Engine, s.Job, s.ID)]; p != nil && p.Bind == s.Bind && p.State == subjects.StateBound && b.running(s) {
			b.breaks("the seed of %s was ended while its rollout %s runs on %s", key, s.Rollout(), s.Engine)
		}
	}
	a.Answer = core.OK
	if !e.GiveBack {
		b.Ended["cooldown"]++
		a.Seq = b.putSeed(e.Seed, e.TTL)
		return a
	}
	b.Ended["given_back"]++
	b.seq++
	g := &core.SeedGone{Key: key, Revision: b.seq, Stored: b.w.stamp(), TTLMS: markerTTL.Milliseconds()}
	b.setSeed(key, &seedAt{gone: g, rev: b.seq}, markerTTL)
	b.w.tell(*g)
	a.Seq = b.seq
	return a
}

// running tells whether the seeded rollout is at work in the life it was bound to.
func (b *Bus) running(s *core.SeedPut) bool {
	n := b.w.Nodes[s.Engine]
	return n != nil && n.alive && !n.away && n.Reg.Epoch == s.Epoch && n.running[s.Rollout()] != nil
}

// writeOwners compares and sets an entry of the owner map, and judges it: not
// more owners than the ceiling, none without proof.
func (b *Bus) writeOwners(e core.WriteOwners) core.OwnersAnswer {
	a := core.OwnersAnswer{Key: e.Key, Revision: e.Revision}
	if at := b.ownerSeq[e.Key]; at != e.Revision {
		a.Answer, a.Actual = core.Conflict, at
		return a
	}
	if set, err := policy.Resolve(b.w.opts.Settings); err == nil && len(e.Owners) > set.OwnerCeiling {
		b.breaks("key %s has %d owners, more than the ceiling of %d", e.Key, len(e.Owners), set.OwnerCeiling)
	}
	b.MaxOwners = max(b.MaxOwners, len(e.Owners))
	for i := range e.Owners {
		b.judgeOwner(e.Key, &e.Owners[i])
	}
	b.ownerRev++
	a.Answer, a.Seq = core.OK, b.ownerRev
	rev := b.ownerRev
	b.ownerSeq[e.Key] = rev
	ttl := e.TTL
	if len(e.Owners) == 0 {
		delete(b.owners, e.Key)
		ttl = markerTTL
		b.w.tell(core.OwnersGone{Key: e.Key, Revision: rev})
	} else {
		p := &core.OwnerPut{Ownership: e.Ownership, Revision: rev, Stored: b.w.stamp(), TTLMS: ttl.Milliseconds()}
		b.owners[e.Key] = p
		b.w.tell(*p)
	}
	b.w.after(ttl, func() {
		if b.ownerSeq[e.Key] == rev {
			delete(b.owners, e.Key)
			delete(b.ownerSeq, e.Key)
		}
	})
	return a
}

func (b *Bus) judgeOwner(key string, o *subjects.Owner) {
	if old := b.owners[key]; old != nil {
		for i := range old.Owners {
			if old.Owners[i].Engine == o.Engine && old.Owners[i].Epoch == o.Epoch {
				return // it was judged when it came
			}
		}
	}
	b.Proved++
	r := b.register[o.Proof.Rollout]
	switch {
	case r == nil || !r.Status.Sample():
		b.breaks("%s owns %s by %s, which was not completed", o.Engine, key, o.Proof.Rollout)
	case r.Engine != o.Engine || r.Epoch != o.Epoch || r.Bind != o.Proof.Bind:
		b.breaks("%s (%s) owns %s by %s, which %s (%s) completed", o.Engine, o.Epoch, key, o.Proof.Rollout, r.Engine, r.Epoch)
	case r.CompletionTokens == nil:
		b.breaks("%s owns %s by %s, whose answer has no usage", o.Engine, key, o.Proof.Rollout)
	}
}

func (b *Bus) ownerSwaps(r *core.ViewSwap) core.ViewSwap {
	for _, k := range sorted(b.seeds) {
		if s := b.seeds[k]; s.put != nil {
			r.Seeds = append(r.Seeds, *s.put)
		} else {
			r.SeedsGone = append(r.SeedsGone, *s.gone)
		}
	}
	own := core.ViewSwap{Kind: core.ViewOwners}
	for _, k := range sorted(b.owners) {
		own.Owners = append(own.Owners, *b.owners[k])
	}
	return own
}

// Owners of a key now, and whether a seed of it is live.
func (b *Bus) Owners(key string) (owners []subjects.Owner, seeding bool) {
	if p := b.owners[key]; p != nil {
		owners = p.Owners
	}
	return owners, b.seeds[key].live()
}

// ownerProblems lists what was broken on the way, and leases that nobody ended
// although their rollout is over.
func (b *Bus) ownerProblems() []string {
	out := b.broken
	for _, k := range sorted(b.seeds) {
		if s := b.seeds[k]; s.live() && b.keys[keyOf(s.put.Engine, s.put.Job, s.put.ID)] == nil {
			out = append(out, fmt.Sprintf("the seed of %s is left behind: %s on %s is over", k, s.put.Rollout(), s.put.Engine))
		}
	}
	return out
}

// seedBind carries one out, or finds after a lost answer what became of it.
func (d *Dispatcher) seedBind(e core.SeedBind) {
	b := d.w.Bus
	a := b.seedBind(e)
	if b.Lost > 0 && a.Answer == core.OK {
		b.Lost--
		d.w.after(100*time.Millisecond, func() { d.answer(d.repeatSeed(e)) })
		return
	}
	d.answer(a)
}

func (d *Dispatcher) repeatSeed(e core.SeedBind) core.BindAnswer {
	a := d.w.Bus.seedBind(e)
	if a.Answer != core.Conflict && a.Answer != core.Duplicate {
		return a
	}
	return d.w.Bus.whose(e.Held, a)
}

// before is what a dispatcher of before owners and seeds makes of an event; nil
// is nothing.
func before(ev core.Event) core.Event {
	switch e := ev.(type) {
	case core.SeedPut, core.SeedGone, core.OwnerPut, core.OwnersGone:
		return nil
	case core.PoolPut:
		e.Settings.Policy, e.Settings.Knobs = "", nil // refused, for what it does not know: the baseline decides
		return e
	case core.ViewSwap:
		if e.Kind == core.ViewOwners {
			return nil
		}
		e.Seeds, e.SeedsGone = nil, nil
		if e.Pool != nil {
			p := before(*e.Pool).(core.PoolPut)
			e.Pool = &p
		}
		return e
	}
	return ev
}
