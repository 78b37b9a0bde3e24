package canary

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/bench/demo/local"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Config of a live canary.
type Config struct {
	Bin         string  // the rollbus program
	Dir         string  // for logs and streams; a folder of its own for each arm
	Scale       float64 // how much faster than their model the engines run
	Dispatchers int
	Progress    func(arm string, answered, of int) // may be nil
}

// Bounds of a Config.
const (
	MaxScale       = 100
	MaxDispatchers = 8
)

// Run plays every arm, one after the other, and reports.
func Run(ctx context.Context, cfg Config) (*contest.Report, error) {
	if cfg.Scale < 1 || cfg.Scale > MaxScale || cfg.Dispatchers < 1 || cfg.Dispatchers > MaxDispatchers {
		return nil, fmt.Errorf("a time scale of %g and %d dispatchers: give 1 to %d and 1 to %d", cfg.Scale, cfg.Dispatchers, MaxScale, MaxDispatchers)
	}
	var arms []*contest.CanaryArm
	for _, p := range contest.CanaryPolicies() {
		a, err := play(ctx, cfg, p)
		if err != nil {
			return nil, fmt.Errorf("arm %s: %w", p.Name, err)
		}
		arms = append(arms, a)
	}
	return contest.LiveCanary(arms, cfg.Scale)
}

const (
	poolName = "canary"
	jobName  = "canary"
	engines  = 2
)

// arm is one being played.
type arm struct {
	cfg   Config
	pool  subjects.Pool
	nc    *nats.Conn
	store *kvstate.Store
	fleet *fleet
	seen  *watch
	out   *contest.CanaryArm
}

func play(ctx context.Context, cfg Config, p contest.CanaryPolicy) (_ *contest.CanaryArm, err error) {
	dir := filepath.Join(cfg.Dir, p.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	srv, err := local.StartNATS(ctx, local.NATSConfig{Dir: filepath.Join(dir, "nats"), Listen: "127.0.0.1:0"}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	defer srv.Stop()
	life, kill := context.WithCancel(ctx)
	x := &arm{cfg: cfg, fleet: &fleet{bin: cfg.Bin, dir: dir, ctx: life}}
	defer func() {
		kill()
		x.fleet.end()
	}()
	x.out = &contest.CanaryArm{Name: p.Name, Dispatchers: cfg.Dispatchers, Engines: engines, Decisions: map[string]int{}, Shares: map[string]float64{}}
	if x.pool, err = subjects.NewPool(poolName); err != nil {
		return nil, err
	}
	if x.nc, err = srv.Conn("canary"); err != nil {
		return nil, err
	}
	defer x.nc.Close()
	if x.store, err = kvstate.Open(x.nc, x.pool); err != nil {
		return nil, err
	}
	if err := subjects.Ensure(ctx, x.store.JS(), x.pool, subjects.Layout{Replicas: 1, Storage: jetstream.MemoryStorage, Budget: 2 << 30}); err != nil {
		return nil, err
	}
	if _, err := x.store.PutSettings(ctx, p.Settings, 0); err != nil {
		return nil, err
	}
	if x.seen, err = listen(x.nc, x.pool, x.out); err != nil {
		return nil, err
	}
	defer x.seen.close()
	if err := x.startAll(ctx, srv.URL()); err != nil {
		return nil, err
	}
	if err := x.drive(ctx); err != nil {
		return nil, fmt.Errorf("%w (logs in %s)", err, dir)
	}
	x.seen.finish()
	return x.out, x.readBack(ctx)
}

func (x *arm) startAll(ctx context.Context, server string) error {
	common := []string{"--server", server, "--pool", poolName, "--log-level", "warn"}
	for i := range x.cfg.Dispatchers {
		name := fmt.Sprintf("d%d", i+1)
		if _, err := x.fleet.start(name, append([]string{"dispatcher", "--name", name, "--storage", "memory", "--no-journal"}, common...)...); err != nil {
			return err
		}
	}
	agent := append([]string{"agent", "--state-dir", filepath.Join(x.fleet.dir, "state")}, common...)
	for i := range engines {
		name := fmt.Sprintf("e%d", i+1)
		ready := filepath.Join(x.fleet.dir, name+".json")
		if _, err := x.fleet.start(name, "engine", "--cache-events", "--listen", "127.0.0.1:0", "--ready-file", ready, "--log-level", "warn", "--time-scale", strconv.FormatFloat(x.cfg.Scale, 'g', -1, 64),
			"--slots", strconv.Itoa(contest.CanarySlots), "--kv-tokens", strconv.Itoa(contest.CanaryKV)); err != nil {
			return err
		}
		var at struct {
			URL string `json:"url"`
		}
		if err := readJSON(ctx, ready, &at); err != nil {
			return err
		}
		agent = append(agent, "--engine", name+"=vllm="+at.URL)
	}
	if _, err := x.fleet.start("agent", agent...); err != nil {
		return err
	}
	return x.awaitEngines(ctx)
}

// awaitEngines waits until both are registered, ready, and have reported.
func (x *arm) awaitEngines(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startWait, fmt.Errorf("the engines are not ready, with exact cache events, after %v: see the logs in %s", startWait, x.fleet.dir))
	defer cancel()
	found := make(chan subjects.Engine, 64)
	go func() {
		put := func(v kvstate.Value[subjects.Engine]) {
			select {
			case found <- v.V:
			case <-ctx.Done():
			}
		}
		_ = x.store.FollowEngines(ctx, kvstate.FollowConfig{Name: "canary", Values: true}, kvstate.Handler[kvstate.Value[subjects.Engine], kvstate.Value[struct{}]]{
			Swap: func(all []kvstate.Value[subjects.Engine], _ []kvstate.Value[struct{}]) {
				for _, v := range all {
					put(v)
				}
			},
			Put: put, Gone: func(kvstate.Value[struct{}]) {}, Alive: func() {},
		}) // it ends with ctx
	}()
	ready := map[string]bool{}
	for len(ready) < engines {
		select {
		case e := <-found:
			if e.State == subjects.EngineReady && e.Events == exactEvents {
				ready[e.Engine] = true
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// exactEvents is what an engine registers whose cache events can be followed.
const exactEvents = "exact"

// drive submits the workload as answers come, at the time scale, and counts.
func (x *arm) drive(ctx context.Context) error {
	c, err := client.Open(ctx, x.nc, poolName, jobName)
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	answers := make(chan *subjects.Result)
	go func() {
		for res, err := range c.Results(ctx) {
			if err != nil {
				cancel(err)
				return
			}
			select {
			case answers <- res:
			case <-ctx.Done():
				return
			}
		}
	}()
	d := &driver{arm: x, client: c, w: contest.CanaryWorkload(), said: map[uint64][]uint32{}, turns: map[string]time.Duration{}, fail: cancel}
	return d.run(ctx, answers)
}

// readBack tells what the processes run and follow.
func (x *arm) readBack(ctx context.Context) error {
	s, revision, err := x.store.Settings(ctx)
	if err != nil {
		return err
	}
	x.out.SettingsDigest = contest.CanaryDigest(struct {
		Settings subjects.Settings
		Revision uint64
	}{s, revision})
	seen := ""
	for _, p := range x.fleet.parts {
		sum, err := programDigest(p.Process.Pid)
		if err != nil {
			return err
		}
		if seen != "" && seen != sum {
			return errors.New("the processes run different programs")
		}
		seen = sum
	}
	x.out.BinarySHA256 = seen
	return x.coreVersion(ctx)
}

// coreVersion is what the dispatchers register.
func (x *arm) coreVersion(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	var versions []int
	err := x.store.FollowDispatchers(ctx, kvstate.FollowConfig{Name: "canary-d", Values: true}, kvstate.Handler[kvstate.Value[subjects.Dispatcher], kvstate.Value[struct{}]]{
		Swap: func(all []kvstate.Value[subjects.Dispatcher], _ []kvstate.Value[struct{}]) {
			for _, v := range all {
				versions = append(versions, v.V.CoreVersion)
			}
			cancel()
		},
		Put: func(kvstate.Value[subjects.Dispatcher]) {}, Gone: func(kvstate.Value[struct{}]) {}, Alive: func() {},
	})
	slices.Sort(versions)
	versions = slices.Compact(versions)
	if len(versions) != 1 {
		return fmt.Errorf("dispatchers of %d core versions are registered: %w", len(versions), errors.Join(err, errNoVersion))
	}
	x.out.CoreVersion = versions[0]
	return nil
}

var errNoVersion = errors.New("want one version")

func engineNames() []string { return strings.Fields("e1 e2") }
