package client_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// trainerPermissions are those of the package's documentation.
var trainerPermissions = &server.Permissions{
	Publish: &server.SubjectPermission{Allow: []string{
		"rollout.p.submit.j.*", "rollout.p.ping", "rollout.p.result.j.main.*",
		"$KV.rollbus_p_cancels.*.j", "$KV.rollbus_p_cancels.*.j.>",
		"$JS.API.CONSUMER.CREATE.RESULTS_p.t-j-main.rollout.p.result.j.main.>",
		"$JS.API.CONSUMER.INFO.RESULTS_p.t-j-main", "$JS.API.CONSUMER.MSG.NEXT.RESULTS_p.t-j-main",
		"$JS.ACK.RESULTS_p.t-j-main.>",
		"$JS.API.DIRECT.GET.RESULTS_p.rollout.p.result.j.main.*",
		"$JS.API.DIRECT.GET.KV_rollbus_pools.$KV.rollbus_pools.p",
	}},
	Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX_j.>", "rollout.p.tokens.j.*"}},
}

func restricted(o *server.Options) {
	o.Users = []*server.User{{Username: "admin", Password: "a"}, {Username: "trainer", Password: "t", Permissions: trainerPermissions}}
	o.NoAuthUser = "admin"
}

func TestTheDocumentedPermissionsAreEnoughForEverything(t *testing.T) {
	b := newBus(t, subjects.Layout{}, natstest.Tweak(restricted))
	_, err := b.kv.PutSettings(ctxFor(t), subjects.Settings{Model: "m"}, 0)
	must(t, err)
	violations := make(chan error, 16)
	nc := b.node.Conn(t, nats.UserInfo("trainer", "t"), nats.CustomInboxPrefix("_INBOX_j"), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		violations <- err
	}))
	c, err := client.Open(ctxFor(t), nc, "p", testJob, client.PollEvery(20*time.Millisecond))
	must(t, err)
	defer c.Close()
	deltas, err := c.Tokens(ctxFor(t), "0001")
	must(t, err)
	h, err := c.Submit(ctxFor(t), request("0001"))
	must(t, err)
	must(t, c.Cancel(ctxFor(t), client.ByID("0009"), ""))
	must(t, c.Cancel(ctxFor(t), client.WholeJob(), ""))
	b.serve()
	res, err := c.Wait(ctxFor(t), h)
	must(t, err)
	must(t, c.Done(ctxFor(t), res))
	for _, err := range deltas {
		must(t, err)
	}
	_, err = c.Wait(ctxFor(t), h) // by a look into the register
	want(t, err, client.ErrReceived)
	for _, err := range c.SubmitMany(ctxFor(t), func(yield func(*subjects.Request) bool) { yield(request("0002")) }) {
		must(t, err)
	}
	collect(t, c, 1)
	c.Close()
	select {
	case err := <-violations:
		t.Errorf("a permission is missing: %v", err)
	default:
	}
}

// scenario B10
func TestACredentialThatMayNotLookSubmitsOnceMore(t *testing.T) {
	inBubbleWith(t, func(t *testing.T, b *bus) {
		nc := b.node.Conn(t, nats.UserInfo("trainer", "t"), nats.CustomInboxPrefix("_INBOX_j"), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		c, err := client.Open(ctxFor(t), nc, "p", testJob)
		must(t, err)
		defer c.Close()
		_, err = c.Submit(ctxFor(t), short("0001"))
		must(t, err)
		b.lose()
		pass(t, 9*time.Minute)
		q := b.queued()
		if len(q) != 1 {
			t.Fatalf("%d stand in the queue", len(q))
		}
		b.answer(q[0])
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		res, err := c.Wait(ctx, c.Handle("0001"))
		must(t, err)
		must(t, c.Done(ctx, res))
	}, natstest.Tweak(restricted))
}
