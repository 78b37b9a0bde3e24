package telemetry_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

func TestPollingIsStaggeredAndNeverOverlaps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var n, inside atomic.Int32
		p := telemetry.NewPoller(telemetry.Poller{Name: "e1", Poll: func(context.Context) error {
			if inside.Add(1) > 1 {
				t.Error("two polls at once")
			}
			time.Sleep(50 * time.Millisecond)
			inside.Add(-1)
			n.Add(1)
			return nil
		}})
		var run sync.WaitGroup
		run.Go(func() { p.Run(ctx) })
		time.Sleep(10 * time.Second) // the bubble's clock
		if got := n.Load(); got < 35 || got > 52 {
			t.Errorf("%d polls in 10 s", got)
		}
		cancel()
		run.Wait()
	})
}

func TestAChangeIsPolledAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var n atomic.Int32
		p := telemetry.NewPoller(telemetry.Poller{Name: "e1", Interval: time.Hour, Poll: func(context.Context) error { n.Add(1); return nil }})
		var run sync.WaitGroup
		run.Go(func() { p.Run(ctx) })
		time.Sleep(time.Hour)
		synctest.Wait()
		before := n.Load()
		p.Kick()
		p.Kick()
		synctest.Wait()
		if got := n.Load() - before; got < 1 || got > 2 {
			t.Errorf("%d polls after a kick", got)
		}
		cancel()
		run.Wait()
	})
}

func TestAFailingEngineIsAskedLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var n atomic.Int32
		p := telemetry.NewPoller(telemetry.Poller{Name: "e1", Poll: func(context.Context) error { n.Add(1); return errors.New("down") }})
		var run sync.WaitGroup
		run.Go(func() { p.Run(ctx) })
		time.Sleep(10 * time.Second)
		if got := n.Load(); got > 13 {
			t.Errorf("%d polls of an engine that is down in 10 s", got)
		}
		cancel()
		run.Wait()
	})
}
