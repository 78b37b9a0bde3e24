package kvevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"
)

// Source is where one data-parallel rank publishes.
type Source struct {
	Rank     int    `json:"rank"`
	Endpoint string `json:"endpoint"`         // tcp://host:port or ipc://path; wildcards resolved
	Replay   string `json:"replay,omitempty"` // "" = none
	Topic    string `json:"topic"`            // prefix of the topics to follow
	Bind     bool   `json:"bind,omitempty"`   // the publisher dials: wait for it at Endpoint
}

// Config of a Feed; zero = the default.
type Config struct {
	// Engine names it in logs and alarms.
	Engine string
	// Epoch of the engine's cache, published with every change.
	Epoch   string
	Index   IndexConfig
	Sources []Source
	// Publish gets every change, encoded, in order. It must not block; the
	// bytes are valid only during the call.
	Publish func(message []byte)
	// Alarm is told what smells: the first time and then once a minute a kind
	// and rank at most. It must not block.
	Alarm func(Alarm)
	// Identity tells one process of the engine from the next, its start time
	// say. Nil or an error = unknown: after a lost connection what was known is
	// forgotten.
	Identity func(context.Context) (string, error)
	// CoolDown after a failed recovery. Default 30 s.
	CoolDown time.Duration
	// RingMessages and RingBytes bound what waits to be decoded, a rank.
	// Default 65,536 and 64 MiB.
	RingMessages, RingBytes int
	// HeldBatches bound what waits for a replay, a rank. Default 4,096.
	HeldBatches int
	// ReplayIdle is how long a replay may be silent. Default 2 s.
	ReplayIdle time.Duration
	// Confirm is how long after a connection began a replay endpoint is asked
	// once more, for what was sent before the subscription arrived. Default 2 s.
	Confirm time.Duration
	// Replays bounds the replays under way: a channel with room for so many,
	// shared by the feeds of a process. Default 2 for this feed.
	Replays chan struct{}
	// Backoff between connections: the first, doubled up to the last, jittered.
	// Default 100 ms and 10 s.
	BackoffMin, BackoffMax time.Duration
	// MuteAfter without a connection a rank's port is alarmed about. Default 10 s.
	MuteAfter time.Duration
	// Tick is how often recoveries and expiries are looked after. Default 1 s.
	Tick time.Duration
	// Sockets. Default Network.
	Sockets Sockets
	Log     *slog.Logger
}

func (c Config) withDefaults() Config {
	dur := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	dur(&c.CoolDown, 30*time.Second)
	dur(&c.ReplayIdle, 2*time.Second)
	dur(&c.Confirm, 2*time.Second)
	dur(&c.BackoffMin, 100*time.Millisecond)
	dur(&c.BackoffMax, 10*time.Second)
	dur(&c.MuteAfter, 10*time.Second)
	dur(&c.Tick, time.Second)
	if c.RingMessages <= 0 {
		c.RingMessages = 1 << 16
	}
	if c.RingBytes <= 0 {
		c.RingBytes = 64 << 20
	}
	if c.Replays == nil {
		c.Replays = make(chan struct{}, 2)
	}
	if c.Sockets == nil {
		c.Sockets = Network{}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Alarm == nil {
		c.Alarm = func(Alarm) {}
	}
	return c
}

// ErrSources is a configuration that cannot be followed.
var ErrSources = errors.New("sources of KV events")

// Feed follows the events of one engine, all its ranks.
type Feed struct {
	cfg   Config
	view  *View // its lock is that of everything below
	ranks []*rankFeed
	start time.Time

	alarmMu sync.Mutex
	alarms  map[alarmKey]*alarmCount
}

type alarmKey struct {
	kind AlarmKind
	rank int
}

type alarmCount struct {
	n    int64
	last time.Time
}

// New checks the configuration; nothing is dialled before Run.
func New(cfg Config) (*Feed, error) {
	cfg = cfg.withDefaults()
	if len(cfg.Sources) == 0 {
		return nil, fmt.Errorf("%w: none; does the engine publish any?", ErrSources)
	}
	f := &Feed{cfg: cfg, view: NewView(cfg.Epoch, cfg.Publish), start: time.Now(), alarms: map[alarmKey]*alarmCount{}}
	ends, ranks := map[string]int{}, map[int]bool{}
	for _, s := range cfg.Sources {
		if other, twice := ends[s.Endpoint]; twice {
			return nil, fmt.Errorf("%w: ranks %d and %d both at %s; one port is one rank's", ErrSources, other, s.Rank, s.Endpoint)
		}
		if ranks[s.Rank] || s.Rank < 0 {
			return nil, fmt.Errorf("%w: rank %d stands twice or is below 0", ErrSources, s.Rank)
		}
		ends[s.Endpoint], ranks[s.Rank] = s.Rank, true
		f.ranks = append(f.ranks, newRankFeed(f, s))
	}
	return f, nil
}

// Run follows until ctx ends. It gives back only then: whatever happens to a
// connection is tried again.
func (f *Feed) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, r := range f.ranks {
		wg.Go(func() { r.receive(ctx) })
		wg.Go(func() { r.work(ctx) })
	}
	wg.Wait()
	return context.Cause(ctx)
}

func (f *Feed) now() time.Duration { return time.Since(f.start) }

// View is the engine's whole block set.
func (f *Feed) View() *View { return f.view }

// Emptied says that a command of ours emptied the cache (reset, sleep, new
// weights): its event may come late or never.
func (f *Feed) Emptied() {
	f.view.mu.Lock()
	defer f.view.mu.Unlock()
	f.emptied()
	f.view.flush()
}

func (f *Feed) emptied() {
	for _, r := range f.ranks {
		r.carry(r.seq.Emptied())
	}
}

// SetEpoch begins another life of the engine's cache.
func (f *Feed) SetEpoch(epoch string) {
	f.view.mu.Lock()
	f.emptied()
	f.view.mu.Unlock()
	f.view.SetEpoch(epoch)
}

// alone tells whether no rank but r has blocks in the view.
func (f *Feed) alone(r *rankFeed) bool {
	for _, o := range f.ranks {
		if o != r && o.index.shown && o.index.byHash.len() > 0 {
			return false
		}
	}
	return true
}

// alarm counts, and tells the first and then one a minute.
func (f *Feed) alarm(kind AlarmKind, rank int, text string) {
	f.alarmMu.Lock()
	c := f.alarms[alarmKey{kind, rank}]
	if c == nil {
		c = &alarmCount{}
		f.alarms[alarmKey{kind, rank}] = c
	}
	c.n++
	now := time.Now()
	tell := c.n == 1 || now.Sub(c.last) >= time.Minute
	if tell {
		c.last = now
	}
	a := Alarm{Kind: kind, Rank: rank, Text: text, Count: c.n}
	f.alarmMu.Unlock()
	if tell {
		f.cfg.Log.Warn("cache events", "engine", f.cfg.Engine, "rank", rank, "alarm", string(kind), "text", text, "count", a.Count)
		f.cfg.Alarm(a)
	}
}

// Alarms counts them by kind and rank, "kind/rank".
func (f *Feed) Alarms() map[string]int64 {
	f.alarmMu.Lock()
	defer f.alarmMu.Unlock()
	out := make(map[string]int64, len(f.alarms))
	for k, c := range f.alarms {
		out[string(k.kind)+"/"+strconv.Itoa(k.rank)] = c.n
	}
	return out
}

// RankStatus is what is known of one rank's stream.
type RankStatus struct {
	Rank      int    `json:"rank"`
	Endpoint  string `json:"endpoint"`
	Connected bool   `json:"connected"`
	Trusted   bool   `json:"trusted"`
	Partial   bool   `json:"partial"` // blocks from before the first contact are missing
	Refused   bool   `json:"refused"` // another engine's publisher is on this port
	Reason    string `json:"reason,omitempty"`
	Applied   uint64 `json:"applied"`
	Batches   int64  `json:"batches"`
	Dropped   int64  `json:"dropped"` // messages that did not fit into the ring
	Malformed int64  `json:"malformed"`
	Unknown   int64  `json:"unknown_events"`
	Broken    int64  `json:"broken_events"`
	Replays   int64  `json:"replays"`
	RingPeak  int    `json:"ring_peak_bytes"`
	BlockSize int    `json:"block_size"` // seen in the events; 0 = none yet
	Index     Stats  `json:"index"`
}

// Status of every rank.
func (f *Feed) Status() []RankStatus {
	f.view.mu.Lock()
	defer f.view.mu.Unlock()
	out := make([]RankStatus, len(f.ranks))
	for i, r := range f.ranks {
		s := r.status
		s.Rank, s.Endpoint = r.src.Rank, r.src.Endpoint
		s.Applied, _ = r.seq.Applied()
		s.Partial = r.seq.Partial()
		s.Dropped, s.RingPeak = r.ring.stats()
		s.Index = r.index.Stats()
		out[i] = s
	}
	return out
}

// Exact tells whether the view may be credited: every rank is connected,
// trusted and its own.
func (f *Feed) Exact() bool {
	f.view.mu.Lock()
	defer f.view.mu.Unlock()
	for _, r := range f.ranks {
		if !r.status.Connected || !r.status.Trusted || r.status.Refused {
			return false
		}
	}
	return true
}
