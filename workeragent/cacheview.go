package workeragent

import (
	"context"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// What a registration says of the cache view.
const (
	eventsExact       = "exact"       // from the engine's own events
	eventsApproximate = "approximate" // a guess from what was run there
	eventsNone        = "none"        // none yet, or of another epoch than the registered one
)

// cacheTold is what the registration says of the cache view. Under unit.mu.
type cacheTold struct {
	events string
	epoch  string // of the view: another epoch's view is none
	block  int    // tokens of the engine's blocks as its events show, 0 = not seen
}

// maxRan bounds runs that wait to be entered into an approximate view; those
// over it are forgotten, which costs a match.
const maxRan = 256

// ranHere is one run for the approximate view.
type ranHere struct {
	epoch     string
	namespace uint64
	prompt    []uint32
	resumed   []uint32
	output    []uint32
}

// cacheWant is what the view has to be of; another value is another view, or
// for the epoch alone another life of the same one.
type cacheWant struct {
	epoch   string
	exact   bool
	model   string
	block   int // of the pool
	engine  int // of the engine, 0 = not told
	most    int // pool blocks that fit into its cache, 0 = unknown
	emptied int
}

// cacheView is the loop's own; nothing else touches it.
type cacheView struct {
	u       *unit
	begun   time.Time
	want    cacheWant
	sources []kvevents.Source
	view    *kvevents.View
	feed    *kvevents.Feed        // exact
	approx  *kvevents.Approximate // approximate
	audited *audited              // exact
	sub     *nats.Subscription
	stop    context.CancelFunc
	running sync.WaitGroup
	missed  atomic.Bool // a change was not sent: whoever follows does not know yet
}

// cacheLoop keeps the engine's cache view: its changes go out, snapshots are
// answered. Neither the engine nor a run ever waits for it.
func (u *unit) cacheLoop(ctx context.Context) {
	c := &cacheView{u: u, begun: time.Now(), stop: func() {}}
	defer c.end()
	tick := time.NewTicker(u.a.t.Probe)
	defer tick.Stop()
	for {
		c.renew(ctx)
		for waiting := true; waiting; {
			select {
			case r := <-u.ran:
				c.ran(&r)
			case <-u.kickCache:
				waiting = false
			case <-tick.C:
				c.compare()
				waiting = false
			case <-ctx.Done():
				return
			}
		}
	}
}

// renew brings the view in line with what is known of the engine now.
func (c *cacheView) renew(ctx context.Context) {
	u := c.u
	u.mu.Lock()
	known, want := u.probed, u.cacheWantLocked()
	u.mu.Unlock()
	if !known {
		return
	}
	// Within one life a look that failed to find the events takes nothing back.
	if c.feed != nil && want.epoch == c.want.epoch {
		want.exact = true
	}
	sources, ok := c.ask(ctx, want.exact)
	if !ok {
		if c.view == nil || c.want.epoch != want.epoch {
			return // told as none; the next tick asks again
		}
		sources = c.sources
	}
	same := c.want
	same.epoch, same.emptied, same.most = want.epoch, want.emptied, want.most
	switch {
	case c.view == nil || same != want || !reflect.DeepEqual(sources, c.sources):
		if err := c.build(ctx, want, sources); err != nil {
			u.log.Warn("no view of the engine's cache", "error", err)
			return
		}
	case c.want.epoch != want.epoch:
		c.setEpoch(want.epoch)
	case c.want.emptied != want.emptied:
		c.emptied()
	}
	c.want = want
	if c.approx != nil {
		c.approx.Expire(time.Since(c.begun))
	}
	if c.missed.Load() && u.a.nc.IsConnected() && c.missed.Swap(false) {
		c.doubt()
	}
	c.tell()
}

// ask reads where the engine publishes; ok is false when it does not say now.
func (c *cacheView) ask(ctx context.Context, exact bool) (sources []kvevents.Source, ok bool) {
	e, has := c.u.cfg.Adapter.(engine.EventSourcer)
	if !exact || !has {
		return nil, true
	}
	ctx, cancel := context.WithTimeout(ctx, c.u.a.t.ProbeTimeout)
	defer cancel()
	sources, err := e.EventSources(ctx)
	if err != nil || len(sources) == 0 {
		c.u.log.Debug("the engine does not say where its cache events are", "error", err)
		return nil, false
	}
	return sources, true
}

// cacheWantLocked is what the view should be of. Callers hold mu.
func (u *unit) cacheWantLocked() cacheWant {
	s := u.a.settings.Load()
	w := cacheWant{
		epoch: u.epoch.String(), exact: u.caps.Events == eventsExact, emptied: u.emptied,
		model: or(or(u.cfg.Model, u.caps.Model), s.Model), block: s.BlockTokens,
	}
	if u.caps.EngineBlock != nil {
		w.engine = *u.caps.EngineBlock
	}
	if n, _ := u.capacityLocked(); n > 0 {
		const most = 1 << 20 // 64 Mi tokens at the default block
		w.most = int(min(most, max(1, n/int64(max(1, s.BlockTokens)))))
	}
	return w
}

// build makes another view. Whoever follows the old one in the same epoch is
// made to ask for a snapshot: the new one counts its changes from 1.
func (c *cacheView) build(ctx context.Context, want cacheWant, sources []kvevents.Source) (err error) {
	c.end()
	if c.view != nil && c.want.epoch == want.epoch {
		c.doubt()
	}
	c.view, c.feed, c.approx, c.audited, c.sources = nil, nil, nil, nil, sources
	u := c.u
	if len(sources) > 0 {
		feed, err := kvevents.New(kvevents.Config{
			Engine: u.name, Epoch: want.epoch, Sources: sources, Publish: c.publish, Log: u.log, Replays: u.a.replays, MuteAfter: u.a.t.DownAfter,
			Index:    kvevents.IndexConfig{Model: want.model, BlockTokens: want.block, EngineBlock: want.engine},
			Identity: u.cfg.Adapter.(engine.EventSourcer).Identity,
			Alarm:    func(a kvevents.Alarm) { u.a.metrics.cacheAlarms.WithLabelValues(u.name, string(a.Kind)).Inc() },
		})
		if err != nil {
			return err
		}
		c.feed, c.view = feed, feed.View()
		c.audited = &audited{view: c.view, block: want.block, audit: kvevents.NewAudit(func(k kvevents.AlarmKind, text string) {
			u.log.Warn("the view of the engine's cache is wrong", "alarm", string(k), "text", text)
			u.a.metrics.cacheAlarms.WithLabelValues(u.name, string(k)).Inc()
		})}
	} else {
		c.view = kvevents.NewView(want.epoch, c.publish)
		c.approx = kvevents.NewApproximate(c.view, u.a.t.CacheGuess, want.most)
	}
	if c.sub, err = kvevents.AnswerSnapshots(u.a.nc, u.a.pool.Snapshot(u.name), c.view); err != nil {
		c.view, c.feed, c.approx, c.audited = nil, nil, nil, nil
		return err
	}
	if c.feed != nil {
		feed := c.feed
		life, stop := context.WithCancel(ctx)
		c.stop = stop
		c.running.Go(func() { _ = feed.Run(life) })
	}
	u.log.Info("following the engine's cache", "events", c.events(), "ranks", len(sources), "epoch", want.epoch)
	return nil
}

func (c *cacheView) events() string {
	if c.feed != nil {
		return eventsExact
	}
	return eventsApproximate
}

func (c *cacheView) setEpoch(epoch string) {
	if c.feed != nil {
		c.feed.SetEpoch(epoch)
		return
	}
	c.approx.Emptied()
	c.view.SetEpoch(epoch)
}

func (c *cacheView) emptied() {
	if c.feed != nil {
		c.feed.Emptied()
		return
	}
	c.approx.Emptied()
}

// publish sends one change, or remembers that it could not. It runs under the
// view's lock and takes no other of the agent's.
func (c *cacheView) publish(b []byte) {
	a := c.u.a
	if !a.nc.IsConnected() || a.nc.Publish(a.pool.Cache(c.u.name), b) != nil {
		c.missed.Store(true)
		return
	}
	a.metrics.cacheChanges.WithLabelValues(c.u.name).Inc()
}

// doubt shows a gap: who follows asks for a snapshot, now and once more with the
// next real change. It is for changes that were lost, since nobody notices a
// loss before the next one.
func (c *cacheView) doubt() {
	epoch, seq := c.view.Seq()
	if seq == 0 {
		return
	}
	c.publish(kvevents.AppendChange(nil, &kvevents.Change{Epoch: epoch, Seq: seq + 2, Kind: kvevents.Cleared}))
}

// tell makes the registration say what the view is.
func (c *cacheView) tell() {
	told := cacheTold{events: c.events(), epoch: c.want.epoch}
	if c.feed != nil {
		for _, r := range c.feed.Status() {
			told.block = max(told.block, r.BlockSize)
		}
	}
	u := c.u
	u.mu.Lock()
	defer u.mu.Unlock()
	u.audited = c.audited
	if u.told != told {
		u.told = told
		kick(u.kickReg)
	}
}

// end stops following and answering; the view stays to be read.
func (c *cacheView) end() {
	if c.sub != nil {
		_ = c.sub.Unsubscribe() // gone with its connection otherwise
		c.sub = nil
	}
	c.stop()
	c.running.Wait()
}

// ran enters a run into an approximate view.
func (c *cacheView) ran(r *ranHere) {
	if c.approx == nil || r.epoch != c.want.epoch {
		return
	}
	h := blockhash.New(r.namespace, c.want.block)
	var blocks []uint64
	for _, part := range [...][]uint32{r.prompt, r.resumed, r.output} {
		blocks = h.Append(blocks, part)
	}
	c.approx.Ran(time.Since(c.begun), r.namespace, blocks)
}

// cached offers a run that the engine has worked on to the approximate view.
func (u *unit) cached(req *subjects.Request, o *engine.Outcome) {
	if len(req.PromptTokenIDs) == 0 || o.Kind != engine.Completed && len(o.TokenIDs) == 0 {
		return
	}
	u.mu.Lock()
	told := u.told
	u.mu.Unlock()
	if told.events != eventsApproximate {
		return
	}
	r := ranHere{epoch: told.epoch, namespace: u.namespace(req), prompt: req.PromptTokenIDs, output: o.TokenIDs}
	if req.Resume != nil {
		r.resumed = req.Resume.TokenIDs
	}
	select {
	case u.ran <- r:
	default:
	}
}

// eventsLocked is what the registration says: a view of another life is none.
// Callers hold mu.
func (u *unit) eventsLocked() string {
	if u.told.events == "" || u.told.epoch != u.epoch.String() {
		return eventsNone
	}
	return u.told.events
}

// emptiedLocked notes that the cache was emptied by something that the engine's
// events may tell late or never. Callers hold mu.
func (u *unit) emptiedLocked() {
	u.emptied++
	kick(u.kickCache)
}
