package core

import (
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// Seeding (S2): the one way to add an owner to a key that has some. A seed is
// written together with the reservation that it is for, and is live exactly as
// long as that: nobody renews it, and a paused dispatcher can do nothing late.
//
//	(none | given back | cooldown over)
//	     | SeedBind: both guards, or nothing is written
//	     v
//	   live --reservation retires, clean, with usage--> owner added by CAS --> cooldown --TTL--> (none)
//	     '--retires without proof, comes back, its engine is lost--> given back --TTL--> (none)
//
// Whoever is alive ends it: the live dispatchers take turns by rendezvous(key),
// and the exact guard makes a second one harmless. What happens to the seeded
// rollout afterwards waits until the seed is given back.

// seedEntry is what stands at a key's seed.
type seedEntry struct {
	SeedPut
	gone   bool // a marker: the seed was given back
	unseen bool // known from our own writes; the follower has not delivered it yet

	// Of a live seed whose reservation was seen to retire.
	retired bool
	proof   *subjects.Owner // nil = unproved
	why     string          // of no proof

	absent  bool          // its reservation is not in the view, since missing
	missing time.Duration // its marker may still be on its way, with the proof
}

func (s *seedEntry) live() bool { return s != nil && !s.gone && s.State == subjects.SeedLive }

// revisionOf is what the next seed expects at the key.
func (s *seedEntry) revisionOf() uint64 {
	if s == nil {
		return 0
	}
	return s.Revision
}

// isOf tells whether the seed was written with that reservation.
func (s *seedEntry) isOf(engineName, rollout string, bind int) bool {
	return s.live() && s.Engine == engineName && s.Rollout() == rollout && s.Bind == bind
}

// overTTL tells whether the server has dropped the entry by its TTL.
func (c *Core) overTTL(stored, ttlMS int64, grace time.Duration) bool {
	return ttlMS > 0 && c.server.since(stored, c.now) > time.Duration(ttlMS)*time.Millisecond+grace
}

// cooling tells whether the key's last seed was proven a moment ago.
func (c *Core) cooling(k *ownerKey) bool {
	s := k.seed
	return s != nil && !s.gone && s.State == subjects.SeedCooldown && !c.overTTL(s.Stored, s.TTLMS, 0)
}

// seeding tells whether a seed of the key is live, on its way, or being looked
// for in the view.
func (c *Core) seeding(k *ownerKey) bool {
	return k.seed.live() || k.flight != nil || k.awaitSeq > c.seen && c.now < k.awaitUntil
}

// seedBind is the batch for an item that was just decided to be a seed: in the
// same step, on the same view, so that everything it was chosen on is what is
// known now. What changes between here and the server is caught by the guards:
// a move of the engine's keys, or of the key's seed.
func (c *Core) seedBind(it *item, ttl time.Duration) SeedBind {
	k := c.ownerKey(it.owner)
	k.flight = it
	c.flying[it.engine] = true
	h := &it.held
	it.seedAt = k.seed.revisionOf()
	it.sown = subjects.Seed{
		Key: it.owner, State: subjects.SeedLive, Engine: h.Engine, Job: h.Job, ID: h.ID, Bind: h.Bind,
		Epoch: h.Epoch, WeightVersion: h.WeightVersion, Anchor: h.Anchor, Dispatcher: c.cfg.Dispatcher,
	}
	return SeedBind{Handle: it.h, Held: it.held, Expected: it.expected, TTL: ttl, Seed: it.sown, SeedAt: it.seedAt}
}

// landed ends the flight of a seed; its answer is dealt with as any bind's.
func (c *Core) landed(it *item, a BindAnswer) {
	if !it.seed {
		return
	}
	k := c.ownerKey(it.sown.Key)
	if k.flight == it {
		k.flight = nil
	}
	delete(c.flying, it.engine)
	switch {
	case a.Answer == OK:
		c.putSeed(SeedPut{Seed: it.sown, Revision: a.Seq - 1, Stored: a.Stored, TTLMS: it.ttlMS()}, true)
		c.transition(k, "seeded", it.sown.Engine, it.sown.Rollout(), "")
	case a.Answer == Conflict && a.Seed && a.Actual < it.seedAt:
		// What stood there has expired at the server.
		if k.seed != nil && k.seed.Revision == it.seedAt && !k.seed.live() {
			k.seed = nil
		}
	case a.Answer == Conflict && a.Seed:
		k.awaitSeq, k.awaitUntil = a.Actual, c.now+c.t.ViewWait
	}
	c.forgetKey(k)
}

// putSeed takes what stands at a seed's key.
func (c *Core) putSeed(p SeedPut, unseen bool) {
	if !unseen {
		c.server.observe(p.Stored, c.now)
	}
	k := c.ownerKey(p.Key)
	if old := k.seed; old != nil && old.Revision >= p.Revision {
		old.unseen = old.unseen && (unseen || old.Revision != p.Revision)
		return
	}
	c.setSeed(k, &seedEntry{SeedPut: p, unseen: unseen})
	c.retire(k) // its reservation may be over already
	c.attend(k)
}

// goneSeed takes the marker of a seed.
func (c *Core) goneSeed(g SeedGone, unseen bool) {
	if !unseen {
		c.server.observe(g.Stored, c.now)
	}
	k := c.ownerKey(g.Key)
	if old := k.seed; old != nil && old.Revision >= g.Revision {
		old.unseen = old.unseen && (unseen || old.Revision != g.Revision)
		return
	}
	c.setSeed(k, &seedEntry{gone: true, unseen: unseen, SeedPut: SeedPut{
		Seed: subjects.Seed{Key: g.Key}, Revision: g.Revision, Stored: g.Stored, TTLMS: g.TTLMS}})
	c.attend(k)
}

// setSeed replaces what stands at a key's seed and keeps the engines' count.
func (c *Core) setSeed(k *ownerKey, s *seedEntry) {
	if k.seed.live() {
		delete(c.seeded, k.seed.Engine+"/"+k.seed.Rollout())
		if c.targets[k.seed.Engine]--; c.targets[k.seed.Engine] <= 0 {
			delete(c.targets, k.seed.Engine)
		}
	}
	k.seed = s
	if s.live() {
		c.seeded[s.Engine+"/"+s.Rollout()] = k
		c.targets[s.Engine]++
	}
	c.dirty = true
}

// swapSeeds replaces the seeds by those of a complete view, which reaches to
// newest. Our own that no follower has delivered yet are kept.
func (c *Core) swapSeeds(v ViewSwap, newest uint64) {
	fresh := make(map[string]uint64, len(v.Seeds)+len(v.SeedsGone))
	for _, s := range v.Seeds {
		fresh[s.Key] = s.Revision
	}
	for _, g := range v.SeedsGone {
		fresh[g.Key] = g.Revision
	}
	for _, name := range sortedKeys(c.keys) {
		k := c.keys[name]
		if s := k.seed; s != nil && fresh[name] != s.Revision && !(s.unseen && s.Revision > newest) {
			c.setSeed(k, nil)
			c.forgetKey(k)
		}
	}
	for _, s := range v.Seeds {
		c.putSeed(s, false)
	}
	for _, g := range v.SeedsGone {
		c.goneSeed(g, false)
	}
	c.seen = newest
}

// newestSeed is the highest revision of a view's seeds.
func newestSeed(v ViewSwap) uint64 {
	var newest uint64
	for i := range v.Seeds {
		newest = max(newest, v.Seeds[i].Revision)
	}
	for i := range v.SeedsGone {
		newest = max(newest, v.SeedsGone[i].Revision)
	}
	return newest
}

// passedBy notes how far the follower of reservations and seeds has come.
func (c *Core) passedBy(revision uint64) { c.seen = max(c.seen, revision) }

// released is told of every retirement, before the reservation leaves the view:
// of a seed's it is the end, with or without proof; of others it may be the
// proof of a key's first owner.
func (c *Core) released(h *held, g ReservationGone) {
	k := c.seeded[g.Engine+"/"+subjects.RolloutKey(g.Job, g.ID)]
	switch {
	case k != nil && k.seed.Bind <= g.Bind && k.seed.Revision < g.Revision:
		s := k.seed
		s.retired = true
		s.proof, s.why = c.prove(claim{s.Engine, s.Epoch, s.WeightVersion, s.Anchor, s.Rollout(), s.Bind}, g)
		c.attend(k)
	case h != nil && h.OwnerKey != "" && h.State == subjects.StateBound:
		c.ordinary(h, g)
	}
}

// retire finds the end of a seed by looking at the whole view: nothing is said
// when a marker has expired unseen.
func (c *Core) retire(k *ownerKey) {
	s := k.seed
	if !s.live() || s.retired || c.swapping || s.Revision >= c.seen {
		return // the reservation comes right behind its seed
	}
	h := c.find(s.Engine, s.Rollout())
	if h != nil && h.Bind <= s.Bind && h.State == subjects.StateBound {
		return
	}
	if h != nil && h.State == subjects.StateReturned {
		s.retired, s.why = true, "returned"
		return
	}
	if !s.absent {
		s.absent, s.missing = true, c.now
	}
	if c.now-s.missing >= c.t.ContactFresh {
		s.retired, s.why = true, "unseen"
	}
}

// giveBackFirst holds up the end of a seeded reservation until its seed is given
// back: then it is ordinary traffic. True says that this is under way.
func (c *Core) giveBackFirst(h *held) bool {
	k := c.seeded[h.Engine+"/"+h.Key()]
	if k == nil || !k.seed.isOf(h.Engine, h.Key(), h.Bind) || h.cause == causeAnswered {
		return false
	}
	if k.acting == actNone {
		k.seed.retired, k.seed.proof, k.seed.why = true, nil, "failed"
		c.endSeed(k)
	}
	h.next = c.now + c.t.Sweep
	return true
}

// endSeed writes the end of a retired seed: the owner first, then the cooldown;
// or that it is given back.
func (c *Core) endSeed(k *ownerKey) {
	s := k.seed
	end := WriteSeed{Seed: s.Seed, Revision: s.Revision}
	if s.proof != nil {
		if s.why = c.doubt(s.proof); s.why != "" {
			s.proof = nil
		}
	}
	if s.proof != nil && c.mayWrite() {
		if k.index(s.proof.Engine, s.proof.Epoch) < 0 || k.isStruck(s.proof) {
			if next, ok := c.with(k, s.proof); ok {
				c.writeOwners(k, next, "proved")
				return
			}
			c.transition(k, "over_ceiling", s.Engine, s.Rollout(), "")
		}
		end.Seed.State, end.TTL = subjects.SeedCooldown, c.policy.SeedCooldown
	} else {
		end.GiveBack = true
	}
	k.acting, k.actingAt, k.givingBack, k.ending, k.endingWhy = actSeed, s.Revision, end.GiveBack, end.Seed, s.why
	c.emit(end)
}

// seedAnswer is the answer to endSeed's write.
func (c *Core) seedAnswer(a SeedAnswer) {
	k := c.keys[a.Key]
	if k == nil || k.acting != actSeed || k.actingAt != a.Revision {
		return
	}
	k.acting = actNone
	s := k.seed
	at := s != nil && s.Revision == a.Revision // else the view was quicker
	switch a.Answer {
	case OK:
		stored := c.server.estimate(c.now)
		if k.givingBack {
			c.transition(k, "given_back", k.ending.Engine, k.ending.Rollout(), k.endingWhy)
			c.goneSeed(SeedGone{Key: a.Key, Revision: a.Seq, Stored: stored, TTLMS: markerMS}, true)
			break
		}
		c.transition(k, "cooldown", k.ending.Engine, k.ending.Rollout(), "")
		c.putSeed(SeedPut{Seed: k.ending, Revision: a.Seq, Stored: stored, TTLMS: c.policy.SeedCooldown.Milliseconds()}, true)
	case Gone:
		if at { // expired, or given back so long ago that its marker is
			c.setSeed(k, nil)
		}
	default:
		if at {
			k.next = c.now + c.t.Backoff // somebody else's end is on its way, or NATS refuses
		}
	}
	c.attend(k)
}

// markerMS is how long the marker of a seed that is given back lives.
const markerMS = 60_000

// provable tells whether an engine's cache can be followed, so that what becomes
// of an owner there is seen.
func (c *Core) provable(e *engine) bool {
	return e.reg.Events == eventsExact || c.policy.ApproximateCredit
}

// eventsExact is what an engine with cache events registers.
const eventsExact = "exact"

// seedsOwners tells whether this pool's settings let owners be added.
func (c *Core) seedsOwners() bool {
	return c.policy.Policy == policy.OwnerPressure && c.policy.Mode == subjects.ModeEnforce
}

func (c *Core) mayWrite() bool { return c.seedsOwners() && c.ready[ViewOwners] }
