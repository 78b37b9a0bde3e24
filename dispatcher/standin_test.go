package dispatcher

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// standIn is the least that an agent does: it registers an engine, follows its
// keys, answers each binding once and releases it.
type standIn struct {
	b      *bench
	store  *kvstate.Store
	engine string
	epoch  string
	end    context.CancelFunc
	done   sync.WaitGroup
	// act replaces answering; false = go on and answer.
	act func(ctx context.Context, r kvstate.Reservation) bool

	events string // of its registration; exact: it reports its load too
	slots  int

	mu      sync.Mutex
	runs    map[string]int // by rollout
	running map[string]uint64
	most    int // bindings held at once
}

func (b *bench) agent(engine string, slots int, act func(context.Context, kvstate.Reservation) bool) *standIn {
	b.t.Helper()
	return b.agentWith(engine, slots, "none", act)
}

func (b *bench) agentWith(engine string, slots int, events string, act func(context.Context, kvstate.Reservation) bool) *standIn {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	a := &standIn{
		b: b, engine: engine, epoch: engine + "-1", end: cancel, act: act,
		store: must(kvstate.Open(b.connect(), b.pool, kvstate.Heartbeat(50*time.Millisecond))),
		runs:  map[string]int{}, running: map[string]uint64{}, events: events, slots: slots,
	}
	a.done.Go(func() { a.register(ctx) })
	a.done.Go(func() {
		for ctx.Err() == nil {
			_ = a.store.FollowOwn(ctx, engine, kvstate.Handler[kvstate.Reservation, kvstate.Marker]{
				Swap: func(rs []kvstate.Reservation, _ []kvstate.Marker) {
					for _, r := range rs {
						a.take(ctx, r)
					}
				},
				Put: func(r kvstate.Reservation) { a.take(ctx, r) },
			})
		}
	})
	b.t.Cleanup(a.stop)
	return a
}

// stop ends it without a word, as a crash does.
func (a *standIn) stop() {
	a.end()
	a.done.Wait()
}

func (a *standIn) register(ctx context.Context) {
	e := engine(a.engine)
	e.Epoch, e.Slots, e.Events = a.epoch, a.slots, a.events
	beat := time.NewTicker(200 * time.Millisecond)
	defer beat.Stop()
	for seq := uint64(1); ; seq++ {
		if a.events == "exact" {
			a.report(seq)
		}
		_, _ = a.store.PutEngine(ctx, e)
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		}
	}
}

// report publishes a whole load report.
func (a *standIn) report(seq uint64) {
	a.mu.Lock()
	running, newest := len(a.running), uint64(0)
	for _, rev := range a.running {
		newest = max(newest, rev)
	}
	a.mu.Unlock()
	waiting, ranks, capacity, used := max(0, running-a.slots), 1, int64(1_000_000), int64(running)*200
	running -= waiting
	l := subjects.Load{
		SchemaVersion: subjects.SchemaVersion, Engine: a.engine, Epoch: a.epoch, Seq: seq, AppliedRevision: newest, Source: "test",
		IntervalMS: 1000, RanksAdvertised: &ranks, Ranks: []subjects.RankLoad{{
			Running: &running, Waiting: &waiting, MaxRunning: &a.slots, KVUsedTokens: &used, KVCapacityTokens: &capacity}},
	}
	_ = a.b.nc.Publish(a.b.pool.Load(a.engine), must(json.Marshal(l)))
}

func (a *standIn) take(ctx context.Context, r kvstate.Reservation) {
	if r.State != subjects.StateBound || r.Epoch != a.epoch {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.running[r.Key()] == r.Revision {
		return // seen in a fresh view again
	}
	a.running[r.Key()] = r.Revision
	a.runs[r.Key()]++
	a.most = max(a.most, len(a.running))
	a.done.Go(func() {
		a.run(ctx, r)
		a.mu.Lock()
		delete(a.running, r.Key())
		a.mu.Unlock()
	})
}

func (a *standIn) run(ctx context.Context, r kvstate.Reservation) {
	if a.act != nil && a.act(ctx, r) {
		return
	}
	n := 16
	res := &subjects.Result{
		SchemaVersion: subjects.SchemaVersion, Job: r.Job, ID: r.ID, Attempt: r.Bind, Status: subjects.Completed,
		Text: "done by " + a.engine, Route: subjects.Route{Engine: a.engine},
	}
	facts := subjects.Answer{Reader: r.Reader, Bind: r.Bind, Engine: a.engine, Epoch: r.Epoch, CompletionTokens: &n}
	outcome := subjects.OutcomeAnswered
	for {
		_, err := a.store.Commit(ctx, res, facts)
		if errors.Is(err, kvstate.ErrSuperseded) {
			outcome = subjects.OutcomeSuperseded
			break
		}
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return
		}
	}
	// It counts no more from here: others see the release before its writer does.
	a.mu.Lock()
	delete(a.running, r.Key())
	a.mu.Unlock()
	for {
		_, err := a.store.Release(ctx, subjects.Released{
			Engine: a.engine, Job: r.Job, ID: r.ID, Outcome: outcome, Bind: r.Bind, Epoch: r.Epoch, Tokens: r.Tokens, CompletionTokens: &n,
			PromptTokens: r.PromptTokens, Status: subjects.Completed,
		}, r.Revision)
		if err == nil || errors.Is(err, kvstate.ErrSuperseded) || errors.Is(err, kvstate.ErrGone) || ctx.Err() != nil {
			return
		}
	}
}

func (a *standIn) ran(key string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runs[key]
}

// settled waits until nothing waits and nothing is bound, and there are that
// many answers.
func (b *bench) settled(answers uint64) {
	b.t.Helper()
	natstest.Eventually(b.t, 2*within, "every queue and reservation empty, one answer each", func() bool {
		if b.messages(b.pool.Rollouts()) != 0 || b.messages(b.pool.Retry()) != 0 || b.messages(b.pool.Results()) != answers {
			return false
		}
		return len(b.bindings()) == 0
	})
}

// bindings are the keys that stand.
func (b *bench) bindings() []string {
	b.t.Helper()
	kv := must(b.js.KeyValue(b.ctx(), b.pool.Bucket(subjects.Reservations)))
	l, err := kv.ListKeys(b.ctx())
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for k := range l.Keys() {
		out = append(out, k)
	}
	return out
}
