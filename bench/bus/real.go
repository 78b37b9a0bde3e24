package bus

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/dispatcher"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent"
	"github.com/rollbus/rollbus/workeragent/engine"
)

const (
	enginesPerAgent = 128
	registerWait    = 30 * time.Second
	stopWait        = 10 * time.Second
)

// startBus starts a pool as it is deployed, with the recommended policy, but for
// journals.
func startBus(ctx context.Context, s *servers, c Case) (*side, error) {
	return startPool(ctx, "bus", s, c, nil)
}

// startPool starts one whose dispatchers keep journals when journaled is not nil.
func startPool(ctx context.Context, name string, s *servers, c Case, journaled *journals) (*side, error) {
	x, err := newSide(ctx, name, s, c)
	if err == nil {
		err = x.startBus(ctx, c, journaled)
	}
	if err != nil {
		if x != nil {
			x.stop()
		}
		return nil, err
	}
	return x, nil
}

func (x *side) startBus(ctx context.Context, c Case, journaled *journals) error {
	store, err := kvstate.Open(x.nc, x.pool)
	if err != nil {
		return err
	}
	settings := policy.Recommended()
	settings.SchemaVersion = subjects.SchemaVersion
	if _, err := store.PutSettings(ctx, settings, 0); err != nil {
		return fmt.Errorf("write the settings: %w", err)
	}
	ended := make(chan error, c.Dispatchers+c.Engines)
	var runs sync.WaitGroup
	x.ends = append(x.ends, runs.Wait)
	run := func(name string, run func(context.Context) error, stop func(context.Context) error) {
		runs.Go(func() {
			if err := run(context.WithoutCancel(ctx)); err != nil {
				ended <- fmt.Errorf("%s: %w", name, err)
			}
		})
		x.ends = append(x.ends, func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
			defer cancel()
			_ = stop(ctx) // nothing is left to lose
		})
	}
	layout := subjects.Layout{Storage: c.Storage, Replicas: c.Replicas}
	for i := range c.Dispatchers {
		name := fmt.Sprintf("d%d", i+1)
		nc, _, err := x.connect("dispatcher "+name, i)
		if err != nil {
			return err
		}
		cfg := dispatcher.Config{Pool: x.name, Name: name, Layout: layout, Recorder: refusals{&x.refused}}
		if journaled != nil {
			if cfg.Recorder, err = journaled.start(x, cfg.WithDefaults(), nc); err != nil {
				return err
			}
		}
		d, err := dispatcher.New(cfg, nc)
		if err != nil {
			return err
		}
		run("dispatcher "+name, d.Run, d.Stop)
	}
	for from := 0; from < c.Engines; from += enginesPerAgent {
		nc, _, err := x.connect("agent", 2+from/enginesPerAgent)
		if err != nil {
			return err
		}
		cfg := workeragent.Config{Pool: x.name, Name: fmt.Sprintf("a%d", from)}
		for e := from; e < min(from+enginesPerAgent, c.Engines); e++ {
			cfg.Engines = append(cfg.Engines, workeragent.EngineConfig{Name: engineName(e), Adapter: instant{}})
		}
		a, err := workeragent.New(cfg, nc)
		if err != nil {
			return err
		}
		run("agent "+cfg.Name, a.Run, a.Stop)
	}
	nc, _, err := x.connect("trainer", 0)
	if err != nil {
		return err
	}
	// Answers are counted by the stopwatch, on both sides alike.
	cl, err := client.Open(ctx, nc, x.name, job, client.MaxInFlight(inFlight), client.WithoutLedger())
	if err != nil {
		return err
	}
	x.ends = append(x.ends, cl.Close)
	x.submit = func(ctx context.Context, ids iter.Seq[string]) error {
		for h, err := range cl.SubmitMany(ctx, requests(ids, c.Payload)) {
			if err != nil {
				return fmt.Errorf("submit %s: %w", h.ID, err)
			}
		}
		select {
		case err := <-ended:
			return err
		default:
			return nil
		}
	}
	return x.awaitEngines(ctx, store, c.Engines)
}

// refusals counts binds that were refused, on the dispatcher's own goroutine.
type refusals struct{ n *atomic.Int64 }

func (r refusals) Record(_ time.Duration, ev core.Event, _ []core.Effect) {
	if a, ok := ev.(core.BindAnswer); ok && a.Answer != core.OK {
		r.n.Add(1)
	}
}

// awaitEngines waits until so many are registered and ready.
func (x *side) awaitEngines(ctx context.Context, store *kvstate.Store, n int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, registerWait, fmt.Errorf("not every engine was ready after %v", registerWait))
	defer cancel()
	done, finish := context.WithCancel(ctx)
	defer finish()
	ready := map[string]bool{}
	seen := func(v kvstate.Value[subjects.Engine]) {
		if v.V.State == subjects.EngineReady {
			ready[v.Key] = true
		}
		if len(ready) == n {
			finish()
		}
	}
	err := store.FollowEngines(done, kvstate.FollowConfig{Name: "stopwatch", Values: true}, kvstate.Handler[kvstate.Value[subjects.Engine], kvstate.Value[struct{}]]{
		Swap: func(all []kvstate.Value[subjects.Engine], _ []kvstate.Value[struct{}]) {
			for _, v := range all {
				seen(v)
			}
		},
		Put: seen, Gone: func(kvstate.Value[struct{}]) {}, Alive: func() {},
	})
	switch {
	case len(ready) == n:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return err
}

// requests are of about that many bytes, each with a prompt of its own.
func requests(ids iter.Seq[string], payload int) iter.Seq[*subjects.Request] {
	const (
		around   = 160 // bytes of a request that are not its prompt
		perToken = 6   // five digits and a comma
	)
	random := rand.New(rand.NewPCG(1, uint64(payload)))
	return func(yield func(*subjects.Request) bool) {
		for id := range ids {
			prompt := make([]uint32, max(1, (payload-around)/perToken))
			for i := range prompt {
				prompt[i] = 10_000 + random.Uint32N(90_000)
			}
			r := &subjects.Request{ID: id, Job: job, PromptTokenIDs: prompt, Sampling: subjects.SamplingParams{MaxTokens: 64}}
			if !yield(r) {
				return
			}
		}
	}
}

// instant is an engine that answers at once.
type instant struct{}

func (instant) Capabilities(context.Context) (engine.Capabilities, error) {
	running, length := slots, 32_768
	capacity := int64(1 << 30)
	return engine.Capabilities{
		Kind: "instant", Model: "bench", Slots: &running, Ranks: 1, MaxModelLen: &length,
		CapacityTokens: &capacity, CapacitySource: "reported", Events: "none",
	}, nil
}

func (instant) Generate(_ context.Context, r *subjects.Request, _ engine.Run, _ func(engine.Delta)) (engine.Outcome, error) {
	return engine.Outcome{
		Kind: engine.Completed, FinishReason: "stop", TokenIDs: []uint32{1, 2, 3, 4}, Text: "done",
		Usage: &subjects.Usage{PromptTokens: len(r.PromptTokenIDs), CompletionTokens: 4},
	}, nil
}

func (instant) Load(context.Context) (*subjects.Load, error) { return nil, nil }
func (instant) Abort(context.Context, engine.Run) error      { return nil }
func (instant) Close() error                                 { return nil }
