package client_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestTheSameIDAgainIsOneRollout(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	h, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	again, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	if h.Duplicate || !again.Duplicate || again.Seq != h.Seq {
		t.Errorf("%+v then %+v", h, again)
	}
	if q := b.queued(); len(q) != 1 {
		t.Errorf("%d stand in the queue", len(q))
	}
	// From another process with the same secret the answer is still ours.
	b.serve()
	if got := collect(t, c, 1); got["0001"] != 1 {
		t.Errorf("%v", got)
	}
}

func TestWhatRoutingNeedsStandsInTheHeaders(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	_, err := b.kv.PutSettings(ctxFor(t), subjects.Settings{Model: "m", BlockTokens: 2}, 0)
	must(t, err)
	pings, err := b.nc.SubscribeSync(b.pool.Ping())
	must(t, err)
	must(t, b.nc.Flush())
	c := b.client()
	r := request("0001")
	r.Trajectory = &subjects.Trajectory{ID: "t 1", Turn: 2}
	_, err = c.Submit(ctxFor(t), r)
	must(t, err)
	if r.Job != "" || r.ReplyKey != "" {
		t.Error("the caller's request was changed")
	}
	m, err := pings.NextMsgWithContext(ctxFor(t))
	must(t, err)
	if m.Subject != b.pool.Ping() {
		t.Error(m.Subject)
	}
	s, err := b.js.Stream(ctxFor(t), b.pool.Rollouts())
	must(t, err)
	raw, err := s.GetLastMsgForSubject(ctxFor(t), b.pool.Submit(testJob, subjects.LaneContinue))
	must(t, err)
	if raw.Header.Get(subjects.HdrMsgID) != "j.0001" {
		t.Errorf("message id %q", raw.Header.Get(subjects.HdrMsgID))
	}
	f, complete, err := subjects.FactsFromHeader(testJob, "0001", subjects.LaneContinue, raw.Header)
	must(t, err)
	if !complete || f.PromptTokens != 3 || f.MaxTokens != 16 || len(f.Blocks) != 1 || f.BlockTokens != 2 || f.Trajectory != "t 1" {
		t.Errorf("%v %+v", complete, f)
	}
}

func TestABadRequestIsNotSent(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	for name, change := range map[string]func(*subjects.Request){
		"no prompt":      func(r *subjects.Request) { r.PromptTokenIDs = nil },
		"a foreign job":  func(r *subjects.Request) { r.Job = "other" },
		"another reader": func(r *subjects.Request) { r.Reader = "r2" },
		"a bad id":       func(r *subjects.Request) { r.ID = "A.b" },
		"no max_tokens":  func(r *subjects.Request) { r.Sampling.MaxTokens = 0 },
	} {
		r := request("0001")
		change(r)
		_, err := c.Submit(ctxFor(t), r)
		if !errors.Is(err, subjects.ErrInvalid) || len(subjects.FieldErrors(err)) == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	big := request("0002")
	big.PromptTokenIDs, big.Prompt = nil, strings.Repeat("x", subjects.MaxRequestBytes)
	_, err := c.Submit(ctxFor(t), big)
	want(t, err, subjects.ErrTooLarge)
	_, err = c.Submit(ctxFor(t), nil)
	want(t, err, subjects.ErrInvalid)
	if q := b.queued(); len(q) != 0 || c.Unanswered() != 0 {
		t.Errorf("%d were sent, %d are waited for", len(q), c.Unanswered())
	}
}

func TestManyAreStoredInOrderWithABoundOnWhatIsInFlight(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client(client.MaxInFlight(16))
	all := ids(500)
	sent, asked := 0, 0
	requests := func(yield func(*subjects.Request) bool) {
		for _, id := range all {
			if asked++; asked-sent > 16 {
				t.Errorf("%d in flight", asked-sent)
			}
			r := request(id)
			if id == "0100" {
				r.PromptTokenIDs = nil // refused, and does not stop the others
			}
			if !yield(r) {
				return
			}
		}
	}
	for h, err := range c.SubmitMany(ctxFor(t), requests) {
		if h.ID != all[sent] {
			t.Fatalf("%s out of order, want %s", h.ID, all[sent])
		}
		if (err != nil) != (h.ID == "0100") {
			t.Errorf("%s: %v", h.ID, err)
		}
		sent++
	}
	q := b.queued()
	if len(q) != 499 || sent != 500 {
		t.Fatalf("%d stored of %d", len(q), sent)
	}
	if !slices.IsSortedFunc(q, func(a, b *subjects.Request) int { return strings.Compare(a.ID, b.ID) }) {
		t.Error("the queue is out of order")
	}
}

func TestLeavingSubmitManyEarlyLosesNoOutcome(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client(client.MaxInFlight(8))
	for range c.SubmitMany(ctxFor(t), func(yield func(*subjects.Request) bool) {
		for _, id := range ids(100) {
			if !yield(request(id)) {
				return
			}
		}
	}) {
		break
	}
	if q := b.queued(); len(q) != c.Unanswered() || len(q) == 0 || len(q) > 10 {
		t.Errorf("%d stored, %d in the ledger", len(q), c.Unanswered())
	}
}

func TestAFullPoolSaysWhenToTryAgainAndLosesNothing(t *testing.T) {
	b := newBus(t, subjects.Layout{RolloutsBytes: 64 << 10})
	c := b.client()
	text := strings.Repeat("x", 4<<10)
	stored := map[string]bool{}
	var full *client.BackpressureError
	send := func(id string) error {
		r := request(id)
		r.PromptTokenIDs, r.Prompt = nil, text
		_, err := c.Submit(ctxFor(t), r)
		return err
	}
	var refused string
	for _, id := range ids(100) {
		err := send(id)
		if errors.As(err, &full) {
			refused = id
			break
		}
		must(t, err)
		stored[id] = true
	}
	if full == nil || full.RetryAfter <= 0 || full.RetryAfter > 30*time.Second {
		t.Fatalf("no back-pressure: %+v", full)
	}
	many := 0
	for _, err := range c.SubmitMany(ctxFor(t), func(yield func(*subjects.Request) bool) {
		r := request("many")
		r.PromptTokenIDs, r.Prompt = nil, text
		yield(r)
	}) {
		want(t, err, client.ErrBackpressure)
		many++
	}
	if many != 1 || c.Unanswered() != len(stored) {
		t.Errorf("%d outcomes, %d unanswered of %d", many, c.Unanswered(), len(stored))
	}
	b.serve() // takes work away: space returns
	natstest.Eventually(t, 10*time.Second, "the refused one is taken", func() bool { return send(refused) == nil })
	stored[refused] = true
	got := collect(t, c, len(stored))
	if !maps.EqualFunc(got, stored, func(n int, _ bool) bool { return n == 1 }) {
		t.Errorf("answers %v of %v", got, stored)
	}
}

func TestTooManyUnansweredIsBackpressure(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client(client.MaxUnanswered(2))
	for _, id := range ids(2) {
		_, err := c.Submit(ctxFor(t), request(id))
		must(t, err)
	}
	_, err := c.Submit(ctxFor(t), request("0002"))
	want(t, err, client.ErrBackpressure)
	_, err = c.Submit(ctxFor(t), request("0001"))
	must(t, err) // the same one again is no more
}

func TestAPoolThatDoesNotExistIsNamedAtOnce(t *testing.T) {
	node := natstest.Server(t)
	c, err := client.Open(ctxFor(t), node.Conn(t), "nowhere", testJob)
	must(t, err)
	defer c.Close()
	began := time.Now()
	_, err = c.Submit(ctxFor(t), request("0001"))
	want(t, err, client.ErrNoPool)
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("only after %v", d)
	}
	_, err = c.Wait(ctxFor(t), c.Handle("0001"))
	want(t, err, client.ErrNoPool)
	n := 0
	for _, err := range c.Results(ctxFor(t)) {
		want(t, err, client.ErrNoPool)
		n++
	}
	if n != 1 {
		t.Errorf("%d errors", n)
	}
}

func TestBadOptionsAreNamedTogether(t *testing.T) {
	_, err := client.Open(ctxFor(t), nil, "P", "a.b", client.Reader("_x"), client.MaxInFlight(0), client.ReplySecret(nil))
	for _, part := range []string{"pool", "job", "reader", "MaxInFlight", "ReplySecret", "connection"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not named: %v", part, err)
		}
	}
}

func TestExpandMakesTheSamplesOfOnePrompt(t *testing.T) {
	seed := int64(5)
	r := request("p7")
	r.Sampling.Seed = &seed
	r.Group = &subjects.Group{Need: 2, CancelRest: true}
	list, err := client.Expand(r, 3)
	must(t, err)
	for i, s := range list {
		g := *s.Group
		if s.ID != "p7-"+string(rune('0'+i)) || g.ID != "p7" || g.Index != i || g.Size != 3 || g.Need != 2 || *s.Sampling.Seed != seed+int64(i) {
			t.Errorf("%d: %+v %+v", i, s, g)
		}
		s.Job = testJob
		must(t, s.Validate())
	}
	if r.ID != "p7" || r.Group.Size != 0 || *r.Sampling.Seed != 5 {
		t.Error("the prompt itself was changed")
	}
	for _, n := range []int{0, -1, 5000} {
		if _, err := client.Expand(r, n); err == nil {
			t.Errorf("%d samples were made", n)
		}
	}
}

func TestASubmitThatNobodyAnsweredIsSafeToRepeat(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	line := natstest.Link(t, b.node)
	c, err := client.Open(ctxFor(t), line.Conn(t), "p", testJob, client.RetryFor(0))
	must(t, err)
	defer c.Close()
	_, err = c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	line.LoseReplies()
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err = c.Submit(ctx, request("0002"))
	want(t, err, client.ErrUnknown)
	_, err = c.Submit(ctx, request("0001"))
	want(t, err, client.ErrUnknown)
	if c.Unanswered() != 1 { // 0001, which was stored the first time
		t.Errorf("%d are vouched for", c.Unanswered())
	}
	line.Heal()
	h, err := b.client().Submit(ctxFor(t), request("0002"))
	must(t, err)
	if q := b.queued(); len(q) != 2 || !h.Duplicate {
		t.Errorf("%d stand in the queue; %+v", len(q), h)
	}
}

func TestWithoutAConnectionNothingIsSentLater(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	nc := b.node.Conn(t)
	c, err := client.Open(ctxFor(t), nc, "p", testJob)
	must(t, err)
	defer c.Close()
	b.node.Stop()
	natstest.Eventually(t, 10*time.Second, "the client sees it", func() bool { return !nc.IsConnected() })
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err = c.Submit(ctx, request("0001"))
	want(t, err, client.ErrUnavailable)
	b.node.Start()
	_, err = c.Submit(ctxFor(t), request("0002"))
	must(t, err)
	if q := b.queued(); len(q) != 1 || q[0].ID != "0002" {
		t.Errorf("%d stand in the queue", len(q))
	}
}

// One cause, a full queue, has one outcome whenever it strikes: alone, among
// many in flight, from several goroutines, after NATS has restarted, and in a
// client that was opened when it was full already.
//
// scenario R18
func TestAFullQueueIsTheSameErrorWheneverItStrikes(t *testing.T) {
	b := newBus(t, subjects.Layout{RolloutsBytes: 64 << 10})
	c := b.client()
	big := func(id string) *subjects.Request {
		r := request(id)
		r.PromptTokenIDs, r.Prompt = nil, strings.Repeat("x", 4<<10)
		return r
	}
	refused := func(when string, err error) {
		t.Helper()
		full, ok := errors.AsType[*client.BackpressureError](err)
		if !ok || full.RetryAfter <= 0 || full.RetryAfter > 30*time.Second || full.Cause == "" {
			t.Errorf("%s: %v, want back-pressure with a time", when, err)
		}
	}
	many := func(c *client.Client, prefix string, n int) (stored int) {
		t.Helper()
		requests := func(yield func(*subjects.Request) bool) {
			for i := range n {
				if !yield(big(fmt.Sprintf("%s-%d", prefix, i))) {
					return
				}
			}
		}
		for h, err := range c.SubmitMany(ctxFor(t), requests) {
			if err == nil {
				stored++
				continue
			}
			refused("one of many, "+h.ID, err)
		}
		return stored
	}
	stored := many(c, "first", 40) // fills up in the middle
	if stored == 0 || stored == 40 {
		t.Fatalf("%d of 40 were stored: it did not fill up in the middle", stored)
	}
	_, err := c.Submit(ctxFor(t), big("alone"))
	refused("alone", err)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { _, errs[i] = c.Submit(ctxFor(t), big(fmt.Sprintf("at-once-%d", i))) })
	}
	wg.Wait()
	for _, err := range errs {
		refused("at once", err)
	}
	b.node.Restart()
	_, err = c.Submit(ctxFor(t), big("after"))
	refused("after a restart", err)
	late := b.client()
	_, err = late.Submit(ctxFor(t), big("late"))
	refused("in a client opened later", err)
	if n := many(late, "second", 5); n != 0 {
		t.Errorf("%d were stored in a full queue", n)
	}
	// Nothing that was refused is anywhere.
	if q := b.queued(); len(q) != stored || c.Unanswered() != stored || late.Unanswered() != 0 {
		t.Errorf("%d in the queue, %d and %d waited for, %d stored", len(q), c.Unanswered(), late.Unanswered(), stored)
	}
}
