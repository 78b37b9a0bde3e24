package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
)

// Config of a simulated server. Zero values take the default.
type Config struct {
	Listen string   // address; default 127.0.0.1:0, a free port
	Model  string   // served model name; default "sim"
	LoRAs  []string // adapter names, served as models of their own

	Engine    model.Config // of one rank
	Ranks     int          // data-parallel ranks, each an engine model of its own; default 1, at most 64
	TimeScale float64      // modelled seconds per second; default 1, 0.001 to 10,000; modelled time lasts 292 years

	// MaxModelLen bounds prompt + output, tokens; default 131,072 or the KV
	// pool, whichever is smaller. More is a 400.
	MaxModelLen int
	// MaxQueued waiting requests (over all ranks) are taken, more answer 503;
	// default 65,536.
	MaxQueued int
	// MeanOutput is the mean of the drawn output length, tokens, for requests
	// that neither ignore EOS nor name a length; default 256.
	MeanOutput int
	// WeightVersion that /weight_info reports until it is updated.
	WeightVersion int64

	OmitZeroCached bool // leave out prompt_tokens_details when nothing was cached, as vLLM does
	KeepAbandoned  bool // a client that leaves does not stop its request
	NoControl      bool // no control endpoints (vLLM without its dev mode): 404
	// StreamInterval is the shortest time between two rounds of deltas; default
	// 20 ms. More streams than 5,000 a second allow stretch it.
	StreamInterval time.Duration
	Faults         []Fault // armed from the start

	// OnKV gets the cache events of one step of one rank, in order, from the
	// driver's goroutine: it must not block. nil = no events.
	OnKV func(rank int, step []KVEvent)
	// OnLife is called before a life of the server takes its first request.
	OnLife func(life int)
	// Routes adds endpoints; patterns served already must not be repeated.
	Routes func(s *Server, mux *http.ServeMux)
	// Paths are not served, so that Routes may.
	Without []string

	Logger *slog.Logger // default: discarded
}

// Bounds of a Config.
const (
	MaxRanks     = 64
	MinTimeScale = 0.001
	MaxTimeScale = 10_000
	// MaxBody is the largest request body, bytes.
	MaxBody = 32 << 20
)

// WithDefaults fills what is zero.
func (c Config) WithDefaults() Config {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Model == "" {
		c.Model = "sim"
	}
	c.Engine = c.Engine.WithDefaults()
	c.Ranks = or(c.Ranks, 1)
	c.TimeScale = or(c.TimeScale, 1)
	c.MaxModelLen = or(c.MaxModelLen, min(131_072, c.Engine.Capacity()))
	c.MaxQueued = or(c.MaxQueued, 65_536)
	c.MeanOutput = or(c.MeanOutput, 256)
	c.StreamInterval = or(c.StreamInterval, 20*time.Millisecond)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func or[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// Validate reports everything that is wrong at once.
func (c Config) Validate() error {
	errs := []error{c.Engine.Validate()}
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.Ranks >= 1 && c.Ranks <= MaxRanks, "%d ranks: give 1 to %d", c.Ranks, MaxRanks)
	check(c.TimeScale >= MinTimeScale && c.TimeScale <= MaxTimeScale, "time scale %v: give %v to %v", c.TimeScale, MinTimeScale, MaxTimeScale)
	check(c.MaxModelLen >= 2 && c.MaxModelLen <= model.MaxKVTokens, "context of %d tokens: give 2 to %d", c.MaxModelLen, model.MaxKVTokens)
	check(c.MaxQueued >= 1, "%d queued requests: give at least 1", c.MaxQueued)
	check(c.MeanOutput >= 1, "mean output of %d tokens: give at least 1", c.MeanOutput)
	check(c.StreamInterval >= time.Millisecond, "stream interval of %v: give at least 1ms", c.StreamInterval)
	for _, f := range c.Faults {
		errs = append(errs, f.Validate())
	}
	return errors.Join(errs...)
}
