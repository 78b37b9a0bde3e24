package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// CacheDecoder reads what agents publish of their engines' caches.
type CacheDecoder interface {
	// Event decodes one message of the cache subject of engine.
	Event(engine string, data []byte) (core.Cache, error)
	// Part decodes one part of a snapshot of engine.
	Part(engine string, data []byte) (SnapshotPart, error)
}

// SnapshotPart is one message of an engine's whole block set.
type SnapshotPart struct {
	Epoch string
	AsOf  uint64 // sequence of the last cache event it contains
	Part  int    // from 0, without gaps
	Last  bool
	Tiers []TierBlocks
}

// TierBlocks are blocks of one tier.
type TierBlocks struct {
	Tier   string
	Blocks []uint64
}

// maxSnapshotParts bounds one snapshot: 512 KiB each.
const maxSnapshotParts = 4096

var (
	errSnapshotIdle  = errors.New("no part came in time")
	errSnapshotParts = errors.New("a part is missing or out of order")
	errSnapshotOther = errors.New("the parts belong to different snapshots")
	errSnapshotAgain = errors.New("asked for again")
	errNoDecoder     = errors.New("this dispatcher reads no cache messages")
)

// snapshots are those under way, one an engine: asking again ends the older.
type snapshots struct {
	mu  sync.Mutex
	end map[string]context.CancelCauseFunc
	n   map[string]uint64
}

func newSnapshots() *snapshots {
	return &snapshots{end: map[string]context.CancelCauseFunc{}, n: map[string]uint64{}}
}

func (s *snapshots) begin(ctx context.Context, engine string) (context.Context, func()) {
	ctx, end := context.WithCancelCause(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.end[engine]; old != nil {
		old(errSnapshotAgain)
	}
	s.n[engine]++
	mine := s.n[engine]
	s.end[engine] = end
	return ctx, func() {
		end(nil)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.n[engine] == mine {
			delete(s.end, engine)
			delete(s.n, engine)
		}
	}
}

// snapshot asks an engine's agent for its whole block set. The core gets begin,
// parts and end, or failed at any point; only a snapshot that ended counts.
func (d *Dispatcher) snapshot(ctx context.Context, e core.AskSnapshot) {
	ctx, over := d.snapshots.begin(ctx, e.Engine)
	defer over()
	err := d.receiveSnapshot(ctx, e)
	if err == nil {
		d.metrics.snapshots.WithLabelValues("complete").Inc()
		return
	}
	d.metrics.snapshots.WithLabelValues("failed").Inc()
	d.log.Debug("snapshot failed", "engine", e.Engine, "err", err)
	if !errors.Is(err, errSnapshotAgain) {
		d.send(d.workCtx, core.Snapshot{Engine: e.Engine, Epoch: e.Epoch, Phase: "failed"})
	}
}

func (d *Dispatcher) receiveSnapshot(ctx context.Context, e core.AskSnapshot) error {
	decode := d.cfg.Cache
	if decode == nil {
		return errNoDecoder
	}
	inbox := d.nc.NewInbox()
	parts := make(chan *nats.Msg, 64)
	sub, err := d.nc.ChanSubscribe(inbox, parts)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := d.nc.PublishRequest(d.pool.Snapshot(e.Engine), inbox, nil); err != nil {
		return err
	}
	idle := time.NewTimer(d.cfg.Timings.SnapshotIdle)
	defer idle.Stop()
	var first SnapshotPart
	for n := range maxSnapshotParts {
		var m *nats.Msg
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-idle.C:
			return errSnapshotIdle
		case m = <-parts:
			idle.Reset(d.cfg.Timings.SnapshotIdle)
		}
		if m.Header.Get("Status") == "503" {
			return nats.ErrNoResponders
		}
		p, err := decode.Part(e.Engine, m.Data)
		switch {
		case err != nil:
			d.metrics.malformed.WithLabelValues("snapshot").Inc()
			return err
		case n == 0:
			first = p
		case p.AsOf != first.AsOf || p.Epoch != first.Epoch:
			return errSnapshotOther
		}
		if p.Part != n {
			return errSnapshotParts
		}
		if p.Epoch != e.Epoch {
			return fmt.Errorf("%w: epoch %.64q, asked for %.64q", errSnapshotOther, p.Epoch, e.Epoch)
		}
		say := func(phase, tier string, blocks []uint64) bool {
			return d.send(ctx, core.Snapshot{
				Engine: e.Engine, Epoch: p.Epoch, AsOf: p.AsOf, Phase: phase, Tier: tier, Blocks: blocks,
			})
		}
		ok := n > 0 || say("begin", "", nil)
		for _, t := range p.Tiers {
			ok = ok && say("part", t.Tier, t.Blocks)
		}
		if p.Last {
			ok = ok && say("end", "", nil)
		}
		switch {
		case !ok:
			return context.Cause(ctx)
		case p.Last:
			return nil
		}
	}
	return fmt.Errorf("%w: more than %d", errSnapshotParts, maxSnapshotParts)
}

// decodeCache refuses what speaks for another engine than its subject's.
func (d *Dispatcher) decodeCache(engine string, m *nats.Msg) (core.Event, bool) {
	if !goodToken(engine) || strings.Contains(engine, ".") {
		return nil, false
	}
	c, err := d.cfg.Cache.Event(engine, m.Data)
	if err != nil || c.Engine != engine {
		return nil, false
	}
	return c, true
}
