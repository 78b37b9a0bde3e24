package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// queues looks after the durable consumers, one for each queue.
//
//	unsure --ensure--> there --silent once--> unsure
//	there --silent thrice, work pending, nobody served since--> made anew --> there
//
// A consumer is created and never changed. It is deleted in one case alone
// (scenario B4): it left three pulls of ours without a heartbeat while its info
// was answered, work is pending, and between the silences it delivered nothing
// to anybody. The messages stay in the stream, so that nothing is lost; what
// was delivered before and not acked is delivered again, which every hand-over
// stands. First its leader is asked to step down, which costs nothing.
type queues struct {
	d       *Dispatcher
	pulling atomic.Int64

	mu   sync.Mutex
	m    map[core.Queue]*queue
	over atomic.Bool // no inbox is opened any more
}

// queue is the state of one consumer as this dispatcher knows it.
type queue struct {
	d *Dispatcher
	q core.Queue

	size atomic.Int64 // bytes a message may have, learned: the room that a pull reserves for each

	mu        sync.Mutex // held across requests: one look at a time
	there     bool
	silences  int
	delivered uint64 // consumer sequence at the last silence
	box       *inbox
	used      time.Time // owned by queues
}

// silencesMost in a row make a consumer suspect of being stuck.
const silencesMost = 3

func newQueues(d *Dispatcher) *queues {
	return &queues{d: d, m: map[core.Queue]*queue{}}
}

// get makes the queue's state if it is not there, and forgets those that no
// pull has used for as long as the server keeps their consumers.
func (s *queues) get(q core.Queue) *queue {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	x := s.m[q]
	if x == nil {
		if len(s.m) >= 1024 {
			for k, old := range s.m {
				if now.Sub(old.used) > s.d.cfg.Timings.Inactive {
					delete(s.m, k)
					old.close()
				}
			}
		}
		x = &queue{d: s.d, q: q}
		x.size.Store(firstSize)
		s.m[q] = x
	}
	x.used = now
	return x
}

// close takes every inbox away.
func (s *queues) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.m {
		x.close()
	}
}

// drain takes every inbox away and waits until all that was delivered to them
// went to a pull or back. What is given back after that cannot be delivered to
// a pull of ours that nobody reads any more, and wait there for AckWait.
func (s *queues) drain(ctx context.Context) bool {
	s.over.Store(true)
	var all []<-chan struct{}
	s.mu.Lock()
	for _, x := range s.m {
		if done := x.drain(); done != nil {
			all = append(all, done)
		}
	}
	s.mu.Unlock()
	for _, done := range all {
		select {
		case <-done:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

func (x *queue) drain() (done <-chan struct{}) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.box != nil {
		done, x.box = x.box.drain(), nil
	}
	return done
}

// open is the queue's inbox.
func (x *queue) open() (*inbox, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.d.queues.over.Load() {
		return nil, ErrStopped
	}
	if x.box == nil {
		box, err := openInbox(x.d.nc, x.d.hand)
		if err != nil {
			return nil, err
		}
		x.box = box
	}
	return x.box, nil
}

func (x *queue) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.box != nil {
		x.box.shut()
		x.box = nil
	}
}

// firstSize is what a message is taken to need before one was seen, bytes.
const firstSize = 64 << 10

// sized learns from a message: up at once, down slowly.
func (x *queue) sized(n int64) {
	n += n / 2
	if old := x.size.Load(); n < old {
		n = old - (old-n)/16
	}
	x.size.Store(max(n, 4<<10))
}

// names of the stream and the durable of a queue.
func (d *Dispatcher) names(q core.Queue) (stream, durable string) {
	cfg := d.consumer(q)
	if q.Retry {
		return d.pool.Retry(), cfg.Durable
	}
	return d.pool.Rollouts(), cfg.Durable
}

func (d *Dispatcher) consumer(q core.Queue) jetstream.ConsumerConfig {
	c := d.pool.RolloutsConsumer(q.Job, q.Lane)
	if q.Retry {
		c = d.pool.RetryConsumer(q.Job)
	}
	c.AckWait, c.InactiveThreshold = d.cfg.Timings.AckWait, d.cfg.Timings.Inactive
	return c
}

// ensure creates the consumer unless it is known to be there.
func (x *queue) ensure(ctx context.Context) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.there {
		return nil
	}
	return x.create(ctx)
}

func (x *queue) create(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, x.d.cfg.Timings.Attempt)
	defer cancel()
	stream, durable := x.d.names(x.q)
	_, err := x.d.store.JS().CreateConsumer(ctx, stream, x.d.consumer(x.q))
	if api, ok := errors.AsType[*jetstream.APIError](err); ok &&
		(api.ErrorCode == jetstream.JSErrCodeConsumerExists || api.ErrorCode == jetstream.JSErrCodeConsumerNameExists) {
		// Another version of ours made it with other times. It serves as well.
		x.d.metrics.consumers.WithLabelValues("differs").Inc()
		x.d.log.Warn("a consumer exists with another configuration; it is used as it is", "stream", stream, "consumer", durable)
		err = nil
	}
	if err != nil {
		x.d.metrics.consumers.WithLabelValues("refused").Inc()
		return fmt.Errorf("create consumer %s on %s: %w", durable, stream, err)
	}
	x.d.metrics.consumers.WithLabelValues("ensured").Inc()
	x.there = true
	return nil
}

// forget makes the next pull look whether the consumer is there.
func (x *queue) forget() {
	x.mu.Lock()
	x.there = false
	x.mu.Unlock()
}

// answered ends a row of silences.
func (x *queue) answered() {
	x.mu.Lock()
	x.silences = 0
	x.mu.Unlock()
}

// fellSilent is told that a pull got neither a message nor a heartbeat.
func (x *queue) fellSilent(ctx context.Context) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.there = false
	stream, durable := x.d.names(x.q)
	ictx, cancel := context.WithTimeout(ctx, x.d.cfg.Timings.Attempt)
	defer cancel()
	c, err := x.d.store.JS().Consumer(ictx, stream, durable)
	if err != nil {
		x.silences = 0 // it is NATS that is away, or the consumer that is gone: ensure tells
		return
	}
	info := c.CachedInfo()
	if x.silences > 0 && info.Delivered.Consumer != x.delivered {
		x.silences = 0 // it serves somebody: the fault is on our side
	}
	x.silences++
	x.delivered = info.Delivered.Consumer
	if info.NumPending == 0 || x.silences < silencesMost {
		return
	}
	log := x.d.log.With("stream", stream, "consumer", durable, "pending", info.NumPending)
	if x.silences == silencesMost {
		log.Warn("a consumer with work pending serves nobody: asking its leader to step down")
		x.d.metrics.consumers.WithLabelValues("stepdown").Inc()
		_, _ = x.d.nc.RequestWithContext(ictx, x.d.api.subject("CONSUMER.LEADER.STEPDOWN", stream, durable), nil)
		return
	}
	log.Warn("a consumer with work pending serves nobody: making it anew")
	if err := x.d.store.JS().DeleteConsumer(ictx, stream, durable); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		log.Warn("the stuck consumer cannot be deleted", "err", err)
		return
	}
	x.d.metrics.consumers.WithLabelValues("remade").Inc()
	x.silences = 0
	if err := x.create(ctx); err != nil {
		log.Warn("the stuck consumer is deleted and not made yet", "err", err)
	}
}
