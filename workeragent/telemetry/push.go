package telemetry

import (
	"context"
	"encoding/binary"
	"strings"
	"sync"
	"time"

	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

// Push follows the load messages of one SGLang engine, one socket a rank. It is
// a registry of its own: ending it, or one of its ranks, leaves subscriptions to
// cache events alone. Safe for concurrent use.
type Push struct {
	mu    sync.Mutex
	begun time.Time
	board Board
	ranks map[int]pushed
	wg    sync.WaitGroup
	over  bool
	stats PushStats
}

type pushed struct {
	endpoint string
	cancel   context.CancelFunc
}

// PushStats count what came.
type PushStats struct {
	Messages  int64
	Malformed int64
	Refused   int64 // of another rank than the socket's
	Restarts  int64 // sequences that fell back
}

// Times of a connection to a publisher of load.
const (
	pushBackoffMin = 100 * time.Millisecond
	pushBackoffMax = 10 * time.Second
)

// NewPush makes one that follows nobody yet.
func NewPush() *Push {
	return &Push{begun: time.Now(), ranks: map[int]pushed{}}
}

// Follow subscribes to rank i at endpoints[i]. Ranks that are followed there
// already go on, others end: called again it changes only what has changed.
func (p *Push) Follow(endpoints []string, topic string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	for rank, r := range p.ranks {
		if rank >= len(endpoints) || endpoints[rank] != r.endpoint {
			p.drop(rank)
		}
	}
	for rank, endpoint := range endpoints {
		if _, ok := p.ranks[rank]; ok || endpoint == "" {
			continue
		}
		ctx, cancel := context.WithCancel(context.Background())
		p.ranks[rank] = pushed{endpoint, cancel}
		p.wg.Go(func() { p.follow(ctx, rank, endpoint, topic) })
	}
}

// Remove ends the subscription of a rank.
func (p *Push) Remove(rank int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop(rank)
}

func (p *Push) drop(rank int) {
	if r, ok := p.ranks[rank]; ok {
		r.cancel()
		delete(p.ranks, rank)
	}
	p.board.Remove(rank)
}

// Close ends all subscriptions and waits for them.
func (p *Push) Close() {
	p.mu.Lock()
	p.over = true
	for rank := range p.ranks {
		p.drop(rank)
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// Sample is what the ranks said lately; see Board.
func (p *Push) Sample(advertised *int) (Sample, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.board.Sample(time.Since(p.begun), advertised)
}

// Stats so far.
func (p *Push) Stats() PushStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

func (p *Push) follow(ctx context.Context, rank int, endpoint, topic string) {
	zmq.Redial(ctx, pushBackoffMin, pushBackoffMax, func(ctx context.Context) { p.connect(ctx, rank, endpoint, topic) })
}

// maxLoadMessage is far above any of them.
const maxLoadMessage = 1 << 20

func (p *Push) connect(ctx context.Context, rank int, endpoint, topic string) {
	c, err := zmq.Dial(ctx, endpoint, zmq.Options{Type: zmq.SUB, Subscribe: []string{topic}, MaxMessage: maxLoadMessage})
	if err != nil {
		return
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	for {
		frames, err := c.Recv()
		if err != nil {
			return
		}
		p.take(ctx, rank, topic, frames)
	}
}

func (p *Push) take(ctx context.Context, rank int, topic string, frames [][]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return // removed meanwhile
	}
	p.stats.Messages++
	if len(frames) != 3 || len(frames[1]) != 8 || !strings.HasPrefix(string(frames[0]), topic) {
		p.stats.Malformed++
		return
	}
	l, err := ParseLoadStat(frames[2])
	if err != nil {
		p.stats.Malformed++
		return
	}
	restarted, ok := p.board.Put(rank, binary.BigEndian.Uint64(frames[1]), l, time.Since(p.begun))
	if !ok {
		p.stats.Refused++
	}
	if restarted {
		p.stats.Restarts++
	}
}
