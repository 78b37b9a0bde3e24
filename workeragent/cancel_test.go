package workeragent

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

func (r *rig) cancel(kind, value string) {
	r.t.Helper()
	if err := r.store.PutCancel(r.ctx(), subjects.Cancel{Kind: kind, Job: "j", Value: value, Reason: "enough"}); err != nil {
		r.t.Fatal(err)
	}
}

// scenario R4: a cancel reaches the engine that runs it, whatever names it.
// scenario R2: it brings what is reserved to exactly zero.
func TestACancelReachesTheEngineAndIsAnsweredWithWhatCame(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	for id, kind := range map[string]string{"0001": subjects.CancelID, "0002": subjects.CancelGroup, "0003": subjects.CancelTrajectory, "0004": subjects.CancelJob} {
		t.Run(kind, func(t *testing.T) {
			r := r.with(t)
			r.bind(request(id, 50), func(h *subjects.Held) { h.Group, h.Trajectory = "g"+id, "t"+id })
			c := p.next()
			c.tokens(1, 2)
			a.moved(r, id)
			value := map[string]string{
				subjects.CancelID: id, subjects.CancelGroup: "g" + id, subjects.CancelTrajectory: "t" + id,
			}[kind]
			r.cancel(kind, value)
			c.left()
			got := r.result(id)
			if got.Status != subjects.Cancelled || got.Error.Code != "cancelled" || !slices.Equal(got.TokenIDs, []uint32{1, 2}) {
				t.Errorf("got %+v %+v", got, got.Error)
			}
			if m := r.marker(id); m.Outcome != subjects.OutcomeCancelled {
				t.Errorf("marker %+v", m)
			}
		})
	}
	if n := r.reserved(); n != 0 {
		t.Errorf("%d reservations are left", n)
	}
}

// scenario R3: cancelled before it could start, it never reaches the engine.
func TestWhatWasCancelledBeforeItStartsNeverReachesTheEngine(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	accepted := time.Now().Add(-time.Minute).UnixNano()
	r.cancel(subjects.CancelID, "0001")
	r.eventually("the cancel is known", func() bool {
		_, ok := a.cancels.hit(&kvstate.Reservation{Held: subjects.Held{Job: "j", ID: "0001", Accepted: accepted}}, nil)
		return ok
	})
	r.bind(request("0001", 50), func(h *subjects.Held) { h.Accepted = accepted })
	if got := r.result("0001"); got.Status != subjects.Cancelled || got.TokenIDs != nil {
		t.Errorf("got %+v", got)
	}
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeCancelled {
		t.Errorf("marker %+v", m)
	}
	if p.arrivals() != 0 {
		t.Error("it reached the engine")
	}
	// The same id, submitted after the cancel, is another rollout.
	r.cancel(subjects.CancelID, "0002")
	r.eventually("the cancel is known", func() bool {
		_, ok := a.cancels.hit(&kvstate.Reservation{Held: subjects.Held{Job: "j", ID: "0002", Accepted: accepted}}, nil)
		return ok
	})
	r.bind(request("0002", 50), func(h *subjects.Held) { h.Accepted = time.Now().Add(time.Minute).UnixNano() })
	c := p.next()
	c.tokens(1)
	c.finish("stop")
	if got := r.result("0002"); got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
}

// scenario R19: a cancel that comes after the answer is a no-op, and so is an
// answer after the cancel.
func TestACancelAfterTheAnswerChangesNothing(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	r.bind(request("0001", 50))
	c := p.next()
	c.tokens(1)
	c.finish("stop")
	r.result("0001")
	r.released("0001")
	r.cancel(subjects.CancelID, "0001")
	r.eventually("the cancel is known", func() bool {
		_, ok := a.cancels.hit(&kvstate.Reservation{Held: subjects.Held{Job: "j", ID: "0001", Accepted: 1}}, nil)
		return ok
	})
	if got := r.result("0001"); got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeAnswered {
		t.Errorf("marker %+v", m)
	}
	if n := r.reserved(); n != 0 {
		t.Errorf("%d reservations are left", n)
	}
}

func TestRunsOfOlderWeightsAreCancelledByVersion(t *testing.T) {
	var c cancels
	six, seven := int64(6), int64(7)
	res := kvstate.Reservation{Held: subjects.Held{Job: "j", ID: "1", Accepted: 5}}
	put := func(value string, stored int64) {
		x := subjects.Cancel{Kind: subjects.CancelVersion, Job: "j", Value: value}
		c.put(kvstate.Value[subjects.Cancel]{Key: x.Key(), V: x, Stored: time.Unix(0, stored)})
	}
	put("7", 10)
	for name, x := range map[string]struct {
		weight *int64
		want   bool
	}{"older": {&six, true}, "of that version": {&seven, false}, "unknown": {nil, false}} {
		if _, ok := c.hit(&res, x.weight); ok != x.want {
			t.Errorf("%s: cancelled %v", name, ok)
		}
	}
	later := res
	later.Accepted = 11
	if _, ok := c.hit(&later, &six); ok {
		t.Error("what was accepted after the cancel is cancelled")
	}
	c.gone("version.j.7")
	if _, ok := c.hit(&res, &six); ok || c.versions != 0 {
		t.Error("a cancel that is gone still counts")
	}
}

// An engine that goes on when its client leaves is told by name, and the run
// counts as load until that is answered: scenario R20.
func TestARunThatWasCancelledCountsUntilItsEngineHasLetGo(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	asked, let := make(chan string, 1), make(chan struct{})
	a := r.agent(p.url, func(c *Config) {
		c.Engines[0].Adapter = &slowAbort{Adapter: c.Engines[0].Adapter, asked: asked, let: let}
		c.Timings.AbortTimeout = within
	})
	r.bind(request("0001", 50))
	c := p.next()
	r.cancel(subjects.CancelID, "0001")
	r.released("0001")
	select {
	case id := <-asked:
		if id != c.header.Get("X-Request-Id") {
			t.Errorf("asked to abort %q, the engine knows %q", id, c.header.Get("X-Request-Id"))
		}
	case <-time.After(within):
		t.Fatal("the engine was not asked to abort")
	}
	load := func() int {
		l := a.units[0].sample(r.ctx())
		return *l.Ranks[0].Running
	}
	if load() != 1 {
		t.Error("the run does not count any more")
	}
	close(let)
	r.eventually("it counts no more", func() bool { return load() == 0 })
	if _, err := r.store.Reservation(r.ctx(), "e1", "j", "0001"); !errors.Is(err, kvstate.ErrGone) {
		t.Errorf("the key: %v", err)
	}
}
