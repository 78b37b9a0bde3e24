package kvstate

import (
	"context"
	"fmt"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Renew writes an external reservation again at the revision held, so that its
// time to live starts anew. ErrSuperseded and ErrGone: it is not held any more.
func (s *Store) Renew(ctx context.Context, h subjects.Held, revision uint64, ttl time.Duration) (seq uint64, err error) {
	if err := checkKey(h.Engine, h.Job, h.ID); err != nil {
		return 0, fmt.Errorf("renew: %w", err)
	}
	if h.State != subjects.StateExternal || ttl <= 0 {
		return 0, fmt.Errorf("renew %s on %s: %w: state is %s and time to live %v: only external reservations are renewed, for more than 0", h.Key(), h.Engine, ErrRefused, h.State, ttl)
	}
	header := h.Header()
	guard(header, revision)
	setTTL(header, ttl)
	seq, err = s.publish(ctx, s.pool.ReservationSubject(h.Engine, h.Job, h.ID), header, nil)
	if err != nil {
		return 0, fmt.Errorf("renew %s on %s at %d: %w", h.Key(), h.Engine, revision, superseded(err))
	}
	return seq, nil
}
