package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

const maxRanks = 4096

// gauges are what an adapter remembers between two looks at a server's load.
type gauges struct {
	mu       sync.Mutex
	begun    time.Time
	tracker  *telemetry.Tracker
	inFlight int
	health   Health
}

// Health is what the samples of an engine's load come to, one after another.
type Health struct {
	Restarts int    // lives of the server that only its counters told: they fell
	Wedged   bool   // there is work and nothing moves
	Moved    bool   // something has moved since the sample before
	Asleep   bool   // the cache is gone, requests wait
	Problem  string // why the last sample does not count, for people; "" = it does
}

// Observer is what adapters that follow an engine's load implement too.
type Observer interface {
	// Health as of the last Load.
	Health() Health
}

func newGauges(cfg telemetry.TrackerConfig) *gauges {
	return &gauges{begun: time.Now(), tracker: telemetry.NewTracker(cfg)}
}

func (g *gauges) enter(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inFlight += n
}

func (g *gauges) observe(s telemetry.Sample) subjects.Load {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.tracker.Observe(s, time.Since(g.begun), g.inFlight)
	if r.Restarted && s.StartedAt == nil {
		g.health.Restarts++
	}
	g.health.Wedged, g.health.Moved, g.health.Asleep, g.health.Problem = r.Wedged, r.Moved, r.Asleep, problemOf(&r)
	r.Load.Problem = g.health.Problem
	return r.Load
}

// problemOf is why a reading does not count.
func problemOf(r *telemetry.Reading) string {
	switch {
	case r.Complete:
		return ""
	case r.Frozen:
		return "frozen: the gauges show work that nobody gave the engine, and nothing moves"
	case len(r.Problems) > 0:
		return clip("inconsistent: " + r.Problems[0].String())
	case r.Load.RanksAdvertised != nil && len(r.Load.Ranks) < *r.Load.RanksAdvertised:
		return fmt.Sprintf("incomplete: %d of %d ranks have reported", len(r.Load.Ranks), *r.Load.RanksAdvertised)
	}
	return "incomplete: a rank does not tell what runs and waits"
}

// Health implements Observer.
func (a *OpenAI) Health() Health {
	a.gauges.mu.Lock()
	defer a.gauges.mu.Unlock()
	return a.gauges.health
}

// Load reads /metrics by the names of vLLM (which the simulated engine and many
// look-alikes speak too), SGLang or llama.cpp. Nil when the server has none of
// them.
func (a *OpenAI) Load(ctx context.Context) (*subjects.Load, error) {
	status, b, err := a.get(ctx, "/metrics")
	switch {
	case err != nil:
		return nil, err
	case status != http.StatusOK:
		return nil, nil
	}
	s, _, err := telemetry.ParseMetrics(b)
	switch {
	case errors.Is(err, telemetry.ErrNoSeries):
		return nil, nil
	case err != nil:
		return nil, err
	}
	if v := a.served.Load(); v != nil {
		s.Fill(v.hints)
	}
	l := a.gauges.observe(s)
	return &l, nil
}

// fromMetrics adds what an exposition says of the process and its cache.
func fromMetrics(b []byte, c *Capabilities) {
	s, _, err := telemetry.ParseMetrics(b)
	if s.StartedAt != nil {
		c.StartedAt = s.StartedAt
	}
	if err != nil {
		return
	}
	c.EngineBlock = s.BlockSize
	c.Ranks = max(c.Ranks, len(s.Ranks))
	if s.Advertised != nil {
		c.Ranks = max(c.Ranks, *s.Advertised)
	}
	var total int64
	for _, r := range s.Ranks {
		if r.KVCapacityTokens == nil {
			return // an engine with an unknown rank has an unknown capacity
		}
		total += *r.KVCapacityTokens
	}
	if total > 0 && len(s.Ranks) == c.Ranks {
		c.CapacityTokens, c.CapacitySource = &total, "reported"
	}
}

// hintsOf is what capabilities say of one rank.
func hintsOf(c *Capabilities) telemetry.Hints {
	h := telemetry.Hints{Ranks: &c.Ranks}
	if c.Slots != nil {
		n := *c.Slots / c.Ranks
		h.MaxRunning = &n
	}
	return h
}

// serverInfo adds what vLLM tells in its dev mode, and the simulated engine.
func serverInfo(b []byte, c *Capabilities) {
	var o struct {
		Simulated bool `json:"simulated"`
		VLLM      struct {
			Model struct {
				MaxModelLen *int `json:"max_model_len"`
			} `json:"model_config"`
			Scheduler struct {
				Slots *int `json:"max_num_seqs"`
			} `json:"scheduler_config"`
			Parallel struct {
				Ranks int `json:"data_parallel_size"`
			} `json:"parallel_config"`
		} `json:"vllm_config"`
	}
	if json.Unmarshal(b, &o) != nil {
		return
	}
	if o.Simulated {
		c.Kind = "sim"
	}
	if n := o.VLLM.Parallel.Ranks; n > 1 && n <= maxRanks {
		c.Ranks = n
	}
	if n := positive(o.VLLM.Scheduler.Slots); n != nil {
		slots := *n * c.Ranks // max_num_seqs is of one rank
		c.Slots = &slots
	}
	if c.MaxModelLen == nil {
		c.MaxModelLen = positive(o.VLLM.Model.MaxModelLen)
	}
}

// weightInfo reads {"weight_version": "7"}; what is no number stays unknown.
func weightInfo(b []byte, c *Capabilities) {
	var o struct {
		Version json.RawMessage `json:"weight_version"`
	}
	if json.Unmarshal(b, &o) != nil {
		return
	}
	if n, err := strconv.ParseInt(strings.Trim(string(o.Version), `"`), 10, 64); err == nil {
		c.WeightVersion = &n
	}
}
