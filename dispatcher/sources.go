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
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// errRebuild ends a follower so that it starts over with a fresh view.
var errRebuild = errors.New("the core asks for fresh views")

// restarts ends every follower at once.
type restarts struct {
	mu   sync.Mutex
	ends map[core.ViewKind]context.CancelCauseFunc
}

func newRestarts() *restarts { return &restarts{ends: map[core.ViewKind]context.CancelCauseFunc{}} }

func (r *restarts) set(view core.ViewKind, end context.CancelCauseFunc) {
	r.mu.Lock()
	r.ends[view] = end
	r.mu.Unlock()
}

func (r *restarts) all() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, end := range r.ends {
		end(errRebuild)
	}
}

// follow runs a follower until ctx ends, over and over: kvstate's followers
// recover by themselves, and end early only when asked to or on what they
// cannot mend.
func (d *Dispatcher) follow(view core.ViewKind, once func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		again := newPause(d.cfg.Timings.RestartMin, d.cfg.Timings.RestartMax)
		for {
			try, end := context.WithCancelCause(ctx)
			d.rebuilds.set(view, end)
			began := time.Now()
			err := once(try)
			asked := errors.Is(context.Cause(try), errRebuild)
			end(nil)
			switch {
			case ctx.Err() != nil:
				return nil
			case asked:
				d.metrics.restarts.WithLabelValues(string(view), "asked").Inc()
				continue
			}
			d.metrics.restarts.WithLabelValues(string(view), "error").Inc()
			d.log.Warn("a follower ended; it starts over", "view", view, "err", err)
			if time.Since(began) > d.cfg.Timings.RestartMax {
				again.reset()
			}
			if !again.wait(ctx) {
				return nil
			}
		}
	}
}

// contact is the Alive handler of one follower: its goroutine alone calls it.
// The proof goes to the core behind the entries that came before it, so that a
// view that lags is not taken for a fresh one.
func (d *Dispatcher) contact(ctx context.Context, view core.ViewKind) func() {
	var last time.Time
	return func() {
		now := time.Now()
		if now.Sub(last) < d.cfg.Timings.ContactEvery {
			return
		}
		last = now
		d.ready.contact(now)
		d.send(ctx, core.Contact{Proven: true, View: view})
	}
}

// unreadable counts entries that nobody can read; what they mean for the view
// comes beside them.
func (d *Dispatcher) unreadable(view core.ViewKind) func(kvstate.Undecodable) {
	return func(u kvstate.Undecodable) {
		d.metrics.malformed.WithLabelValues("view_" + string(view)).Inc()
		d.log.Warn("an entry cannot be read", "view", view, "subject", u.Subject, "revision", u.Revision, "err", u.Err)
	}
}

// followers are the followed views. Every event is sent on the goroutine of its
// follower, in stream order.
func (d *Dispatcher) followers() map[core.ViewKind]func(context.Context) error {
	cfg := kvstate.FollowConfig{Name: d.cfg.Name}
	out := map[core.ViewKind]func(context.Context) error{}
	add := func(view core.ViewKind, once func(context.Context) error) {
		out[view] = d.follow(view, once)
	}
	add(core.ViewReservations, func(ctx context.Context) error {
		return d.store.FollowAll(ctx, cfg, kvstate.Handler[kvstate.Entry, kvstate.Ended]{
			Swap:  func(es []kvstate.Entry, xs []kvstate.Ended) { d.send(ctx, entries(es, xs)) },
			Put:   func(e kvstate.Entry) { d.send(ctx, entryPut(e)) },
			Gone:  func(x kvstate.Ended) { d.send(ctx, entryGone(x)) },
			Alive: d.contact(ctx, core.ViewReservations), Bad: d.unreadable(core.ViewReservations),
		})
	})
	add(core.ViewResults, func(ctx context.Context) error {
		return d.store.FollowResults(ctx, cfg, kvstate.Handler[kvstate.Registered, struct{}]{
			Swap: func(rs []kvstate.Registered, _ []struct{}) {
				d.send(ctx, core.ViewSwap{Kind: core.ViewResults, Answered: each(rs, answered)})
			},
			Put:   func(r kvstate.Registered) { d.send(ctx, answered(r)) },
			Gone:  func(struct{}) {},
			Alive: d.contact(ctx, core.ViewResults), Bad: d.unreadable(core.ViewResults),
		})
	})
	add(core.ViewEngines, func(ctx context.Context) error {
		return d.store.FollowEngines(ctx, cfg, kvstate.Handler[kvstate.Value[subjects.Engine], kvstate.Value[struct{}]]{
			Swap: func(vs []kvstate.Value[subjects.Engine], _ []kvstate.Value[struct{}]) {
				d.send(ctx, core.ViewSwap{Kind: core.ViewEngines, Engines: each(vs, enginePut)})
			},
			Put: func(v kvstate.Value[subjects.Engine]) {
				d.unread.gone(v.Key)
				d.send(ctx, enginePut(v))
			},
			Gone: func(v kvstate.Value[struct{}]) {
				d.send(ctx, core.EngineGone{Engine: v.Key, Revision: v.Revision})
			},
			Alive: d.contact(ctx, core.ViewEngines), Bad: func(u kvstate.Undecodable) {
				d.unread.put(strings.TrimPrefix(u.Subject, subjects.BucketSubject(d.pool.Bucket(subjects.Engines), "")), u)
				d.unreadable(core.ViewEngines)(u)
			},
		})
	})
	add(core.ViewDispatchers, func(ctx context.Context) error {
		return d.store.FollowDispatchers(ctx, cfg, kvstate.Handler[kvstate.Value[subjects.Dispatcher], kvstate.Value[struct{}]]{
			Swap: func(vs []kvstate.Value[subjects.Dispatcher], _ []kvstate.Value[struct{}]) {
				d.peers.swap(vs)
				d.send(ctx, core.ViewSwap{Kind: core.ViewDispatchers, Dispatchers: each(vs, dispatcherPut)})
			},
			Put: func(v kvstate.Value[subjects.Dispatcher]) {
				d.peers.put(v.Key)
				d.send(ctx, dispatcherPut(v))
			},
			Gone: func(v kvstate.Value[struct{}]) {
				d.peers.gone(v.Key)
				d.send(ctx, core.DispatcherGone{Dispatcher: v.Key, Revision: v.Revision})
			},
			Alive: d.contact(ctx, core.ViewDispatchers), Bad: d.unreadable(core.ViewDispatchers),
		})
	})
	add(core.ViewCancels, func(ctx context.Context) error {
		return d.store.FollowCancels(ctx, cfg, kvstate.Handler[kvstate.Value[subjects.Cancel], kvstate.Value[struct{}]]{
			Swap: func(vs []kvstate.Value[subjects.Cancel], _ []kvstate.Value[struct{}]) {
				d.walker.swapCancels(vs)
				d.send(ctx, core.ViewSwap{Kind: core.ViewCancels, Cancels: each(vs, cancelPut)})
			},
			Put: func(v kvstate.Value[subjects.Cancel]) {
				d.walker.putCancel(v)
				d.send(ctx, cancelPut(v))
			},
			Gone:  func(v kvstate.Value[struct{}]) { d.walker.goneCancel(v.Key) },
			Alive: d.contact(ctx, core.ViewCancels), Bad: d.unreadable(core.ViewCancels),
		})
	})
	add(core.ViewOwners, func(ctx context.Context) error {
		return d.store.FollowOwners(ctx, cfg, kvstate.Handler[kvstate.Value[subjects.Ownership], kvstate.Value[struct{}]]{
			Swap: func(vs []kvstate.Value[subjects.Ownership], _ []kvstate.Value[struct{}]) {
				d.send(ctx, core.ViewSwap{Kind: core.ViewOwners, Owners: each(vs, ownerPut)})
			},
			Put: func(v kvstate.Value[subjects.Ownership]) { d.send(ctx, ownerPut(v)) },
			Gone: func(v kvstate.Value[struct{}]) {
				d.send(ctx, core.OwnersGone{Key: v.Key, Revision: v.Revision})
			},
			Alive: d.contact(ctx, core.ViewOwners), Bad: d.unreadable(core.ViewOwners),
		})
	})
	add(core.ViewPools, func(ctx context.Context) error {
		cfg := cfg
		cfg.Filter = d.pool.String()
		return d.store.FollowPools(ctx, cfg, kvstate.Handler[kvstate.Value[subjects.Settings], kvstate.Value[struct{}]]{
			Swap: func(vs []kvstate.Value[subjects.Settings], _ []kvstate.Value[struct{}]) {
				swap := core.ViewSwap{Kind: core.ViewPools}
				for _, v := range vs {
					if v.Key == d.pool.String() {
						put := core.PoolPut{Settings: v.V, Revision: v.Revision}
						swap.Pool = &put
					}
				}
				if swap.Pool == nil {
					d.use(subjects.Settings{})
				} else {
					d.use(swap.Pool.Settings)
				}
				d.send(ctx, swap)
			},
			Put: func(v kvstate.Value[subjects.Settings]) {
				d.use(v.V)
				d.send(ctx, core.PoolPut{Settings: v.V, Revision: v.Revision})
			},
			Gone: func(v kvstate.Value[struct{}]) {
				d.use(subjects.Settings{})
				d.send(ctx, core.PoolPut{Revision: v.Revision})
			},
			Alive: d.contact(ctx, core.ViewPools), Bad: d.unreadable(core.ViewPools),
		})
	})
	return out
}

// use keeps the settings that decoding and expiry need: block size, deadline.
// The core refuses a bad change whole; so do these.
func (d *Dispatcher) use(s subjects.Settings) {
	if _, err := policy.Resolve(s); err != nil {
		return
	}
	s = s.WithDefaults()
	d.settings.Store(&s)
}

// watchConnection tells the core at once when the connection is gone: no
// decision is made on views that nothing feeds.
func (d *Dispatcher) watchConnection(ctx context.Context) error {
	ch := d.nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING, nats.DISCONNECTED, nats.CLOSED)
	defer d.nc.RemoveStatusListener(ch)
	if d.nc.IsClosed() {
		return ErrConnectionClosed
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case s := <-ch:
			switch s {
			case nats.CONNECTED:
				d.ready.report(partConnection, nil)
				d.log.Info("connected to NATS again")
				continue
			case nats.CLOSED:
				return ErrConnectionClosed
			}
			d.metrics.disconnects.Inc()
			d.ready.report(partConnection, fmt.Errorf("connection is %v", s))
			d.log.Warn("the connection to NATS is lost", "status", s.String())
			d.send(ctx, core.Contact{Proven: false})
		}
	}
}

func each[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i, v := range in {
		out[i] = f(v)
	}
	return out
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func reservationPut(r kvstate.Reservation) core.ReservationPut {
	return core.ReservationPut{Held: r.Held, Revision: r.Revision, Stored: nanos(r.Stored), TTLMS: r.TTL.Milliseconds()}
}

func reservationGone(m kvstate.Marker) core.ReservationGone {
	return core.ReservationGone{Released: m.Released, Revision: m.Revision, Stored: nanos(m.Stored)}
}

func answered(r kvstate.Registered) core.Answered {
	return core.Answered{Answer: r.Answer, Revision: r.Revision, Stored: nanos(r.Stored)}
}

func enginePut(v kvstate.Value[subjects.Engine]) core.EnginePut {
	return core.EnginePut{Engine: v.V, Revision: v.Revision, Stored: nanos(v.Stored)}
}

func dispatcherPut(v kvstate.Value[subjects.Dispatcher]) core.DispatcherPut {
	return core.DispatcherPut{Dispatcher: v.Key, Revision: v.Revision, Stored: nanos(v.Stored)}
}

func ownerPut(v kvstate.Value[subjects.Ownership]) core.OwnerPut {
	return core.OwnerPut{Ownership: v.V, Revision: v.Revision, Stored: nanos(v.Stored), TTLMS: v.TTL.Milliseconds()}
}

func cancelPut(v kvstate.Value[subjects.Cancel]) core.CancelPut {
	return core.CancelPut{Cancel: v.V, Revision: v.Revision, Stored: nanos(v.Stored)}
}
