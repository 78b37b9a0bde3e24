package journal

import (
	"context"
	"log/slog"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// ForPool starts a writer that stores on the pool's JOURNAL stream. cfg is the
// dispatcher's core, as it is made. The stream may come later. check replays samples of
// it in the background, nil = off.
func ForPool(js jetstream.JetStream, pool subjects.Pool, cfg core.Config, program string, check *SelfCheck, log *slog.Logger) (*Writer, error) {
	subject := pool.JournalSubject(cfg.Dispatcher)
	return NewWriter(Options{
		Pool: pool.String(), Program: program, Core: cfg, SelfCheck: check, Log: log,
		Publish: func(ctx context.Context, id string, frame []byte) error {
			_, err := js.Publish(ctx, subject, frame, jetstream.WithMsgID(id), jetstream.WithExpectStream(pool.Journal()))
			return err
		},
	})
}
