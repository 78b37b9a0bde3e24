package kvstate

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	fillEvery    = time.Second            // how old the known fill of the reservations bucket may be
	fillPatience = 250 * time.Millisecond // how long a bind waits for it
)

// fill is what a store knows of the room in the reservations bucket: what NATS
// said last, and what this store has bound since. Other dispatchers bind too;
// the tenth that FillLimit leaves is far more than all of them write in fillEvery.
type fill struct {
	mu     sync.Mutex
	asked  time.Time // of the last answer or attempt
	asking bool
	bytes  uint64
	limit  int64 // <= 0 = unlimited or unknown
	since  uint64
}

// room refuses a bind that would leave no room for returns. It asks NATS at most
// once per fillEvery; without an answer it lets the bind pass: NATS itself
// refuses what does not fit.
func (s *Store) room(ctx context.Context, body int) error {
	f := &s.fill
	f.mu.Lock()
	if !f.asking && (f.asked.IsZero() || time.Since(f.asked) > fillEvery) {
		f.asking = true
		f.mu.Unlock()
		ask, cancel := context.WithTimeout(ctx, min(fillPatience, s.opt.timeout))
		info, err := s.streamInfo(ask, s.reservationsStream())
		cancel()
		f.mu.Lock()
		f.asking, f.asked = false, time.Now()
		if err == nil {
			f.bytes, f.limit, f.since = info.State.Bytes, info.Config.MaxBytes, 0
		}
	}
	defer f.mu.Unlock()
	if f.limit <= 0 {
		return nil
	}
	const overhead = 1 << 10 // headers, subject and record of a typical bind
	size := uint64(body + overhead)
	if most := uint64(float64(f.limit) * FillLimit); f.bytes+f.since+size > most {
		return fmt.Errorf("%w: reservations hold %d of %d bytes, binds stop at %.0f %%: wait for releases", ErrFull, f.bytes+f.since, f.limit, 100*FillLimit)
	}
	f.since += size
	return nil
}
