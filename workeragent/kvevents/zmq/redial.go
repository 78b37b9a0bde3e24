package zmq

import (
	"context"
	"math/rand/v2"
	"time"
)

// Redial calls connect until ctx ends; each call lives as long as one connection.
// Between two calls it waits: first at first, doubled up to most, jittered by a
// half, and from the start again after a connection that outlived most.
func Redial(ctx context.Context, first, most time.Duration, connect func(context.Context)) {
	wait := first
	for ctx.Err() == nil {
		began := time.Now()
		connect(ctx)
		if time.Since(began) > most {
			wait = first
		}
		t := time.NewTimer(time.Duration(float64(wait) * (0.5 + rand.Float64())))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
		wait = min(2*wait, most)
	}
}
