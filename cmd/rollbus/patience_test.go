package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPatienceEndsAfterSilenceAndNotAfterWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silence := errors.New("silent")
		ctx, end := patient(t.Context(), 10*time.Second, silence)
		defer end()
		child, done := context.WithCancel(ctx)
		defer done()
		began := time.Now()
		tick := time.NewTicker(9 * time.Second)
		defer tick.Stop()
		for range 5 {
			<-tick.C
			heard(child)
		}
		if ctx.Err() != nil || child.Err() != nil {
			t.Fatalf("ended after %v although an answer came every 9 s: %v", time.Since(began), ctx.Err())
		}
		<-child.Done()
		if d := time.Since(began); d != 55*time.Second {
			t.Errorf("ended after %v, want 10 s after the last answer", d)
		}
		if !errors.Is(ctx.Err(), context.DeadlineExceeded) || !errors.Is(child.Err(), context.DeadlineExceeded) {
			t.Errorf("errors are %v and %v, want a passed deadline", ctx.Err(), child.Err())
		}
		if !errors.Is(context.Cause(ctx), silence) || !errors.Is(context.Cause(child), silence) {
			t.Errorf("causes are %v and %v, want the silence", context.Cause(ctx), context.Cause(child))
		}
	})
}
