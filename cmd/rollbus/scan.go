package main

import (
	"context"
	"fmt"
	"iter"

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
		for pending := cons.CachedInfo().NumPending; pending > 0; {
			m, err := cons.Next(jetstream.FetchContext(ctx))
			if err == nil {
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
