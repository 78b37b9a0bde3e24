package client_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// One rollout through the client and a register without dispatchers: submitted
// by SubmitMany, answered by a stand-in, read by a Results loop, received.
func BenchmarkRollout(b *testing.B) {
	bus := newBus(b, subjects.Layout{Budget: 2 << 30})
	bus.serve()
	c := bus.client(client.MaxUnanswered(10_000_000))
	b.ResetTimer()
	go func() {
		for _, err := range c.SubmitMany(context.Background(), func(yield func(*subjects.Request) bool) {
			for i := range b.N {
				if !yield(request(fmt.Sprintf("%08d", i))) {
					return
				}
			}
		}) {
			if err != nil {
				b.Error(err)
			}
		}
	}()
	n := 0
	for _, err := range c.Results(context.Background()) {
		if err != nil {
			b.Fatal(err)
		}
		if n++; n == b.N {
			break
		}
	}
}

func BenchmarkSubmitMany(b *testing.B) {
	bus := newBus(b, subjects.Layout{Budget: 4 << 30})
	c := bus.client(client.MaxUnanswered(10_000_000))
	b.ResetTimer()
	for _, err := range c.SubmitMany(context.Background(), func(yield func(*subjects.Request) bool) {
		for i := range b.N {
			if !yield(request(fmt.Sprintf("%08d", i))) {
				return
			}
		}
	}) {
		if err != nil {
			b.Fatal(err)
		}
	}
}
