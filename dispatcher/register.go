package dispatcher

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// registration is this dispatcher's own entry. A renewal holds mu until it is
// answered, so that the goodbye names the last revision and nothing comes after it.
type registration struct {
	mu       sync.Mutex
	revision uint64 // 0 = none
	over     bool
}

// register renews the registration every Heartbeat, jittered by a fifth.
func (d *Dispatcher) register(ctx context.Context) error {
	me := subjects.Dispatcher{
		SchemaVersion: subjects.SchemaVersion, Dispatcher: d.cfg.Name, Version: d.cfg.Version,
		CoreVersion: core.Version, Started: time.Now().UnixMilli(),
	}
	again := newPause(d.cfg.Timings.RestartMin, min(d.cfg.Timings.RestartMax, d.cfg.Timings.Heartbeat))
	for {
		err := d.renew(me)
		if ctx.Err() != nil {
			return nil
		}
		d.ready.report(partRegistration, err)
		if err != nil {
			d.metrics.renewals.WithLabelValues("error").Inc()
			d.log.Debug("the registration is not renewed", "err", err)
			if !again.wait(ctx) {
				return nil
			}
			continue
		}
		again.reset()
		d.metrics.renewals.WithLabelValues("ok").Inc()
		beat := d.cfg.Timings.Heartbeat
		next := time.NewTimer(beat - beat/10 + rand.N(beat/5+1))
		select {
		case <-ctx.Done():
			next.Stop()
			return nil
		case <-next.C:
		}
	}
}

func (d *Dispatcher) renew(me subjects.Dispatcher) error {
	d.registered.mu.Lock()
	defer d.registered.mu.Unlock()
	if d.registered.over {
		return ErrStopped
	}
	ctx, cancel := context.WithTimeout(d.workCtx, d.cfg.Timings.Attempt)
	defer cancel()
	rev, err := d.store.PutDispatcher(ctx, me)
	if err == nil {
		d.registered.revision = rev
	}
	return err
}

// unregister says goodbye at the revision of the last renewal: the entry of
// whoever took the name since stays.
func (d *Dispatcher) unregister(ctx context.Context) bool {
	d.registered.mu.Lock()
	defer d.registered.mu.Unlock()
	d.registered.over = true
	rev := d.registered.revision
	if rev == 0 {
		return true
	}
	w := d.untilAnswered(ctx, "unregister", func(ctx context.Context) (uint64, error) {
		return 0, d.store.DeleteDispatcher(ctx, d.cfg.Name, rev)
	})
	switch w.answer {
	case core.OK:
		return true
	case core.Conflict, core.Superseded, core.Gone:
		d.log.Info("the registration is another's or has ended", "answer", w.answer)
		return true
	}
	return false
}

// peers are the other dispatchers, for the one task that one of them does: the
// expiry walk. The core keeps its own list, on proven contact.
type peers struct {
	self  string
	keep  time.Duration
	mu    sync.Mutex
	known bool // a whole view was seen
	seen  map[string]time.Time
}

func newPeers(self string, keep time.Duration) *peers {
	return &peers{self: self, keep: keep, seen: map[string]time.Time{}}
}

func (p *peers) swap(vs []kvstate.Value[subjects.Dispatcher]) {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.seen)
	p.known = true
	for _, v := range vs {
		p.seen[v.Key] = time.Now()
	}
}

func (p *peers) put(name string) {
	p.mu.Lock()
	p.seen[name] = time.Now()
	p.mu.Unlock()
}

func (p *peers) gone(name string) {
	p.mu.Lock()
	delete(p.seen, name)
	p.mu.Unlock()
}

// first tells whether this dispatcher has the highest hash of the live ones. In
// doubt two do the task, or none for a while: it must stand both.
func (p *peers) first(task string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	mine := rank(task, p.self)
	for name, at := range p.seen {
		if time.Since(at) > p.keep {
			delete(p.seen, name) // the server drops entries without telling
			continue
		}
		if r := rank(task, name); r > mine || r == mine && name < p.self {
			return false
		}
	}
	return p.known
}

func rank(task, name string) uint64 { return xxhash.Sum64String(task + "\x00" + name) }
