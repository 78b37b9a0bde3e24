package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// ownerKey is all that is known of one beginning of prompts.
//
//	cold: no owner counts. The engine of its oldest reservation is provisional;
//	  the first clean completion with usage there makes it the first owner.
//	owned: the owners that count keep its work; a seed alone adds another.
//
// An owner counts while its engine is of the same epoch and weight version and
// has not evicted the anchor. The map is changed by compare and set alone, by
// the live dispatcher whose turn it is.
type ownerKey struct {
	name   string
	entry  *OwnerPut // as in the map; nil = none
	marker uint64    // revision of the marker that stands there instead
	held   []*held   // its reservations, any engine and state
	seed   *seedEntry

	flight     *item // whose seed is on its way to NATS
	awaitSeq   uint64
	awaitUntil time.Duration // a seed that a refusal told of has to come by the view

	struck  []strike        // owners of entry that count no more
	first   *subjects.Owner // proven while the key was cold
	refresh bool            // an owner was used: the entry's TTL starts anew

	acting     acting // what is being written
	actingAt   uint64 // on which revision
	writing    []subjects.Owner
	writingWhy string
	givingBack bool
	ending     subjects.Seed
	endingWhy  string
	since      time.Duration
	waiting    bool          // since is meaningful
	next       time.Duration // not before
}

type strike struct{ engine, epoch string }

type acting uint8

const (
	actNone acting = iota
	actSeed
	actOwners
)

// ownerBook is what a core knows of owners and seeds.
type ownerBook struct {
	keys     map[string]*ownerKey
	attended map[string]bool      // keys that may need something done
	seeded   map[string]*ownerKey // by <engine>/<rollout> of their live seed
	targets  map[string]int       // live seeds by engine
	flying   map[string]bool      // engines that a seed is on its way to
	ownedBy  map[string][]string  // sorted keys by the engines of their entries
	anchors  map[uint64][]string  // and by the anchors

	seen      uint64 // how far the follower of reservations and seeds has come
	mapSeen   uint64 // and that of the owner map
	swapping  bool   // within one step
	keysSwept time.Duration
	keeping   map[string]bool // within one pass of place: keys whose owners cannot take anything
	kept      int             // items that wait for owners, after the last pass
}

func newOwnerBook() ownerBook {
	return ownerBook{
		keys: map[string]*ownerKey{}, attended: map[string]bool{}, seeded: map[string]*ownerKey{}, targets: map[string]int{},
		flying: map[string]bool{}, ownedBy: map[string][]string{}, anchors: map[uint64][]string{}, keeping: map[string]bool{},
	}
}

// ownerKey is made when something is known of it; forgetKey ends it.
func (c *Core) ownerKey(name string) *ownerKey {
	k := c.keys[name]
	if k == nil {
		k = &ownerKey{name: name}
		c.keys[name] = k
	}
	return k
}

func (c *Core) forgetKey(k *ownerKey) {
	if k.entry == nil && len(k.held) == 0 && k.seed == nil && k.flight == nil && k.first == nil && k.acting == actNone && k.awaitUntil <= c.now {
		delete(c.keys, k.name)
		delete(c.attended, k.name)
	}
}

// keyed and unkeyed keep a key's reservations.
func (c *Core) keyed(h *held) {
	if h.OwnerKey != "" {
		k := c.ownerKey(h.OwnerKey)
		k.held = append(k.held, h)
	}
	if k := c.seeded[h.Engine+"/"+h.Key()]; k != nil && h.State == subjects.StateReturned {
		c.attend(k)
	}
}

func (c *Core) unkeyed(h *held) {
	if k := c.keys[h.OwnerKey]; k != nil {
		if i := slices.Index(k.held, h); i >= 0 {
			last := len(k.held) - 1
			k.held[i], k.held[last] = k.held[last], nil
			k.held = k.held[:last]
		}
		c.forgetKey(k)
	}
}

// provisional is the oldest live reservation of the key, by stream sequence and
// so the same for all observers; the seeded one is followed by nobody.
func (k *ownerKey) provisional() *held {
	var oldest *held
	for _, h := range k.held {
		if h.counted && h.State == subjects.StateBound && !k.seed.isOf(h.Engine, h.Key(), h.Bind) &&
			(oldest == nil || h.Revision < oldest.Revision) {
			oldest = h
		}
	}
	return oldest
}

// owners are those of the map, nil when it has none or the entry's time is over.
func (c *Core) owners(k *ownerKey) []subjects.Owner {
	if k.entry == nil || c.overTTL(k.entry.Stored, k.entry.TTLMS, 0) {
		return nil
	}
	return k.entry.Owners
}

// counts tells whether an owner of the map is one now.
func (c *Core) counts(k *ownerKey, o *subjects.Owner) bool {
	return c.claims(o) && !c.engines[o.Engine].lost() && !k.isStruck(o)
}

func (k *ownerKey) isStruck(o *subjects.Owner) bool {
	return slices.Contains(k.struck, strike{o.Engine, o.Epoch})
}

// claims tells whether the owner's engine lives the same life, with the same weights.
func (c *Core) claims(o *subjects.Owner) bool {
	e := c.engines[o.Engine]
	return e != nil && e.known && !e.external && e.reg.Epoch == o.Epoch && sameVersion(e.reg.WeightVersion, o.WeightVersion)
}

func sameVersion(a, b *int64) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// index finds an engine's life in the map's entry.
func (k *ownerKey) index(engineName, epoch string) int {
	if k.entry == nil {
		return -1
	}
	return slices.IndexFunc(k.entry.Owners, func(o subjects.Owner) bool { return o.Engine == engineName && o.Epoch == epoch })
}

// counting is how many owners the key has now.
func (c *Core) counting(k *ownerKey) int {
	n := 0
	all := c.owners(k)
	for i := range all {
		if c.counts(k, &all[i]) {
			n++
		}
	}
	return n
}

// with is the entry with one owner more: those that count, and the new one. Not
// beyond the ceiling.
func (c *Core) with(k *ownerKey, o *subjects.Owner) ([]subjects.Owner, bool) {
	next := c.remaining(k)
	if len(next) >= c.policy.OwnerCeiling {
		return nil, false
	}
	return append(next, *o), true
}

// remaining are the owners that count.
func (c *Core) remaining(k *ownerKey) []subjects.Owner {
	var out []subjects.Owner
	for _, o := range c.owners(k) {
		if c.counts(k, &o) {
			out = append(out, o)
		}
	}
	return out
}

// claim is what a reservation's clean end would prove.
type claim struct {
	engine, epoch string
	version       *int64
	anchor        uint64
	rollout       string
	bind          int
}

// prove judges a retirement: only an answer of that very run, a sample, with
// usage. Never the dispatch, never the first byte.
func (c *Core) prove(x claim, g ReservationGone) (*subjects.Owner, string) {
	o := &subjects.Owner{Engine: x.engine, Epoch: x.epoch, WeightVersion: x.version, Anchor: x.anchor,
		Proof: subjects.Proof{Rollout: x.rollout, Bind: x.bind, CachedTokens: g.CachedTokens, At: g.Stored}}
	switch {
	case g.Outcome != subjects.OutcomeAnswered || !g.Status.Sample() || g.Bind != x.bind || g.Epoch != x.epoch:
		return nil, "failed"
	case g.CompletionTokens == nil || g.PromptTokens <= 0:
		return nil, "no_usage"
	}
	return o, ""
}

// doubt says why a proof does not count here and now, "" when it does: its
// engine lives another life, or nobody could follow its cache. It is asked when
// the engines are known.
func (c *Core) doubt(o *subjects.Owner) string {
	switch {
	case !c.claims(o):
		return "other_life"
	case !c.provable(c.engines[o.Engine]):
		return "unprovable"
	}
	return ""
}

// ordinary is the end of a reservation that is no seed's: it may make a cold
// key's first owner, keeps an owner's entry alive, and never adds another.
func (c *Core) ordinary(h *held, g ReservationGone) {
	k := c.ownerKey(h.OwnerKey)
	if !c.mayWrite() {
		return
	}
	if all := c.owners(k); c.counting(k) > 0 {
		i := k.index(h.Engine, h.Epoch)
		if i >= 0 && c.counts(k, &all[i]) && g.Status.Sample() && 2*c.server.since(k.entry.Stored, c.now) > time.Duration(k.entry.TTLMS)*time.Millisecond {
			k.refresh = true
			c.attend(k)
		}
		return
	}
	if p := k.provisional(); p == nil || p.Engine != h.Engine {
		c.count("owner_proofs", "stray")
		return
	}
	o, why := c.prove(claim{h.Engine, h.Epoch, h.WeightVersion, h.Anchor, h.Key(), h.Bind}, g)
	if o != nil {
		why = c.doubt(o)
	}
	if why != "" {
		c.count("owner_proofs", why)
		return
	}
	c.count("owner_proofs", "clean")
	k.first = o
	c.attend(k)
}

// attend looks at a key now and at every sweep until nothing is to be done.
func (c *Core) attend(k *ownerKey) {
	c.attended[k.name] = true
	c.work(k)
}

// sweepKeys works on what is to be done, and forgets what has expired.
func (c *Core) sweepKeys() {
	for _, name := range sortedKeys(c.attended) {
		if k := c.keys[name]; k != nil {
			c.work(k)
		} else {
			delete(c.attended, name)
		}
	}
	if c.now-c.keysSwept < c.t.AgingStep {
		return
	}
	c.keysSwept = c.now
	for _, name := range sortedKeys(c.keys) {
		k := c.keys[name]
		if k.entry != nil && c.overTTL(k.entry.Stored, k.entry.TTLMS, expiryGrace) {
			c.setEntry(k, nil)
		}
		if s := k.seed; s != nil && c.overTTL(s.Stored, s.TTLMS, expiryGrace) {
			c.setSeed(k, nil)
		}
		c.forgetKey(k)
	}
}

// expiryGrace is how long after its TTL an entry is surely gone at the server.
const expiryGrace = 2 * time.Second

// work does the next thing that a key needs, when it is this dispatcher's turn.
func (c *Core) work(k *ownerKey) {
	if k.acting != actNone || c.now < k.next || c.stopped || c.swapping || !c.knows() || !c.freshView(ViewReservations) {
		return
	}
	c.retire(k)
	owners, why, due := c.owed(k)
	seed := k.seed.live() && k.seed.retired
	if !seed && !due {
		k.waiting = false
		if !k.seed.live() && k.first == nil {
			delete(c.attended, k.name)
			c.forgetKey(k)
		}
		return
	}
	if !k.waiting {
		k.waiting, k.since = true, c.now
	}
	if c.now < k.since+time.Duration(turn(k.name, c.cfg.Dispatcher, c.live))*c.t.RequeueStagger {
		return
	}
	switch {
	case !seed:
		c.writeOwners(k, owners, why)
	case k.seed.proof != nil && c.seedsOwners() && !c.ready[ViewOwners]:
		// The map is on its way.
	default:
		c.endSeed(k)
	}
}

// knows tells whether the views that owners and seeds are judged by are whole:
// what runs, by whom, and whether this pool has owners at all.
func (c *Core) knows() bool {
	return c.ready[ViewReservations] && c.ready[ViewEngines] && c.ready[ViewPools]
}

// owed is what the map's entry should be, and whether that is to be written:
// without owners that count no more for good, with the first owner of a cold
// key, or as it is with a new TTL.
func (c *Core) owed(k *ownerKey) (next []subjects.Owner, why string, due bool) {
	if !c.mayWrite() {
		return nil, "", false
	}
	all := c.owners(k)
	for i := range all {
		if o := &all[i]; c.over(k, o) {
			due, why = true, "struck"
		} else {
			next = append(next, *o)
		}
	}
	if k.first != nil {
		if c.counting(k) > 0 || !c.claims(k.first) {
			k.first = nil
		} else if n, ok := c.with(k, k.first); ok {
			return n, "first", true
		}
	}
	if k.refresh && !due {
		k.refresh = false
		return next, "refreshed", len(next) > 0
	}
	return next, why, due
}

// over tells whether an owner is to be struck off: evicted, cleared, or of
// another life or weights than its engine is known to have. An engine that is
// merely away may come back as it was.
func (c *Core) over(k *ownerKey, o *subjects.Owner) bool {
	if k.isStruck(o) {
		return true
	}
	e := c.engines[o.Engine]
	return e != nil && e.known && !e.lost() && !c.claims(o)
}

func (c *Core) writeOwners(k *ownerKey, owners []subjects.Owner, why string) {
	k.acting, k.actingAt, k.writing, k.writingWhy = actOwners, 0, owners, why
	if k.entry != nil && !c.overTTL(k.entry.Stored, k.entry.TTLMS, expiryGrace) {
		k.actingAt = k.entry.Revision
	} else if k.entry != nil {
		c.setEntry(k, nil)
	}
	if k.marker != 0 && k.entry == nil {
		k.actingAt = k.marker
	}
	c.emit(WriteOwners{Ownership: subjects.Ownership{SchemaVersion: subjects.SchemaVersion, Key: k.name, Owners: owners},
		Revision: k.actingAt, TTL: c.policy.OwnerTTL})
}

func (c *Core) ownersAnswer(a OwnersAnswer) {
	k := c.keys[a.Key]
	if k == nil || k.acting != actOwners || k.actingAt != a.Revision {
		return
	}
	k.acting = actNone
	switch {
	case a.Answer == OK:
		k.first, k.refresh = nil, false
		c.wroteOwners(k, a.Seq)
	case a.Answer == Conflict && a.Actual < a.Revision:
		k.marker = a.Actual // what stood there has expired
		c.setEntry(k, nil)
		c.attend(k)
	case a.Answer == Conflict && k.entry == nil && a.Actual <= c.mapSeen:
		k.marker = a.Actual // the view has passed it and holds nothing: a marker stands there
		c.attend(k)
	case a.Answer == Conflict && (k.entry == nil || k.entry.Revision < a.Actual):
		k.next = c.now + c.t.ViewWait // somebody else's entry is on its way
	default:
		k.next = c.now + c.t.Backoff
	}
}

// wroteOwners takes what we wrote for seen.
func (c *Core) wroteOwners(k *ownerKey, seq uint64) {
	owners, why := k.writing, k.writingWhy
	k.writing = nil
	if len(owners) == 0 {
		c.goneOwners(OwnersGone{Key: k.name, Revision: seq})
		c.transition(k, why, "", "", "")
		return
	}
	o := &owners[len(owners)-1]
	if why == "proved" || why == "first" {
		k.struck = slices.DeleteFunc(k.struck, func(s strike) bool { return s == strike{o.Engine, o.Epoch} })
	}
	c.putOwners(OwnerPut{Ownership: subjects.Ownership{Key: k.name, Owners: owners}, Revision: seq,
		Stored: c.server.estimate(c.now), TTLMS: c.policy.OwnerTTL.Milliseconds()})
	c.transition(k, why, o.Engine, o.Proof.Rollout, "")
	c.attend(k)
}

// putOwners takes an entry of the map.
func (c *Core) putOwners(p OwnerPut) {
	c.server.observe(p.Stored, c.now)
	k := c.ownerKey(p.Key)
	if max(k.marker, k.revision()) >= p.Revision {
		return
	}
	k.marker, k.next = 0, 0
	c.setEntry(k, &p)
	c.attend(k)
}

// goneOwners takes its deletion.
func (c *Core) goneOwners(g OwnersGone) {
	k := c.ownerKey(g.Key)
	if max(k.marker, k.revision()) >= g.Revision {
		return
	}
	k.marker, k.next = g.Revision, 0
	c.setEntry(k, nil)
	c.attend(k)
}

func (k *ownerKey) revision() uint64 {
	if k.entry == nil {
		return 0
	}
	return k.entry.Revision
}

// setEntry replaces an entry and keeps what finds keys by engine and by anchor.
func (c *Core) setEntry(k *ownerKey, p *OwnerPut) {
	if k.entry != nil {
		for i := range k.entry.Owners {
			o := &k.entry.Owners[i]
			unlist(c.ownedBy, o.Engine, k.name)
			unlist(c.anchors, o.Anchor, k.name)
		}
	}
	k.entry = p
	if p == nil {
		k.struck = nil
	} else {
		k.struck = slices.DeleteFunc(k.struck, func(s strike) bool { return k.index(s.engine, s.epoch) < 0 })
		for i := range p.Owners {
			o := &p.Owners[i]
			list(c.ownedBy, o.Engine, k.name)
			if o.Anchor != 0 {
				list(c.anchors, o.Anchor, k.name)
			}
		}
	}
	c.dirty = true
}

func list[K cmp.Ordered](m map[K][]string, at K, name string) {
	if i, has := slices.BinarySearch(m[at], name); !has {
		m[at] = slices.Insert(m[at], i, name)
	}
}

func unlist[K cmp.Ordered](m map[K][]string, at K, name string) {
	if i, has := slices.BinarySearch(m[at], name); has {
		if m[at] = slices.Delete(m[at], i, i+1); len(m[at]) == 0 {
			delete(m, at)
		}
	}
}

// swapOwners replaces the map by a complete view of it.
func (c *Core) swapOwners(v ViewSwap) {
	fresh := make(map[string]bool, len(v.Owners))
	for _, p := range v.Owners {
		fresh[p.Key] = true
	}
	for _, name := range sortedKeys(c.keys) {
		k := c.keys[name]
		if k.marker = 0; !fresh[name] && k.entry != nil {
			c.setEntry(k, nil)
		}
		if k.entry != nil {
			k.entry.Revision = 0 // the stream may have been made anew
		}
		c.forgetKey(k)
	}
	c.mapSeen = 0
	for _, p := range v.Owners {
		c.mapSeen = max(c.mapSeen, p.Revision)
		c.putOwners(p)
	}
}

// evicted strikes off whom an engine's cache events have made no owner: its
// cache has lost the anchor, was cleared, or turned out not to have it.
func (c *Core) evicted(engineName string, names []string, why string, all bool) {
	e := c.engines[engineName]
	if e == nil || !c.provable(e) {
		return // a view that is only estimated strikes nobody
	}
	for _, name := range slices.Clone(names) {
		k := c.keys[name]
		if k == nil || k.entry == nil {
			continue
		}
		for i := range k.entry.Owners {
			o := &k.entry.Owners[i]
			holds, known := c.index.Holds(o.Engine, o.Anchor)
			if o.Engine == engineName && c.claims(o) && (all || known && o.Anchor != 0 && !holds) && !k.isStruck(o) {
				k.struck = append(k.struck, strike{o.Engine, o.Epoch})
				c.count("owners_struck", why)
				c.dirty = true
			}
		}
		c.attend(k)
	}
}

// cacheMoved is told of every cache event, after the index has taken it.
func (c *Core) cacheMoved(ev Cache) {
	switch {
	case len(c.ownedBy[ev.Engine]) == 0:
	case ev.Op == "cleared":
		c.evicted(ev.Engine, c.ownedBy[ev.Engine], "cleared", true)
	case ev.Op == "removed":
		for _, b := range ev.Blocks {
			if names := c.anchors[b]; len(names) > 0 {
				c.evicted(ev.Engine, names, "evicted", false)
			}
		}
	}
}

// cacheKnown is told when a whole view of an engine's cache was taken. A proof
// may be newer than the view that it says: those get a while.
func (c *Core) cacheKnown(engineName string) {
	var old []string
	for _, name := range c.ownedBy[engineName] {
		if k := c.keys[name]; k != nil && k.entry != nil && c.server.since(k.entry.Stored, c.now) > proofGrace {
			old = append(old, name)
		}
	}
	c.evicted(engineName, old, "evicted", false)
}

// proofGrace is how much later than a proof the cache events of its run may come.
const proofGrace = 10 * time.Second

// engineMoved looks at the keys of an engine that has a new life or weights.
func (c *Core) engineMoved(name string) {
	for _, key := range slices.Clone(c.ownedBy[name]) {
		if k := c.keys[key]; k != nil {
			c.attend(k)
		}
	}
}

// transition tells of a change of owners or seeds that this dispatcher made.
func (c *Core) transition(k *ownerKey, what, engineName, rollout, why string) {
	c.count("owner_transitions", what)
	c.emit(Transition{Key: k.name, What: what, Engine: engineName, Rollout: rollout, Why: why, Owners: len(c.owners(k))})
}

// maxKept bounds the items that wait for owners and leave room for others in
// what is fetched.
const maxKept = 128

// keep notes that the owners of an item's key can take nothing now. The rest of
// the pass asks for others' requests only: a key that waits holds up nobody.
func (c *Core) keep(it *item) tried {
	c.keeping[it.owner] = true
	if !it.kept {
		it.kept = true
		c.count("owner_waits", string(c.rec.NoSpill))
	}
	return kept
}

// keepsWaiting tells without a decision what keep has found in this pass.
func (c *Core) keepsWaiting(it *item) bool {
	return len(c.keeping) > 0 && c.keeping[c.keyOf(it)]
}

// nameKey writes the owner key into the facts of a bind, where all dispatchers
// read it.
func (c *Core) nameKey(it *item, e *engine) {
	if name := c.keyOf(it); name != "" {
		it.held.OwnerKey, it.held.Anchor, it.held.WeightVersion = name, it.anchor, e.reg.WeightVersion
	}
}

// attendSeeds looks at every live seed after a view was replaced.
func (c *Core) attendSeeds() {
	for _, name := range sortedKeys(c.keys) {
		if k := c.keys[name]; k != nil && k.seed.live() {
			c.attend(k)
		}
	}
}

// keyOf is the owner key of an item under the settings in force, "" without.
func (c *Core) keyOf(it *item) string {
	if c.policy.Policy != policy.OwnerPressure || c.policy.Mode == subjects.ModeOff || it.ttl > 0 {
		return ""
	}
	if it.keyedBy != c.revision+1 {
		it.keyedBy = c.revision + 1
		it.owner, it.anchor = subjects.OwnerKey(&it.facts, c.settings)
	}
	return it.owner
}

// markOwners tells the decision what is known of the request's owner key. The
// returned func takes it out again: candidates live longer than a request.
func (c *Core) markOwners(it *item, in *policy.Input) (undo func()) {
	name := c.keyOf(it)
	if name == "" || !c.ready[ViewOwners] {
		return func() {}
	}
	r := &in.Request
	r.OwnerKey, r.Affinity = name, name
	r.NoSeed = it.facts.Bind > 0
	k := c.keys[name]
	for target := range c.targets { // the order plays no part
		c.markSeeding(target, policy.SeedOther)
	}
	for target := range c.flying {
		c.markSeeding(target, policy.SeedOther)
	}
	if k != nil {
		c.markKey(k, r)
	}
	return func() {
		for i := range c.cands {
			cand := &c.cands[i]
			cand.Owner, cand.Provisional, cand.Seeding = false, false, policy.SeedNone
		}
	}
}

func (c *Core) markKey(k *ownerKey, r *policy.Request) {
	r.SeedLive, r.Cooldown = c.seeding(k), c.cooling(k)
	all, ready := c.owners(k), false
	for i := range all {
		if o := &all[i]; c.counts(k, o) {
			r.Owners++
			cand := &c.cands[c.engines[o.Engine].at]
			cand.Owner = true
			ready = ready || cand.State == policy.Ready
		}
	}
	if !ready {
		if h := k.provisional(); h != nil {
			c.cands[c.engines[h.Engine].at].Provisional = true
		}
	}
	if k.seed.live() {
		c.markSeeding(k.seed.Engine, policy.SeedSame)
	}
	if k.flight != nil {
		c.markSeeding(k.flight.engine, policy.SeedSame)
	}
}

func (c *Core) markSeeding(engineName string, s policy.SeedState) {
	if e := c.engines[engineName]; e != nil {
		c.cands[e.at].Seeding = s
	}
}
