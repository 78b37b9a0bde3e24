package kvstate

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

// ServerClock estimates the NATS servers' clock from the stamps they put on
// what they store. The estimate is a lower bound (a stamp is older than its
// arrival), carried on by this machine's monotonic clock, and never goes back:
// no two machines' wall clocks are compared. The zero value is ready and knows
// nothing. Its methods may be called from any goroutine.
type ServerClock struct {
	mu     sync.Mutex
	base   time.Time     // of the monotonic clock: first observation
	offset time.Duration // Now = base + elapsed + offset, in server time
	known  bool
}

// Observe takes a server's stamp. Zero and older ones than the estimate change nothing.
func (c *ServerClock) Observe(stamp time.Time) {
	if stamp.IsZero() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if !c.known {
		c.base, c.known = now, true
		c.offset = stamp.Sub(c.base.Round(0))
		return
	}
	elapsed := now.Sub(c.base)
	if ahead := stamp.Sub(c.base.Round(0)) - elapsed; ahead > c.offset {
		c.offset = ahead
	}
}

// Now is the estimate; ok is false before the first stamp.
func (c *ServerClock) Now() (now time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.known {
		return time.Time{}, false
	}
	return c.base.Round(0).Add(time.Since(c.base) + c.offset), true
}

// ServerTime asks the leader of the reservations bucket for the time, feeds the
// clock with it and returns the estimate. No answer is ErrUnavailable.
func (s *Store) ServerTime(ctx context.Context) (time.Time, error) {
	if _, err := s.streamInfo(ctx, s.reservationsStream()); err != nil {
		return time.Time{}, fmt.Errorf("ask for the server's time: %w", err)
	}
	now, _ := s.opt.clock.Now()
	return now, nil
}

// streamInfo is what is read of a STREAM.INFO answer. nats.go hides the stamp.
type streamInfo struct {
	apiError
	Stamp   time.Time `json:"ts"`
	Created time.Time `json:"created"`
	Config  struct {
		MaxBytes int64 `json:"max_bytes"`
	} `json:"config"`
	State struct {
		Bytes   uint64 `json:"bytes"`
		LastSeq uint64 `json:"last_seq"`
	} `json:"state"`
}

func (s *Store) streamInfo(ctx context.Context, stream string) (streamInfo, error) {
	var info streamInfo
	data, err := s.ask(ctx, "$JS.API.STREAM.INFO."+stream, nil)
	if err != nil {
		return info, err
	}
	if err := json.Unmarshal(data, &info); err != nil {
		return info, fmt.Errorf("%w: stream %s: its info does not decode: %w", ErrUnavailable, stream, err)
	}
	if err := info.read(stream); err != nil {
		return info, err
	}
	s.opt.clock.Observe(info.Stamp)
	return info, nil
}
