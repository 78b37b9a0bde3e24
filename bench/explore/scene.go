package explore

import (
	"fmt"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Mutation is a guard or a check taken away, to see that the rules find it.
type Mutation string

// Mutations.
const (
	NoWildcardGuard Mutation = "no wildcard guard" // a bind is stored whatever has moved at its engine
	NoExactGuard    Mutation = "no exact guard"    // a seed is stored whatever stands at its key
	LateSeedEnd     Mutation = "late seed end"     // the end of a seed takes whatever stands at its key
	NoCeiling       Mutation = "no ceiling"        // the cores are told of no ceiling
	NoProof         Mutation = "no proof"          // every end of a run looks like a clean completion with usage
	NoCooldown      Mutation = "no cooldown"       // a proven seed is given back instead
)

// Scene is a small world and what may happen in it.
type Scene struct {
	Name        string
	Dispatchers int // 2 or 3
	Engines     int // 3, of one slot each
	Keys        int // owner keys; 1
	Rollouts    int // in the queue at the start

	// At the start: engines from the first on, each busy with a rollout of key 0.
	Owners int  // that own it
	Seeded bool // then one that is being seeded
	Strays int  // then some that do not own it

	Ceiling  int           // owners of a key
	OwnerTTL int           // s; 0 = none ends within a run
	Jump     time.Duration // how far time goes at once, beyond a cooldown; 6 s

	Troubles  budget // how much may go wrong, of each kind
	MaxDepth  int    // moves; 0 = until there is nothing new
	MaxStates int    // visited; 0 = no limit
	RestEvery int    // the world is left alone in one of so many states; 1

	Mutation Mutation
}

// Trouble bounds what may go wrong, of each kind.
type Trouble = budget

const (
	job         = "j"
	blockTokens = 64
	longMS      = 1_000_000_000 // a deadline that nobody meets
)

func (x *Scene) settings() subjects.Settings {
	s := subjects.Settings{Policy: "owner_pressure", Mode: subjects.ModeEnforce, BlockTokens: blockTokens, AnchorTokens: 2 * blockTokens,
		MaxAttempts: 5, Prefetch: -1, Knobs: map[string]float64{"owner_ceiling": float64(x.Ceiling)}}
	if x.OwnerTTL > 0 {
		s.Knobs["owner_ttl"] = float64(x.OwnerTTL)
	}
	if x.Mutation == NoCeiling {
		s.Knobs["owner_ceiling"] = 64
	}
	return s
}

// busy is how many rollouts run at the start; all counts those of the queue too.
func (x *Scene) busy() int { return x.Owners + int(bit(x.Seeded)) + x.Strays }
func (x *Scene) all() int  { return x.busy() + x.Rollouts }

func (x *Scene) keyOf(rollout int) int {
	if rollout < x.busy() || x.Keys < 2 {
		return 0
	}
	return (rollout - x.busy()) % x.Keys
}

func (x *Scene) check() error {
	if x.Dispatchers > maxDispatchers || x.Engines > maxEngines || x.Keys > maxKeys || x.all() > maxRollouts || x.busy() > x.Engines {
		return fmt.Errorf("scene %s is larger than %d dispatchers, %d engines, %d keys and %d rollouts", x.Name, maxDispatchers, maxEngines, maxKeys, maxRollouts)
	}
	return x.settings().Validate()
}

func rolloutID(i int) string { return fmt.Sprintf("%04d", i) }

func (x *Scene) blocks(rollout int) []uint64 {
	k := uint64(x.keyOf(rollout)+1) << 32
	return []uint64{k + 1, k + 2}
}

func (x *Scene) facts(rollout int) subjects.Facts {
	return subjects.Facts{Job: job, ID: rolloutID(rollout), Reader: "main", Lane: subjects.LaneNormal, Model: "m",
		PromptTokens: 2*blockTokens + 1, MaxTokens: blockTokens, BlockTokens: blockTokens, Blocks: x.blocks(rollout), DeadlineMS: longMS, MaxAttempts: 5}
}

func (x *Scene) ownerKey(key int) string { return fmt.Sprintf("%016x", uint64(key+1)<<32+2) }

func epochName(engine int, life uint8) string { return fmt.Sprintf("%s-%d", engineName(engine), life) }

func (x *Scene) registration(engine int, life uint8, revision uint64, stored int64) core.EnginePut {
	capacity := int64(1 << 20)
	return core.EnginePut{Revision: revision, Stored: stored, Engine: subjects.Engine{SchemaVersion: subjects.SchemaVersion,
		Engine: engineName(engine), Agent: "a", Epoch: epochName(engine, life), Kind: "sim", Model: "m", State: subjects.EngineReady, Slots: 1, Ranks: 1,
		CapacityTokens: &capacity, BlockTokens: blockTokens, Events: "exact"}}
}

// load is a report of an engine as it was before anything began: reservations
// are newer, and counted exactly.
func (x *Scene) load(engine int, life uint8, seq uint64) core.Load {
	zero, one, used, capacity := 0, 1, int64(0), int64(1<<20)
	return core.Load{Load: subjects.Load{SchemaVersion: subjects.SchemaVersion, Engine: engineName(engine), Epoch: epochName(engine, life), Seq: seq,
		Source: "sim", IntervalMS: 20_000, RanksAdvertised: &one,
		Ranks: []subjects.RankLoad{{Running: &zero, Waiting: &zero, KVUsedTokens: &used, KVCapacityTokens: &capacity, MaxRunning: &one}}}}
}

// begin is the world before the first move.
func (x *world) begin() *state {
	sc := &x.scene
	s := &state{left: sc.Troubles, proved: [maxKeys]int8{-1, -1}}
	var owners []subjects.Owner
	for i := range sc.Engines {
		s.epoch[i] = 1
		s.regs[i] = x.cores.event(sc.registration(i, 1, uint64(i+1), x.cores.stamp(0)))
	}
	for i := range sc.busy() {
		f := sc.facts(i)
		if sc.Seeded && i == sc.Owners {
			s.seq++
			s.seeds[0] = stored{x.cores.event(core.SeedPut{Revision: uint64(s.seq), Stored: x.cores.stamp(0), TTLMS: 2 * longMS, Seed: subjects.Seed{
				Key: sc.ownerKey(0), State: subjects.SeedLive, Engine: engineName(i), Job: f.Job, ID: f.ID, Bind: 1, Epoch: epochName(i, 1), Anchor: f.Blocks[1]}}), s.seq, 0}
			s.sown[i] = 1 << 1
		}
		s.seq++
		s.last[i] = s.seq
		s.keys = append(s.keys, x.cores.event(core.ReservationPut{Revision: uint64(s.seq), Stored: x.cores.stamp(0), TTLMS: 2 * longMS, Held: subjects.Held{
			Engine: engineName(i), Job: f.Job, ID: f.ID, State: subjects.StateBound, Bind: 1, Epoch: epochName(i, 1), LeftMS: longMS, Tokens: f.PromptTokens + f.MaxTokens,
			PromptTokens: f.PromptTokens, MaxTokens: f.MaxTokens, Lane: f.Lane, Reader: f.Reader, Dispatcher: "before", MaxAttempts: f.MaxAttempts,
			OwnerKey: sc.ownerKey(0), Anchor: f.Blocks[1]}}))
		s.ids = append(s.ids, bindID{uint8(i), 1, s.seq})
		if i < sc.Owners {
			owners = append(owners, subjects.Owner{Engine: engineName(i), Epoch: epochName(i, 1), Anchor: f.Blocks[1], Proof: subjects.Proof{Rollout: "before", Bind: 1}})
		}
	}
	if len(owners) > 0 {
		s.ownerRev, s.ownerAt[0] = 1, 1
		ttl := int64(sc.OwnerTTL) * 1000
		if ttl == 0 {
			ttl = 3_600_000
		}
		s.owners[0] = stored{x.cores.event(core.OwnerPut{Ownership: subjects.Ownership{SchemaVersion: 1, Key: sc.ownerKey(0), Owners: owners},
			Revision: 1, Stored: x.cores.stamp(0), TTLMS: ttl}), 1, 0}
	}
	for i := sc.busy(); i < sc.all(); i++ {
		x.queue(s, i, sc.facts(i), false)
	}
	for d := range maxDispatchers {
		s.cores[d] = -1
		if d < sc.Dispatchers {
			x.start(s, d)
		}
	}
	return s
}

// queue stores a message. Its handle is its own: a dispatcher never has two of it.
func (x *world) queue(s *state, rollout int, f subjects.Facts, retry bool) {
	q := core.Queue{Job: job, Lane: f.Lane}
	if retry {
		q = core.Queue{Job: job, Retry: true}
	}
	ev := core.Fetched{Handle: core.Handle(1 + rollout + maxRollouts*f.Bind), Queue: q, Facts: f, Seq: uint64(1 + rollout + maxRollouts*f.Bind), Stored: x.cores.stamp(s.now)}
	s.messages = append(s.messages, message{fetched: x.cores.event(ev), rollout: uint8(rollout), waits: true})
}

// start makes a dispatcher whose views are those of now.
func (x *world) start(s *state, d int) {
	sc := &x.scene
	evs := []core.Event{core.ServerTime{UnixNano: x.cores.stamp(s.now)}, core.Contact{Proven: true}}
	r := core.ViewSwap{Kind: core.ViewReservations}
	for _, k := range s.keys {
		r.Reservations = append(r.Reservations, x.one(k).(core.ReservationPut))
	}
	for _, k := range s.markers {
		r.Gone = append(r.Gone, x.one(k).(core.ReservationGone))
	}
	own := core.ViewSwap{Kind: core.ViewOwners}
	for k := range sc.Keys {
		switch p := x.one(s.seeds[k].ev).(type) {
		case core.SeedPut:
			r.Seeds = append(r.Seeds, p)
		case core.SeedGone:
			r.SeedsGone = append(r.SeedsGone, p)
		}
		if p, ok := x.one(s.owners[k].ev).(core.OwnerPut); ok {
			own.Owners = append(own.Owners, p)
		}
	}
	res := core.ViewSwap{Kind: core.ViewResults}
	for _, a := range s.answers {
		if a != 0 {
			res.Answered = append(res.Answered, x.one(a).(core.Answered))
		}
	}
	eng, dis := core.ViewSwap{Kind: core.ViewEngines}, core.ViewSwap{Kind: core.ViewDispatchers}
	for i := range sc.Engines {
		eng.Engines = append(eng.Engines, x.one(s.regs[i]).(core.EnginePut))
	}
	for i := range sc.Dispatchers {
		dis.Dispatchers = append(dis.Dispatchers, core.DispatcherPut{Dispatcher: dispatcherName(i), Revision: uint64(i + 1), Stored: x.cores.stamp(s.now)})
	}
	for _, v := range []core.ViewSwap{{Kind: core.ViewPools, Pool: &core.PoolPut{Settings: sc.settings(), Revision: 1}}, eng, r, res, dis, {Kind: core.ViewCancels}, own} {
		evs = append(evs, v)
	}
	for i := range sc.Engines {
		evs = append(evs, sc.load(i, s.epoch[i], uint64(s.now)+1))
	}
	for l := range s.lanes {
		s.pos[d][l] = uint8(len(s.lanes[l]))
	}
	s.cores[d] = 0 // alive while its first effects are taken
	e := x.cores.fresh(int8(d), x.cores.event(evs...), s.now)
	s.cores[d] = e.to
	x.took(s, d, e.effects)
}

// one is the event of a number, nil for 0.
func (x *world) one(ev uint32) core.Event {
	if ev == 0 {
		return nil
	}
	return x.cores.events.all[ev][0]
}
