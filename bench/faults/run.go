package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/subjects"
)

// Config of a run. Zero values take the default.
type Config struct {
	Bin         string        // the rollbus program; must be given
	Dir         string        // empty or missing, for data, logs and the history; must be given
	Seed        uint64        // of the schedule; 0 is a seed like others
	Kills       int           // SIGKILLs; 100
	Rollouts    int           // 5,000
	Dispatchers int           // 3
	Engines     int           // each with an agent of its own; 4
	Scale       float64       // of every liveness timing; 0.2
	Sync        bool          // NATS syncs every write
	Within      time.Duration // of the whole run; 9 min
	Log         io.Writer     // progress, for people; nil = none

	// script strikes instead of a drawn schedule, while rate rollouts a second
	// are submitted.
	script func(ctx context.Context, p *pool, each func(Struck)) error
	rate   float64
	// hot > 0: the pool is under owner_pressure, and the rollouts share that many
	// beginnings.
	hot int
}

func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.Kills, 100)
	def(&c.Rollouts, 5000)
	def(&c.Dispatchers, 3)
	def(&c.Engines, 4)
	if c.Scale == 0 {
		c.Scale = 0.2
	}
	if c.Within == 0 {
		c.Within = 9 * time.Minute
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	return c
}

// Validate joins every complaint.
func (c Config) Validate() error {
	var errs []error
	if c.Bin == "" {
		errs = append(errs, errors.New("no program: name a rollbus binary"))
	}
	if c.Dir == "" {
		errs = append(errs, errors.New("no directory: name one for data and logs"))
	}
	for _, n := range []struct {
		name        string
		v, low, top int
	}{
		{"kills", c.Kills, 1, 10_000}, {"rollouts", c.Rollouts, 1, 1_000_000},
		{"dispatchers", c.Dispatchers, 1, 16}, {"engines", c.Engines, 1, 32},
	} {
		if n.v < n.low || n.v > n.top {
			errs = append(errs, fmt.Errorf("%s is %d: give %d to %d", n.name, n.v, n.low, n.top))
		}
	}
	if c.Scale < 0.1 || c.Scale > 1 {
		errs = append(errs, fmt.Errorf("scale is %g: give 0.1 to 1 (server TTLs have a grain of 1 s)", c.Scale))
	}
	return errors.Join(errs...)
}

// Run starts a pool, strikes it and judges it. The report holds as far as the
// run came; an error tells what kept it from ending.
func Run(ctx context.Context, cfg Config) (r Report, err error) {
	cfg = cfg.withDefaults()
	r.Seed = cfg.Seed
	if err := cfg.Validate(); err != nil {
		return r, err
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Within, fmt.Errorf("not done within %v", cfg.Within))
	defer cancel()
	p, err := newPool(cfg)
	if err != nil {
		return r, err
	}
	defer p.close()
	if err := p.start(ctx); err != nil {
		return r, errors.Join(err, p.failed())
	}
	x := &run{pool: p, cfg: cfg, begin: time.Now(), last: time.Now()}
	h, err := x.all(ctx)
	r.judge(h, p.struck, x.trainers, p.failed())
	if err := keep(cfg.Dir, h); err != nil {
		return r, err
	}
	return r, err
}

// run is a pool under load.
type run struct {
	pool     *pool
	cfg      Config
	begin    time.Time
	rec      *checker.Recorder
	trainers []*trainer

	mu    sync.Mutex
	kills int
	last  time.Time // of the last kill
}

var jobs = []string{"math", "code"}

func (x *run) all(ctx context.Context) (checker.History, error) {
	nc, err := x.pool.connect("recorder")
	if err != nil {
		return checker.History{}, err
	}
	defer nc.Close()
	name, err := subjects.NewPool(poolName)
	if err != nil {
		return checker.History{}, err
	}
	x.rec, err = checker.Record(ctx, nc, name)
	if err != nil {
		return checker.History{}, err
	}
	defer x.rec.Close()
	// Whatever dies, somebody sees each write before it is overwritten.
	var each []*nats.Conn
	for _, s := range x.pool.servers {
		one, err := connectTo(s.url(), "recorder")
		if err != nil {
			return checker.History{}, err
		}
		defer one.Close()
		each = append(each, one)
	}
	if err := x.rec.Watch(ctx, each...); err != nil {
		return checker.History{}, err
	}
	for i, job := range jobs {
		n := (x.cfg.Rollouts + i) / len(jobs)
		t, err := x.pool.newTrainer(ctx, job, n, x.rec)
		if err != nil {
			return checker.History{}, err
		}
		defer t.close()
		t.may = x.may
		x.trainers = append(x.trainers, t)
	}
	if err := x.load(ctx); err != nil {
		return x.rec.History(), err
	}
	return x.rec.Finish(ctx)
}

// ahead is how many rollouts are submitted beyond the pace, so that something
// always waits or runs.
const ahead = 60

// may spreads the rollouts over the faults, so that each meets a loaded pool.
func (x *run) may() int {
	x.mu.Lock()
	done := float64(x.kills) + min(time.Since(x.last).Seconds()/meanGap.Seconds(), 1)
	x.mu.Unlock()
	pace := int(float64(x.cfg.Rollouts)*done/float64(x.cfg.Kills)) + ahead
	if x.cfg.rate > 0 {
		pace = int(time.Since(x.begin).Seconds()*x.cfg.rate) + ahead
	}
	return min(pace, x.rec.Counts().Answered+window) / len(jobs)
}

func (x *run) load(ctx context.Context) error {
	reading, stop := context.WithCancel(ctx)
	var readers, work sync.WaitGroup
	defer readers.Wait()
	defer stop()
	for _, t := range x.trainers {
		readers.Go(func() { t.read(reading) })
		work.Go(func() { t.submitAll(ctx) })
	}
	script := x.cfg.script
	if script == nil {
		drawn := Schedule(x.cfg.Seed, x.cfg.Kills, [4]int{x.cfg.Dispatchers, x.cfg.Engines, x.cfg.Engines, servers}, x.cfg.Scale)
		script = follow(drawn)
	}
	err := script(ctx, x.pool, x.struck)
	x.logf("the last fault has healed")
	work.Wait()
	if err != nil {
		return err
	}
	if err := x.await(ctx, checker.AllAnswered); err != nil {
		return fmt.Errorf("not everything was answered: %w", err)
	}
	x.logf("everything is answered")
	// Most answers have been handed out by now.
	part, done := context.WithTimeout(ctx, sweepAfter)
	_ = x.await(part, checker.AllReceived) // what is missing is asked for
	done()
	for _, t := range x.trainers {
		t.sweep(ctx)
	}
	if err := x.await(ctx, checker.AllReceived); err != nil {
		return fmt.Errorf("not everything was received: %w", err)
	}
	return nil
}

func (x *run) await(ctx context.Context, done func(checker.Counts) bool) error {
	return x.rec.Await(ctx, func(c checker.Counts) bool { return done(c) && c.Submitted > 0 })
}

func (x *run) struck(s Struck) {
	x.mu.Lock()
	if !s.Pause {
		x.kills++
		x.last = s.At
	}
	n := x.kills
	x.mu.Unlock()
	c := x.rec.Counts()
	x.logf("%3d/%d %-30v submitted %d, answered %d, held %d", n, x.cfg.Kills, s.Fault, c.Submitted, c.Answered, c.Held)
}

func (x *run) logf(format string, args ...any) {
	fmt.Fprintf(x.cfg.Log, "%6.1fs "+format+"\n", append([]any{time.Since(x.begin).Seconds()}, args...)...)
}

// keep writes the history beside the logs, for whoever looks for a cause.
func keep(dir string, h checker.History) error {
	b, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("keep the history: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, "history.json"), b, 0o600)
}
