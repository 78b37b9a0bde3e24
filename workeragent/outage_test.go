package workeragent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// pass waits for time itself, for what must outlast a server's TTL.
func pass(t *testing.T, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	<-ctx.Done()
}

// answers counts what was ever written to the register.
func (r *rig) answers() uint64 {
	r.t.Helper()
	s, err := r.store.JS().Stream(r.ctx(), r.pool.Results())
	if err != nil {
		r.t.Fatal(err)
	}
	return s.CachedInfo().State.LastSeq
}

func (a *agentRun) spooledCount() int {
	n, _ := a.spool.figures()
	return n
}

// onALine is an agent whose connection to NATS a test can cut.
func onALine(t *testing.T) (*rig, *puppet, *line) {
	r, p, l := newRig(t), newPuppet(t), &line{}
	r.along(l, p.url)
	return r, p, l
}

func TestNATSRestartedBetweenAResultAndItsRelease(t *testing.T) {
	r, p, l := onALine(t)
	r.bind(request("0001", 50))
	c := p.next()
	cut := l.cutAt(false, func(b []byte) bool {
		return bytes.Contains(b, []byte("e1.j.0001")) && bytes.Contains(b, []byte("KV-Operation"))
	})
	c.tokens(1)
	c.finish("stop")
	<-cut
	r.result("0001")
	if _, err := r.store.Reservation(r.ctx(), "e1", "j", "0001"); err != nil {
		t.Fatalf("the key was released all the same: %v", err)
	}
	r.node.Restart()
	l.mend()
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeAnswered {
		t.Errorf("marker %+v", m)
	}
	if n := r.answers(); n != 1 || p.arrivals() != 1 {
		t.Errorf("%d answers of %d runs", n, p.arrivals())
	}
}

func TestAnAnswerWhoseAcknowledgementIsLostIsKnownForOurs(t *testing.T) {
	r, p, l := onALine(t)
	r.bind(request("0001", 50))
	c := p.next()
	cut := l.cutAt(true, func(b []byte) bool { return bytes.Contains(b, []byte("rollout.p.result.j.main.0001")) })
	c.tokens(1)
	c.finish("stop")
	<-cut
	r.result("0001")
	l.mend()
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeAnswered {
		t.Errorf("marker %+v", m)
	}
	if n := r.answers(); n != 1 {
		t.Errorf("%d answers", n)
	}
}

// An outage longer than the registrations live ends no run: what finishes is
// spooled, what runs goes on, and the epoch stays.
func TestAnOutageOfNATSEndsNoRun(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url)
	before, _ := r.engine("e1")
	r.bind(request("0001", 50))
	one := p.next()
	r.bind(request("0002", 50))
	two := p.next()
	r.node.Stop()
	one.tokens(1)
	one.finish("stop")
	r.eventually("the answer is spooled", func() bool { return a.spooledCount() == 1 })
	two.tokens(1)
	pass(t, 1700*time.Millisecond) // 25 s at this scale: registrations live for 1 s here
	two.tokens(2)
	if a.Ready() == nil {
		t.Error("without NATS the agent says that it is ready")
	}
	r.node.Start()
	if got := r.result("0001"); got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
	r.released("0001")
	r.eventually("it is registered again, in the same epoch", func() bool {
		e, ok := r.engine("e1")
		return ok && e.Epoch == before.Epoch && e.State == subjects.EngineReady
	})
	two.tokens(3)
	two.finish("stop")
	if got := r.result("0002"); got.Status != subjects.Completed || len(got.TokenIDs) != 3 {
		t.Errorf("got %+v", got)
	}
	r.released("0002")
	if p.arrivals() != 2 || a.spooledCount() != 0 {
		t.Errorf("%d runs, %d answers spooled", p.arrivals(), a.spooledCount())
	}
	r.bind(request("0003", 50))
	p.next()
}

// scenario F10: the agent alone is cut off. What was given elsewhere meanwhile
// is dropped; what was answered meanwhile stays answered.
func TestAfterAPartitionOnlyKeysThatAreStillHeldGoOn(t *testing.T) {
	r, p, l := onALine(t)
	r.bind(request("keeps", 50))
	keeps := p.next()
	taken := r.bind(request("taken", 50))
	moved := p.next()
	r.bind(request("late", 50))
	late := p.next()
	l.sever()
	if _, err := r.store.Release(r.ctx(), subjects.Released{Engine: "e1", Job: "j", ID: "taken", Outcome: subjects.OutcomeRequeued}, taken.Revision); err != nil {
		t.Fatal(err)
	}
	r.answerFirst("late")
	late.tokens(1)
	late.finish("stop")
	keeps.tokens(1)
	l.mend()
	moved.left()
	keeps.tokens(2)
	keeps.finish("stop")
	if got := r.result("keeps"); len(got.TokenIDs) != 2 {
		t.Errorf("got %+v", got)
	}
	if m := r.marker("late"); m.Outcome != subjects.OutcomeSuperseded {
		t.Errorf("marker %+v", m)
	}
	if got := r.result("late"); got.Text != "theirs" {
		t.Errorf("the first answer was replaced by %+v", got)
	}
	if _, err := r.store.Result(r.ctx(), "j", "main", "taken"); !errors.Is(err, kvstate.ErrGone) {
		t.Errorf("what was taken away was answered: %v", err)
	}
}

// fill makes the register refuse more.
func (r *rig) fill() {
	r.t.Helper()
	for size := 32 << 10; size > 64; size /= 2 {
		for i := 0; ; i++ {
			subj := r.pool.Result("filler", "main", fmt.Sprintf("%d-%d", size, i))
			if _, err := r.store.JS().Publish(r.ctx(), subj, make([]byte, size), jetstream.WithRetryAttempts(0)); err != nil {
				break
			}
			if i > 1000 {
				r.t.Fatal("the register does not fill up")
			}
		}
	}
}

func (r *rig) empty() {
	r.t.Helper()
	s, err := r.store.JS().Stream(r.ctx(), r.pool.Results())
	if err != nil {
		r.t.Fatal(err)
	}
	if err := s.Purge(r.ctx()); err != nil {
		r.t.Fatal(err)
	}
}

func smallRegister(l *subjects.Layout) { l.ResultsBytes = 64 << 10 }

func TestAnAnswerThatDoesNotFitTheRegisterIsKeptAndItsKeyStays(t *testing.T) {
	r := newRig(t, smallRegister)
	p := newPuppet(t)
	a := r.agent(p.url)
	r.bind(request("0001", 50))
	c := p.next()
	r.fill()
	c.tokens(1)
	c.finish("stop")
	r.eventually("the answer is spooled", func() bool { return a.spooledCount() == 1 })
	pass(t, 200*time.Millisecond)
	if res, err := r.store.Reservation(r.ctx(), "e1", "j", "0001"); err != nil || res.State != subjects.StateBound {
		t.Errorf("the key is %+v %v", res.Held, err)
	}
	r.empty()
	if got := r.result("0001"); got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
	r.released("0001")
	r.eventually("the spool is empty", func() bool { return a.spooledCount() == 0 })
}

func TestASpoolOnDiskOutlivesItsAgent(t *testing.T) {
	r := newRig(t, smallRegister)
	p := newPuppet(t)
	dir := filepath.Join(t.TempDir(), "spool")
	spool := func(c *Config) { c.SpoolDir = dir }
	a := r.agent(p.url, spool)
	r.bind(request("0001", 50))
	c := p.next()
	r.fill()
	c.tokens(1)
	c.finish("stop")
	files := func() int {
		names, _ := filepath.Glob(filepath.Join(dir, "*.json"))
		return len(names)
	}
	r.eventually("the answer is on disk", func() bool { return files() == 1 })
	a.kill()
	a.end(t)
	// What is broken there is named and stays, and stops nothing.
	broken := filepath.Join(dir, "e1.broken.json")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.empty()
	r.agent(p.url, spool)
	if got := r.result("0001"); got.Status != subjects.Completed || got.Attempt != 1 {
		t.Errorf("got %+v", got)
	}
	if m := r.marker("0001"); m.Outcome != subjects.OutcomeAnswered {
		t.Errorf("marker %+v", m)
	}
	r.eventually("the file is gone", func() bool { return files() == 1 })
	if _, err := os.Stat(broken); err != nil {
		t.Error(err)
	}
	if p.arrivals() != 1 {
		t.Errorf("it ran %d times", p.arrivals())
	}
}

func TestNothingNewIsTakenWhileTheSpoolIsFull(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	a := r.agent(p.url, func(c *Config) { c.SpoolBytes = subjects.MaxPayload })
	e := &spooled{Result: &subjects.Result{Text: strings.Repeat("x", subjects.MaxPayload)}}
	a.spooling(e, true)
	r.eventually("it is registered as paused", func() bool {
		e, _ := r.engine("e1")
		return e.State == subjects.EnginePaused
	})
	r.bind(request("0001", 50))
	if got := r.returned("0001"); got.ReturnReason != returnSpoolFull || got.Burnt != 0 {
		t.Errorf("returned %q with %d burnt", got.ReturnReason, got.Burnt)
	}
	a.spooling(e, false)
	r.eventually("it is ready again", func() bool { return a.Ready() == nil })
	if n, b := a.spool.figures(); n != 0 || b != 0 {
		t.Errorf("the spool counts %d answers of %d bytes", n, b)
	}
}

func TestASpooledAnswerIsReadBackAsItWas(t *testing.T) {
	s, err := newSpool(1<<30, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	e := &spooled{Engine: "e1", Revision: 7, Answer: subjects.Answer{Job: "j", ID: "1", Bind: 2},
		Released: subjects.Released{Engine: "e1"}, Result: &subjects.Result{ID: "1", Job: "j", TokenIDs: []uint32{1}}}
	if err := errors.Join(s.keep(e), s.keep(e)); err != nil {
		t.Fatal(err)
	}
	other := &spooled{Engine: "e1.x", Answer: e.Answer, Result: e.Result}
	if err := s.keep(other); err != nil {
		t.Fatal(err)
	}
	got, err := s.load("e1")
	if err != nil || len(got) != 1 {
		t.Fatalf("%d answers, %v", len(got), err)
	}
	want, _ := json.Marshal(e)
	if have, _ := json.Marshal(got[0]); !bytes.Equal(want, have) {
		t.Errorf("got %s, want %s", have, want)
	}
	s.remove(got[0])
	if got, _ := s.load("e1"); len(got) != 0 {
		t.Error("a removed answer is still there")
	}
}
