package workeragent

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// answerFirst plays another agent that answers a rollout.
func (r *rig) answerFirst(id string) {
	r.t.Helper()
	res := &subjects.Result{SchemaVersion: 1, ID: id, Job: "j", Attempt: 9, Status: subjects.Completed, Text: "theirs"}
	if _, err := r.store.Commit(r.ctx(), res, subjects.Answer{Job: "j", ID: id, Reader: "main", Status: subjects.Completed, Bind: 9, Engine: "e9"}); err != nil {
		r.t.Fatal(err)
	}
}

// scenario F3, scenario R1: an agent is killed in mid-generation. Its keys stay,
// and the next agent gives them back.
func TestAKilledAgentsKeysAreReturnedByTheNextOne(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	bound := r.bind(request("0001", 50), func(h *subjects.Held) { h.Burnt = 1 })
	c := p.next()
	c.tokens(1, 2)
	a.kill()
	if err := a.end(t); err == nil {
		t.Error("a killed agent ended well")
	}
	c.left()
	if res, err := r.store.Reservation(r.ctx(), "e1", "j", "0001"); err != nil || res.State != subjects.StateBound || res.Revision != bound.Revision {
		t.Fatalf("the killed agent touched its key: %+v %v", res.Held, err)
	}
	if _, ok := r.engine("e1"); !ok {
		t.Error("the killed agent took its registration away")
	}
	b := r.agent(p.url)
	if got := r.returned("0001"); got.ReturnReason != returnEpoch || got.Burnt != 2 || len(got.Body) == 0 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	if p.arrivals() != 1 {
		t.Error("the next agent ran a key of another epoch")
	}
	if err := b.Stop(r.ctx()); err != nil {
		t.Error(err)
	}
}

func TestARestartedAgentReleasesWhatWasAnsweredAndDoesNotRunIt(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	r.bind(request("0001", 50))
	p.next()
	a.kill()
	a.end(t)
	r.answerFirst("0001")
	r.agent(p.url)
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeSuperseded {
		t.Errorf("marker %+v", m)
	}
	if p.arrivals() != 1 {
		t.Error("it was run again")
	}
}

// scenario F4: a late result changes nothing.
func TestALateResultIsSupersededAndChangesNothing(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	r.bind(request("0001", 50))
	c := p.next()
	r.answerFirst("0001")
	c.tokens(1)
	c.finish("stop")
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeSuperseded {
		t.Errorf("marker %+v", m)
	}
	if got := r.result("0001"); got.Text != "theirs" || got.Attempt != 9 {
		t.Errorf("the first answer was replaced by %+v", got)
	}
}

func TestAKeyThatIsTakenAwayEndsItsRunWithoutAnAnswer(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	res := r.bind(request("0001", 50))
	c := p.next()
	c.tokens(1)
	// A dispatcher that took the engine for lost has requeued it.
	rel := subjects.Released{Engine: "e1", Job: "j", ID: "0001", Outcome: subjects.OutcomeRequeued}
	if _, err := r.store.Release(r.ctx(), rel, res.Revision); err != nil {
		t.Fatal(err)
	}
	c.left()
	r.eventually("nothing is on the agent's list", func() bool {
		a.units[0].mu.Lock()
		defer a.units[0].mu.Unlock()
		return len(a.units[0].runs)+len(a.units[0].handing) == 0
	})
	if _, err := r.store.Result(r.ctx(), "j", "main", "0001"); !errors.Is(err, kvstate.ErrGone) {
		t.Errorf("it was answered: %v", err)
	}
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeRequeued {
		t.Errorf("the marker was replaced by %+v", m)
	}
	if e, _ := r.engine("e1"); e.State != subjects.EngineReady {
		t.Errorf("the engine is %s", e.State)
	}
}

func TestTheSecondAttemptOnTheSameEngineSurvivesTheLateDeleteOfTheFirst(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	first := r.bind(request("0001", 50))
	c1 := p.next()
	second := r.bind(request("0001", 50), func(h *subjects.Held) { h.Bind = 2 })
	c1.left()
	c2 := p.next()
	rel := subjects.Released{Engine: "e1", Job: "j", ID: "0001", Outcome: subjects.OutcomeRequeued}
	if _, err := r.store.Release(r.ctx(), rel, first.Revision); !errors.Is(err, kvstate.ErrSuperseded) {
		t.Errorf("the late delete: %v", err)
	}
	// Even when the follower were told of it late.
	a.units[0].gone(kvstate.Marker{Released: rel, Revision: second.Revision - 1})
	c2.tokens(4)
	c2.finish("stop")
	if got := r.result("0001"); got.Attempt != 2 || got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
	r.released("0001")
}

// scenario F17: an old agent process ends after a new one has registered.
func TestAnOldAgentTouchesNothingOfTheNewOne(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url, func(c *Config) { c.Name = "old" })
	b := r.agent(p.url, func(c *Config) { c.Name = "new" })
	if err := a.end(t); !errors.Is(err, ErrReplaced) {
		t.Errorf("the old agent ended with %v", err)
	}
	e, ok := r.engine("e1")
	if !ok || e.Agent != "new" || e.Epoch != b.units[0].epochText() {
		t.Fatalf("registered is %+v", e)
	}
	r.bind(request("0001", 50))
	c := p.next()
	if err := a.Stop(r.ctx()); err != nil {
		t.Error(err)
	}
	c.tokens(4)
	c.finish("stop")
	if got := r.result("0001"); got.Status != subjects.Completed || got.Route.Epoch != e.Epoch {
		t.Errorf("got %+v", got)
	}
	if e, ok := r.engine("e1"); !ok || e.Agent != "new" {
		t.Errorf("registered is %+v", e)
	}
}

// The same when the old one does not notice in time: it was stopped for long,
// or may not look. Its goodbye and its keys are guarded by revisions.
func TestAnOldAgentThatDoesNotKnowIsHeldOffByItsRevisions(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	l := &line{}
	a := r.launch(l.conn(r), p.url, func(c *Config) { c.Timings.Heartbeat = time.Hour })
	r.eventually("the engine is registered as ready", func() bool {
		e, ok := r.engine("e1")
		return ok && e.State == subjects.EngineReady
	})
	r.bind(request("0001", 50))
	p.next()
	l.sever()
	b := r.agent(p.url)
	r.returned("0001")
	res := r.bind(request("0001", 50), func(h *subjects.Held) { h.Bind = 2 })
	c2 := p.next()
	u := a.units[0]
	// It says goodbye with what it knew, and offers its own key's end.
	l.mend()
	u.deregister()
	u.release(subjects.Released{Engine: "e1", Job: "j", ID: "0001"}, res.Revision-1)
	if e, ok := r.engine("e1"); !ok || e.Epoch != b.units[0].epochText() {
		t.Errorf("registered is %+v", e)
	}
	if now, err := r.store.Reservation(r.ctx(), "e1", "j", "0001"); err != nil || now.Revision != res.Revision {
		t.Errorf("the key is %+v %v", now.Held, err)
	}
	c2.tokens(4)
	c2.finish("stop")
	if got := r.result("0001"); got.Attempt != 2 {
		t.Errorf("got %+v", got)
	}
	if err := a.end(t); !errors.Is(err, ErrReplaced) {
		t.Errorf("the old agent ended with %v", err)
	}
}

func TestAnEarlierAgentsLateRegistrationIsWrittenOver(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	// The bucket's sequence begins at 1: somebody else has that.
	if _, err := r.store.PutEngine(r.ctx(), subjects.Engine{Engine: "e9"}); err != nil {
		t.Fatal(err)
	}
	b := r.agent(p.url)
	e, _ := r.engine("e1")
	old := e
	old.Epoch, old.Agent = epoch{start: 1, mark: "older"}.String(), "old"
	if text := b.units[0].epochText(); startOf(text, 0) <= 1 {
		t.Fatalf("the agent's epoch is %s", text)
	}
	if _, err := r.store.PutEngine(r.ctx(), old); err != nil {
		t.Fatal(err)
	}
	r.eventually("the later agent's registration stands again", func() bool {
		now, ok := r.engine("e1")
		return ok && now.Epoch == e.Epoch
	})
}

func TestKeysOfALaterEpochAreLeftAlone(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	later, _ := parseEpoch(a.units[0].epochText())
	later.start += 1000
	later.mark = "other"
	res := r.bind(request("0001", 50), func(h *subjects.Held) { h.Epoch = later.String() })
	r.bind(request("0002", 50)) // its arrival shows that the first was seen
	p.next()
	if now, err := r.store.Reservation(r.ctx(), "e1", "j", "0001"); err != nil || now.Revision != res.Revision {
		t.Errorf("the key is %+v %v", now.Held, err)
	}
}

func TestEpochsOrderAgentsWithoutAClock(t *testing.T) {
	e := epoch{start: 42, life: 3, mark: newMark()}
	got, ok := parseEpoch(e.String())
	if !ok || got != e {
		t.Errorf("%s reads as %+v", e, got)
	}
	for _, bad := range []string{"", "x", "1-a", "1.2-", "a.2-m", "1.b-m", "1.-2-m", "e1-1"} {
		if e, ok := parseEpoch(bad); ok {
			t.Errorf("%q reads as %+v", bad, e)
		}
	}
	for _, c := range []struct {
		text string
		rev  uint64
		want uint64
	}{{"42.0-m", 50, 42}, {"0.0-m", 50, 50}, {"theirs", 50, 50}} {
		if got := startOf(c.text, c.rev); got != c.want {
			t.Errorf("%q at %d starts at %d, want %d", c.text, c.rev, got, c.want)
		}
	}
}

func TestAViewWithoutAKeyEndsItsRun(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	stays := r.bind(request("stays", 50))
	c1 := p.next()
	moves := r.bind(request("moves", 50))
	c2 := p.next()
	r.bind(request("goes", 50))
	c3 := p.next()
	moves.Revision += 100
	moves.State = subjects.StateReturned
	a.units[0].swap([]kvstate.Reservation{moves, stays}, nil)
	c2.left()
	c3.left()
	c1.tokens(1)
	c1.finish("stop")
	r.result("stays")
	for _, id := range []string{"moves", "goes"} {
		if _, err := r.store.Result(r.ctx(), "j", "main", id); !errors.Is(err, kvstate.ErrGone) {
			t.Errorf("%s was answered: %v", id, err)
		}
	}
}

func TestALoadClaimsNoRevisionThatWasNotHandedOver(t *testing.T) {
	u := newUnit(&Agent{log: slog.New(slog.DiscardHandler)}, EngineConfig{Name: "e1"})
	at := func(rev uint64, p phase) *run {
		return &run{phase: p, res: kvstate.Reservation{Revision: rev}}
	}
	u.seen = 9
	u.runs["a"], u.runs["b"] = at(5, running), at(9, settling)
	if got := u.appliedLocked(); got != 9 {
		t.Errorf("all were handed over: claims %d", got)
	}
	u.runs["c"], u.runs["d"] = at(6, pending), at(8, pending)
	if got := u.appliedLocked(); got != 5 {
		t.Errorf("6 and 8 wait: claims %d", got)
	}
}
