package dispatcher

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// step is a point in the life of a seed at which a dispatcher is struck: before
// a write leaves, or after it is stored and before its answer is known.
type step struct {
	write string // seed, owners, end
	after bool
}

func (s step) String() string {
	if s.after {
		return "after " + s.write
	}
	return "before " + s.write
}

// ambush strikes the first of several dispatchers that comes to its step.
type ambush struct {
	mu     sync.Mutex
	at     step
	armed  bool
	struck chan *Dispatcher // who came there
	goOn   chan struct{}    // closed: it may go on, stopped so long
}

func (a *ambush) arm(at step) (struck <-chan *Dispatcher, goOn func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at, a.armed = at, true
	a.struck, a.goOn = make(chan *Dispatcher, 1), make(chan struct{})
	open := a.goOn
	return a.struck, sync.OnceFunc(func() { close(open) })
}

// pass holds whoever comes to the step until it may go on or is killed.
func (a *ambush) pass(ctx context.Context, d *Dispatcher, at step) {
	a.mu.Lock()
	if !a.armed || at != a.at {
		a.mu.Unlock()
		return
	}
	a.armed = false
	open := a.goOn
	a.struck <- d
	a.mu.Unlock()
	select {
	case <-open:
	case <-ctx.Done():
	}
}

// ambushed are the writes of one dispatcher.
type ambushed struct {
	seedWriter
	a *ambush
	d *Dispatcher
}

func (x *ambushed) around(ctx context.Context, write string, do func() (uint64, error)) (uint64, error) {
	x.a.pass(x.d.workCtx, x.d, step{write, false})
	if x.d.workCtx.Err() != nil {
		return 0, fmt.Errorf("%w: killed before it", kvstate.ErrUnavailable)
	}
	seq, err := do()
	if err == nil {
		x.a.pass(x.d.workCtx, x.d, step{write, true})
	}
	return seq, err
}

func (x *ambushed) Seed(ctx context.Context, b kvstate.Seeding) (uint64, error) {
	return x.around(ctx, "seed", func() (uint64, error) { return x.seedWriter.Seed(x.d.workCtx, b) })
}

func (x *ambushed) PutOwners(ctx context.Context, o subjects.Ownership, expected uint64, ttl time.Duration) (uint64, error) {
	return x.around(ctx, "owners", func() (uint64, error) { return x.seedWriter.PutOwners(x.d.workCtx, o, expected, ttl) })
}

func (x *ambushed) Cooldown(ctx context.Context, sd subjects.Seed, revision uint64, ttl time.Duration) (uint64, error) {
	return x.around(ctx, "end", func() (uint64, error) { return x.seedWriter.Cooldown(x.d.workCtx, sd, revision, ttl) })
}

// judge follows owners and seeds as a stranger and writes down every rule that
// is broken.
type judge struct {
	mu      sync.Mutex
	ceiling int
	live    map[string]string // key -> rollout of its live seed
	targets map[string]string // engine -> key
	seeds   int
	owners  map[string][]subjects.Owner
	broken  []string
}

func (b *bench) judge(ceiling int) *judge {
	b.t.Helper()
	j := &judge{ceiling: ceiling, live: map[string]string{}, targets: map[string]string{}, owners: map[string][]subjects.Owner{}}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	ready := make(chan struct{}, 64)
	up := func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	}
	store := must(kvstate.Open(b.connect(), b.pool))
	done.Go(func() {
		_ = store.FollowAll(ctx, kvstate.FollowConfig{Name: "judge"}, kvstate.Handler[kvstate.Entry, kvstate.Ended]{
			Swap: func([]kvstate.Entry, []kvstate.Ended) { up() },
			Put: func(e kvstate.Entry) {
				if e.Seed != nil {
					j.seed(*e.Seed)
				}
			},
			Gone: func(x kvstate.Ended) {
				if x.SeedKey != "" {
					j.ended(x.SeedKey)
				}
			},
		})
	})
	done.Go(func() {
		_ = store.FollowOwners(ctx, kvstate.FollowConfig{Name: "judge"}, kvstate.Handler[kvstate.Value[subjects.Ownership], kvstate.Value[struct{}]]{
			Swap: func([]kvstate.Value[subjects.Ownership], []kvstate.Value[struct{}]) { up() },
			Put:  func(v kvstate.Value[subjects.Ownership]) { j.owned(v.V) },
		})
	})
	b.t.Cleanup(func() { cancel(); done.Wait() })
	for range 2 {
		select {
		case <-ready:
		case <-time.After(2 * within):
			b.t.Fatal("the judge sees nothing")
		}
	}
	return j
}

func (j *judge) breaks(format string, args ...any) {
	j.broken = append(j.broken, fmt.Sprintf(format, args...))
}

func (j *judge) seed(s subjects.Seed) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s.State != subjects.SeedLive {
		j.over(s.Key)
		return
	}
	j.seeds++
	if other := j.live[s.Key]; other != "" {
		j.breaks("key %s is seeded by %s while %s is live", s.Key, s.Rollout(), other)
	}
	if other := j.targets[s.Engine]; other != "" {
		j.breaks("%s is the target of seeds of %s and %s", s.Engine, other, s.Key)
	}
	j.live[s.Key], j.targets[s.Engine] = s.Rollout(), s.Key
}

func (j *judge) ended(key string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.over(key)
}

func (j *judge) over(key string) {
	delete(j.live, key)
	for e, k := range j.targets {
		if k == key {
			delete(j.targets, e)
		}
	}
}

func (j *judge) owned(o subjects.Ownership) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(o.Owners) > j.ceiling {
		j.breaks("key %s has %d owners, the ceiling is %d", o.Key, len(o.Owners), j.ceiling)
	}
	j.owners[o.Key] = o.Owners
}

// verdict also looks at every owner's proof in the register.
func (j *judge) verdict(b *bench) {
	b.t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, x := range j.broken {
		b.t.Error(x)
	}
	if len(j.live) > 0 {
		b.t.Errorf("live seeds are left behind: %v", j.live)
	}
	for key, owners := range j.owners {
		for _, o := range owners {
			job, id, _ := subjects.SplitRolloutKey(o.Proof.Rollout)
			r, err := b.store.Result(b.ctx(), job, subjects.DefaultReader, id)
			if err != nil || !r.Status.Sample() || r.Engine != o.Engine || r.Epoch != o.Epoch || r.CompletionTokens == nil {
				b.t.Errorf("%s owns %s by %s, whose answer is %+v, %v", o.Engine, key, o.Proof.Rollout, r.Answer, err)
			}
		}
	}
}

// hotBench is a pool under owner_pressure.
type hotBench struct {
	*bench
	cfg     Config
	ambush  *ambush
	judge   *judge
	nth     int
	answers uint64
	key     string                         // of the beginning at hand
	lines   map[*Dispatcher]*natstest.Line // of those that are behind one
}

func newHotBench(b *bench, replicas int) *hotBench {
	b.t.Helper()
	x := &hotBench{bench: b, cfg: b.config(), ambush: &ambush{}, lines: map[*Dispatcher]*natstest.Line{}}
	x.cfg.Layout.Replicas = replicas
	x.cfg.Timings = DefaultTimings().Scale(0.2) // engines must not look lost on a loaded machine
	x.cfg.Timings.AckWait = 3 * time.Second     // what a dead dispatcher held comes back soon
	ctx, cancel := context.WithTimeout(context.Background(), 4*within)
	defer cancel()
	if err := subjects.Ensure(ctx, b.js, b.pool, x.cfg.Layout); err != nil {
		b.t.Fatal(err)
	}
	must(b.store.PutSettings(b.ctx(), subjects.Settings{
		Policy: "owner_pressure", Mode: subjects.ModeEnforce, BlockTokens: 64, AnchorTokens: 128,
		Knobs: map[string]float64{"owner_ceiling": 3, "seed_cooldown": 1},
	}, 0))
	x.judge = b.judge(3)
	return x
}

func (x *hotBench) dispatcher() *Dispatcher {
	x.t.Helper()
	line := natstest.Link(x.t, x.node)
	d := must(New(x.cfg, line.Conn(x.t, nats.ReconnectBufSize(-1))))
	x.lines[d] = line
	d.seeds = &ambushed{seedWriter: d.seeds, a: x.ambush, d: d}
	go func() { _ = d.Run(context.Background()) }()
	x.t.Cleanup(d.Kill)
	natstest.Eventually(x.t, 4*within, "a ready dispatcher", func() bool { return len(d.Ready()) == 0 })
	return d
}

// burst submits n rollouts of one beginning and gives their owner key.
func (x *hotBench) burst(beginning uint32, n int) string {
	x.t.Helper()
	key := ""
	for range n {
		x.nth++
		r := request("j", fmt.Sprintf("%05d", x.nth))
		r.Prompt = ""
		for i := range uint32(192) {
			r.PromptTokenIDs = append(r.PromptTokenIDs, beginning*1000+i)
		}
		r.PromptTokenIDs = append(r.PromptTokenIDs, uint32(x.nth))
		f := subjects.FactsFromRequest(r, subjects.Settings{BlockTokens: 64})
		key, _ = subjects.OwnerKey(&f, subjects.Settings{BlockTokens: 64, AnchorTokens: 128})
		x.submit(r)
		x.answers++
	}
	return key
}

// quiet waits until all is answered and no seed is live.
func (x *hotBench) quiet(what string) {
	x.t.Helper()
	natstest.Eventually(x.t, 4*within, "everything answered and no seed live, "+what, func() bool {
		x.judge.mu.Lock()
		live := len(x.judge.live)
		x.judge.mu.Unlock()
		return live == 0 && x.messages(x.pool.Results()) == x.answers && x.messages(x.pool.Rollouts()) == 0 && x.messages(x.pool.Retry()) == 0
	})
}

// taking answers a binding after a while, as an engine does.
func taking(d time.Duration) func(context.Context, kvstate.Reservation) bool {
	return func(ctx context.Context, _ kvstate.Reservation) bool {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		return false
	}
}

// strikes are what happens to whom, at each step of a seed.
type strike struct {
	at   step
	name string
	do   func(x *hotBench, d *Dispatcher, goOn func())
}

// killed ends it there; another one takes its place.
func killed(x *hotBench, d *Dispatcher, _ func()) {
	d.Kill()
	x.dispatcher()
}

// stopped keeps it there until the others have answered nearly everything, then
// lets it go on with what it was about to do.
func stopped(x *hotBench, _ *Dispatcher, goOn func()) {
	x.others(2)
	goOn()
}

// cutOff lets it go on without a line, which comes back when the others are done.
func cutOff(x *hotBench, d *Dispatcher, goOn func()) {
	x.lines[d].Cut()
	goOn()
	x.others(4)
	x.lines[d].Heal()
}

// others waits until all but that many rollouts are answered.
func (x *hotBench) others(but uint64) {
	x.t.Helper()
	natstest.Eventually(x.t, 4*within, "the others to go on", func() bool { return x.messages(x.pool.Results())+but >= x.answers })
}

// Four dispatchers, three servers. At each step of a seed the first dispatcher to
// come there is struck, and the others have to end it.
func TestDispatchersStruckAtEachStepOfASeedDoNoHarm(t *testing.T) { // scenarios F18, F2, F10
	c := natstest.Cluster(t, 3) // not beside other tests: it is busy enough
	x := newHotBench(benchAt(t, c.List[0], c.Conn), 3)
	for range 4 {
		x.dispatcher()
	}
	for i := range 3 {
		x.agentWith(fmt.Sprintf("e%d", i+1), 2, "exact", taking(100*time.Millisecond))
	}
	for i, s := range []strike{
		{step{"seed", false}, "killed", killed}, {step{"seed", true}, "killed", killed}, {step{"owners", false}, "killed", killed},
		{step{"owners", true}, "killed", killed}, {step{"end", false}, "killed", killed}, {step{"end", true}, "killed", killed},
		{step{"seed", false}, "stopped", stopped}, {step{"owners", false}, "stopped", stopped}, {step{"end", false}, "stopped", stopped},
		{step{"seed", true}, "cut off", cutOff}, {step{"owners", true}, "cut off", cutOff}, {step{"end", true}, "cut off", cutOff},
	} {
		x.round(uint32(i+1), s)
	}
	x.judge.verdict(x.bench)
	x.judge.mu.Lock()
	defer x.judge.mu.Unlock()
	if x.judge.seeds < 12 {
		t.Errorf("%d seeds in 12 rounds", x.judge.seeds)
	}
	t.Logf("%d rollouts, %d seeds", x.answers, x.judge.seeds)
}

// round makes a beginning hot and strikes whoever comes to the step.
func (x *hotBench) round(beginning uint32, s strike) {
	x.t.Helper()
	// A completion that no dispatcher saw, all of them being at their views anew on
	// a machine that stood still, proves nothing: then the next one does.
	var asked time.Time
	natstest.Eventually(x.t, 4*within, "the first owner", func() bool {
		if time.Since(asked) > within/3 {
			asked = time.Now()
			x.key = x.burst(beginning, 1)
		}
		x.judge.mu.Lock()
		defer x.judge.mu.Unlock()
		return len(x.judge.owners[x.key]) == 1
	})
	struck, goOn := x.ambush.arm(s.at)
	defer goOn()
	x.burst(beginning, 12)
	select {
	case d := <-struck:
		s.do(x, d, goOn)
	case <-time.After(4 * within):
		x.t.Errorf("nobody came to the step %s", s.at)
	}
	goOn()
	x.quiet(s.name + " " + s.at.String())
}

func TestASeedThatWasChosenTooLongAgoIsNotWritten(t *testing.T) { // scenario F2
	b := newBench(t)
	d, f := b.faked()
	b.submit(request("j", "0001"))
	got := b.fetchOne(f, queueOf(request("j", "0001")))
	bind := bindOf("e1", got, 1, 0)
	e := core.SeedBind{Handle: got.Handle, Held: bind.Held, TTL: bind.TTL, Seed: subjects.Seed{
		Key: "00000000000000ff", State: subjects.SeedLive, Engine: "e1", Job: "j", ID: "0001", Bind: 1}}
	m := d.hand.get(got.Handle)
	if a := d.seed(b.ctx(), e, m, time.Now().Add(-2*seedAge)); a.Answer != core.Unavailable {
		t.Errorf("an old choice: answer %+v", a)
	}
	if _, _, err := b.store.SeedOf(b.ctx(), "00000000000000ff"); err == nil {
		t.Error("an old choice stands")
	}
	if a := d.seed(b.ctx(), e, m, time.Now()); a.Answer != core.OK {
		t.Errorf("a fresh choice: answer %+v", a)
	}
	a := d.seed(b.ctx(), e, m, time.Now())
	if a.Answer != core.OK && a.Answer != core.Conflict {
		t.Errorf("the same again: answer %+v", a)
	}
}

// A lost answer is looked for at the leader: the seed stands once.
func TestASeedWhoseAnswerIsLostStandsOnce(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	b.submit(request("j", "0001"))
	got := b.fetchOne(f, queueOf(request("j", "0001")))
	bind := bindOf("e1", got, 1, 0)
	bind.Held.Dispatcher = d.cfg.Name
	d.seeds = &forgetful{seedWriter: d.seeds}
	e := core.SeedBind{Handle: got.Handle, Held: bind.Held, TTL: bind.TTL, Seed: subjects.Seed{Key: "00000000000000ff"}}
	a := d.seed(b.ctx(), e, d.hand.get(got.Handle), time.Now())
	_, at, err := b.store.SeedOf(b.ctx(), "00000000000000ff")
	if a.Answer != core.OK || a.Seq != at+1 || err != nil {
		t.Errorf("answer %+v; the seed stands at %d, %v", a, at, err)
	}
}

// forgetful loses the first answer.
type forgetful struct {
	seedWriter
	lost bool
}

func (x *forgetful) Seed(ctx context.Context, b kvstate.Seeding) (uint64, error) {
	seq, err := x.seedWriter.Seed(ctx, b)
	if !x.lost {
		x.lost = true
		return 0, kvstate.ErrUnknown
	}
	return seq, err
}

func TestATransitionIsPublishedBesideDecisions(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	lines := make(chan *nats.Msg, 16)
	sub := must(b.nc.ChanSubscribe(b.pool.Decision(), lines))
	defer func() { _ = sub.Unsubscribe() }()
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	f.do(core.Transition{Key: "00000000000000ff", What: "seeded", Engine: "e1", Rollout: "j.1", Owners: 1})
	select {
	case m := <-lines:
		for _, want := range []string{`"transition":{`, `"what":"seeded"`, `"dispatcher":`} {
			if !strings.Contains(string(m.Data), want) {
				t.Errorf("%s has no %s", m.Data, want)
			}
		}
	case <-time.After(within):
		t.Fatal("nothing is published")
	}
}
