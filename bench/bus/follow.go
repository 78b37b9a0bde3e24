package bus

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// pullBatch is how much one request of a follower asks for.
const pullBatch = 512

// follow calls h with every message of a consumer that needs no acks, on one
// goroutine, with nothing around it: the least that a follower can be.
func follow(ctx context.Context, nc *nats.Conn, js jetstream.JetStream, stream string, cfg jetstream.ConsumerConfig, h func(*nats.Msg)) error {
	body, err := json.Marshal(map[string]any{"batch": pullBatch, "expires": time.Minute})
	if err != nil {
		return err
	}
	inbox := nc.NewInbox()
	subject := "$JS.API.CONSUMER.MSG.NEXT." + stream + "." + cfg.Name
	request, got := 0, 0
	next := func() {
		request, got = request+1, 0
		_ = nc.PublishRequest(subject, inbox+"."+strconv.Itoa(request), body) // a closed connection ends the turn anyway
	}
	sub, err := nc.Subscribe(inbox+".*", func(m *nats.Msg) {
		if m.Reply == "" { // a status: the request has ended
			if m.Subject == inbox+"."+strconv.Itoa(request) {
				next()
			}
			return
		}
		if got++; got == pullBatch {
			next()
		}
		h(m)
	})
	if err != nil {
		return err
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return err
	}
	if _, err := js.CreateConsumer(ctx, stream, cfg); err != nil {
		return fmt.Errorf("consumer %s on %s: %w", cfg.Name, stream, err)
	}
	request = 1
	return nc.PublishRequest(subject, inbox+".1", body)
}
