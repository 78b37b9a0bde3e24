package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestARolloutIsSubmittedAnsweredAndReceivedOnce(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	c := b.client()
	ctx := ctxFor(t)
	h, err := c.Submit(ctx, request("0001"))
	must(t, err)
	res, err := c.Wait(ctx, h)
	must(t, err)
	if res.Key() != "j.0001" || res.Status != subjects.Completed {
		t.Errorf("%+v", res)
	}
	if c.Unanswered() != 0 {
		t.Errorf("%d unanswered", c.Unanswered())
	}
	if b.received("0001") {
		t.Error("it was received before Done")
	}
	must(t, c.Done(ctx, res))
	must(t, c.Done(ctx, res))
	if !b.received("0001") {
		t.Error("it was not received")
	}
	_, err = c.Wait(ctx, h)
	want(t, err, client.ErrReceived)
	c.Close()
	b.none(b.client())
}

func TestAnAnswerComesAgainUntilItIsReceivedAndNeverAfter(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	first := b.client()
	for _, id := range ids(5) {
		_, err := first.Submit(ctxFor(t), request(id))
		must(t, err)
	}
	n := 0
	for _, err := range first.Results(ctxFor(t)) {
		must(t, err)
		if n++; n == 3 { // two received by asking on, the third in hand
			break
		}
	}
	first.Close()
	second := b.client()
	got := collect(t, second, 3)
	if len(got) != 3 {
		t.Errorf("after a crash with 2 of 5 received came %v", got)
	}
	second.Close()
	b.none(b.client())
}

func TestManualDoneReceivesNothingByItself(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	c := b.client(client.ManualDone())
	for _, id := range ids(4) {
		_, err := c.Submit(ctxFor(t), request(id))
		must(t, err)
	}
	var kept []*subjects.Result
	for res, err := range c.Results(ctxFor(t)) {
		must(t, err)
		if kept = append(kept, res); len(kept) == 4 {
			break
		}
	}
	for _, id := range ids(4) {
		if b.received(id) {
			t.Errorf("%s was received without Done", id)
		}
	}
	for _, res := range kept[:3] {
		must(t, c.Done(ctxFor(t), res))
	}
	c.Close()
	if got := collect(t, b.client(), 1); got[kept[3].ID] != 1 {
		t.Errorf("%v came again, want %s", got, kept[3].ID)
	}
}

// scenario F13
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

// scenario B9
// scenario R18
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

// scenario B9
func TestSubmittingAndReadingSurviveARestartOfNATS(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	_, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	waited := make(chan error, 1)
	ctx := ctxFor(t)
	go func() {
		_, err := c.Wait(ctx, c.Handle("0002"))
		waited <- err
	}()
	b.node.Stop()
	stored := make(chan error, 1)
	go func() {
		_, err := c.Submit(ctx, request("0002"))
		stored <- err
	}()
	b.node.Start()
	must(t, <-stored)
	b.serve()
	must(t, <-waited)
	if got := collect(t, c, 1); got["0001"] != 1 {
		t.Errorf("%v", got)
	}
}

// scenario B4
func TestReadingGoesOnWhenItsConsumerIsGone(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	c := b.client()
	_, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	collect(t, c, 1)
	must(t, b.js.DeleteConsumer(ctxFor(t), b.pool.Results(), subjects.ConsumerTrainer(testJob, "main")))
	_, err = c.Submit(ctxFor(t), request("0002"))
	must(t, err)
	if got := collect(t, c, 1); got["0002"] != 1 {
		t.Errorf("%v", got)
	}
}

func TestAForgedAnswerIsShown(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve(func(r *subjects.Result) {
		switch r.ID {
		case "0001":
			r.ReplyKey = "guess"
		case "0002":
			r.ReplyKey = ""
		case "0003":
			r.ReplyKey, r.Status, r.TokenIDs = "", subjects.Expired, nil // by a dispatcher
		}
	})
	c := b.client()
	for id, forged := range map[string]bool{"0000": false, "0001": true, "0002": true, "0003": false} {
		h, err := c.Submit(ctxFor(t), request(id))
		must(t, err)
		res, err := c.Wait(ctxFor(t), h)
		if errors.Is(err, client.ErrForged) != forged || err != nil && !forged {
			t.Errorf("%s: %v", id, err)
		}
		if res == nil || res.ID != id {
			t.Errorf("%s: the answer is not shown: %v", id, res)
		}
	}
}

func TestASecretChecksTheAnswersOfAnEarlierProcess(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	secret := []byte("0123456789abcdef")
	first := b.client(client.ReplySecret(secret))
	for _, id := range ids(2) {
		_, err := first.Submit(ctxFor(t), request(id))
		must(t, err)
	}
	first.Close()
	forger := request("0009")
	forger.Job, forger.ReplyKey = testJob, "guess"
	b.answer(forger)
	second := b.client(client.ReplySecret(secret))
	got := map[string]error{}
	for res, err := range second.Results(ctxFor(t)) {
		if got[res.ID] = err; len(got) == 3 {
			break
		}
	}
	if got["0000"] != nil || got["0001"] != nil || !errors.Is(got["0009"], client.ErrForged) {
		t.Errorf("%v", got)
	}
}

// scenario F14
func TestAnAnswerThatDoesNotDecodeStopsNobody(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	for id, body := range map[string]string{
		"0001": "rubbish", "0002": `{"id":"0009","job":"j","status":"completed"}`, "0003": `{"id":"0003","job":"j","status":"completed"}`,
	} {
		m := nats.NewMsg(b.pool.Result(testJob, "main", id))
		m.Data = []byte(body)
		if id == "0003" {
			m.Header.Set(subjects.HdrStatus, "failed") // header and body do not agree
		}
		_, err := b.js.PublishMsg(ctxFor(t), m)
		must(t, err)
	}
	good := request("0004")
	good.Job = testJob
	b.answer(good)
	got := map[string]error{}
	for res, err := range c.Results(ctxFor(t)) {
		if got[res.ID] = err; len(got) == 4 {
			must(t, c.Done(ctxFor(t), res))
			break
		}
	}
	for _, id := range []string{"0001", "0002", "0003"} {
		if !errors.Is(got[id], client.ErrBadAnswer) {
			t.Errorf("%s: %v", id, got[id])
		}
	}
	must(t, got["0004"])
	c.Close()
	b.none(b.client())
}

func TestWaitingGoesPastAnswersThatNobodyTakes(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	c := b.client(client.MaxHeld(4), client.PollEvery(50*time.Millisecond))
	for _, id := range ids(20) {
		_, err := c.Submit(ctxFor(t), request(id))
		must(t, err)
	}
	res, err := c.Wait(ctxFor(t), c.Handle("0019"))
	must(t, err)
	must(t, c.Done(ctxFor(t), res))
	cons, err := b.js.Consumer(ctxFor(t), b.pool.Results(), subjects.ConsumerTrainer(testJob, "main"))
	must(t, err)
	if n := cons.CachedInfo().NumAckPending; n > 4 {
		t.Errorf("%d are fetched, 4 may be held", n)
	}
	if got := collect(t, c, 19); len(got) != 19 || got["0019"] != 0 {
		t.Errorf("%v", got)
	}
}

// An answer that was read from the register is not handed out a second time when
// it is delivered.
func TestWhatWasWaitedForIsNotHandedToALoopToo(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	c := b.client(client.MaxHeld(1), client.PollEvery(20*time.Millisecond))
	for _, id := range ids(2) {
		_, err := c.Submit(ctxFor(t), request(id))
		must(t, err)
	}
	_, err := c.Wait(ctxFor(t), c.Handle("0001")) // behind 0000, which fills the client
	must(t, err)
	if got := collect(t, c, 1); got["0000"] != 1 {
		t.Errorf("%v", got)
	}
	b.none(c)
}

// Two processes of one name: what one has received the other does not hand out,
// although it was fetched before.
func TestWhatAnotherProcessReceivedIsNotHandedOut(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bus) {
		for _, id := range ids(1) {
			r := request(id)
			r.Job = testJob
			b.answer(r)
		}
		one, two := b.client(client.MaxHeld(1)), b.client()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := one.Wait(ctx, one.Handle("nobody")) // reads, and holds 0000
		want(t, err, context.DeadlineExceeded)
		res, err := two.Wait(ctxFor(t), two.Handle("0000"))
		must(t, err)
		must(t, two.Done(ctxFor(t), res))
		two.Close() // else it takes the probe
		pass(t, 2*time.Second)
		b.none(one)
		one.Close()
	})
}

func TestAnswersThatComeWhileAReaderLeavesReachTheNext(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	b.serve()
	sender := b.client()
	const readers, each = 12, 40
	all := ids(readers * each)
	for i := range readers {
		c := b.client(client.ManualDone())
		left := make(chan struct{})
		go func() {
			defer close(left)
			n := 0
			for range c.Results(context.Background()) {
				if n++; n == each/4 { // in the midst of them; none is received
					return
				}
			}
		}()
		requests := func(yield func(*subjects.Request) bool) {
			for _, id := range all[i*each : (i+1)*each] {
				if !yield(request(id)) {
					return
				}
			}
		}
		for _, err := range sender.SubmitMany(ctxFor(t), requests) {
			must(t, err)
		}
		<-left
		c.Close()
	}
	got := collect(t, b.client(), len(all))
	for id, n := range got {
		if n != 1 {
			t.Errorf("%s came %d times", id, n)
		}
	}
}

func TestManyMayWaitForOneAnswer(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	h, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	out := make(chan error, 8)
	ctx := ctxFor(t)
	for range cap(out) {
		go func() {
			res, err := c.Wait(ctx, h)
			if err == nil && len(res.TokenIDs) != 2 {
				err = errors.New("half an answer")
			}
			out <- err
		}()
	}
	b.serve()
	for range cap(out) {
		must(t, <-out)
	}
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

func TestACancelIsStoredForWhoeverRunsTheWork(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	for key, target := range map[string]client.Target{
		"id.j.0001": client.ByID("0001"), "group.j.g1": client.ByGroup("g1"), "trajectory.j.t1": client.ByTrajectory("t1"),
		"job.j": client.WholeJob(), "version.j.7": client.OlderThan(7),
	} {
		must(t, c.Cancel(ctxFor(t), target, "enough"))
		kv, err := b.js.KeyValue(ctxFor(t), b.pool.Bucket(subjects.Cancels))
		must(t, err)
		e, err := kv.Get(ctxFor(t), key)
		must(t, err)
		var got subjects.Cancel
		must(t, json.Unmarshal(e.Value(), &got))
		if got.Key() != key || got.Reason != "enough" {
			t.Errorf("%s holds %+v", key, got)
		}
	}
	for _, bad := range []client.Target{{}, client.ByGroup(""), client.ByID("a.b")} {
		if err := c.Cancel(ctxFor(t), bad, ""); err == nil {
			t.Errorf("%v was cancelled", bad)
		}
	}
}

func TestTokensStreamUntilTheAnswer(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	deltas, err := c.Tokens(ctxFor(t), "0001")
	must(t, err)
	_, err = c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	for i, text := range []string{"to", "ken", "s"} {
		d, err := json.Marshal(subjects.Delta{SchemaVersion: 1, Bind: 1, Seq: i, Text: text, Last: i == 2})
		must(t, err)
		must(t, b.nc.Publish(b.pool.Tokens(testJob, "0001"), d))
	}
	must(t, b.nc.Flush())
	b.answer(b.queued()[0])
	var text string
	for d, err := range deltas {
		must(t, err)
		text += d.Text
	}
	if text != "tokens" {
		t.Errorf("%q", text)
	}
	if _, err := c.Tokens(ctxFor(t), "a.b"); err == nil {
		t.Error("a bad id was taken")
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

func TestAClosedClientSaysSo(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	h, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	out := make(chan error, 1)
	ctx := ctxFor(t)
	go func() { _, err := c.Wait(ctx, h); out <- err }()
	c.Close()
	c.Close()
	want(t, <-out, client.ErrClosed)
	_, err = c.Submit(ctx, request("0002"))
	want(t, err, client.ErrClosed)
	for _, err := range c.Results(ctx) {
		want(t, err, client.ErrClosed)
	}
}

func TestTheEndOfTheContextEndsALoopQuietly(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	for res, err := range c.Results(ctx) {
		t.Errorf("%v %v", res, err)
	}
	_, err := c.Wait(ctx, c.Handle("0001"))
	want(t, err, context.DeadlineExceeded)
}

func TestAProcessThatOnlySubmitsTakesNoAnswers(t *testing.T) {
	b := newBus(t, subjects.Layout{})
	c := b.client()
	_, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	_, err = b.js.Consumer(ctxFor(t), b.pool.Results(), subjects.ConsumerTrainer(testJob, "main"))
	want(t, err, jetstream.ErrConsumerNotFound)
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
