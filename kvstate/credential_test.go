package kvstate

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// agentPermissions is what section 10 of the design gives the agent of engine e1.
func agentPermissions(p subjects.Pool) *server.Permissions {
	res := p.Bucket(subjects.Reservations)
	api, stream := "$JS.API.CONSUMER.", subjects.BucketStream(res)
	return &server.Permissions{
		Publish: &server.SubjectPermission{Allow: []string{
			subjects.BucketSubject(res, "e1.>"), subjects.BucketSubject(p.Bucket(subjects.Engines), "e1"),
			p.ResultFilter("", ""),
			api + "CREATE." + stream + ".a-e1." + subjects.BucketSubject(res, "e1.>"),
			api + "DELETE." + stream + ".a-e1", api + "INFO." + stream + ".a-e1", api + "MSG.NEXT." + stream + ".a-e1",
		}},
		Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX_e1.>"}},
	}
}

func TestAnAgentsCredentialIsEnoughForWhatAnAgentDoes(t *testing.T) {
	t.Parallel()
	pool, err := subjects.NewPool("p")
	must(t, err)
	n := natstest.Server(t, natstest.Tweak(func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "all", Password: "x"},
			{Username: "e1", Password: "x", Permissions: agentPermissions(pool)},
		}
	}))
	e := &env{
		node: n, nc: n.Conn(t, nats.UserInfo("all", "x")),
		layout: subjects.Layout{Storage: jetstream.MemoryStorage, Budget: 128 << 20},
	}
	e.open(t)
	denied := make(chan error, 16)
	nc := n.Conn(t, nats.UserInfo("e1", "x"), nats.CustomInboxPrefix("_INBOX_e1"),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			select {
			case denied <- err:
			default:
			}
		}))
	s := e.storeOn(t, nc, Timeout(200*time.Millisecond))
	a, b := e.bind(t, "e1", "a", 1), e.bind(t, "e1", "b", 1)
	other := e.bind(t, "e2", "a", 1)

	f := follows(t, s, func(ctx context.Context, h Handler[Reservation, Marker]) error { return s.FollowOwn(ctx, "e1", h) }).wait(t)
	f.shows(t, keyOf("e1", "a", 1, a), keyOf("e1", "b", 1, b))
	_, err = s.PutEngine(t.Context(), subjects.Engine{Engine: "e1", Epoch: "1"})
	must(t, err)
	res := result("a")
	res.Job = "e1"
	_, err = s.Commit(t.Context(), res, subjects.Answer{})
	must(t, err)
	_, err = s.Release(t.Context(), released("e1", "a", 1), a)
	must(t, err)
	r, ok := f.Get("e1", "e1", "b")
	if !ok {
		t.Fatal("b is not in the view")
	}
	back, err := s.Return(t.Context(), r, "no slot", 0)
	must(t, err)
	f.shows(t, keyOf("e1", "b", 1, back))
	_, alive := f.counts()
	natstest.Eventually(t, within, "proof of contact", func() bool { _, n := f.counts(); return n > alive+3 })
	select {
	case err := <-denied:
		t.Fatalf("denied something: %v", err)
	default:
	}
	// And for nothing else.
	_, err = s.Release(t.Context(), released("e2", "a", 1), other)
	wantErr(t, err, ErrUnknown) // a denied publish has no answer
	if err := <-denied; !strings.Contains(strings.ToLower(err.Error()), "permissions violation") {
		t.Fatalf("error %v, want a permissions violation", err)
	}
	_, err = e.store.Reservation(t.Context(), "e2", "e2", "a")
	must(t, err)
}

// scenario B7
func TestReadsThatDecideAreNeverDirectGets(t *testing.T) {
	t.Parallel()
	e := single(t, jetstream.MemoryStorage)
	direct, err := e.nc.SubscribeSync("$JS.API.DIRECT.>")
	must(t, err)
	e.bind(t, "e", "a", 1)
	_, err = e.store.Commit(t.Context(), result("a"), subjects.Answer{})
	must(t, err)
	_, err = e.store.PutSettings(t.Context(), subjects.Settings{}, 0)
	must(t, err)
	_, err = e.store.Reservation(t.Context(), "e", "e", "a")
	must(t, err)
	_, err = e.store.Result(t.Context(), "j", "main", "a")
	must(t, err)
	_, _, err = e.store.Settings(t.Context())
	must(t, err)
	// nats.go's own read shows that the subscription sees one.
	kv, err := e.store.JS().KeyValue(t.Context(), e.pool.Bucket(subjects.Reservations))
	must(t, err)
	_, err = kv.Get(t.Context(), "e.e.a")
	must(t, err)
	must(t, e.nc.Flush())
	if n, _, err := direct.Pending(); err != nil || n != 1 {
		t.Fatalf("%d direct gets, %v, want the one of nats.go", n, err)
	}
}
