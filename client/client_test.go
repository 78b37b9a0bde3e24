package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/client"
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
// scenario B9
// scenario R18
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
	var text strings.Builder
	for d, err := range deltas {
		must(t, err)
		text.WriteString(d.Text)
	}
	if text.String() != "tokens" {
		t.Errorf("%q", text.String())
	}
	if _, err := c.Tokens(ctxFor(t), "a.b"); err == nil {
		t.Error("a bad id was taken")
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
