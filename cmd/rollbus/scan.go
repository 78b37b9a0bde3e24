package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// latest yields the last message of each subject of a stream that filter
// matches, in stream order, through a consumer of its own that the server
// forgets by itself. It is no way to look at a WorkQueue stream.
func latest(ctx context.Context, js jetstream.JetStream, stream, filter string, headersOnly bool) iter.Seq2[jetstream.Msg, error] {
	return func(yield func(jetstream.Msg, error) bool) {
		cons, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
			FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, HeadersOnly: headersOnly,
		})
		if err != nil {
			yield(nil, fmt.Errorf("read stream %s: %w", stream, err))
			return
		}
		heard(ctx)
		pending := cons.CachedInfo().NumPending
		if pending == 0 {
			return
		}
		// Messages asks for many at once; Next of the consumer would make a
		// consumer anew for each.
		msgs, err := cons.Messages()
		if err != nil {
			yield(nil, fmt.Errorf("read stream %s: %w", stream, err))
			return
		}
		defer msgs.Stop()
		for quiet := false; pending > 0; {
			try, cancel := context.WithTimeout(ctx, quietScan)
			m, err := msgs.Next(jetstream.NextContext(try))
			cancel()
			if err != nil && ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
				// What was counted may have been deleted since.
				info, infoErr := cons.Info(ctx)
				if infoErr == nil && info.NumPending == 0 && quiet {
					return
				}
				quiet = infoErr == nil && info.NumPending == 0
				continue
			}
			if err == nil {
				quiet = false
				heard(ctx)
				var meta *jetstream.MsgMetadata
				if meta, err = m.Metadata(); err == nil {
					pending = meta.NumPending
				}
			}
			if err != nil {
				yield(nil, fmt.Errorf("read stream %s: %w", stream, err))
				return
			}
			if !yield(m, nil) {
				return
			}
		}
	}
}

// quietScan is how long a scan waits for a message before it asks whether
// there still is one.
const quietScan = 500 * time.Millisecond

// following yields what latest yields, then what is stored after that, until
// ctx ends; caught is called once when everything that was there has been yielded.
func following(ctx context.Context, js jetstream.JetStream, stream string, filters []string, caught func() bool) iter.Seq2[jetstream.Msg, error] {
	return func(yield func(jetstream.Msg, error) bool) {
		cons, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
			FilterSubjects: filters, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy,
		})
		if err != nil {
			yield(nil, fmt.Errorf("read stream %s: %w", stream, err))
			return
		}
		pending, told := cons.CachedInfo().NumPending, false
		if pending == 0 {
			if told = true; !caught() {
				return
			}
		}
		msgs, err := cons.Messages()
		if err != nil {
			yield(nil, fmt.Errorf("read stream %s: %w", stream, err))
			return
		}
		defer msgs.Stop()
		for {
			m, err := msgs.Next(jetstream.NextContext(ctx))
			if err != nil {
				if ctx.Err() == nil {
					yield(nil, fmt.Errorf("read stream %s: %w", stream, err))
				}
				return
			}
			heard(ctx)
			if !yield(m, nil) {
				return
			}
			meta, err := m.Metadata()
			if err == nil && meta.NumPending == 0 && !told {
				if told = true; !caught() {
					return
				}
			}
		}
	}
}
