package dispatcher

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// walking are timings that let a test see the walker at work.
func walking(b *bench) Config {
	cfg := b.config().WithDefaults()
	cfg.Timings.WalkEvery, cfg.Timings.WalkAge = 50*time.Millisecond, 100*time.Millisecond
	cfg.Timings.JobsPoll = 40 * time.Millisecond
	return cfg
}

func lasting(job, id string, deadline time.Duration) *subjects.Request {
	r := request(job, id)
	r.Deadline = subjects.Duration(deadline)
	return r
}

func TestADeadlineThatPassesInTheQueueIsAnsweredWithoutAnyEngine(t *testing.T) {
	b := newBench(t)
	d, _ := b.running(walking(b), &fakeCore{}) // a core that fetches nothing
	b.ready(d)
	b.submit(lasting("j", "0001", 300*time.Millisecond))
	b.submit(lasting("j", "0002", time.Hour))
	r := lasting("k", "0001", 300*time.Millisecond)
	urgent := -1
	r.Priority, r.Reader, r.Group = &urgent, "r7", &subjects.Group{ID: "g", Size: 2}
	b.submit(r)
	// A submit without facts in its headers: the body says when.
	bare := lasting("j", "0003", 300*time.Millisecond)
	b.publish(b.pool.Submit("j", subjects.LaneNormal), "j.0003", nil, body(bare))
	// A requeued one counts what was left.
	left := nats.Header{}
	left.Set(subjects.HdrLane, "normal")
	left.Set(subjects.HdrBind, "4")
	left.Set(subjects.HdrLeft, "200")
	b.publish(b.pool.RetrySubject("j"), "j.0004#4", left, body(lasting("j", "0004", time.Hour)))

	for _, id := range []string{"0001", "0003", "0004"} {
		res := b.result("j", id)
		if res.Status != subjects.Expired || res.ReplyKey != "secret" || res.Error == nil || res.Error.Code != "deadline" {
			t.Errorf("j.%s: %+v", id, res)
		}
	}
	var got *subjects.Result
	natstest.Eventually(t, within, "an answer for reader r7", func() bool {
		x, err := b.store.Result(b.ctx(), "k", "r7", "0001")
		if err != nil {
			return false
		}
		got = must(subjects.DecodeResult(x.Body))
		return true
	})
	if got.Status != subjects.Expired || got.Group == nil || got.Group.ID != "g" {
		t.Errorf("k.0001: %+v", got)
	}
	if n := b.messages(b.pool.Rollouts()); n != 4 {
		t.Errorf("%d messages in the queue: the copies are dropped by who fetches them", n)
	}
	if n := b.messages(b.pool.Results()); n != 4 {
		t.Errorf("%d answers", n)
	}
}

func TestADeadlineThatPassedWithEverythingDownIsAnsweredAfterwards(t *testing.T) {
	b := newBench(t)
	if err := subjects.Ensure(b.ctx(), b.js, b.pool, b.config().Layout); err != nil {
		t.Fatal(err)
	}
	b.submit(lasting("j", "0001", 50*time.Millisecond))
	b.node.Restart()
	d, _ := b.running(walking(b), &fakeCore{})
	b.ready(d)
	if res := b.result("j", "0001"); res.Status != subjects.Expired {
		t.Fatalf("result %+v", res)
	}
}

func TestAnAnswerThatIsThereStandsAgainstTheWalker(t *testing.T) { // scenario R19
	b := newBench(t)
	d, _ := b.running(walking(b), &fakeCore{})
	b.ready(d)
	b.submit(lasting("j", "0001", 300*time.Millisecond))
	must(b.store.Commit(b.ctx(), &subjects.Result{Job: "j", ID: "0001", Status: subjects.Completed}, subjects.Answer{Bind: 1}))
	b.submit(lasting("j", "0002", 300*time.Millisecond))
	if res := b.result("j", "0002"); res.Status != subjects.Expired {
		t.Fatalf("j.0002: %+v", res)
	}
	natstest.Eventually(t, within, "both looked at", func() bool {
		return counterValue(t, d, "rollbus_dispatcher_writes_total", string("superseded")) >= 1
	})
	if res := b.result("j", "0001"); res.Status != subjects.Completed {
		t.Fatalf("j.0001: %+v", res)
	}
}

func TestACancelReachesWhatWaits(t *testing.T) { // scenario R3
	b := newBench(t)
	d, _ := b.running(walking(b), &fakeCore{})
	b.ready(d)
	member := func(id, group, trajectory string) *subjects.Request {
		r := request("j", id)
		if group != "" {
			r.Group = &subjects.Group{ID: group, Size: 8}
		}
		if trajectory != "" {
			r.Trajectory = &subjects.Trajectory{ID: trajectory, Turn: 1}
		}
		return r
	}
	b.submit(member("0001", "", ""))
	b.submit(member("0002", "g", ""))
	b.submit(member("0003", "", "t"))
	b.submit(member("0004", "h", "u"))
	b.submit(request("k", "0001"))
	b.submit(request("l", "0001"))
	natstest.Eventually(t, within, "all six read", func() bool {
		return counterValue(t, d, "rollbus_dispatcher_walked_messages_total", "") >= 6
	})
	for _, c := range []subjects.Cancel{
		{Kind: subjects.CancelID, Job: "j", Value: "0001"}, {Kind: subjects.CancelGroup, Job: "j", Value: "g"},
		{Kind: subjects.CancelTrajectory, Job: "j", Value: "t"}, {Kind: subjects.CancelJob, Job: "k"},
	} {
		if err := b.store.PutCancel(b.ctx(), c); err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range [][2]string{{"j", "0001"}, {"j", "0002"}, {"j", "0003"}, {"k", "0001"}} {
		if res := b.result(key[0], key[1]); res.Status != subjects.Cancelled {
			t.Errorf("%v: %+v", key, res)
		}
	}
	// What is submitted after a cancel of its job is another matter.
	b.submit(request("k", "0002"))
	b.submit(lasting("k", "0003", 50*time.Millisecond))
	if res := b.result("k", "0003"); res.Status != subjects.Expired {
		t.Errorf("k.0003: %+v", res)
	}
	if n := b.messages(b.pool.Results()); n != 5 {
		t.Errorf("%d answers, want 5", n)
	}
}

func TestACancelBeforeTheWalkerStartsIsFoundByItsFirstWalk(t *testing.T) {
	b := newBench(t)
	if err := subjects.Ensure(b.ctx(), b.js, b.pool, b.config().Layout); err != nil {
		t.Fatal(err)
	}
	for i := range 300 { // more than one batch
		b.submit(request("j", fmt.Sprintf("%04d", i)))
	}
	if err := b.store.PutCancel(b.ctx(), subjects.Cancel{Kind: subjects.CancelJob, Job: "j"}); err != nil {
		t.Fatal(err)
	}
	d, _ := b.running(walking(b), &fakeCore{})
	b.ready(d)
	natstest.Eventually(t, within, "300 answers", func() bool { return b.messages(b.pool.Results()) == 300 })
}

func TestOneDispatcherWalksAndAnotherTakesOver(t *testing.T) {
	b := newBench(t)
	cfg := walking(b)
	one, _ := b.running(cfg, &fakeCore{})
	cfg.Name = ""
	two, _ := b.running(cfg.WithDefaults(), &fakeCore{})
	b.ready(one)
	b.ready(two)
	walkers := func() (out []*Dispatcher) {
		for _, d := range []*Dispatcher{one, two} {
			if counterValue(t, d, "rollbus_dispatcher_expiry_walker", "") == 1 {
				out = append(out, d)
			}
		}
		return out
	}
	natstest.Eventually(t, within, "one walker", func() bool { return len(walkers()) == 1 })
	b.submit(lasting("j", "0001", 50*time.Millisecond))
	b.result("j", "0001")
	if err := walkers()[0].Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	b.submit(lasting("j", "0002", 50*time.Millisecond))
	if res := b.result("j", "0002"); res.Status != subjects.Expired {
		t.Fatalf("result %+v", res)
	}
}

func TestTheWalkerReadsNoMoreThanItMayAndNothingTwice(t *testing.T) {
	b := newBench(t)
	cfg := walking(b)
	cfg.Limits.WalkPerS = 400 // 20 each walk
	d, _ := b.running(cfg, &fakeCore{})
	b.ready(d)
	const n = 100
	began := time.Now()
	for i := range n {
		b.submit(request("j", fmt.Sprintf("%04d", i)))
	}
	walked := func() float64 { return counterValue(t, d, "rollbus_dispatcher_walked_messages_total", "") }
	natstest.Eventually(t, within, "all read", func() bool { return walked() >= n })
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("%d messages were read within %v at 400 a second", n, took)
	}
	before := counterValue(t, d, "rollbus_dispatcher_walks_total", "ok")
	natstest.Eventually(t, within, "some more walks", func() bool {
		return counterValue(t, d, "rollbus_dispatcher_walks_total", "ok") > before+5
	})
	if w := walked(); w != n {
		t.Errorf("%v messages were read, %d are there", w, n)
	}
}

func TestWhatHasNotWaitedLongIsNotRead(t *testing.T) {
	b := newBench(t)
	d, _ := b.running(walking(b), &fakeCore{})
	b.ready(d)
	for i := range 10 {
		b.submit(request("j", fmt.Sprintf("%04d", i)))
	}
	budget, hits := 100, 0
	// The looks have told that only the first four have waited.
	n, last, err := d.walker.pass(b.ctx(), b.pool.Rollouts(), b.pool.SubmitFilter(), 1, 4, &budget,
		func(*stored, *subjects.Facts) bool { hits++; return false })
	if err != nil || n != 4 || last != 4 || hits != 4 || budget != 96 {
		t.Fatalf("read %d up to %d, %d looked at, budget %d, err %v", n, last, hits, budget, err)
	}
	s := walkStream{marks: []mark{{at: time.Now(), seq: 7}}}
	if got := s.limit(time.Minute); got != 0 {
		t.Errorf("a fresh look sets the limit %d", got)
	}
	s.marks[0].at = time.Now().Add(-time.Hour)
	if got := s.limit(time.Minute); got != 7 {
		t.Errorf("an old look sets the limit %d, want 7", got)
	}
}

func TestDeadlinesBeyondTheBoundAreGatheredAnew(t *testing.T) { // scenario I11
	w := newWalker(&Dispatcher{cfg: Config{Limits: Limits{WalkEntries: 4}}})
	s := &w.streams[queueRollouts]
	for i := range 4 {
		s.due.add(due{at: int64(i), seq: uint64(i + 1)})
	}
	s.first, s.next = 3, 5
	if !w.makeRoom(queueRollouts) || len(s.due) != 2 {
		t.Fatalf("%d deadlines kept, two messages are there", len(s.due))
	}
	s.due.add(due{seq: 5})
	s.due.add(due{seq: 6})
	if w.makeRoom(queueRollouts) || len(s.due) != 0 || s.next != 3 {
		t.Fatalf("%d deadlines kept, reading on at %d", len(s.due), s.next)
	}
}

func TestDueGivesTheEarliestFirstAndNothingBeforeItsTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h dueHeap
		in := rapid.SliceOf(rapid.Int64Range(0, 100)).Draw(t, "deadlines")
		for i, at := range in {
			h.add(due{at: at, seq: uint64(i)})
		}
		first := rapid.Uint64Range(0, uint64(len(in)+1)).Draw(t, "first")
		now := rapid.Int64Range(0, 100).Draw(t, "now")
		h.prune(first)
		var want, got []int64
		for i, at := range in {
			if uint64(i) >= first && at <= now {
				want = append(want, at)
			}
		}
		slices.Sort(want)
		for {
			x, ok := h.next(now)
			if !ok {
				break
			}
			got = append(got, x.at)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("due at %d of %v from %d on: got %v, want %v", now, in, first, got, want)
		}
	})
}
