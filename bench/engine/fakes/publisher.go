package fakes

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

// EventsConfig of a fake's publishers; zero = the default.
type EventsConfig struct {
	// Host they bind to. Default 127.0.0.1.
	Host string
	// Dial turns a PUB around: rank r dials Dial[r] instead of binding.
	Dial []string
	// NoReplay: no replay endpoint, which is the engines' default.
	NoReplay bool
	// Ring is how many batches a replay reaches back. Default 10,000.
	Ring int
	// NewFraming puts the topic into replayed messages (vLLM since #45177).
	NewFraming bool
	// Topic of the messages. Default "".
	Topic string
	// HighWater is how many messages wait for a slow subscriber. Default 100,000.
	HighWater int
}

func (c EventsConfig) withDefaults() EventsConfig {
	if c.Host == "" {
		c.Host = "127.0.0.1"
	}
	if c.Ring <= 0 {
		c.Ring = 10_000
	}
	if c.HighWater <= 0 {
		c.HighWater = 100_000
	}
	return c
}

// publisher is one rank's PUB and ROUTER. Endpoints stay over a restart.
type publisher struct {
	cfg    EventsConfig
	topic  string
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	pub    *zmq.Listener // nil when it dials
	router *zmq.Listener // nil without replay

	mu    sync.Mutex
	next  uint64
	ring  [][]byte // the last ones, up to next-1
	peers map[*peer]bool
	lose  int // batches to lose on the way to subscribers
}

type peer struct {
	conn   *zmq.Conn
	queue  chan [][]byte
	topics []string // guarded by publisher.mu
}

// newPublisher binds or dials. rank is its place in Dial.
func newPublisher(cfg EventsConfig, topic string, rank int, replay bool) (*publisher, error) {
	ctx, cancel := context.WithCancel(context.Background())
	p := &publisher{cfg: cfg, topic: topic, ctx: ctx, cancel: cancel, peers: map[*peer]bool{}}
	var err error
	if rank < len(cfg.Dial) {
		p.wg.Go(func() { p.dial(cfg.Dial[rank]) })
	} else if p.pub, err = zmq.Listen(ctx, "tcp://"+cfg.Host+":0", zmq.Options{Type: zmq.PUB}); err != nil {
		cancel()
		return nil, fmt.Errorf("publish events: %w", err)
	} else {
		p.wg.Go(func() { p.accept(p.pub, p.serve) })
	}
	if replay {
		if p.router, err = zmq.Listen(ctx, "tcp://"+cfg.Host+":0", zmq.Options{Type: zmq.ROUTER}); err != nil {
			p.close()
			return nil, fmt.Errorf("replay events: %w", err)
		}
		p.wg.Go(func() { p.accept(p.router, p.answer) })
	}
	return p, nil
}

func (p *publisher) close() {
	p.cancel()
	p.wg.Wait()
}

func (p *publisher) endpoint() string {
	if p.pub == nil {
		return ""
	}
	return "tcp://" + p.pub.Addr().String()
}

func (p *publisher) replayEndpoint() string {
	if p.router == nil {
		return ""
	}
	return "tcp://" + p.router.Addr().String()
}

func (p *publisher) accept(l *zmq.Listener, serve func(*zmq.Conn)) {
	for {
		c, err := l.Accept(p.ctx)
		if err != nil {
			return
		}
		p.wg.Go(func() { p.with(c, serve) })
	}
}

func (p *publisher) with(c *zmq.Conn, serve func(*zmq.Conn)) {
	stop := context.AfterFunc(p.ctx, func() { _ = c.Close() })
	defer stop()
	defer c.Close()
	serve(c)
}

// dial is a PUB whose endpoint has no wildcard: it connects, again and again.
func (p *publisher) dial(endpoint string) {
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for {
		if c, err := zmq.Dial(p.ctx, endpoint, zmq.Options{Type: zmq.PUB}); err == nil {
			p.with(c, p.serve)
		}
		select {
		case <-t.C:
		case <-p.ctx.Done():
			return
		}
	}
}

// serve takes a subscriber's subscriptions while its queue is written.
func (p *publisher) serve(c *zmq.Conn) {
	q := &peer{conn: c, queue: make(chan [][]byte, p.cfg.HighWater)}
	p.mu.Lock()
	p.peers[q] = true
	p.mu.Unlock()
	done := make(chan struct{})
	p.wg.Go(func() {
		for {
			select {
			case m := <-q.queue:
				if c.Send(m...) != nil {
					_ = c.Close()
					return
				}
			case <-done:
				return
			}
		}
	})
	for {
		m, err := c.Recv()
		if err != nil {
			break
		}
		if len(m) == 1 && len(m[0]) > 0 {
			p.subscribe(q, m[0][0] == 1, string(m[0][1:]))
		}
	}
	close(done)
	p.mu.Lock()
	delete(p.peers, q)
	p.mu.Unlock()
}

func (p *publisher) subscribe(q *peer, on bool, topic string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if on {
		q.topics = append(q.topics, topic)
	} else if i := slices.Index(q.topics, topic); i >= 0 {
		q.topics = slices.Delete(q.topics, i, i+1)
	}
}

// send publishes the next batch. It never blocks.
func (p *publisher) send(payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := [][]byte{[]byte(p.topic), sequence(p.next), payload}
	p.next++
	if p.router != nil {
		if len(p.ring) >= p.cfg.Ring {
			p.ring = append(p.ring[:0], p.ring[len(p.ring)-p.cfg.Ring+1:]...)
		}
		p.ring = append(p.ring, payload)
	}
	if p.lose > 0 {
		p.lose--
		return
	}
	for q := range p.peers {
		if !slices.ContainsFunc(q.topics, func(t string) bool { return strings.HasPrefix(p.topic, t) }) {
			continue
		}
		select {
		case q.queue <- m:
		default: // above the high-water mark: gone, and nobody is told
		}
	}
}

// restart is another process behind the same ports: connections break, the
// sequence begins anew, nothing is announced.
func (p *publisher) restart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next, p.ring = 0, nil
	for q := range p.peers {
		_ = q.conn.Close()
	}
}

func (p *publisher) loseNext(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = n
}

func (p *publisher) subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for q := range p.peers {
		if len(q.topics) > 0 {
			n++
		}
	}
	return n
}

func sequence(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// answer serves replays: a request of any other form than delimiter and start
// is never answered.
func (p *publisher) answer(c *zmq.Conn) {
	for {
		m, err := c.Recv()
		if err != nil {
			return
		}
		if len(m) != 2 || len(m[0]) != 0 || len(m[1]) != 8 {
			continue
		}
		from := binary.BigEndian.Uint64(m[1])
		p.mu.Lock()
		first := p.next - uint64(len(p.ring))
		ring := p.ring
		if from > first {
			ring = ring[min(from-first, uint64(len(ring))):]
			first = p.next - uint64(len(ring))
		}
		ring = slices.Clone(ring)
		p.mu.Unlock()
		for i, payload := range ring {
			if c.Send(p.frames(first+uint64(i), payload)...) != nil {
				return
			}
		}
		if c.Send(p.end()...) != nil {
			return
		}
	}
}

// frames of one replayed batch, after the delimiter.
func (p *publisher) frames(seq uint64, payload []byte) [][]byte {
	if p.cfg.NewFraming {
		return [][]byte{nil, []byte(p.topic), sequence(seq), payload}
	}
	return [][]byte{nil, sequence(seq), payload}
}

// end of a replay; the new framing has an empty topic in it.
func (p *publisher) end() [][]byte {
	if p.cfg.NewFraming {
		return [][]byte{nil, nil, sequence(math.MaxUint64), nil}
	}
	return [][]byte{nil, sequence(math.MaxUint64), nil}
}
