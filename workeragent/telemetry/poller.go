package telemetry

import (
	"context"
	"hash/fnv"
	"math/rand/v2"
	"time"
)

// Poller decides when an engine is asked. Polls of one engine never overlap: a
// slow answer delays the next question instead of doubling it.
type Poller struct {
	// Interval between polls. Default 200 ms (5 Hz).
	Interval time.Duration
	// Jitter of each interval, a fraction of it. Default 0.1.
	Jitter float64
	// Timeout of one poll. Default 2 s.
	Timeout time.Duration
	// Slow is the interval after a poll failed. Default 1 s.
	Slow time.Duration
	// Name staggers the pollers of one process: the first poll is up to one
	// interval late, by the hash of the name.
	Name string
	// Poll asks once. An error only slows the poller down.
	Poll func(context.Context) error

	kick chan struct{}
}

// NewPoller fills in the defaults.
func NewPoller(p Poller) *Poller {
	if p.Interval <= 0 {
		p.Interval = 200 * time.Millisecond
	}
	if p.Jitter <= 0 || p.Jitter > 1 {
		p.Jitter = 0.1
	}
	if p.Timeout <= 0 {
		p.Timeout = 2 * time.Second
	}
	if p.Slow <= 0 {
		p.Slow = time.Second
	}
	p.kick = make(chan struct{}, 1)
	return &p
}

// Kick asks for a poll at once: something changed. It never blocks; kicks
// during a poll are one poll after it.
func (p *Poller) Kick() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// Run polls until ctx ends.
func (p *Poller) Run(ctx context.Context) {
	h := fnv.New64a()
	_, _ = h.Write([]byte(p.Name))
	timer := time.NewTimer(time.Duration(float64(p.Interval) * float64(h.Sum64()%1024) / 1024))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-p.kick:
		}
		asked, cancel := context.WithTimeout(ctx, p.Timeout)
		err := p.Poll(asked)
		cancel()
		next := p.Interval
		if err != nil {
			next = max(p.Slow, p.Interval)
		}
		timer.Reset(time.Duration(float64(next) * (1 + p.Jitter*(2*rand.Float64()-1))))
	}
}
