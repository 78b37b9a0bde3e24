package dispatcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestABindCarriesTheWholeRequestAndItsSequenceComesBack(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	r := request("j", "0001")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	f.do(bindOf("e1", got, 1, 0))
	a := waitFor[core.BindAnswer](t, f, 1, nil)
	if a.Answer != core.OK || a.Handle != got.Handle || a.Bind != 1 || a.Seq == 0 || a.Stored < got.Stored {
		t.Fatalf("answer %+v", a)
	}
	held, err := b.store.Reservation(b.ctx(), "e1", "j", "0001")
	if err != nil || held.Revision != a.Seq || string(held.Body) != string(body(r)) {
		t.Fatalf("reservation %+v, err %v", held, err)
	}
	if diff := cmp.Diff(heldOn("e1", got, 1), held.Held); diff != "" {
		t.Fatalf("facts differ (-want +got):\n%s", diff)
	}
	if n := histogramCount(t, d, "rollbus_dispatcher_dispatch_seconds"); n != 1 {
		t.Errorf("%d dispatch times observed", n)
	}
}

func TestARefusedBindSaysWhyAndWhereTheSequenceStands(t *testing.T) { // scenario B7
	b := newBench(t)
	_, f := b.faked()
	_, first := b.bound(f, request("j", "0001"))
	r := request("j", "0002")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	n := 1
	bind := func(engine string, bind int, expected uint64) core.BindAnswer {
		t.Helper()
		f.do(bindOf(engine, got, bind, expected))
		n++
		return waitFor[core.BindAnswer](t, f, n, nil)
	}
	if a := bind("e1", 1, 0); a.Answer != core.Conflict || a.Actual != first.Seq {
		t.Errorf("a bind on an old expectation: %+v, the sequence is %d", a, first.Seq)
	}
	ok := bind("e1", 2, first.Seq)
	if ok.Answer != core.OK {
		t.Fatalf("a bind on the sequence told: %+v", ok)
	}
	if a := bind("e2", 2, 0); a.Answer != core.Duplicate || a.Seq != ok.Seq {
		t.Errorf("the same bind number elsewhere: %+v, it stands at %d", a, ok.Seq)
	}
	f.do(core.Ack{Handle: got.Handle})
	if a := bind("e2", 3, 0); a.Answer != core.Unavailable {
		t.Errorf("a bind of what is not in hand: %+v", a)
	}
}

func TestAFullBucketIsAnAnswer(t *testing.T) { // scenario B9
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	cfg.Layout.ReservationsBytes = 64 << 10
	d, _ := b.running(cfg, f)
	b.ready(d)
	r := request("j", "0001")
	r.Meta = fmt.Appendf(nil, `"%064000d"`, 1)
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	f.do(bindOf("e1", got, 1, 0))
	if a := waitFor[core.BindAnswer](t, f, 1, nil); a.Answer != core.Full {
		t.Fatalf("answer %+v", a)
	}
	if m := d.Ready(); len(m) != 1 || m[0].What != string(partWrites) {
		t.Errorf("missing %+v", m)
	}
	natstest.Eventually(t, within, "readiness again: the complaint expires", func() bool { return len(d.Ready()) == 0 })
}

// lossy does a bind and loses the answer, the first times.
func lossy(bind func(context.Context, kvstate.Bind) (uint64, error), lose int) func(context.Context, kvstate.Bind) (uint64, error) {
	return func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		seq, err := bind(ctx, w)
		if lose > 0 {
			lose--
			return 0, fmt.Errorf("%w: the answer is lost (it was %d, %w)", kvstate.ErrUnknown, seq, err)
		}
		return seq, err
	}
}

func TestABindWhoseAnswerIsLostIsFoundToHaveHappened(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	d.bindKey = lossy(d.bindKey, 1)
	r := request("j", "0001")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	f.do(bindOf("e1", got, 1, 0))
	a := waitFor[core.BindAnswer](t, f, 1, nil)
	held := must(b.store.Reservation(b.ctx(), "e1", "j", "0001"))
	if a.Answer != core.OK || a.Seq != held.Revision {
		t.Fatalf("answer %+v, it stands at %d", a, held.Revision)
	}
	if n := b.messages(subjects.BucketStream(b.pool.Bucket(subjects.Reservations))); n != 1 {
		t.Fatalf("%d reservations", n)
	}
}

func TestABindThatNeverHappenedIsRepeatedOnTheSameEngine(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	real, lost := d.bindKey, 3
	d.bindKey = func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		if lost--; lost >= 0 {
			return 0, kvstate.ErrUnknown
		}
		return real(ctx, w)
	}
	r := request("j", "0001")
	b.submit(r)
	f.do(bindOf("e1", b.fetchOne(f, queueOf(r)), 1, 0))
	if a := waitFor[core.BindAnswer](t, f, 1, nil); a.Answer != core.OK || a.Engine != "e1" {
		t.Fatalf("answer %+v", a)
	}
	if n := counterValue(t, d, "rollbus_dispatcher_write_repeats_total", "bind"); n != 3 {
		t.Errorf("%v repetitions, want 3", n)
	}
}

func TestARefusalWithoutEffectDoesNotEndTheDoubtAboutAnEarlierAttempt(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	real := d.bindKey
	script := []error{kvstate.ErrUnknown, kvstate.ErrUnavailable, kvstate.ErrBusy, kvstate.ErrFull}
	d.bindKey = func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		if len(script) == 0 {
			return real(ctx, w)
		}
		if len(script) == 4 {
			must(real(ctx, w)) // it happens, and nobody hears of it
		}
		err := script[0]
		script = script[1:]
		return 0, err
	}
	r := request("j", "0001")
	b.submit(r)
	f.do(bindOf("e1", b.fetchOne(f, queueOf(r)), 1, 0))
	a := waitFor[core.BindAnswer](t, f, 1, nil)
	if held := must(b.store.Reservation(b.ctx(), "e1", "j", "0001")); a.Answer != core.OK || a.Seq != held.Revision {
		t.Fatalf("answer %+v, it stands at %d", a, held.Revision)
	}
}

func TestABindThatConflictsAfterALostAnswerIsNotMistakenForOurs(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	_, first := b.bound(f, request("j", "0001"))
	real, lost := d.bindKey, 1
	d.bindKey = func(ctx context.Context, w kvstate.Bind) (uint64, error) {
		if lost--; lost >= 0 {
			return 0, kvstate.ErrUnknown // never sent
		}
		return real(ctx, w)
	}
	r := request("j", "0002")
	b.submit(r)
	f.do(bindOf("e1", b.fetchOne(f, queueOf(r)), 1, 0))
	if a := waitFor[core.BindAnswer](t, f, 2, nil); a.Answer != core.Conflict || a.Actual != first.Seq {
		t.Fatalf("answer %+v, the sequence is %d", a, first.Seq)
	}
}

func TestAnUnansweredBindIsAnsweredAfterNATSRestarts(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	r := request("j", "0001")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	if err := b.node.Running().DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	f.do(bindOf("e1", got, 1, 0))
	natstest.Eventually(t, within, "a repeated bind", func() bool {
		return counterValue(t, d, "rollbus_dispatcher_write_repeats_total", "bind") > 0
	})
	ticks := func() int { f.mu.Lock(); defer f.mu.Unlock(); return f.ticks }
	before := ticks()
	natstest.Eventually(t, within, "a core that goes on", func() bool { return ticks() > before+10 })
	b.node.Restart()
	a := waitFor[core.BindAnswer](t, f, 1, nil)
	held := must(b.store.Reservation(b.ctx(), "e1", "j", "0001"))
	if a.Answer != core.OK || a.Seq != held.Revision || a.Engine != "e1" {
		t.Fatalf("answer %+v, it stands at %d", a, held.Revision)
	}
}

func TestAWriteWithoutAnAnswerIsGivenUpInTheEnd(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	cfg.Timings.AttemptsFor = 100 * time.Millisecond
	d, _ := b.running(cfg, f)
	b.ready(d)
	d.bindKey = func(context.Context, kvstate.Bind) (uint64, error) { return 0, kvstate.ErrUnknown }
	r := request("j", "0001")
	b.submit(r)
	f.do(bindOf("e1", b.fetchOne(f, queueOf(r)), 1, 0))
	if a := waitFor[core.BindAnswer](t, f, 1, nil); a.Answer != core.Unavailable {
		t.Fatalf("answer %+v", a)
	}
}

func TestEveryErrorOfKvstateHasItsAnswer(t *testing.T) {
	for _, c := range []struct {
		err         error
		want        core.Answer
		seq, actual uint64
	}{
		{nil, core.OK, 0, 0},
		{&kvstate.ConflictError{Actual: 7}, core.Conflict, 0, 7},
		{kvstate.ErrConflict, core.Conflict, 0, 0},
		{kvstate.ErrBusy, core.Busy, 0, 0},
		{&kvstate.DuplicateError{Seq: 9}, core.Duplicate, 9, 0},
		{kvstate.ErrUnknown, core.Unknown, 0, 0},
		{kvstate.ErrSuperseded, core.Superseded, 0, 0},
		{kvstate.ErrFull, core.Full, 0, 0},
		{kvstate.ErrGone, core.Gone, 0, 0},
		{kvstate.ErrUnavailable, core.Unavailable, 0, 0},
		{kvstate.ErrRefused, core.Unavailable, 0, 0},
		{errors.New("something new"), core.Unavailable, 0, 0},
	} {
		err := c.err
		if err != nil {
			err = fmt.Errorf("bind: %w", err)
		}
		if a, seq, actual := answerOf(err); a != c.want || seq != c.seq || actual != c.actual {
			t.Errorf("%v: %v %d %d, want %v %d %d", c.err, a, seq, actual, c.want, c.seq, c.actual)
		}
	}
}

// scenario R15: the agent is gone and cannot give its run back; what its
// checkpoint kept of that attempt is not made again.
func TestARequeueGoesOnFromTheCheckpointOfThatAttempt(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	s := subjects.Settings{PartialsEvery: 2}.WithDefaults()
	d.settings.Store(&s)
	bucket := b.pool.Bucket(subjects.Partials)
	for n, attempt := range []int{1, 2} { // a checkpoint of the attempt that was bound, and of another one
		id := []string{"0001", "0002"}[n]
		r := request("j", id)
		r.Prompt, r.PromptTokenIDs = "", []uint32{1, 2, 3, 4}
		_, a := b.bound(f, r)
		res := must(b.store.Reservation(b.ctx(), "e1", "j", id))
		kept := subjects.Partial{SchemaVersion: subjects.SchemaVersion, Engine: "e1", Epoch: res.Epoch, Bind: attempt, TokenIDs: []uint32{7, 8, 9},
			Segments: []subjects.Segment{{Engine: "e1", Epoch: res.Epoch, End: 3}}}
		must(b.js.Publish(b.ctx(), subjects.BucketSubject(bucket, "e1.j."+id), must(json.Marshal(kept))))
		f.do(core.Retry{Engine: "e1", Job: "j", ID: id, Revision: a.Seq, Bind: 2, Burnt: 1, Tried: []string{"e1"}, LeftMS: 30_000, Lane: subjects.LaneNormal, Accepted: 5})
		if x := waitFor[core.RetryAnswer](t, f, n+1, nil); x.Answer != core.OK {
			t.Fatalf("answer %+v", x)
		}
		prompt, most := 4, 16
		if attempt == 1 {
			prompt, most = 7, 13
		}
		if x := b.fetchOne(f, core.Queue{Job: "j", Retry: true}).Facts; x.ID != id || x.PromptTokens != prompt || x.MaxTokens != most {
			t.Errorf("a checkpoint of attempt %d: %s comes back with a prompt of %d and %d tokens to make, want %d and %d", attempt, x.ID, x.PromptTokens, x.MaxTokens, prompt, most)
		}
	}
}

func TestARequeueTakesTheBodyOfExactlyItsRevision(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	_, a := b.bound(f, r)
	retry := core.Retry{
		Engine: "e1", Job: "j", ID: "0001", Revision: a.Seq + 1, Bind: 2, Burnt: 1, Tried: []string{"e1"},
		LeftMS: 30_000, Lane: subjects.LaneNormal, Accepted: 5,
	}
	f.do(retry)
	if x := waitFor[core.RetryAnswer](t, f, 1, nil); x.Answer != core.Gone || x.Revision != a.Seq+1 {
		t.Fatalf("another revision: %+v", x)
	}
	retry.Revision = a.Seq
	f.do(retry)
	if x := waitFor[core.RetryAnswer](t, f, 2, nil); x.Answer != core.OK {
		t.Fatalf("answer %+v", x)
	}
	f.do(retry) // as after a crash between requeue and delete
	if x := waitFor[core.RetryAnswer](t, f, 3, nil); x.Answer != core.Duplicate {
		t.Fatalf("again: %+v", x)
	}
	f.do(core.DeleteKey{Engine: "e1", Job: "j", ID: "0001", Revision: a.Seq, Released: subjects.Released{
		Engine: "e1", Job: "j", ID: "0001", Outcome: subjects.OutcomeRequeued, Bind: 1,
	}})
	if x := waitFor[core.DeleteAnswer](t, f, 1, nil); x.Answer != core.OK || x.Seq <= a.Seq {
		t.Fatalf("delete: %+v", x)
	}
	got := b.fetchOne(f, core.Queue{Job: "j", Retry: true})
	x := got.Facts
	if x.Key() != "j.0001" || x.Bind != 2 || x.Burnt != 1 || x.LeftMS != 30_000 || x.Accepted != 5 ||
		x.Lane != subjects.LaneNormal || len(x.Tried) != 1 || x.MaxTokens != 16 || got.Bad != nil {
		t.Fatalf("fetched %+v", got)
	}
	f.do(retry)
	if x := waitFor[core.RetryAnswer](t, f, 4, nil); x.Answer != core.Gone {
		t.Fatalf("after the delete: %+v", x)
	}
	if n := b.messages(b.pool.Retry()); n != 1 {
		t.Fatalf("%d messages in RETRY", n)
	}
}

func TestADeleteOfAMovedKeyIsSuperseded(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	_, a := b.bound(f, request("j", "0001"))
	held := must(b.store.Reservation(b.ctx(), "e1", "j", "0001"))
	must(b.store.Return(b.ctx(), held, "the engine is full", 0))
	f.do(core.DeleteKey{Engine: "e1", Job: "j", ID: "0001", Revision: a.Seq, Released: subjects.Released{Engine: "e1", Job: "j", ID: "0001"}})
	if x := waitFor[core.DeleteAnswer](t, f, 1, nil); x.Answer != core.Superseded {
		t.Fatalf("answer %+v", x)
	}
}

func TestAnAnswerEchoesTheRequestAndTheFirstOneWins(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	r.Group = &subjects.Group{ID: "g", Index: 1, Size: 2}
	r.Trajectory = &subjects.Trajectory{ID: "t", Turn: 1}
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	publish := core.PublishResult{
		Handle: got.Handle, Job: "j", ID: "0001", Reader: "main", Status: subjects.Rejected, Group: "g",
		Error: subjects.ResultError{Class: subjects.ClassData, Code: "too_large", Message: "larger than any engine"},
	}
	f.do(publish)
	a := waitFor[core.ResultAnswer](t, f, 1, nil)
	if a.Answer != core.OK || a.Seq == 0 || a.Handle != got.Handle {
		t.Fatalf("answer %+v", a)
	}
	res := b.result("j", "0001")
	want := &subjects.Result{
		SchemaVersion: subjects.SchemaVersion, Job: "j", ID: "0001", Status: subjects.Rejected, Error: &publish.Error,
		Group: r.Group, Trajectory: r.Trajectory, Labels: r.Labels, ReplyKey: r.ReplyKey, Meta: r.Meta,
	}
	if diff := cmp.Diff(want, res); diff != "" {
		t.Fatalf("result differs (-want +got):\n%s", diff)
	}
	publish.Status = subjects.Expired
	f.do(publish)
	if a := waitFor[core.ResultAnswer](t, f, 2, nil); a.Answer != core.Superseded {
		t.Fatalf("the second answer: %+v", a)
	}
	if again := b.result("j", "0001"); again.Status != subjects.Rejected {
		t.Fatalf("the first answer became %s", again.Status)
	}
}

func TestAnAnswerForAReservationEchoesItsBodyAtItsRevisionOnly(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	_, a := b.bound(f, r)
	publish := core.PublishResult{
		Engine: "e1", Revision: a.Seq + 1, Job: "j", ID: "0001", Attempt: 1, Status: subjects.Expired,
		Error: subjects.ResultError{Class: subjects.ClassInfra, Code: "deadline", Message: "late"},
	}
	f.do(publish)
	if x := waitFor[core.ResultAnswer](t, f, 1, nil); x.Answer != core.Gone {
		t.Fatalf("another revision: %+v", x)
	}
	publish.Revision = a.Seq
	f.do(publish)
	if x := waitFor[core.ResultAnswer](t, f, 2, nil); x.Answer != core.OK {
		t.Fatalf("answer %+v", x)
	}
	if res := b.result("j", "0001"); res.ReplyKey != r.ReplyKey || res.Attempt != 1 || res.Route.Engine != "e1" {
		t.Fatalf("result %+v", res)
	}
}

func TestDeadKeepsTheWholeRequestWithTheReason(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	r := request("j", "0001")
	b.submit(r)
	got := b.fetchOne(f, queueOf(r))
	f.do(core.PublishDead{Handle: got.Handle, Job: "j", ID: "0001", Code: "max_attempts", Reason: "gave up\nafter 3"})
	if a := waitFor[core.DeadAnswer](t, f, 1, nil); a.Answer != core.OK || a.Handle != got.Handle {
		t.Fatalf("answer %+v", a)
	}
	s := must(b.js.Stream(b.ctx(), b.pool.Dead()))
	m := must(s.GetLastMsgForSubject(b.ctx(), b.pool.DeadSubject("j")))
	if string(m.Data) != string(body(r)) || m.Header.Get(subjects.HdrMaxTokens) != "16" || m.Header.Get(subjects.HdrError) == "" {
		t.Fatalf("dead %q %v", m.Data, m.Header)
	}
	_, a := b.bound(f, request("j", "0002"))
	f.do(core.PublishDead{Engine: "e1", Revision: a.Seq, Job: "j", ID: "0002", Code: "max_attempts", Reason: "x"})
	if x := waitFor[core.DeadAnswer](t, f, 2, nil); x.Answer != core.OK {
		t.Fatalf("answer %+v", x)
	}
	if m := must(s.GetLastMsgForSubject(b.ctx(), b.pool.DeadSubject("j"))); string(m.Data) != string(body(request("j", "0002"))) {
		t.Fatalf("dead %q", m.Data)
	}
}

func TestTheLeaderSaysWhatStandsAndWhatIsAnswered(t *testing.T) {
	b := newBench(t)
	_, f := b.faked()
	_, bound := b.bound(f, request("j", "0001"))
	ask := core.GetFromLeader{Handle: 77, Engine: "e1", Job: "j", ID: "0001"}
	f.do(ask)
	a := waitFor[core.LeaderAnswer](t, f, 1, nil)
	if a.Err != "" || a.Handle != 77 || a.Reservation == nil || a.Reservation.Revision != bound.Seq || a.Reservation.Bind != 1 || a.Answered != nil {
		t.Fatalf("answer %+v", a)
	}
	must(b.store.Commit(b.ctx(), &subjects.Result{Job: "j", ID: "0001", Status: subjects.Completed}, subjects.Answer{Bind: 1}))
	ask.Engine = ""
	f.do(ask)
	if a := waitFor[core.LeaderAnswer](t, f, 2, nil); a.Err != "" || a.Reservation != nil || a.Answered == nil || a.Answered.Status != subjects.Completed {
		t.Fatalf("answer %+v", a)
	}
	ask.ID, ask.Engine = "0002", "e2"
	f.do(ask)
	if a := waitFor[core.LeaderAnswer](t, f, 3, nil); a.Err != "" || a.Reservation != nil || a.Answered != nil {
		t.Fatalf("answer %+v", a)
	}
	if err := b.node.Running().DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	f.do(ask)
	if a := waitFor[core.LeaderAnswer](t, f, 4, nil); a.Err == "" {
		t.Fatalf("without a leader: %+v", a)
	}
	b.node.Restart()
}
