package bus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Case is one thing to measure.
type Case struct {
	Storage     jetstream.StorageType // file or memory
	Replicas    int                   // 1 or 3: as many servers
	Payload     int                   // bytes of a request, about; 512 to 1 MiB
	Dispatchers int                   // 1 to 16
	Engines     int                   // 1 to 1,024
}

// Validate names every value that cannot be measured.
func (c Case) Validate() error {
	var errs []error
	within := func(what string, v, lo, hi int) {
		if v < lo || v > hi {
			errs = append(errs, fmt.Errorf("bench bus: %s is %d: give %d to %d", what, v, lo, hi))
		}
	}
	if c.Replicas != 1 && c.Replicas != 3 {
		errs = append(errs, fmt.Errorf("bench bus: replicas is %d: give 1 or 3", c.Replicas))
	}
	within("payload", c.Payload, 512, 1<<20)
	within("dispatchers", c.Dispatchers, 1, 16)
	within("engines", c.Engines, 1, 1024)
	return errors.Join(errs...)
}

// Default are the cases of a run without --all.
func Default() []Case {
	return []Case{
		{Storage: jetstream.FileStorage, Replicas: 1, Payload: 1 << 10, Dispatchers: 1, Engines: 50},
		{Storage: jetstream.FileStorage, Replicas: 1, Payload: 1 << 10, Dispatchers: 4, Engines: 50},
	}
}

// All are the cases of a run with --all: each dimension away from the default.
func All() []Case {
	base := Default()[0]
	out := Default()
	add := func(change func(*Case)) {
		c := base
		change(&c)
		out = append(out, c)
	}
	add(func(c *Case) { c.Storage = jetstream.MemoryStorage })
	add(func(c *Case) { c.Replicas = 3 })
	add(func(c *Case) { c.Replicas, c.Dispatchers = 3, 4 })
	add(func(c *Case) { c.Payload = 16 << 10 })
	add(func(c *Case) { c.Engines = 400 })
	add(func(c *Case) { c.Engines, c.Dispatchers = 400, 4 })
	return out
}

// Config of a run.
type Config struct {
	Cases  []Case
	Rounds int           // turns of each side; 3
	Slice  time.Duration // length of a turn; 3 s
	Half   time.Duration // length of the turns at half load together; 900 ms
	Dir    string        // where streams go; empty = a temporary folder
	// Progress is called before and after each turn; nil = nobody looks.
	Progress func(text string)
}

func (c Config) withDefaults() Config {
	if c.Rounds == 0 {
		c.Rounds = 3
	}
	if c.Slice == 0 {
		c.Slice = 3 * time.Second
	}
	if c.Half == 0 {
		c.Half = 900 * time.Millisecond
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// Result is what one case came to. Times are in the unit of their names; CPU is
// of the whole process: NATS, trainer, dispatchers, agents.
type Result struct {
	Transport   string `json:"transport"` // tcp
	Storage     string `json:"storage"`
	Replicas    int    `json:"replicas"`
	Payload     int    `json:"payload_bytes"`
	Dispatchers int    `json:"dispatchers"`
	Engines     int    `json:"engines"`

	Rollouts float64 `json:"rollouts_per_s"`
	Bare     float64 `json:"bare_per_s"`
	Ratio    float64 `json:"ratio"` // of the two

	HalfLoad float64 `json:"half_load_per_s"` // offered to both sides for the latencies
	P50      float64 `json:"dispatch_p50_ms"`
	P99      float64 `json:"dispatch_p99_ms"`
	BareP50  float64 `json:"bare_p50_ms"`
	BareP99  float64 `json:"bare_p99_ms"`

	CPU     float64 `json:"cpu_us_per_rollout"`
	BareCPU float64 `json:"bare_cpu_us_per_rollout"`

	// Refused are binds for each rollout that met a sequence that had moved: what
	// the guard costs when dispatchers, or a dispatcher and a release, meet.
	Refused     float64 `json:"refused_per_rollout"`
	BareRefused float64 `json:"bare_refused_per_rollout"`

	// Rounds are the rates of each turn, to see how steady they are.
	Rounds     []float64 `json:"rounds_per_s"`
	BareRounds []float64 `json:"bare_rounds_per_s"`
}

// Run measures the cases one after another.
func Run(ctx context.Context, cfg Config) ([]Result, error) {
	cfg = cfg.withDefaults()
	for _, c := range cfg.Cases {
		if err := c.Validate(); err != nil {
			return nil, err
		}
	}
	var out []Result
	for _, c := range cfg.Cases {
		r, err := one(ctx, cfg, c)
		if err != nil {
			return out, fmt.Errorf("%s storage, %d replicas, %d bytes, %d dispatchers, %d engines: %w",
				storageName(c.Storage), c.Replicas, c.Payload, c.Dispatchers, c.Engines, err)
		}
		out = append(out, r)
	}
	return out, nil
}

func storageName(s jetstream.StorageType) string {
	if s == jetstream.MemoryStorage {
		return "memory"
	}
	return "file"
}

// warm is how long each side runs before anything is counted.
const warm = 300 * time.Millisecond

func one(ctx context.Context, cfg Config, c Case) (r Result, err error) {
	dir, err := os.MkdirTemp(cfg.Dir, "rollbus-bench-bus-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	servers, err := startServers(ctx, dir, c.Replicas)
	if err != nil {
		return r, err
	}
	defer servers.stop()

	bare, err := startBare(ctx, servers, c)
	if err != nil {
		return r, fmt.Errorf("bare chain: %w", err)
	}
	defer bare.stop()
	bus, err := startBus(ctx, servers, c)
	if err != nil {
		return r, fmt.Errorf("bus: %w", err)
	}
	defer bus.stop()

	r = Result{
		Transport: "tcp", Storage: storageName(c.Storage), Replicas: c.Replicas,
		Payload: c.Payload, Dispatchers: c.Dispatchers, Engines: c.Engines,
	}
	for _, s := range []*side{bare, bus} {
		if _, err := s.saturate(ctx, warm); err != nil && !errors.Is(err, errNothing) {
			return r, fmt.Errorf("warm up %s: %w", s.name, err)
		}
	}
	var busTurns, bareTurns turns
	for i := range cfg.Rounds {
		for _, t := range []struct {
			s   *side
			sum *turns
		}{{bus, &busTurns}, {bare, &bareTurns}} {
			cfg.Progress(fmt.Sprintf("D=%d %s round %d of %d", c.Dispatchers, t.s.name, i+1, cfg.Rounds))
			got, err := t.s.saturate(ctx, cfg.Slice)
			if err != nil {
				return r, fmt.Errorf("%s, round %d: %w", t.s.name, i+1, err)
			}
			t.sum.add(got)
		}
	}
	r.Rollouts, r.CPU, r.Refused, r.Rounds = busTurns.figures()
	r.Bare, r.BareCPU, r.BareRefused, r.BareRounds = bareTurns.figures()
	if r.Bare > 0 {
		r.Ratio = r.Rollouts / r.Bare
	}
	r.HalfLoad = r.Rollouts / 2
	cfg.Progress(fmt.Sprintf("D=%d half load", c.Dispatchers))
	var waits, bareWaits []float64
	for range cfg.Rounds {
		for _, t := range []struct {
			s   *side
			all *[]float64
		}{{bus, &waits}, {bare, &bareWaits}} {
			got, err := t.s.paced(ctx, cfg.Half/time.Duration(cfg.Rounds), r.HalfLoad)
			if err != nil {
				return r, fmt.Errorf("%s at half load: %w", t.s.name, err)
			}
			*t.all = append(*t.all, got...)
		}
	}
	r.P50, r.P99 = percentile(waits, 0.5), percentile(waits, 0.99)
	r.BareP50, r.BareP99 = percentile(bareWaits, 0.5), percentile(bareWaits, 0.99)
	return r, nil
}
