package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// exampleUsers are those of deploy/nats/users.conf, all with the password x.
func exampleUsers(t *testing.T) []*server.User {
	t.Helper()
	for _, who := range []string{"ADMIN", "D1", "E1", "MATH"} {
		t.Setenv("NATS_PASSWORD_"+who, "x")
	}
	o, err := server.ProcessConfigFile(filepath.Join(deployDir, "nats", "users.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if len(o.Users) != 4 {
		t.Fatalf("%d users in the example, want 4", len(o.Users))
	}
	return o.Users
}

func TestTheExampleUsersAreWhatAuthPrints(t *testing.T) {
	users := map[string]*server.User{}
	for _, u := range exampleUsers(t) {
		users[u.Username] = u
	}
	for name, args := range map[string][]string{"d1": {"dispatcher", "d1"}, "e1": {"agent", "e1"}, "math": {"trainer", "math"}} {
		var out, msg bytes.Buffer
		if code := run(t.Context(), append([]string{"auth", "-o", "json"}, args...), nil, strings.NewReader(""), &out, &msg); code != exitOK {
			t.Fatalf("auth %v: %d %s", args, code, &msg)
		}
		var c credential
		if err := json.Unmarshal(out.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		p := users[name].Permissions
		if !slices.Equal(p.Publish.Allow, c.Publish) || !slices.Equal(p.Subscribe.Allow, c.Subscribe) {
			t.Errorf("deploy/nats/users.conf: %s is not what `rollbus auth %s` prints: print it again", name, strings.Join(args, " "))
		}
		if (p.Response != nil) != c.Responses || c.Responses && (p.Response.MaxMsgs != subjects.MaxResponses || p.Response.Expires != subjects.ResponseTime) {
			t.Errorf("deploy/nats/users.conf: %s: responses %+v", name, p.Response)
		}
	}
	if users["admin"].Permissions != nil {
		t.Error("the operator is restricted")
	}
}

// guarded is a pool on a server that knows the example's users and nobody else.
type guarded struct {
	t     *testing.T
	node  *natstest.Node
	pool  subjects.Pool
	admin *nats.Conn
	js    jetstream.JetStream
	store *kvstate.Store
}

// credentialScale is that of every liveness timing in these tests.
const credentialScale = 0.2

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	users := exampleUsers(t)
	g := &guarded{t: t, node: natstest.Server(t, natstest.Tweak(func(o *server.Options) { o.Users = users }))}
	g.admin = g.node.Conn(t, nats.UserInfo("admin", "x"))
	var err error
	g.js, g.pool = scaledPool(t, g.admin, "default", credentialScale)
	if g.store, err = kvstate.Open(g.admin, g.pool); err != nil {
		t.Fatal(err)
	}
	settings := recommended()
	settings.PartialsEvery, settings.Record = 8, false
	if _, err := g.store.PutSettings(g.ctx(), settings, 0); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *guarded) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	g.t.Cleanup(cancel)
	return ctx
}

// daemon starts the program as that user.
func (g *guarded) daemon(bin, user string, args ...string) *process {
	return start(g.t, bin, append(args, "--server", g.node.URL(), "--user", user, "--password", "x", "--inbox", subjects.InboxPrefix(user),
		"--timing-scale", fmt.Sprint(credentialScale))...)
}

// as connects as that user; what is denied comes out of the channel.
func (g *guarded) as(user string) (*nats.Conn, <-chan error) {
	g.t.Helper()
	denied := make(chan error, 64)
	return g.node.Conn(g.t, nats.UserInfo(user, "x"), nats.CustomInboxPrefix(subjects.InboxPrefix(user)),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			select {
			case denied <- err:
			default:
			}
		})), denied
}

// freeAddress is where nobody listens. Somebody may before it is used: bad luck.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// With their own credentials and nothing else, a dispatcher, an agent and a
// trainer do everything: a rollout, streamed tokens, checkpoints, a cancel, a
// return, an outage.
//
// scenario F3
// scenario F9
func TestTheCredentialsAreEnoughForEverything(t *testing.T) {
	g := newGuarded(t)
	sim, err := fakes.VLLM(fakes.VLLMConfig{Engine: simengine.Config{TimeScale: 4, Model: "sim"}, Events: &fakes.EventsConfig{}, Sources: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sim.Close() })
	bin := program(t)
	metrics := freeAddress(t)
	d := g.daemon(bin, "d1", "dispatcher", "--name", "d1", "--http", metrics)
	agentArgs := []string{"agent", "--engine", "e1=vllm=" + sim.URL(), "--slots", "8", "--drain-timeout", "10ms"}
	a := g.daemon(bin, "e1", agentArgs...)

	nc, denied := g.as("math")
	c, err := client.Open(g.ctx(), nc, "default", "math", client.ManualDone())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	submit := func(id string, tokens int) client.Handle {
		t.Helper()
		ids := make([]uint32, 256)
		for i := range ids {
			ids[i] = uint32(i)
		}
		h, err := c.Submit(g.ctx(), &subjects.Request{SchemaVersion: subjects.SchemaVersion, Job: "math", ID: id, Stream: true,
			PromptTokenIDs: ids, Sampling: subjects.SamplingParams{MaxTokens: tokens, IgnoreEOS: true}})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	answered := func(h client.Handle, want ...subjects.Status) *subjects.Result {
		t.Helper()
		res, err := c.Wait(g.ctx(), h)
		if err != nil {
			t.Fatalf("%s: %v", h.ID, err)
		}
		if !slices.Contains(want, res.Status) {
			t.Errorf("%s: %s %+v, want %v", h.ID, res.Status, res.Error, want)
		}
		if err := c.Done(g.ctx(), res); err != nil {
			t.Errorf("%s: %v", h.ID, err)
		}
		return res
	}
	// runs waits until a rollout has made a checkpoint: it is in mid-generation.
	runs := func(id string) {
		t.Helper()
		kv, err := g.js.KeyValue(g.ctx(), g.pool.Bucket(subjects.Partials))
		if err != nil {
			t.Fatal(err)
		}
		natstest.Eventually(t, awaitWithin, "a checkpoint of "+id, func() bool {
			_, err := kv.Get(g.ctx(), "e1.math."+id)
			return err == nil
		})
	}

	deltas, err := c.Tokens(g.ctx(), "0001")
	if err != nil {
		t.Fatal(err)
	}
	first := answered(submit("0001", 64), subjects.Truncated)
	n := 0
	for d, err := range deltas {
		if err != nil {
			t.Fatal(err)
		}
		n += len(d.TokenIDs)
	}
	if n != len(first.TokenIDs) {
		t.Errorf("%d tokens were streamed of %d", n, len(first.TokenIDs))
	}
	natstest.Eventually(t, awaitWithin, "the dispatcher holds a snapshot of the engine's blocks", func() bool {
		return metric(t, metrics, `rollbus_dispatcher_snapshots_total\{[^}]*\} [1-9]`)
	})

	long := submit("0002", 4000)
	runs("0002")
	if err := c.Cancel(g.ctx(), client.ByID("0002"), "not needed"); err != nil {
		t.Fatal(err)
	}
	answered(long, subjects.Cancelled)

	// Two seconds of tokens: it is still running when it is meant to be stopped.
	const whole = 1200

	// What runs longer than the drain is given back with what was generated.
	back := submit("0003", whole)
	runs("0003")
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Wait(); err != nil {
		t.Errorf("the agent did not end in order: %v", err)
	}
	a.begin()
	if res := answered(back, subjects.Truncated); len(res.Segments) < 2 {
		t.Errorf("what was given back did not go on: segments %+v", res.Segments)
	}

	outage := submit("0004", whole)
	runs("0004")
	before, err := g.store.Reservation(g.ctx(), "e1", "math", "0004")
	if err != nil {
		t.Fatal(err)
	}
	g.node.Restart()
	if res := answered(outage, subjects.Truncated); res.Attempt != before.Bind || len(res.TokenIDs) != whole || len(res.Segments) != 1 {
		t.Errorf("after the outage: attempt %d, before it %d; %d tokens in %+v", res.Attempt, before.Bind, len(res.TokenIDs), res.Segments)
	}

	// A killed agent's successor reads what the checkpoint kept.
	killed := submit("0005", whole)
	runs("0005")
	a.restart()
	if res := answered(killed, subjects.Truncated); len(res.Segments) < 2 {
		t.Errorf("what a killed agent ran did not go on from its checkpoint: segments %+v", res.Segments)
	}

	c.Close()
	select {
	case err := <-denied:
		t.Errorf("the trainer lacks a permission: %v", err)
	default:
	}
	for _, p := range []*process{d, a} {
		p.kill()
		if s := regexp.MustCompile(`(?i).*permissions violation.*`).FindString(p.log.String()); s != "" {
			t.Errorf("%v lacks a permission: %s", p.args[:1], s)
		}
	}
}

// metric tells whether the exposition at addr has a line that matches.
func metric(t *testing.T, addr, line string) bool {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		return false
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	return err == nil && regexp.MustCompile(`(?m)^`+line).Match(b)
}

// What a credential does not say, NATS does not do (invariant I8).
func TestACredentialReachesOnlyWhatItSays(t *testing.T) {
	g := newGuarded(t)
	p := g.pool
	res := subjects.BucketStream(p.Bucket(subjects.Reservations))
	held := func(engine, id string) uint64 {
		t.Helper()
		h := subjects.Held{Engine: engine, Job: "math", ID: id, Bind: 1, Epoch: "1", LeftMS: 60_000, Lane: subjects.LaneNormal, Reader: "main", Dispatcher: "d1"}
		seq, err := g.store.Bind(g.ctx(), kvstate.Bind{Held: h, Body: []byte(`{"secret":true}`)})
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
	held("e1", "mine")
	theirs := held("e2", "theirs")
	if _, err := g.js.Publish(g.ctx(), p.Submit("code", subjects.LaneNormal), []byte(`{"secret":true}`), jetstream.WithMsgID("code.0001")); err != nil {
		t.Fatal(err)
	}
	if _, err := g.js.CreateConsumer(g.ctx(), res, p.AgentConsumer("e2")); err != nil {
		t.Fatal(err)
	}
	consumer := func(stream, name, filter string, filters ...string) (subject, body string) {
		cfg := jetstream.ConsumerConfig{Name: name, FilterSubject: filter, FilterSubjects: filters, MemoryStorage: true, InactiveThreshold: time.Minute}
		b, err := json.Marshal(map[string]any{"stream_name": stream, "config": cfg})
		if err != nil {
			t.Fatal(err)
		}
		return "$JS.API.CONSUMER.CREATE." + stream + "." + name + "." + filter, string(b)
	}
	type try struct{ user, what, subject, body string }
	tries := []try{
		{"e1", "write another engine's key", p.ReservationSubject("e2", "math", "theirs"), "x"},
		{"e1", "register another engine", subjects.BucketSubject(p.Bucket(subjects.Engines), "e2"), "{}"},
		{"e1", "write another engine's checkpoint", subjects.BucketSubject(p.Bucket(subjects.Partials), "e2.math.theirs"), "{}"},
		{"e1", "say another engine's load", p.Load("e2"), "{}"},
		{"e1", "submit", p.Submit("math", subjects.LaneNormal), "{}"},
		{"e1", "requeue", p.RetrySubject("math"), "{}"},
		{"e1", "bury", p.DeadSubject("math"), "{}"},
		{"e1", "cancel", subjects.BucketSubject(p.Bucket(subjects.Cancels), "job.math"), "{}"},
		{"e1", "write settings", subjects.BucketSubject(subjects.BucketPools, p.String()), "{}"},
		{"e1", "read a key from the leader", "$JS.API.STREAM.MSG.GET." + res, `{"last_by_subj":"` + p.ReservationSubject("e2", "math", "theirs") + `"}`},
		{"e1", "read a key directly", "$JS.API.DIRECT.GET." + res + "." + p.ReservationSubject("e2", "math", "theirs"), ""},
		{"e1", "read the queue", "$JS.API.STREAM.MSG.GET." + p.Rollouts(), `{"seq":1}`},
		{"e1", "read another engine's checkpoint", "$JS.API.DIRECT.GET." + subjects.BucketStream(p.Bucket(subjects.Partials)) + "." + subjects.BucketSubject(p.Bucket(subjects.Partials), "e2.math.theirs"), ""},
		{"e1", "take from another agent's consumer", "$JS.API.CONSUMER.MSG.NEXT." + res + ".a-e2", `{"batch":1}`},
		{"e1", "delete another agent's consumer", "$JS.API.CONSUMER.DELETE." + res + ".a-e2", ""},
		{"e1", "purge", "$JS.API.STREAM.PURGE." + res, ""},
		{"e1", "delete a stream", "$JS.API.STREAM.DELETE." + res, ""},
		{"math", "requeue", p.RetrySubject("math"), "{}"},
		{"math", "submit for another job", p.Submit("code", subjects.LaneNormal), "{}"},
		{"math", "answer for another job", p.Result("code", "main", "0001"), "{}"},
		{"math", "cancel another job", subjects.BucketSubject(p.Bucket(subjects.Cancels), "job.code"), "{}"},
		{"math", "write a key", p.ReservationSubject("e1", "math", "mine"), "x"},
		{"math", "read the queue", "$JS.API.STREAM.MSG.GET." + p.Rollouts(), `{"seq":1}`},
		{"math", "read another job's answer", "$JS.API.DIRECT.GET." + p.Results() + "." + p.Result("code", "main", "0001"), ""},
		{"d1", "purge", "$JS.API.STREAM.PURGE." + p.Rollouts(), ""},
		{"d1", "delete a stream", "$JS.API.STREAM.DELETE." + p.Rollouts(), ""},
		{"d1", "change a stream", "$JS.API.STREAM.UPDATE." + p.Rollouts(), "{}"},
		{"d1", "write settings", subjects.BucketSubject(subjects.BucketPools, p.String()), "{}"},
		{"d1", "register another dispatcher", subjects.BucketSubject(p.Bucket(subjects.Dispatchers), "d2"), "{}"},
		{"d1", "submit", p.Submit("math", subjects.LaneNormal), "{}"},
	}
	add := func(user, what, stream, name, filter string, filters ...string) {
		subject, body := consumer(stream, name, filter, filters...)
		tries = append(tries, try{user, what, subject, body})
	}
	add("e1", "follow another engine's keys", res, "a-e1", p.EngineGuard("e2"))
	add("e1", "follow under another name", res, "a-e2", p.EngineGuard("e1"))
	add("e1", "follow the queue", p.Rollouts(), "a-e1", p.SubmitFilter())
	add("math", "follow another job's answers", p.Results(), "t-math-main", p.ResultFilter("code", "main"))

	conns := map[string]*nats.Conn{}
	denials := map[string]<-chan error{}
	for _, user := range []string{"d1", "e1", "math"} {
		conns[user], denials[user] = g.as(user)
	}
	denied := func(user, what string) {
		t.Helper()
		select {
		case err := <-denials[user]:
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("%s, %s: %v", user, what, err)
			}
		case <-time.After(awaitWithin):
			t.Errorf("%s may %s", user, what)
		}
	}
	before := g.stored()
	for _, x := range tries {
		if err := conns[x.user].PublishRequest(x.subject, subjects.InboxPrefix(x.user)+".answer", []byte(x.body)); err != nil {
			t.Fatal(err)
		}
		denied(x.user, x.what)
	}
	for user, subject := range map[string]string{"e1": "_INBOX_d1.>", "math": "_INBOX_e1.>", "d1": "_INBOX_math.>"} {
		sub, err := conns[user].SubscribeSync(subject)
		if err != nil {
			t.Fatal(err)
		}
		denied(user, "listen at "+subject)
		_ = sub.Unsubscribe() // there is none
	}
	// What the subject allows and the body does not say.
	subject, _ := consumer(res, "a-e1", p.EngineGuard("e1"))
	_, other := consumer(res, "a-e1", p.EngineGuard("e2"))
	_, both := consumer(res, "a-e1", "", p.EngineGuard("e1"), p.EngineGuard("e2"))
	_, all := consumer(res, "a-e1", "")
	for _, lie := range []string{other, both, all} {
		m, err := conns["e1"].RequestWithContext(g.ctx(), subject, []byte(lie))
		if err != nil || !bytes.Contains(m.Data, []byte(`"error"`)) {
			t.Errorf("an agent follows what its credential does not say: %v %s", err, m.Data)
		}
	}
	// A rollup of its own key would wipe the bucket.
	m := nats.NewMsg(p.ReservationSubject("e1", "math", "mine"))
	m.Header.Set("Nats-Rollup", "all")
	answer, err := conns["e1"].RequestMsgWithContext(g.ctx(), m)
	if err != nil || !bytes.Contains(answer.Data, []byte(`"error"`)) {
		t.Errorf("an agent may roll up: %v", err)
	}
	if now := g.stored(); now != before {
		t.Errorf("stored messages were %s, are %s", before, now)
	}
	r, err := g.store.Reservation(g.ctx(), "e2", "math", "theirs")
	if err != nil || r.Revision != theirs || string(r.Body) != `{"secret":true}` {
		t.Errorf("the other engine's key is %+v, %v", r, err)
	}
}

// stored is how many messages each stream has ever had.
func (g *guarded) stored() string {
	g.t.Helper()
	var out []string
	for _, s := range g.pool.Streams(subjects.Layout{}) {
		info, err := g.js.Stream(g.ctx(), s.Name)
		if err != nil {
			g.t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s %d", s.Name, info.CachedInfo().State.LastSeq))
	}
	return strings.Join(out, ", ")
}
