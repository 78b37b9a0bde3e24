package dispatcher

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Config of a Dispatcher.
type Config struct {
	// Pool it serves. Required.
	Pool string
	// Name in the pool, unique among its dispatchers, 1 to 64 of a-z 0-9 _ -.
	// Empty = the host's name and a random token: a restarted dispatcher is
	// another one.
	Name string
	// Version of the program, for its registration. Empty = "dev".
	Version string
	// Layout of streams and buckets, for whoever comes first.
	Layout subjects.Layout

	Timings Timings
	Limits  Limits

	// Explain makes decision records carry their candidates.
	Explain bool
	// QuietDecisions publishes no decision lines.
	QuietDecisions bool

	// Recorder sees every step; nil = none. One that is a prometheus.Collector is
	// served with the dispatcher's metrics.
	Recorder Recorder
	// Decisions is called with every decision record by the goroutine that owns
	// the core: it must not block, and must copy what it keeps. nil = none.
	Decisions func(core.Decision)

	// Log gets rare things at info, rollouts at debug, payloads never. nil = nowhere.
	Log *slog.Logger
}

// Recorder sees what the core saw and did, in order, on the goroutine that owns
// it. Record must not block; effects and what they point to are valid only
// during the call.
type Recorder interface {
	Record(now time.Duration, ev core.Event, effects []core.Effect)
}

// Checkpointer is a Recorder that wants the core's whole state now and then, on
// the same goroutine. The state shares memory with the core: what is kept of it
// is copied during the call.
type Checkpointer interface {
	Due(now time.Duration) bool
	Checkpoint(now time.Duration, of core.Source)
}

// Stepper is the decision core as the shell sees it.
type Stepper interface {
	Step(ev core.Event, now time.Duration) []core.Effect
}

// Limits bound memory and rates. Zero fields take the default.
type Limits struct {
	Events      int   // 4096 events waiting for the core; sources wait when it is full
	InHand      int   // 512 messages fetched and not yet acked or given back
	HandBytes   int64 // 256 MiB of their bodies; a pull asks for no more than what is left
	Answered    int   // 1,000,000 answered ids remembered
	Writers     int   // 64 writes other than binds in flight
	Pulls       int   // 1,024 pulls outstanding
	Telemetry   int   // 8,192 load and cache messages waiting; the oldest are dropped
	Decisions   int   // 1,024 decision lines waiting; newer ones are dropped
	WalkPerS    int   // 2,000 queued messages a second read by the expiry walker
	WalkBytes   int   // 8 MiB that one of its reads may return
	WalkEntries int   // 1,000,000 deadlines it keeps per stream
}

// DefaultLimits are those of production.
func DefaultLimits() Limits {
	return Limits{
		Events: 4096, InHand: 512, HandBytes: 256 << 20, Answered: 1_000_000,
		Writers: 64, Pulls: 1024, Telemetry: 8192, Decisions: 1024,
		WalkPerS: 2000, WalkBytes: 8 << 20, WalkEntries: 1_000_000,
	}
}

// WithDefaults fills in what is zero.
func (l Limits) WithDefaults() Limits {
	def := DefaultLimits()
	fill := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	fill(&l.Events, def.Events)
	fill(&l.InHand, def.InHand)
	fill(&l.Answered, def.Answered)
	fill(&l.Writers, def.Writers)
	fill(&l.Pulls, def.Pulls)
	fill(&l.Telemetry, def.Telemetry)
	fill(&l.Decisions, def.Decisions)
	fill(&l.WalkPerS, def.WalkPerS)
	fill(&l.WalkBytes, def.WalkBytes)
	fill(&l.WalkEntries, def.WalkEntries)
	if l.HandBytes == 0 {
		l.HandBytes = def.HandBytes
	}
	return l
}

// Validate joins every complaint.
func (l Limits) Validate() error {
	var errs []error
	positive := func(name string, v int64) {
		if v <= 0 {
			errs = append(errs, fmt.Errorf("limits: %s is %d: give a positive number", name, v))
		}
	}
	positive("Events", int64(l.Events))
	positive("InHand", int64(l.InHand))
	positive("HandBytes", l.HandBytes)
	positive("Answered", int64(l.Answered))
	positive("Writers", int64(l.Writers))
	positive("Pulls", int64(l.Pulls))
	positive("Telemetry", int64(l.Telemetry))
	positive("Decisions", int64(l.Decisions))
	positive("WalkPerS", int64(l.WalkPerS))
	positive("WalkBytes", int64(l.WalkBytes))
	positive("WalkEntries", int64(l.WalkEntries))
	return errors.Join(errs...)
}

// WithDefaults fills in what is zero. The name is drawn anew at each call.
func (c Config) WithDefaults() Config {
	if c.Name == "" {
		c.Name = ownName()
	}
	if c.Version == "" {
		c.Version = "dev"
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Timings = c.Timings.WithDefaults()
	c.Limits = c.Limits.WithDefaults()
	return c
}

// CoreConfig is the configuration of the core that New makes, for a journal.
// It expects defaults to be filled in.
func (c Config) CoreConfig() core.Config {
	return core.Config{
		Dispatcher: c.Name, Timings: c.Timings.Core, Explain: c.Explain,
		MaxInHand: c.Limits.InHand, MaxAnswered: c.Limits.Answered,
	}
}

// maxName leaves room for what consumer names add to it.
const maxName = 64

// Validate joins every complaint. It expects defaults to be filled in.
func (c Config) Validate() error {
	var errs []error
	if _, err := subjects.NewPool(c.Pool); err != nil {
		errs = append(errs, err)
	}
	if err := subjects.CheckToken("dispatcher name", c.Name); err != nil {
		errs = append(errs, err)
	} else if len(c.Name) > maxName {
		errs = append(errs, fmt.Errorf("dispatcher name is %d bytes long: at most %d are allowed", len(c.Name), maxName))
	}
	errs = append(errs, c.Timings.Validate(), c.Limits.Validate())
	return errors.Join(errs...)
}

// ownName is the host's name, reduced to what a subject allows, and a token
// that makes it unique.
func ownName() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "dispatcher"
	}
	host = strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}, host), "-_")
	if host == "" {
		host = "dispatcher"
	}
	return host[:min(len(host), 40)] + "-" + strings.ToLower(rand.Text()[:8])
}
