package core_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Reserved load is a sum over keys: any history of puts, deletes, renewals,
// restarts and rebuilt views leaves it equal to that sum, and zero at the end.
func TestReservedLoadIsAlwaysTheSumOfTheKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := core.New(core.Config{Dispatcher: "d"})
		now := time.Duration(0)
		step := func(ev core.Event) {
			now += time.Millisecond
			c.Step(ev, now)
		}
		engines := []string{"a", "b"}
		epoch := map[string]int{"a": 1, "b": 1}
		name := func(e string) string { return fmt.Sprintf("%s%d", e, epoch[e]) }
		keys := map[string]core.ReservationPut{}
		var revision uint64
		for _, e := range engines {
			revision++
			step(engineAt(e, name(e), revision, subjects.EngineReady))
		}
		check := func(after string) {
			for _, e := range engines {
				n, tokens := 0, int64(0)
				for _, p := range keys {
					if p.Engine == e && p.Epoch == name(e) {
						n++
						tokens += int64(p.Tokens)
					}
				}
				if gn, gt := c.Reserved(e); gn != n || gt != tokens {
					t.Fatalf("after %s engine %s shows %d requests and %d tokens reserved, its keys say %d and %d", after, e, gn, gt, n, tokens)
				}
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			e := rapid.SampledFrom(engines).Draw(t, "engine")
			id := fmt.Sprint(rapid.IntRange(0, 4).Draw(t, "id"))
			k := e + id
			revision++
			switch what := rapid.SampledFrom([]string{"put", "gone", "late gone", "renew", "restart", "swap"}).Draw(t, "what"); what {
			case "put":
				p := reserved(e, id, name(e), 1, rapid.IntRange(0, 1000).Draw(t, "tokens"), revision)
				keys[k] = p
				step(p)
				check(what)
			case "gone":
				delete(keys, k)
				step(goneAt(e, id, 1, revision))
				check(what)
			case "late gone": // of a revision that is long past: it must not touch what is there now
				if p, ok := keys[k]; ok && p.Revision > 1 {
					step(goneAt(e, id, 1, p.Revision-1))
				}
				check(what)
			case "renew": // scenario P10: a health check lowers nothing
				step(engineAt(e, name(e), revision, rapid.SampledFrom([]subjects.EngineState{subjects.EngineReady, subjects.EngineDown, subjects.EnginePaused}).Draw(t, "state")))
				check(what)
			case "restart": // scenario P9: releases of the old life are to come
				epoch[e]++
				step(engineAt(e, name(e), revision, subjects.EngineReady))
				check(what)
			case "swap":
				s := core.ViewSwap{Kind: core.ViewReservations}
				for _, p := range keys {
					s.Reservations = append(s.Reservations, p)
				}
				s.Gone = append(s.Gone, goneAt("a", "marker", 1, revision)) // the newest entry of the stream
				step(s)
				check(what)
			}
		}
		for _, p := range keys {
			revision++
			step(goneAt(p.Engine, p.ID, 1, revision))
		}
		keys = nil
		check("everything was released")
	})
}

// Attempt 2 on the same engine overwrites attempt 1's key; the late delete of
// attempt 1 names an older revision and must not take attempt 2 away.
func TestASecondAttemptOnTheSameEngineSurvivesTheLateDeleteOfTheFirst(t *testing.T) {
	c := core.New(core.Config{Dispatcher: "d"})
	c.Step(engineAt("e", "x", 1, subjects.EngineReady), 1)
	c.Step(reserved("e", "1", "x", 1, 100, 5), 2)
	c.Step(reserved("e", "1", "x", 2, 300, 9), 3)
	c.Step(goneAt("e", "1", 1, 7), 4)
	if n, tokens := c.Reserved("e"); n != 1 || tokens != 300 {
		t.Errorf("%d requests and %d tokens are reserved: want attempt 2, 1 and 300", n, tokens)
	}
}

// scenario P6: what is bound counts at once, before any engine has heard of it.
func TestAnUndecidedBindCountsAsLoad(t *testing.T) {
	c := ready(t, 2)
	binds := map[string]int{}
	for i := range 4 {
		f := core.Fetched{Handle: core.Handle(i + 1), Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: uint64(i + 1), Stored: stamp,
			Facts: subjects.Facts{Job: "j", ID: fmt.Sprint(i), Lane: subjects.LaneNormal, PromptTokens: 5000, MaxTokens: 1}}
		for _, e := range c.Step(f, time.Second) {
			if b, ok := e.(core.Bind); ok {
				binds[b.Held.Engine]++
				if b.Held.Tokens != 5001 {
					t.Errorf("the bind reserves %d tokens: want the prompt and the output, 5001", b.Held.Tokens)
				}
			}
		}
	}
	if binds["a"] != 1 || binds["b"] != 1 {
		t.Errorf("binds in flight are %v: want one on each of two idle engines", binds)
	}
}

func TestARefusedBindIsBoundAgainUnderTheNextNumber(t *testing.T) {
	for _, refusal := range []core.Answer{core.Conflict, core.Busy, core.Unavailable, core.Full} {
		c := ready(t, 1)
		f := core.Fetched{Handle: 1, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: 1, Stored: stamp,
			Facts: subjects.Facts{Job: "j", ID: "1", Lane: subjects.LaneNormal, PromptTokens: 10, MaxTokens: 10}}
		now := time.Second
		first := bindIn(c.Step(f, now))
		if first == nil {
			t.Fatal("no bind")
		}
		out := c.Step(core.BindAnswer{Handle: 1, Engine: "a", Job: "j", ID: "1", Bind: 1, Answer: refusal, Actual: 7}, now)
		again := bindIn(out)
		for range 30 { // the view catches up, time passes
			if again != nil || given(out) {
				break
			}
			now += 50 * time.Millisecond
			c.Step(core.Contact{Proven: true}, now)
			out = c.Step(core.Tick{}, now)
			again = bindIn(out)
		}
		switch {
		case again != nil && again.Held.Bind != 2:
			t.Errorf("%s: bound again as number %d: numbers rise with every bind, refused or not", refusal, again.Held.Bind)
		case again == nil && !given(out):
			t.Errorf("%s: the message is neither bound again nor given back", refusal)
		}
	}
}

// scenario B6: nothing is fetched that cannot be placed.
func TestNoMoreIsFetchedThanTheFleetCanTake(t *testing.T) {
	c := ready(t, 2) // 2 engines x (4 slots + 2 prefetch)
	asked := 0
	out := c.Step(core.Jobs{Queues: []core.QueueDepth{{Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Messages: 100_000}}}, time.Second)
	for _, e := range out {
		if f, ok := e.(core.Fetch); ok {
			asked += f.N
		}
	}
	if asked != 12 {
		t.Errorf("%d messages were asked for with room for 12", asked)
	}
}

// scenario B6: with no engine nothing is fetched, it waits where all can see it.
func TestWithoutEnginesNothingIsFetched(t *testing.T) {
	c := ready(t, 0)
	for _, e := range c.Step(core.Jobs{Queues: []core.QueueDepth{{Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Messages: 10}}}, time.Second) {
		if f, ok := e.(core.Fetch); ok {
			t.Errorf("fetches %+v", f)
		}
	}
}

// scenario B5: everything was retired, and its markers expired, while the
// follower was away. The new view is empty, and so is ours after it.
func TestAnEmptyViewLeavesNothingReserved(t *testing.T) {
	c := core.New(core.Config{Dispatcher: "d"})
	c.Step(engineAt("e", "x", 1, subjects.EngineReady), 1)
	c.Step(reserved("e", "1", "x", 1, 100, 5), 2)
	c.Step(core.ViewSwap{Kind: core.ViewReservations}, 3)
	if n, tokens := c.Reserved("e"); n != 0 || tokens != 0 {
		t.Errorf("%d requests and %d tokens are reserved after an empty view", n, tokens)
	}
}

// An engine may answer and release before the dispatcher hears of its own bind.
func TestABindThatEndedBeforeItsAnswerCameHoldsNothing(t *testing.T) {
	c := ready(t, 1)
	b := bindIn(c.Step(core.Fetched{Handle: 1, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: 1, Stored: stamp,
		Facts: subjects.Facts{Job: "j", ID: "1", Lane: subjects.LaneNormal, PromptTokens: 10, MaxTokens: 10}}, time.Second))
	c.Step(core.ReservationPut{Held: b.Held, Revision: 7, Stored: stamp}, time.Second)
	c.Step(core.Answered{Answer: subjects.Answer{Job: "j", ID: "1", Status: subjects.Completed}, Revision: 1, Stored: stamp}, time.Second)
	c.Step(goneAt("a", "1", 1, 8), time.Second)
	acked := false
	for _, e := range c.Step(core.BindAnswer{Handle: 1, Engine: "a", Job: "j", ID: "1", Bind: 1, Answer: core.OK, Seq: 7, Stored: stamp}, time.Second) {
		if _, ok := e.(core.Ack); ok {
			acked = true
		}
	}
	if n, _ := c.Reserved("a"); n != 0 || !acked {
		t.Errorf("%d requests are reserved after put and delete, acked %v: want 0, true", n, acked)
	}
}

// What stands no more at the revision held is dropped, not tried for ever.
func TestAKeyThatIsNotThereAnyMoreIsDroppedFromTheView(t *testing.T) {
	for _, answer := range []core.Answer{core.Gone, core.Superseded} {
		c := ready(t, 1)
		p := reserved("a", "1", "x", 1, 100, 7)
		p.Stored = stamp
		c.Step(p, time.Second)
		c.Step(core.DeleteAnswer{Engine: "a", Job: "j", ID: "1", Revision: 7, Answer: answer}, time.Second)
		if n, _ := c.Reserved("a"); n != 0 {
			t.Errorf("after %s %d requests are still reserved", answer, n)
		}
	}
}
