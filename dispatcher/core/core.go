package core

import (
	"fmt"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/dispatcher/prefix"
	"github.com/rollbus/rollbus/subjects"
)

// Config of a Core.
type Config struct {
	Dispatcher string  // own name, unique in the pool
	Timings    Timings // zero = DefaultTimings
	// MaxInHand bounds the messages fetched and not yet bound. 512 when 0.
	MaxInHand int
	// MaxAnswered bounds the answered ids remembered. 1,000,000 when 0.
	MaxAnswered int
	// MaxIndexBytes bounds the block index, bytes. 512 MiB when 0.
	MaxIndexBytes int64
	// Explain makes Decision effects carry their candidates.
	Explain bool
	// Beside sees each decision with what it was taken on, both valid only during
	// the call and not to be changed: what another policy would have done. nil = nobody.
	Beside func(in *policy.Input, rec *policy.Record)
}

func (c Config) withDefaults() Config {
	if c.Timings == (Timings{}) {
		c.Timings = DefaultTimings()
	}
	if c.MaxInHand == 0 {
		c.MaxInHand = 512
	}
	if c.MaxAnswered == 0 {
		c.MaxAnswered = 1_000_000
	}
	return c
}

// Core is one pool's decision state. One goroutine owns it.
type Core struct {
	cfg Config
	t   Timings

	now     time.Duration
	stepped bool // at least one step taken: now is meaningful
	out     []Effect

	server  serverClock
	contact contactClock               // of all views together: engines' ages run on it
	proof   map[ViewKind]time.Duration // last proof by follower
	ready   map[ViewKind]bool          // a complete view was seen
	stopped bool

	settings subjects.Settings
	policy   policy.Settings
	decider  *policy.Decider
	revision uint64 // of the settings

	engines   map[string]*engine
	names     []string // of engines, sorted: the order of cands
	cands     []policy.Candidate
	others    map[string]time.Duration // dispatchers, by contact clock of their last renewal
	live      []string                 // live dispatchers, self included, sorted
	cancels   map[string]CancelPut
	held      map[string][]*held // by rollout: its reservations, at most one per engine
	answered  *answeredSet
	retired   *retiredLog
	lengths   *policy.Lengths
	sticky    *policy.Sticky
	index     *prefix.Index
	tags      []*engine    // by engine.tag; nil = free
	hits      []prefix.Hit // reused by match
	marked    []int        // candidates that markSticky has marked
	picks     uint64       // decisions that placed something, for ties
	rec       policy.Record
	frozen    time.Duration // contact clock until which requeueing waits; 0 = not frozen
	freezeFor []string      // engines whose renewal lifts the freeze
	swept     time.Duration

	ownerBook

	dirty  bool // something changed that may let work be placed or fetched
	stages [stageCount]int
	// Binds in flight at once, in parts of bindUnit; 0 = no limit (crowd.go).
	atOnce  int
	lagging int // refused binds whose items wait for the view
	jobs    map[string]*job
	hand    map[Handle]*item
	byKey   map[string]*item // waiting or binding, by rollout
	queues  map[Queue]*queue
	order   []Queue // sorted keys of queues
	idle    int     // rotates the queues that get a waiting pull
}

// New makes a core that has seen nothing.
func New(cfg Config) *Core {
	cfg = cfg.withDefaults()
	c := &Core{
		cfg: cfg, t: cfg.Timings,
		proof: map[ViewKind]time.Duration{}, ready: map[ViewKind]bool{},
		engines: map[string]*engine{}, others: map[string]time.Duration{},
		cancels: map[string]CancelPut{}, held: map[string][]*held{},
		answered: newAnsweredSet(cfg.MaxAnswered), retired: newRetiredLog(cfg.MaxAnswered),
		lengths: policy.NewLengths(), sticky: policy.NewSticky(), index: prefix.New(prefix.Options{MaxBytes: cfg.MaxIndexBytes}),
		jobs: map[string]*job{}, hand: map[Handle]*item{}, byKey: map[string]*item{},
		queues: map[Queue]*queue{}, ownerBook: newOwnerBook(),
	}
	c.contact = contactClock{last: -1, gap: c.t.ContactFresh}
	c.live = []string{cfg.Dispatcher}
	if err := c.apply(subjects.Settings{}, 0); err != nil {
		panic(fmt.Sprintf("core: the default settings are not valid: %v", err)) // a bug of ours, met by every test
	}
	return c
}

// Step takes one event and returns what must be done about it. now is the time
// since the core started, on a monotonic clock; it must not go back. The
// returned slice is valid until the next Step.
func (c *Core) Step(ev Event, now time.Duration) []Effect {
	c.out = c.out[:0]
	now = max(now, c.now)
	if c.stepped && now-c.now > c.t.PauseRebuild {
		c.now = now
		c.wake()
	}
	c.now, c.stepped = now, true
	c.take(ev)
	if c.dirty && !c.stopped {
		c.place()
		c.fetch()
	}
	return c.out
}

func (c *Core) take(ev Event) {
	switch e := ev.(type) {
	case Tick:
		c.tick()
	case ServerTime:
		c.server.resync(e.UnixNano, c.now)
	case Contact:
		c.contacted(e)
	case ViewSwap:
		c.swap(e)
	case ReservationPut:
		c.server.observe(e.Stored, c.now)
		c.passedBy(e.Revision)
		c.putReservation(e)
	case ReservationGone:
		c.server.observe(e.Stored, c.now)
		c.passedBy(e.Revision)
		c.gone(e)
	case Answered:
		c.server.observe(e.Stored, c.now)
		c.putAnswer(e, true)
	case EnginePut:
		c.putEngine(e)
	case EngineGone:
		c.engineGone(e)
	case DispatcherPut:
		c.putDispatcher(e)
	case DispatcherGone:
		delete(c.others, e.Dispatcher)
		c.countLive()
	case CancelPut:
		c.cancels[e.Key()] = e
		c.cancelInHand()
	case PoolPut:
		c.putPool(e)
	case Jobs:
		c.putJobs(e)
	case Fetched:
		c.fetched(e)
	case Acquire:
		c.acquire(e)
	case FetchDone:
		c.fetchDone(e)
	case BindAnswer:
		c.bindAnswer(e)
	case LeaderAnswer:
		c.leaderAnswer(e)
	case RetryAnswer:
		c.retryAnswer(e)
	case DeleteAnswer:
		c.deleteAnswer(e)
	case ResultAnswer:
		c.resultAnswer(e)
	case DeadAnswer:
		c.deadAnswer(e)
	case Load:
		c.putLoad(e)
	case Cache:
		c.putCache(e)
	case Snapshot:
		c.putSnapshot(e)
	case SeedPut:
		c.passedBy(e.Revision)
		c.putSeed(e, false)
	case SeedGone:
		c.passedBy(e.Revision)
		c.goneSeed(e, false)
	case OwnerPut:
		c.mapSeen = max(c.mapSeen, e.Revision)
		c.putOwners(e)
	case OwnersGone:
		c.mapSeen = max(c.mapSeen, e.Revision)
		c.goneOwners(e)
	case SeedAnswer:
		c.seedAnswer(e)
	case OwnersAnswer:
		c.ownersAnswer(e)
	case Stop:
		c.stop()
	}
}

func (c *Core) emit(e Effect) { c.out = append(c.out, e) }

func (c *Core) count(name, label string) { c.emit(Count{Name: name, Label: label, N: 1}) }

// tick does what only time brings about.
func (c *Core) tick() {
	c.dirty = true
	c.recheck()
	c.index.Tick(c.now)
	c.askAgain()
	if c.now-c.swept < c.t.Sweep {
		return
	}
	dt := c.now - c.swept
	c.swept = c.now
	c.sweepHand()
	c.sweepHeld()
	c.sweepKeys()
	c.sweepJobs(dt)
	c.retired.expire(int64(c.now - c.t.RetiredKeep))
}

// wake is called after a pause of this process: nothing that is held may be
// trusted. Messages go back, and every view is built anew.
func (c *Core) wake() {
	clear(c.ready)
	c.giveBack(c.t.NakMin)
	c.emit(Rebuild{Why: "paused"})
	c.count("rebuilds", "paused")
}

// stop gives back what waits. What is being written is finished by its answers.
func (c *Core) stop() {
	c.stopped = true
	c.giveBack(0)
}

// views are those without which nothing is decided.
var views = [...]ViewKind{ViewReservations, ViewResults, ViewEngines, ViewDispatchers, ViewCancels, ViewPools}

// Missing names the views that have not been seen whole yet.
func (c *Core) Missing() []ViewKind {
	var out []ViewKind
	for _, v := range views {
		if !c.ready[v] {
			out = append(out, v)
		}
	}
	return out
}

// deciding tells whether the views are whole and recent enough to decide on.
func (c *Core) deciding() bool {
	if c.stopped || c.settings.Paused {
		return false
	}
	for _, v := range views {
		if !c.ready[v] {
			return false
		}
	}
	return c.freshView(ViewReservations) && c.freshView(ViewResults) && c.freshView(ViewEngines)
}

func (c *Core) freshView(v ViewKind) bool {
	at, ok := c.proof[v]
	return ok && c.now-at <= c.t.ContactFresh
}

func (c *Core) contacted(e Contact) {
	if !e.Proven {
		clear(c.proof)
		return
	}
	c.contact.prove(c.now)
	if e.View != "" {
		c.proof[e.View] = c.now
		return
	}
	for _, v := range views {
		c.proof[v] = c.now
	}
	c.proof[ViewOwners] = c.now
}

func (c *Core) putPool(e PoolPut) {
	if err := c.apply(e.Settings, e.Revision); err != nil {
		// The settings in force stay: a bad change is refused whole.
		c.count("settings_refused", err.Error())
	}
}

func (c *Core) apply(s subjects.Settings, revision uint64) error {
	p, err := policy.Resolve(s)
	if err != nil {
		return err
	}
	d, err := policy.NewDecider(p)
	if err != nil {
		return err
	}
	c.settings, c.policy, c.decider, c.revision = s.WithDefaults(), p, d, revision
	c.setServers(s.Servers)
	for _, n := range c.names {
		c.refresh(c.engines[n])
	}
	return nil
}
