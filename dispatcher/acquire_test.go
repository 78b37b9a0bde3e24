package dispatcher

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestACallerOutsideAcquiresAReservationOnce(t *testing.T) {
	b := newBench(t)
	d := b.real()
	facts := subjects.FactsFromRequest(request("j", "0001"), subjects.Settings{})
	refused := func(err error, code string) {
		t.Helper()
		if r, ok := errors.AsType[*RefusedError](err); !ok || code != "" && r.Code != code {
			t.Fatalf("acquire: %v, want a refusal %q", err, code)
		}
	}
	b.agent("e1", 2, nil)
	var g Grant
	natstest.Eventually(t, within, "a grant", func() bool {
		var err error
		g, err = d.Acquire(b.ctx(), facts, time.Minute)
		return err == nil
	})
	held := must(b.store.Reservation(b.ctx(), "e1", "j", "0001"))
	if held.State != subjects.StateExternal || held.Revision != g.Revision || g.Held.Engine != "e1" || len(held.Body) != 0 {
		t.Fatalf("granted %+v, stored %+v", g, held)
	}
	_, err := d.Acquire(b.ctx(), facts, time.Minute)
	refused(err, "")
	must(b.store.Release(b.ctx(), subjects.Released{Engine: "e1", Job: "j", ID: "0001"}, g.Revision))
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Acquire(b.ctx(), facts, 0); !errors.Is(err, ErrStopped) {
		t.Fatalf("after the end: %v", err)
	}
}

func TestAGrantWhoseCallerHasGoneIsGivenBack(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	ctx, cancel := context.WithCancel(b.ctx())
	gone := make(chan error, 1)
	go func() {
		_, err := d.Acquire(ctx, subjects.Facts{Job: "j", ID: "0001"}, time.Minute)
		gone <- err
	}()
	a := waitFor[core.Acquire](t, f, 1, nil)
	held := subjects.Held{Engine: "e1", Job: "j", ID: "0001", State: subjects.StateExternal, Bind: 1, Epoch: "ep"}
	f.do(core.Bind{Handle: a.Handle, Held: held, TTL: time.Minute})
	bound := waitFor[core.BindAnswer](t, f, 1, nil)
	if bound.Answer != core.OK {
		t.Fatalf("bind %+v", bound)
	}
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Fatalf("acquire: %v", err)
	}
	f.do(core.Granted{Handle: a.Handle, Held: held, Revision: bound.Seq})
	natstest.Eventually(t, within, "the key released", func() bool { return len(b.bindings()) == 0 })
}
