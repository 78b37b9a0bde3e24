package workeragent

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// partialTTL is how long the marker of a checkpoint that is of no use any more stays.
const partialTTL = 60 * time.Second

// checkpoints writes a run's output every N tokens, beside the run: when a write
// is slow the next one takes the latest state. A nil *checkpoints does nothing.
type checkpoints struct {
	u     *unit
	r     *run
	base  []subjects.Segment // of earlier attempts
	start int                // tokens of earlier attempts
	every int

	ids  []uint32 // on the run's goroutine alone
	last int
	next chan []uint32 // at most one waits: the latest
	wg   sync.WaitGroup
	stop context.CancelFunc
}

// checkpoints starts them where the pool asks, for runs that can go on from
// tokens. Logprobs are not checkpointed: who asks for them starts over.
func (u *unit) checkpoints(r *run, req *subjects.Request) *checkpoints {
	every := u.a.settings.Load().PartialsEvery
	if every <= 0 || len(req.PromptTokenIDs) == 0 || req.Sampling.Logprobs != nil {
		return nil
	}
	c := &checkpoints{u: u, r: r, every: every, next: make(chan []uint32, 1)}
	if req.Resume != nil {
		c.ids = slices.Clone(req.Resume.TokenIDs)
		c.base, c.start, c.last = req.Resume.Segments, len(c.ids), len(c.ids)
	}
	ctx, stop := context.WithCancel(r.ctx)
	c.stop = stop
	c.wg.Go(func() { c.loop(ctx) })
	return c
}

// add takes output on the run's goroutine.
func (c *checkpoints) add(ids []uint32) {
	if c == nil || len(ids) == 0 {
		return
	}
	c.ids = append(c.ids, ids...)
	if len(c.ids)-c.last < c.every {
		return
	}
	c.last = len(c.ids)
	now := slices.Clone(c.ids)
	select {
	case <-c.next: // an older one that was not taken yet
	default:
	}
	c.next <- now // never blocks: this goroutine alone puts in
}

func (c *checkpoints) close() {
	if c == nil {
		return
	}
	c.stop()
	c.wg.Wait()
}

func (c *checkpoints) loop(ctx context.Context) {
	for {
		select {
		case ids := <-c.next:
			c.write(ctx, ids)
		case <-ctx.Done():
			return
		}
	}
}

func (c *checkpoints) write(ctx context.Context, ids []uint32) {
	h := &c.r.res.Held
	p := subjects.Partial{SchemaVersion: subjects.SchemaVersion, Engine: h.Engine, Epoch: h.Epoch, Bind: h.Bind, TokenIDs: ids}
	p.Segments = append(slices.Clone(c.base), subjects.Segment{
		Engine: h.Engine, Epoch: h.Epoch, WeightVersion: weightText(c.r.weight), Start: c.start, End: len(ids),
	})
	b, err := json.Marshal(p)
	if err != nil {
		return
	}
	wctx, cancel := context.WithTimeout(ctx, c.u.a.t.StoreTimeout)
	defer cancel()
	_, err = c.u.a.store.JS().PublishMsg(wctx, &nats.Msg{Subject: c.u.partialSubject(h.Job, h.ID), Data: b}, jetstream.WithRetryAttempts(0))
	if err != nil {
		if ctx.Err() == nil {
			c.u.log.Debug("a checkpoint was not written", "rollout", h.Key(), "error", err)
		}
		return
	}
	c.u.a.metrics.checkpoints.WithLabelValues(c.u.name).Inc()
	c.u.mu.Lock()
	c.r.checkpointed = true
	c.u.mu.Unlock()
}

func (u *unit) partialSubject(job, id string) string {
	return subjects.BucketSubject(u.a.pool.Bucket(subjects.Partials), u.partialKey(job, id))
}

// partialKey begins with the engine, so that a credential can be for its keys alone.
func (u *unit) partialKey(job, id string) string { return u.name + "." + subjects.RolloutKey(job, id) }

// clearCheckpoint takes a run's checkpoint away once it is of no use.
func (u *unit) clearCheckpoint(r *run) {
	u.mu.Lock()
	there := r.checkpointed
	u.mu.Unlock()
	if !there {
		return
	}
	ctx, cancel := context.WithTimeout(u.life, u.a.t.StoreTimeout)
	defer cancel()
	m := &nats.Msg{Subject: u.partialSubject(r.res.Job, r.res.ID), Header: nats.Header{}}
	m.Header.Set(subjects.HdrKVOperation, subjects.KVOperationDelete)
	m.Header.Set(subjects.HdrTTL, strconv.Itoa(int(partialTTL.Seconds())))
	if _, err := u.a.store.JS().PublishMsg(ctx, m, jetstream.WithRetryAttempts(0)); err != nil && u.life.Err() == nil {
		u.log.Debug("a checkpoint was not cleared and will expire", "rollout", r.res.Key(), "error", err)
	}
}

// withCheckpoint is a reservation of an earlier agent with the output that its
// checkpoint kept; as it was when there is none of that attempt. It asks whatever
// the pool's settings say: they may not be known yet, or have changed.
func (u *unit) withCheckpoint(res kvstate.Reservation) kvstate.Reservation {
	ctx, cancel := context.WithTimeout(u.life, u.a.t.StoreTimeout)
	defer cancel()
	kv, err := u.a.store.JS().KeyValue(ctx, u.a.pool.Bucket(subjects.Partials))
	if err != nil {
		return res
	}
	// A direct get may be behind on R3: then a few tokens more are made again.
	got, err := kv.Get(ctx, u.partialKey(res.Job, res.ID))
	if err != nil {
		return res
	}
	var p subjects.Partial
	if json.Unmarshal(got.Value(), &p) != nil {
		return res
	}
	b, req, ok := p.Resumed(&res.Held, res.Body)
	if !ok {
		return res
	}
	res.Body = b
	res.PromptTokens = len(req.PromptTokenIDs) + len(p.TokenIDs)
	res.MaxTokens = req.Sampling.MaxTokens - len(p.TokenIDs)
	return res
}
