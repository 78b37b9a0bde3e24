package kvevents

import (
	"fmt"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// Publisher gives a View its publish function: every change is one message on a
// subject (subjects.Pool.Cache). It never blocks. Without a connection changes
// are dropped: the gap in their sequence makes whoever follows ask for a
// snapshot.
func Publisher(nc *nats.Conn, subject string) func(message []byte) {
	return func(b []byte) {
		if nc.IsConnected() {
			_ = nc.Publish(subject, b)
		}
	}
}

// maxSnapshots bounds the snapshots being sent at once, an engine; who asks
// beyond it times out and asks again.
const maxSnapshots = 4

// AnswerSnapshots serves requests for the whole block set on a subject
// (subjects.Pool.Snapshot) until the subscription is ended.
func AnswerSnapshots(nc *nats.Conn, subject string, v *View) (*nats.Subscription, error) {
	var busy atomic.Int32
	sub, err := nc.Subscribe(subject, func(m *nats.Msg) {
		if m.Reply == "" || busy.Add(1) > maxSnapshots {
			if m.Reply != "" {
				busy.Add(-1)
			}
			return
		}
		go func() {
			defer busy.Add(-1)
			_ = v.Snapshot(m.Respond)
		}()
	})
	if err != nil {
		return nil, fmt.Errorf("answer snapshots on %s: %w", subject, err)
	}
	return sub, nil
}
