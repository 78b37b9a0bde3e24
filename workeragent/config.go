package workeragent

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// Config of an Agent.
type Config struct {
	// Pool it serves. Required.
	Pool string
	// Name of the agent, for people: it stands in the registrations of its
	// engines. Empty = the host's name and a random token.
	Name string
	// Version of the program, for the registrations. Empty = "dev".
	Version string
	// Engines it serves, at least one.
	Engines []EngineConfig

	// Layout makes missing streams and buckets of the pool before anything else.
	// nil = wait until somebody else has made them: an agent's credential need
	// not allow it.
	Layout *subjects.Layout

	Timings Timings
	// SpoolBytes bounds finished answers that are not stored yet: 256 MiB. Over
	// it the agent takes nothing new.
	SpoolBytes int64
	// SpoolDir keeps such answers on disk too, so that they survive the agent.
	// Empty = in memory alone.
	SpoolDir string
	// StateDir keeps what engines reported of themselves, one small file an
	// engine, for a later life of the agent in which they do not tell. Empty = in
	// memory alone.
	StateDir string

	// Log gets rare things at info, rollouts at debug, payloads never. nil = nowhere.
	Log *slog.Logger
}

// EngineConfig is one engine of the node.
type EngineConfig struct {
	// Name in the pool, unique among its engines, 1 to 64 of a-z 0-9 _ -.
	Name string
	// Adapter that drives it. Required; the agent closes it when it stops.
	Adapter engine.Adapter
	// Slots are the requests that it runs at once over all ranks. 0 = what it
	// reports, else 16.
	Slots int
	// CapacityTokens of its KV cache over all ranks, where it does not and did
	// never report it. 0 = unknown then.
	CapacityTokens int64
	// MaxModelLen in tokens. 0 = what it reports, else unknown.
	MaxModelLen int
	// Kind in the registration. Empty = what the adapter says.
	Kind string
	// Model in the registration. Empty = what it reports.
	Model string
}

// Defaults.
const (
	DefaultSlots      = 16
	DefaultSpoolBytes = 256 << 20
	maxName           = 64 // leaves room for what consumer names add to it
	maxEngines        = 256
	maxSlots          = 1 << 16
)

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
	if c.SpoolBytes == 0 {
		c.SpoolBytes = DefaultSpoolBytes
	}
	c.Timings = c.Timings.WithDefaults()
	return c
}

// Validate joins every complaint. It expects defaults to be filled in.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := subjects.NewPool(c.Pool); err != nil {
		errs = append(errs, err)
	}
	if len(c.Name) > subjects.MaxToken {
		bad("agent name is %d bytes long: at most %d are allowed", len(c.Name), subjects.MaxToken)
	}
	switch n := len(c.Engines); {
	case n == 0:
		bad("no engine is configured: name at least one")
	case n > maxEngines:
		bad("%d engines are configured: one agent serves at most %d", n, maxEngines)
	}
	seen := map[string]bool{}
	for i := range c.Engines {
		e := &c.Engines[i]
		errs = append(errs, e.validate())
		if seen[e.Name] {
			bad("engine %q is configured twice: give each its own name", e.Name)
		}
		seen[e.Name] = true
	}
	if c.Layout != nil {
		errs = append(errs, c.Layout.Validate())
	}
	if c.SpoolBytes < subjects.MaxPayload {
		bad("spool is %d bytes: give at least %d, the size of one answer", c.SpoolBytes, subjects.MaxPayload)
	}
	errs = append(errs, c.Timings.Validate())
	return errors.Join(errs...)
}

func (e *EngineConfig) validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("engine %q: %s", e.Name, fmt.Sprintf(format, args...)))
	}
	if err := subjects.CheckToken("engine", e.Name); err != nil {
		errs = append(errs, err)
	} else if len(e.Name) > maxName {
		bad("its name is %d bytes long: at most %d are allowed", len(e.Name), maxName)
	}
	if e.Adapter == nil {
		bad("it has no adapter: make one with engine.NewOpenAI or another")
	}
	if e.Slots < 0 || e.Slots > maxSlots {
		bad("slots is %d: give 1 to %d, or 0 for what it reports", e.Slots, maxSlots)
	}
	if e.CapacityTokens < 0 {
		bad("capacity is %d tokens: give 0 for what it reports, or more", e.CapacityTokens)
	}
	if e.MaxModelLen < 0 {
		bad("max model length is %d tokens: give 0 for what it reports, or more", e.MaxModelLen)
	}
	return errors.Join(errs...)
}

// ownName is the host's name and a token that makes it unique.
func ownName() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "agent"
	}
	return host[:min(len(host), 40)] + "-" + strings.ToLower(rand.Text()[:8])
}
