package dispatcher

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
)

// A dispatcher has decided and is stopped before the bind leaves it, for 60 s at
// these timings. Another one takes the request over meanwhile and it is
// answered. The bind that leaves after that is refused.
//
// scenario F2
func TestADispatcherStoppedBetweenDecisionAndBindDoesNoHarm(t *testing.T) {
	b := newBench(t)
	cfg := b.config()
	cfg.Timings.AckWait = 1500 * time.Millisecond // what it held comes back soon
	scaled := cfg.Timings.Core.Suspect * 4        // Suspect is 15 s in production
	stopped, _ := b.running(cfg, nil)
	b.ready(stopped)
	decided, resume, late := make(chan kvstate.Bind, 1), make(chan struct{}), make(chan error, 1)
	var once atomic.Bool
	write := stopped.bindKey
	stopped.bindKey = func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		if !once.CompareAndSwap(false, true) {
			return write(ctx, w)
		}
		decided <- w
		<-resume
		// A stopped process knows of no timeout: what it was about to send is sent.
		seq, err := write(context.WithoutCancel(ctx), w)
		late <- err
		return seq, err
	}
	a := b.agent("e1", 2, nil)
	b.submit(request("j", "0001"))
	first := <-decided
	if first.Expected != 0 {
		t.Fatalf("it expected %d of an engine that held nothing", first.Expected)
	}
	other, _ := b.running(cfg, nil)
	b.ready(other)
	b.settled(1)
	at := time.Now()
	natstest.Eventually(t, within+scaled, "60 s at these timings", func() bool { return time.Since(at) > scaled })
	close(resume)
	if a, _, _ := answerOf(<-late); a != core.Conflict && a != core.Duplicate {
		t.Errorf("the late bind was answered %s", a)
	}
	// And it goes on to serve.
	for _, id := range []string{"0002", "0003"} {
		b.submit(request("j", id))
	}
	b.settled(3)
	for _, key := range []string{"j.0001", "j.0002", "j.0003"} {
		if n := a.ran(key); n != 1 {
			t.Errorf("%s ran %d times", key, n)
		}
	}
}
