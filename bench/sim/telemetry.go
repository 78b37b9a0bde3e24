package sim

import (
	"math"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// Telemetry is how reports of engines travel: plain subjects, in order from one
// engine to one dispatcher, and lost when a subscriber is slow or away. Zero
// values are a quiet network.
type Telemetry struct {
	LoadEvery  time.Duration // between load reports, and at the soonest half of it after a change; 200 ms
	LoadLoss   float64       // share of load reports that never come
	CacheDelay time.Duration // the most a cache event lags behind what a follower lags
	CacheLoss  float64       // share of cache events that never come
}

func (t Telemetry) withDefaults() Telemetry {
	if t.LoadEvery == 0 {
		t.LoadEvery = 200 * time.Millisecond
	}
	return t
}

// reports is what a node that runs the engine model tells of it.
type reports struct {
	engine *Engine
	cfg    model.Config

	applied uint64 // last revision handed to the engine
	loadSeq uint64
	loadAt  time.Duration
	kicked  bool

	// What an agent has of its engine, the same code.
	tracker *telemetry.Tracker
	backlog *telemetry.Backlog

	cacheSeq uint64
	holds    map[uint64]struct{}
	removed  map[uint64]time.Duration // when what is not held any more was removed; only with Audit
	shown    []uint64                 // an old block set, of PlantNoBarrier
}

// SetModel makes the node run the engine model: its slots, capacity and blocks
// are those of c, it reports load and cache events, and World.Work says what
// each rollout does. Call it before the World runs.
func (n *Node) SetModel(c model.Config) error {
	c = c.WithDefaults()
	c.CacheEvents = true
	capacity := int64(c.Capacity())
	n.Reg.Slots, n.Reg.CapacityTokens, n.Reg.BlockTokens, n.Reg.Events = c.MaxRunning, &capacity, c.BlockTokens, "exact"
	n.tell = &reports{cfg: c}
	if err := n.boot(); err != nil {
		return err
	}
	n.register()
	n.w.after(time.Duration(n.w.rng.Int64N(int64(n.w.opts.Telemetry.LoadEvery))), n.loadLoop)
	return nil
}

// Engine is the model that the node runs now, nil without one.
func (n *Node) Engine() *Engine {
	if n.tell == nil {
		return nil
	}
	return n.tell.engine
}

// boot starts a new life of the engine: nothing cached, counters at zero.
func (n *Node) boot() error {
	e, err := n.w.NewEngine(n.tell.cfg)
	if err != nil {
		return err
	}
	if old := n.tell.engine; old != nil {
		old.retire()
	}
	*n.tell = reports{engine: e, cfg: n.tell.cfg, tracker: telemetry.NewTracker(telemetry.TrackerConfig{}),
		backlog: telemetry.NewBacklog(), holds: map[uint64]struct{}{}, removed: map[uint64]time.Duration{}}
	e.Changed = n.changed
	return nil
}

// Pause stops the engine for a weight sync, as it tells everybody.
func (n *Node) Pause() {
	n.Reg.State = subjects.EnginePaused
	n.tell.engine.Freeze(true)
	n.announce()
}

// Resume ends a pause: another version of the weights, and nothing cached.
func (n *Node) Resume(version int64) {
	n.Reg.State, n.Reg.WeightVersion = subjects.EngineReady, &version
	n.tell.engine.Flush()
	n.tell.engine.Freeze(false)
	n.announce()
}

func (n *Node) announce() {
	if n.alive && !n.away {
		n.register()
	}
}

// run gives a reservation to the engine.
func (n *Node) run(r *run) {
	key, t := r.put.Key(), n.tell
	x := n.w.Work(key)
	started := x.Started
	x.Started = func(at time.Duration) {
		t.backlog.Made(key, at, 1)
		if started != nil {
			started(at)
		}
	}
	w := telemetry.WorkOf(&r.put.Held, r.put.Revision)
	s := t.engine.Model.Stats()
	w.Free = t.backlog.Own() < t.cfg.MaxRunning && s.Waiting == 0 && float64(s.KVUsed) <= telemetry.KVRoom*float64(s.Capacity)
	t.backlog.Begin(key, n.w.Now, w)
	err := t.engine.Add(key, x, func(tokens, cached int) {
		t.backlog.End(key, 0, &cached)
		r.tokens, r.cached = tokens, &cached
		n.finish(r)
	})
	if err != nil {
		n.end(r, subjects.Failed)
	}
}

// stopRun takes a run that ends early out of the engine.
func (n *Node) stopRun(r *run) {
	if n.tell != nil && r.tokens == 0 {
		n.tell.backlog.End(r.put.Key(), 0, nil)
		n.tell.engine.Abort(r.put.Key())
	}
}

// changed publishes what moved in the cache, and the load soon.
func (n *Node) changed(events []model.Event) {
	t := n.tell
	for _, ev := range events {
		var op string
		switch ev.Kind {
		case model.Stored:
			op = "stored"
			for _, b := range ev.Blocks {
				t.holds[b] = struct{}{}
			}
		case model.Removed:
			op = "removed"
			for _, b := range ev.Blocks {
				delete(t.holds, b)
				n.forgot(b)
			}
		case model.Cleared:
			op = "cleared"
			for b := range t.holds {
				n.forgot(b)
			}
			clear(t.holds)
		default:
			continue
		}
		t.cacheSeq++
		c := core.Cache{Engine: n.Name, Epoch: n.Reg.Epoch, Seq: t.cacheSeq, Op: op, Tier: "gpu", Blocks: slices.Clone(ev.Blocks)}
		n.publish(c, laneCache, n.w.opts.Telemetry.CacheLoss, n.w.opts.Telemetry.CacheDelay)
	}
	n.kick()
}

func (n *Node) forgot(b uint64) {
	if n.w.opts.Audit {
		n.tell.removed[b] = n.w.Now
	}
}

func (n *Node) kick() {
	if n.tell.kicked {
		return
	}
	n.tell.kicked = true
	life := n.life
	n.w.at(n.tell.loadAt+n.w.opts.Telemetry.LoadEvery/2, func() {
		if n.life == life && n.alive {
			n.report()
		}
	})
}

func (n *Node) loadLoop() {
	every := n.w.opts.Telemetry.LoadEvery
	switch {
	case n.Mute && n.alive && n.w.opts.Plant == PlantMixedBasis:
		n.pretend()
	case n.alive && n.w.Now-n.tell.loadAt >= every:
		n.report()
	}
	n.w.after(max(every/10, n.tell.loadAt+every-n.w.Now), n.loadLoop)
}

// report publishes the engine's picture as an agent does: what it has sent and
// the engine does not show is waiting.
func (n *Node) report() {
	t := n.tell
	if n.Mute {
		t.kicked = false
		return
	}
	t.engine.poll()
	s := t.engine.Model.Stats()
	t.loadSeq++
	t.loadAt, t.kicked = n.w.Now, false
	ranks := 1
	used, capacity := int64(s.KVUsed), int64(s.Capacity)
	own := t.backlog.Own()
	waiting := s.Waiting + max(0, own-s.Running-s.Waiting)
	seen := t.tracker.Observe(telemetry.Sample{Source: "sim", Advertised: &ranks, Ranks: []telemetry.Rank{{
		RankLoad: subjects.RankLoad{Running: &s.Running, Waiting: &waiting, KVUsedTokens: &used, KVCapacityTokens: &capacity, MaxRunning: &t.cfg.MaxRunning},
		Counters: telemetry.Counters{PromptTokens: &s.PromptTokens, GenerationTokens: &s.GenerationTokens, PrefixHitTokens: &s.PrefixHits, Preemptions: &s.Preemptions},
	}}}, n.w.Now, max(1, len(n.running)))
	l := core.Load{Load: seen.Load}
	uncached := t.backlog.Waiting(waiting, t.applied)
	l.Ranks[0].WaitingUncachedTokens = &uncached
	t.backlog.TellPrefill(&l.Ranks[0])
	for key := range n.running { // each tells of itself alone
		if made, ok := t.engine.Model.Generated(key); ok {
			t.backlog.Made(key, n.w.Now, made)
		}
	}
	prefill, output := t.backlog.Left(t.applied)
	l.SchemaVersion, l.Engine, l.Epoch, l.Seq = subjects.SchemaVersion, n.Name, n.Reg.Epoch, t.loadSeq
	l.AppliedRevision, l.IntervalMS, l.RanksAdvertised = t.applied, int(n.w.opts.Telemetry.LoadEvery.Milliseconds()), &ranks
	l.PendingPrefillTokens, l.PendingOutputTokens, l.OwnRequests = &prefill, &output, &own
	n.told = n.w.Now
	n.publish(l, laneLoad, n.w.opts.Telemetry.LoadLoss, 0)
}

// pretend publishes a report made of what a router counts itself.
func (n *Node) pretend() {
	t := n.tell
	t.loadSeq++
	ranks, running, waiting := 1, len(n.running), 0
	n.publish(core.Load{Load: subjects.Load{SchemaVersion: subjects.SchemaVersion, Engine: n.Name, Epoch: n.Reg.Epoch, Seq: t.loadSeq,
		AppliedRevision: t.applied, IntervalMS: int(n.w.opts.Telemetry.LoadEvery.Milliseconds()), RanksAdvertised: &ranks,
		Ranks: []subjects.RankLoad{{Running: &running, Waiting: &waiting}}}}, laneLoad, 0, 0)
}

// publish sends a report to every dispatcher that can hear.
func (n *Node) publish(ev core.Event, l lane, loss float64, lag time.Duration) {
	if n.away || !n.alive {
		return
	}
	for _, name := range sorted(n.w.Cores) {
		d := n.w.Cores[name]
		if loss > 0 && n.w.rng.Float64() < loss {
			if l == laneCache {
				d.blind[n.Name] = math.MaxInt64
			}
			continue
		}
		extra := time.Duration(0)
		if lag > 0 {
			extra = time.Duration(n.w.rng.Int64N(int64(lag)))
		}
		d.hear(ev, l, n.Name, extra)
		if l == laneCache && d.blind[n.Name] == math.MaxInt64 {
			d.blind[n.Name] = d.next[stream{l, n.Name}] + auditLag
		}
	}
}

// snapshot answers a dispatcher that asks for the whole block set.
func (n *Node) snapshot(d *Dispatcher, epoch string) {
	if n == nil || !n.alive || n.away || n.tell == nil || n.Reg.Epoch != epoch {
		return
	}
	n.tell.engine.poll()
	blocks := make([]uint64, 0, len(n.tell.holds))
	for b := range n.tell.holds {
		blocks = append(blocks, b)
	}
	slices.Sort(blocks)
	if n.w.opts.Plant == PlantNoBarrier {
		blocks, n.tell.shown = n.tell.shown, blocks // what the last one showed, as of now
	}
	s := core.Snapshot{Engine: n.Name, Epoch: epoch, AsOf: n.tell.cacheSeq, Phase: "begin", Tier: "gpu"}
	d.hear(s, laneSnapshot, n.Name, 0)
	s.Phase, s.Blocks = "part", blocks
	d.hear(s, laneSnapshot, n.Name, 0)
	s.Phase, s.Blocks = "end", nil
	d.hear(s, laneSnapshot, n.Name, 0)
}

// Holds tells how many of the first of those blocks the engine has cached, as
// its events have told by now.
func (n *Node) Holds(blocks []uint64) int {
	for i, b := range blocks {
		if _, ok := n.tell.holds[b]; !ok {
			return i
		}
	}
	return len(blocks)
}
