package workeragent

import (
	"context"
	"math/rand/v2"
	"time"
)

// pauses are the waits between repetitions: doubled from min to max, jittered
// by a quarter to both sides.
type pauses struct {
	min, max time.Duration
	next     time.Duration
}

// wait passes the next pause; false when ctx ended first.
func (p *pauses) wait(ctx context.Context) bool {
	return sleep(ctx, p.step())
}

func (p *pauses) step() time.Duration {
	if p.next == 0 {
		p.next = p.min
	}
	d := p.next
	p.next = min(2*p.next, p.max)
	return jitter(d, 0.25)
}

// jitter moves a duration by up to that part of it, to either side.
func jitter(d time.Duration, part float64) time.Duration {
	return time.Duration(float64(d) * (1 + part*(2*rand.Float64()-1)))
}

// sleep passes a duration; false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
