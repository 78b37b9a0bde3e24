package workeragent

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// unit is one engine under the agent's care.
type unit struct {
	a    *Agent
	cfg  EngineConfig
	name string
	log  *slog.Logger

	life context.Context // of runs and writes: ends with the agent, or when Stop gives up
	kill context.CancelFunc
	wg   sync.WaitGroup // every goroutine of this unit

	kickReg   chan struct{} // register at once
	kickLoad  chan struct{} // publish load at once
	kickLook  chan struct{} // probe at once
	kickCache chan struct{} // look at the cache view at once
	ran       chan ranHere  // for an approximate cache view, bounded
	ended     chan matched  // to be held against an exact one, bounded
	changed   chan struct{} // something ended: look whether the unit is idle
	started   chan struct{} // closed when the epoch is known
	replaced  chan struct{} // closed when a later agent serves this engine
	seenRegs  chan struct{} // closed with the first view of registrations

	mu        sync.Mutex
	epoch     epoch
	rival     uint64    // highest start of another agent's registration
	revision  uint64    // of the own registration
	written   time.Time // when it was last written
	unwritten error     // why it was not since
	over      bool      // replaced
	draining  bool
	caps      engine.Capabilities
	probed    bool // capabilities are known
	down      bool
	failing   time.Time // since when looks have been failing; zero = they do not
	downWhy   string    // what the look that failed said
	refused   bool      // a connection was refused since the last good look
	counters  int64     // sum of the preemption counters at the last sample; < 0 = none
	lifeBegan time.Time // of the engine, when a restart was seen; zero = none was
	backoff   time.Duration
	resting   time.Time // the engine is left alone until then
	spooling  bool      // over the spool's bound

	profile  telemetry.Profile // what the engine reported in this or an earlier life of the agent
	measured measured

	health      engine.Health // as of the last sample of the load
	wedgedUntil time.Time     // the engine counts as wedged until then
	wedgeHold   time.Duration // how long the next time

	told    cacheTold // of the cache view
	audited *audited  // what runs are held against, nil = no exact view
	emptied int       // times that something emptied the cache, events apart

	runs     map[string]*run   // reservations that are run or settled here, by rollout
	handing  map[string]uint64 // reservations that are being released or given back, by rollout: their revision
	seen     uint64            // highest revision that was looked at
	ghosts   int               // runs that ended here and may still run at the engine
	lastMove time.Time         // last output of any run
	queued   int               // waiting requests that the engine reports
	queuedAt time.Time
	kvFull   bool // at the last sample: new work may have to wait for KV
	shown    shownRates
	backlog  *telemetry.Backlog
	born     time.Time // the backlog counts from here

	handBack chan struct{} // bounds goroutines that give back
}

// maxHandBacks bounds how many keys are given back at once; the follower waits
// when there are more.
const maxHandBacks = 256

func newUnit(a *Agent, cfg EngineConfig) *unit {
	u := &unit{
		a: a, cfg: cfg, name: cfg.Name, log: a.log.With("engine", cfg.Name),
		kickReg: make(chan struct{}, 1), kickLoad: make(chan struct{}, 1), kickLook: make(chan struct{}, 1),
		kickCache: make(chan struct{}, 1), ran: make(chan ranHere, maxRan), ended: make(chan matched, maxRan),
		changed: make(chan struct{}, 1), started: make(chan struct{}), replaced: make(chan struct{}),
		seenRegs: make(chan struct{}),
		epoch:    epoch{mark: newMark()}, counters: -1,
		runs: map[string]*run{}, handing: map[string]uint64{},
		handBack: make(chan struct{}, maxHandBacks),
		backlog:  telemetry.NewBacklog(), born: time.Now(),
	}
	u.recall()
	return u
}

// kick wakes a loop; one pending wake-up is enough.
func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// run serves the engine until the agent stops, ctx ends or a later agent
// replaces this one.
func (u *unit) run(ctx context.Context) error {
	u.life, u.kill = context.WithCancel(ctx)
	defer u.kill()
	loops, stop := context.WithCancel(u.life)
	defer stop()
	u.wg.Go(func() { u.followRegistrations(loops) })
	u.wg.Go(func() { u.probeLoop(loops) })
	renew, stopRenew := context.WithCancel(loops)
	defer stopRenew()
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		u.registerLoop(renew)
	}()
	u.wg.Go(func() { u.serve(loops) })

	var left int
	select {
	case <-ctx.Done():
	case <-u.replaced:
		u.dropAll()
		u.waitIdle(ctx, u.a.t.HandBack, nil)
	case <-u.a.stopping:
		left = u.drain(ctx)
	}
	stopRenew()
	<-renewed
	if ctx.Err() == nil {
		u.deregister()
	}
	stop()
	u.kill()
	u.wg.Wait()
	u.a.left.Add(int64(left))
	if u.isReplaced() && ctx.Err() == nil {
		return fmt.Errorf("engine %s: %w", u.name, ErrReplaced)
	}
	return nil
}

// serve follows the own keys once the epoch is known.
func (u *unit) serve(ctx context.Context) {
	select {
	case <-u.started:
	case <-ctx.Done():
		return
	}
	u.recover(ctx)
	u.wg.Go(func() { u.loadLoop(ctx) })
	u.wg.Go(func() { u.cacheLoop(ctx) })
	u.wg.Go(func() { u.watchLoop(ctx) })
	u.a.follow(ctx, "own reservations", func() error {
		return u.a.store.FollowOwn(ctx, u.name, kvstate.Handler[kvstate.Reservation, kvstate.Marker]{
			Swap: u.swap, Put: u.see, Gone: u.gone, Alive: u.a.alive,
		})
	})
}

// drain finishes what runs, gives back what does not finish in time, and tells
// how many keys it leaves behind.
func (u *unit) drain(ctx context.Context) int {
	u.mu.Lock()
	u.draining = true
	u.mu.Unlock()
	kick(u.kickReg)
	if !u.waitIdle(ctx, u.a.t.DrainTimeout, u.a.hurry) {
		u.mu.Lock()
		for _, r := range u.runs {
			r.cancel(errHandBack)
		}
		u.mu.Unlock()
		u.waitIdle(ctx, u.a.t.HandBack, nil)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.runs) + len(u.handing)
}

// waitIdle waits until nothing is run or given back, at most for that long.
func (u *unit) waitIdle(ctx context.Context, most time.Duration, hurry <-chan struct{}) bool {
	t := time.NewTimer(most)
	defer t.Stop()
	for {
		u.mu.Lock()
		idle := len(u.runs)+len(u.handing) == 0
		u.mu.Unlock()
		if idle {
			return true
		}
		select {
		case <-u.changed:
		case <-hurry:
			return false
		case <-t.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// dropAll ends every run without a word: another agent answers for the keys.
func (u *unit) dropAll() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for key, r := range u.runs {
		u.drop(key, r)
	}
}

// drop ends a run whose key is no longer held. What is finished already is
// still offered to the register: the first answer counts, whoever's it is.
// Callers hold mu.
func (u *unit) drop(key string, r *run) {
	r.cancel(errDropped)
	delete(u.runs, key)
	kick(u.changed)
	kick(u.kickLoad)
}

func (u *unit) isReplaced() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.over
}

// state is what the registration says.
func (u *unit) state() subjects.EngineState {
	u.mu.Lock()
	defer u.mu.Unlock()
	state, _ := u.standingLocked(time.Now())
	return state
}

// slots the engine runs at once.
func (u *unit) slotsLocked() int {
	switch {
	case u.cfg.Slots > 0:
		return u.cfg.Slots
	case u.caps.Slots != nil:
		return min(*u.caps.Slots, maxSlots)
	case u.measured.slots > 0:
		return min(u.measured.slots, maxSlots)
	case u.profiledLocked() && u.profile.Slots != nil:
		return min(*u.profile.Slots, maxSlots)
	}
	return DefaultSlots
}

// maxModelLen and capacity are 0 when unknown.
func (u *unit) maxModelLenLocked() int {
	switch {
	case u.cfg.MaxModelLen > 0:
		return u.cfg.MaxModelLen
	case u.caps.MaxModelLen != nil:
		return *u.caps.MaxModelLen
	}
	return 0
}

// capacityLocked is what the engine reports, else what it reported once, else
// what is configured: a configured figure outlives the hardware it was made for.
func (u *unit) capacityLocked() (tokens int64, source string) {
	reported, profiled := u.caps.CapacityTokens, u.profile.CapacityTokens
	if reported == nil {
		reported = &u.measured.tokens
	}
	if !u.profiledLocked() {
		profiled = nil
	}
	n, source := telemetry.ResolveCapacity(reported, profiled, &u.cfg.CapacityTokens)
	if n == nil {
		return 0, ""
	}
	return *n, source
}

func (u *unit) ranksLocked() int { return max(1, u.caps.Ranks) }

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
