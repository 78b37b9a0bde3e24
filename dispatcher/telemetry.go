package dispatcher

import (
	"context"
	"encoding/json"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

const (
	maxLoadBytes  = 256 << 10 // of one load message; 512 ranks fit well
	maxBurstBytes = 64 << 20  // of messages that were received and not looked at yet
)

// ring is a queue of bounded length: what is put last stays, what is oldest goes.
type ring[T any] struct {
	mu    sync.Mutex
	items []T
	head  int
	n     int
	some  chan struct{}
}

func newRing[T any](most int) *ring[T] {
	return &ring[T]{items: make([]T, most), some: make(chan struct{}, 1)}
}

// put reports whether the oldest had to go.
func (r *ring[T]) put(v T) (dropped bool) {
	r.mu.Lock()
	if r.n == len(r.items) {
		r.head = (r.head + 1) % len(r.items)
		r.n--
		dropped = true
	}
	r.items[(r.head+r.n)%len(r.items)] = v
	r.n++
	r.mu.Unlock()
	select {
	case r.some <- struct{}{}:
	default:
	}
	return dropped
}

// take waits; it has one taker.
func (r *ring[T]) take(ctx context.Context) (v T, ok bool) {
	for {
		r.mu.Lock()
		if r.n > 0 {
			var zero T
			v, r.items[r.head] = r.items[r.head], zero
			r.head = (r.head + 1) % len(r.items)
			r.n--
			r.mu.Unlock()
			return v, true
		}
		r.mu.Unlock()
		select {
		case <-r.some:
		case <-ctx.Done():
			return v, false
		}
	}
}

// watchTelemetry hands load and cache messages to the core in the order of
// their arrival. It never holds up NATS: when the core is slow, the oldest go.
func (d *Dispatcher) watchTelemetry(ctx context.Context) error {
	waiting := newRing[core.Event](d.cfg.Limits.Telemetry)
	on := func(kind, subject string, decode func(engine string, m *nats.Msg) (core.Event, bool)) (*nats.Subscription, error) {
		prefix := strings.TrimSuffix(subject, "*")
		sub, err := d.nc.Subscribe(subject, func(m *nats.Msg) {
			ev, ok := decode(strings.TrimPrefix(m.Subject, prefix), m)
			if !ok {
				d.metrics.malformed.WithLabelValues(kind).Inc()
				return
			}
			if waiting.put(ev) {
				d.metrics.dropped.WithLabelValues("telemetry").Inc()
			}
		})
		if err != nil {
			return nil, err
		}
		// The handler never waits: what piles up here is a burst, bounded in bytes.
		return sub, sub.SetPendingLimits(-1, maxBurstBytes)
	}
	load, err := on("load", d.pool.Load("*"), decodeLoad)
	if err != nil {
		return err
	}
	defer func() { _ = load.Unsubscribe() }()
	cache, err := on("cache", d.pool.Cache("*"), decodeCache)
	if err != nil {
		return err
	}
	defer func() { _ = cache.Unsubscribe() }()
	for {
		ev, ok := waiting.take(ctx)
		if !ok || !d.send(ctx, ev) {
			return nil
		}
	}
}

// decodeLoad refuses what speaks for another engine than its subject's: agents
// may publish only there.
func decodeLoad(engine string, m *nats.Msg) (core.Event, bool) {
	if len(m.Data) > maxLoadBytes {
		return nil, false
	}
	var l subjects.Load
	if json.Unmarshal(m.Data, &l) != nil || l.Engine != engine || !goodToken(engine) {
		return nil, false
	}
	return core.Load{Load: l}, true
}

// decodeCache reads a cache event: see kvevents for its form.
func decodeCache(engine string, m *nats.Msg) (core.Event, bool) {
	if !goodToken(engine) {
		return nil, false
	}
	c, err := kvevents.DecodeChange(m.Data, nil)
	if err != nil {
		return nil, false
	}
	return core.Cache{
		Engine: engine, Epoch: c.Epoch, Seq: c.Seq, Namespace: c.Namespace,
		Op: c.Kind.String(), Tier: c.Tier.String(), Blocks: c.Blocks,
		Parent: c.Parent, HasParent: c.HasParent,
	}, true
}
