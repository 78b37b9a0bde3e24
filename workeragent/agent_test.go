package workeragent

import (
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// simulated starts a simulated engine.
func simulated(t *testing.T, change ...func(*simengine.Config)) *simengine.Server {
	t.Helper()
	cfg := simengine.Config{Model: "m", TimeScale: 50, Engine: model.Config{MaxRunning: 4}}
	for _, f := range change {
		f(&cfg)
	}
	s, err := simengine.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestARolloutRunsIsAnsweredAndThenReleased(t *testing.T) {
	r := newRig(t)
	s := simulated(t)
	a := r.agent(s.URL())
	req := request("0001", 20)
	req.Meta, req.Labels = json.RawMessage(`{"a":1}`), map[string]string{"k": "v"}
	req.Group = &subjects.Group{ID: "g", Index: 1}
	accepted := time.Now().Add(-time.Second)
	cached := 3
	res := r.bind(req, func(h *subjects.Held) {
		h.Bind, h.Group, h.Accepted, h.PredictedCached = 4, "g", accepted.UnixNano(), &cached
	})
	got := r.result("0001")
	m := r.marker("0001")
	reg, err := r.store.Result(r.ctx(), "j", "main", "0001")
	if err != nil {
		t.Fatal(err)
	}
	if m.Stored.Before(reg.Stored) {
		t.Errorf("released at %v, before the answer was stored at %v", m.Stored, reg.Stored)
	}
	if got.Status != subjects.Truncated || got.FinishReason != "length" || got.Attempt != 4 || len(got.TokenIDs) != 20 || got.ReplyKey != "key" {
		t.Errorf("got %+v", got)
	}
	if d := cmp.Diff(subjects.Route{Engine: "e1", Epoch: res.Epoch, Policy: "kv_tokens", Reason: "least", Dispatcher: "d", PredictedCachedTokens: &cached}, got.Route); d != "" {
		t.Errorf("route: %s", d)
	}
	want := []subjects.Segment{{Engine: "e1", Epoch: res.Epoch, WeightVersion: "0", Start: 0, End: 20}}
	if d := cmp.Diff(want, got.Segments); d != "" {
		t.Errorf("segments: %s", d)
	}
	if got.Usage == nil || got.Usage.PromptTokens != 4 || got.Usage.CompletionTokens != 20 || string(got.Meta) != `{"a":1}` || got.Labels["k"] != "v" || got.Group.ID != "g" {
		t.Errorf("got %+v", got)
	}
	if got.Timing.QueuedMS < 900 || got.Timing.RunMS <= 0 {
		t.Errorf("timing %+v", got.Timing)
	}
	if m.Outcome != subjects.OutcomeAnswered || m.Bind != 4 || m.CompletionTokens == nil || *m.CompletionTokens != 20 || m.Group != "g" || m.Epoch != res.Epoch {
		t.Errorf("marker %+v", m)
	}
	if reg.Status != subjects.Truncated || reg.Bind != 4 || reg.Engine != "e1" || *reg.CompletionTokens != 20 || reg.Group != "g" {
		t.Errorf("register %+v", reg.Answer)
	}
	if err := a.Ready(); err != nil {
		t.Error(err)
	}
	reg2 := prometheus.NewRegistry()
	reg2.MustRegister(a.Collector())
	if _, err := reg2.Gather(); err != nil {
		t.Error(err)
	}
}

func TestAStopIsACompletionAndALengthATruncation(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	for id, want := range map[string]subjects.Status{"stop": subjects.Completed, "length": subjects.Truncated} {
		r.bind(request(id, 5))
		c := p.next()
		c.tokens(1, 2)
		c.finish(id)
		if got := r.result(id); got.Status != want || got.Usage.CompletionTokens != 2 || got.Text != "bc" {
			t.Errorf("%s: got %+v", id, got)
		}
	}
}

func TestTheRegistrationSaysWhatTheEngineIsAndEndsWithTheAgent(t *testing.T) {
	r := newRig(t)
	s := simulated(t, func(c *simengine.Config) { c.Engine.KVTokens = 3200; c.WeightVersion = 7 })
	a := r.agent(s.URL(), func(c *Config) { c.Engines[0].Slots = 0; c.Name = "node1"; c.Version = "1.2" })
	e, _ := r.engine("e1")
	if e.Kind != "sim" || e.Slots != 4 || *e.CapacityTokens != 3200 || e.CapacitySource != "reported" || *e.EngineBlock != 16 ||
		e.BlockTokens != subjects.DefaultBlockTokens || *e.WeightVersion != 7 || e.Agent != "node1" || e.Versions["agent"] != "1.2" || e.Model != "m" {
		t.Errorf("got %+v", e)
	}
	if err := a.Stop(r.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := a.end(t); err != nil {
		t.Errorf("Run ended with %v", err)
	}
	if _, ok := r.engine("e1"); ok {
		t.Error("the registration is still there")
	}
}

func TestLoadIsPublishedWithTheRevisionThatWasHandedOver(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	sub, err := r.nc.SubscribeSync(r.pool.Load("e1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	r.agent(p.url, func(c *Config) { c.Engines[0].Slots = 1 })
	one := r.bind(request("0001", 5))
	p.next()
	two := r.bind(request("0002", 5))
	p.next()
	var last uint64
	for {
		m, err := sub.NextMsg(within)
		if err != nil {
			t.Fatalf("no load that shows both: %v", err)
		}
		var l subjects.Load
		if err := json.Unmarshal(m.Data, &l); err != nil {
			t.Fatal(err)
		}
		if l.Seq <= last {
			t.Fatalf("sequence %d after %d", l.Seq, last)
		}
		last = l.Seq
		k := l.Ranks[0]
		if l.AppliedRevision >= two.Revision {
			if *k.Running != 1 || *k.Waiting != 1 || *k.WaitingUncachedTokens != 4 || *k.MaxRunning != 1 || l.Source != "own" || l.Epoch != two.Epoch || l.IntervalMS != 20 {
				t.Errorf("%+v %+v", l, k)
			}
			return
		}
		if l.AppliedRevision < one.Revision && *k.Running > 0 {
			t.Errorf("revision %d is claimed and a later one counted", l.AppliedRevision)
		}
	}
}

// No engine tells what its requests have still to do, and how fast it computes a
// prompt: the agent sees both.
func TestLoadTellsWhatRunsHaveStillToDo(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	u := r.agent(p.url).units[0]
	eventually := func(what string, prefill, output int64, runs int, more func(subjects.RankLoad) bool) {
		t.Helper()
		r.eventually(what, func() bool {
			l := u.sample(r.ctx())
			return l != nil && *l.PendingPrefillTokens == prefill && *l.PendingOutputTokens == output && *l.OwnRequests == runs &&
				(more == nil || more(l.Ranks[0]))
		})
	}
	cached := 500
	r.bind(request("0001", 100), func(h *subjects.Held) { h.Tokens, h.PromptTokens, h.PredictedCached = 2100, 2000, &cached })
	c := p.next()
	eventually("all but what was expected in the cache is to be computed", 1500, 100, 1, nil)
	c.tokens(1, 2, 3)
	eventually("its prompt is computed", 0, 97, 1, nil)
	c.say("data: {\"choices\":[{\"index\":0,\"text\":\"\",\"token_ids\":[],\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":2000," +
		"\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\ndata: [DONE]\n\n")
	c.end()
	eventually("it has ended, and shown how fast prompts are computed", 0, 0, 0, func(k subjects.RankLoad) bool {
		return k.PrefillTokS != nil && *k.PrefillTokS > 0
	})
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.newLife("a test says so"); u.backlog.PrefillTokS() != nil {
		t.Error("another life of the engine has the rate of the one before")
	}
}

func TestTheEnginesOwnPictureIsPublishedAndCompletedByWhatWasSent(t *testing.T) {
	r := newRig(t)
	s := simulated(t, func(c *simengine.Config) { c.TimeScale = 1 })
	a := r.agent(s.URL(), func(c *Config) { c.Engines[0].Slots = 0 })
	r.bind(request("0001", 2000))
	u := a.units[0]
	r.eventually("the engine shows the run", func() bool {
		l := u.sample(r.ctx())
		k := l.Ranks[0]
		return l.Source == "vllm:/metrics" && k.Running != nil && *k.Running == 1 && *k.Waiting == 0 && *k.MaxRunning == 4 && *k.KVCapacityTokens > 0
	})
	u.mu.Lock()
	u.ghosts = 3 // sent and not shown by the engine: they wait there
	u.mu.Unlock()
	if k := u.sample(r.ctx()).Ranks[0]; *k.Running != 1 || *k.Waiting != 3 {
		t.Errorf("%d running and %d waiting, want 1 and 3", *k.Running, *k.Waiting)
	}
	u.mu.Lock()
	u.ghosts = 0
	u.mu.Unlock()
}

// scenario F6: an engine that does not say when it started shows a restart by
// its counters.
func TestACounterThatFallsBeginsANewEpochOnce(t *testing.T) {
	a := &Agent{log: slog.New(slog.DiscardHandler), t: DefaultTimings()}
	a.metrics = newMetrics(a)
	u := newUnit(a, EngineConfig{Name: "e1"})
	var ended error
	u.runs["j.1"] = &run{cancel: func(err error) { ended = err }}
	load := func(n int64) {
		u.observe(&subjects.Load{Ranks: []subjects.RankLoad{{PreemptionsTotal: &n}}})
	}
	load(5)
	load(6)
	if u.epoch.life != 0 || ended != nil {
		t.Fatalf("a counter that rises: life %d, run ended with %v", u.epoch.life, ended)
	}
	load(2)
	if u.epoch.life != 1 || !errors.Is(ended, errRestarted) {
		t.Errorf("a counter that falls: life %d, run ended with %v", u.epoch.life, ended)
	}
	load(1)
	if u.epoch.life != 1 {
		t.Error("one restart was told twice")
	}
}

// scenario P22: what can never fit is refused at once, with both sizes.
func TestARequestLargerThanTheEngineIsRejectedWithBothSizes(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url, func(c *Config) { c.Engines[0].CapacityTokens = 100 })
	r.bind(request("0001", 5000))
	r.bind(request("0002", 97))
	text := request("0003", 5000)
	text.PromptTokenIDs, text.Prompt = nil, "hello"
	r.bind(text)
	for id, sizes := range map[string][]string{"0001": {"5004", "4096"}, "0002": {"101", "100"}, "0003": {"5000", "4096"}} {
		got := r.result(id)
		if got.Status != subjects.Rejected || got.Error.Class != subjects.ClassData || got.Error.Code != "too_large" {
			t.Errorf("%s: got %+v", id, got)
		}
		for _, s := range sizes {
			if !strings.Contains(got.Error.Message, s) {
				t.Errorf("%s: the error does not name %s: %s", id, s, got.Error.Message)
			}
		}
		r.released(id)
	}
	r.bind(request("0004", 96))
	p.next().finish("stop")
	if p.arrivals() != 1 {
		t.Errorf("%d requests reached the engine", p.arrivals())
	}
}

// scenario P23: a rank is checked before the engine could ignore it.
func TestARankThatTheEngineDoesNotHaveIsRejected(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	rank := 1
	r.bind(request("0001", 5), func(h *subjects.Held) { h.Rank = &rank })
	if got := r.result("0001"); got.Status != subjects.Rejected || got.Error.Code != "no_such_rank" {
		t.Errorf("got %+v", got)
	}
	rank = 0
	r.bind(request("0002", 5), func(h *subjects.Held) { h.Rank = &rank })
	if c := p.next(); c.header.Get("X-Data-Parallel-Rank") != "0" {
		t.Errorf("the engine was told %q", c.header.Get("X-Data-Parallel-Rank"))
	}
}

func TestLogprobsThatTheAnswerMustCarryAreAskedFor(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	req := request("0001", 5)
	req.Return = &subjects.Return{Logprobs: true}
	r.bind(req)
	c := p.next()
	if c.body["logprobs"] != 0.0 {
		t.Errorf("asked for %v", c.body["logprobs"])
	}
	c.say(`data: {"choices":[{"index":0,"text":"a","token_ids":[1],"logprobs":{"token_logprobs":[-0.5]}}]}` + "\n\n")
	c.finish("stop")
	if got := r.result("0001"); string(got.Logprobs) != `{"token_logprobs":[-0.5]}` {
		t.Errorf("got %s", got.Logprobs)
	}
}

func TestAnAgentWaitsForAPoolThatIsMadeLater(t *testing.T) {
	t.Parallel()
	r := &rig{t: t, node: natstest.Server(t)}
	r.nc = r.node.Conn(t)
	r.pool, _ = subjects.NewPool("p")
	var err error
	if r.store, err = kvstate.Open(r.nc, r.pool); err != nil {
		t.Fatal(err)
	}
	p := newPuppet(t)
	a := r.launch(r.node.Conn(t, nats.ReconnectBufSize(-1)), p.url)
	if a.Ready() == nil {
		t.Error("without a pool the agent says that it is ready")
	}
	if err := subjects.Ensure(r.ctx(), r.store.JS(), r.pool, subjects.Layout{Budget: 128 << 20, LivenessTTL: time.Second}); err != nil {
		t.Fatal(err)
	}
	r.eventually("it is ready", func() bool { return a.Ready() == nil })
	r.bind(request("0001", 5))
	p.next()
}

func TestTheFirstAgentMakesThePoolWhenItMay(t *testing.T) {
	t.Parallel()
	r := &rig{t: t, node: natstest.Server(t)}
	p := newPuppet(t)
	a := r.launch(r.node.Conn(t, nats.ReconnectBufSize(-1)), p.url, func(c *Config) {
		c.Layout = &subjects.Layout{Budget: 128 << 20, LivenessTTL: time.Second}
	})
	r.eventually("it is ready", func() bool {
		select {
		case err := <-a.done:
			t.Fatalf("Run ended with %v", err)
		default:
		}
		return a.Ready() == nil
	})
}

func TestOneAgentServesSeveralEngines(t *testing.T) {
	r := newRig(t)
	one, two := newPuppet(t), newPuppet(t)
	a := r.agent(one.url, func(c *Config) {
		ad, err := engine.NewOpenAI(engine.OpenAIConfig{URL: two.url})
		if err != nil {
			t.Fatal(err)
		}
		c.Engines = append(c.Engines, EngineConfig{Name: "e2", Adapter: ad, Slots: 1})
	})
	r.eventually("both are ready", func() bool { return a.Ready() == nil })
	e2, ok := r.engine("e2")
	if e1, _ := r.engine("e1"); !ok || e1.Epoch == e2.Epoch || e2.Slots != 1 {
		t.Fatalf("e1 %+v, e2 %+v", e1, e2)
	}
	body, _ := json.Marshal(request("0002", 5))
	r.write(subjects.Held{Engine: "e2", Job: "j", ID: "0002", Bind: 1, Epoch: e2.Epoch, LeftMS: 60_000, Reader: "main"}, body)
	r.bind(request("0001", 5))
	one.next().tokens(1)
	c := two.next()
	c.tokens(1)
	c.finish("stop")
	if got := r.result("0002"); got.Route.Engine != "e2" {
		t.Errorf("got %+v", got.Route)
	}
}

func TestABodyThatIsNoRequestOfItsKeyIsRejected(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	other, _ := json.Marshal(request("other", 5))
	for id, body := range map[string]string{
		"0001": "{not json", "0002": `{"id":"0002","job":"j"}`, "0003": string(other),
	} {
		r.bindBody("j", id, []byte(body))
		got := r.result(id)
		if got.Status != subjects.Rejected || got.Error.Code != "invalid_request" || got.Error.Message == "" {
			t.Errorf("%s: got %+v", id, got)
		}
		r.released(id)
	}
	if p.arrivals() != 0 {
		t.Errorf("%d of them reached the engine", p.arrivals())
	}
}

func TestWhatIsBoundBeyondSlotsAndPrefetchIsReturnedForFree(t *testing.T) {
	r := newRig(t)
	if _, err := r.store.PutSettings(r.ctx(), subjects.Settings{Prefetch: 1}, 0); err != nil {
		t.Fatal(err)
	}
	p := newPuppet(t)
	a := r.agent(p.url, func(c *Config) { c.Engines[0].Slots = 2 })
	r.eventually("the settings are known", func() bool { return a.settings.Load().Prefetch == 1 })
	for _, id := range []string{"0001", "0002", "0003"} {
		r.bind(request(id, 5), func(h *subjects.Held) { h.Burnt = 1 })
	}
	c := p.next()
	for _, id := range []string{"0004", "0005"} {
		r.bind(request(id, 5), func(h *subjects.Held) { h.Burnt = 1 })
		if got := r.returned(id); got.ReturnReason != returnOverCapacity || got.Burnt != 1 || len(got.Body) == 0 {
			t.Errorf("%s: got %+v", id, got.Held)
		}
	}
	// A place that becomes free is taken again.
	c.tokens(1)
	c.finish("stop")
	p.next()
	p.next()
	r.eventually("one of them is done", func() bool { return r.reserved() == 4 })
	r.bind(request("0006", 5))
	p.next()
}

func TestTwoJobsWithTheSameIDsDoNotTouchEachOther(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	one, two := request("0001", 5), request("0001", 5)
	two.Job = "k"
	r.bind(one)
	c1 := p.next()
	r.bind(two)
	c2 := p.next()
	if err := r.store.PutCancel(r.ctx(), subjects.Cancel{Kind: subjects.CancelID, Job: "k", Value: "0001"}); err != nil {
		t.Fatal(err)
	}
	c2.left()
	c1.tokens(5)
	c1.finish("stop")
	if got := r.result("0001"); got.Status != subjects.Completed {
		t.Errorf("got %+v", got)
	}
	r.eventually("the other one is cancelled", func() bool {
		got, err := r.store.Result(r.ctx(), "k", "main", "0001")
		return err == nil && got.Status == subjects.Cancelled
	})
}

func TestDeltasAreStreamedInOrderWhenAsked(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	sub, err := r.nc.SubscribeSync(r.pool.Tokens("j", "0001"))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	req := request("0001", 5)
	req.Stream = true
	r.bind(req)
	c := p.next()
	c.tokens(1)
	c.tokens(2, 3)
	c.finish("stop")
	var ids []uint32
	for seq := 0; ; seq++ {
		m, err := sub.NextMsg(within)
		if err != nil {
			t.Fatal(err)
		}
		var d subjects.Delta
		if err := json.Unmarshal(m.Data, &d); err != nil {
			t.Fatal(err)
		}
		if d.Seq != seq || d.Bind != 1 {
			t.Fatalf("delta %+v, want sequence %d", d, seq)
		}
		ids = append(ids, d.TokenIDs...)
		if d.Last {
			break
		}
	}
	if !slices.Equal(ids, []uint32{1, 2, 3}) {
		t.Errorf("streamed %v", ids)
	}
}

func TestAnAnswerThatFitsNoMessageFailsAndSaysSo(t *testing.T) {
	r := newRig(t)
	p := newPuppet(t)
	r.agent(p.url)
	r.bind(request("0001", 5))
	c := p.next()
	for range 9 {
		c.say(`data: {"choices":[{"index":0,"text":"` + strings.Repeat("x", 1<<20) + `","token_ids":[]}]}` + "\n\n")
	}
	c.finish("stop")
	got := r.result("0001")
	if got.Status != subjects.Failed || got.Error.Code != "result_too_large" || got.Error.Class != subjects.ClassData || got.Text != "" {
		t.Errorf("got %+v", got.Error)
	}
	r.released("0001")
}

func TestTheConfigurationIsRefusedWhole(t *testing.T) {
	_, err := New(Config{Pool: "P", SpoolBytes: 1, Timings: Timings{Heartbeat: -1, BackoffMin: time.Hour},
		Engines: []EngineConfig{{Name: "a"}, {Name: "a", Slots: -1, CapacityTokens: -1, MaxModelLen: -1}, {Name: "A"}}}, nil)
	for _, want := range []string{"pool", "spool", "Heartbeat", "BackoffMin", "no adapter", "twice", "slots", "capacity", "max model length", `"A"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
	ad, _ := engine.NewOpenAI(engine.OpenAIConfig{URL: "http://h"})
	if _, err := New(Config{Pool: "p", Engines: []EngineConfig{{Name: "e1", Adapter: ad}}}, nil); !errors.Is(err, kvstate.ErrBadOption) {
		t.Errorf("without a connection: %v", err)
	}
}
