package workeragent

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/bench/engine/fakes/faketest"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// alarms of a kind that the agent counted.
func (a *agentRun) alarms(kind kvevents.AlarmKind) float64 {
	reg := prometheus.NewRegistry()
	reg.MustRegister(a.metrics.cacheAlarms)
	families, _ := reg.Gather() // what cannot be read counts as none
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "kind" && l.GetValue() == string(kind) {
					return m.GetCounter().GetValue()
				}
			}
		}
	}
	return 0
}

// ran runs a prompt to its end.
func (r *rig) ran(id string, tokens []uint32) {
	r.t.Helper()
	r.bind(requestOf(id, tokens, 8))
	if got := r.result(id); got.Status != subjects.Truncated {
		r.t.Errorf("%s ended as %+v", id, got)
	}
	r.released(id)
}

// scenario C2: a restarted engine's sequence begins anew and nothing is said of
// what it lost.
func TestARestartedEnginesCacheIsOfAnotherEpochAndEmpty(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t)
	h := r.listen()
	r.agent(f.URL(), vllm(t, f.URL()))
	before := r.registered("its events are followed", withEvents(eventsExact))
	p := prompt(1, 256)
	r.ran("0001", p)
	r.holds("its prompt is in the view", p, 4)
	if err := f.Arm(simengine.Fault{Kind: simengine.FaultRestart}); err != nil {
		t.Fatal(err)
	}
	after := r.registered("another epoch is registered", func(e subjects.Engine) bool {
		return e.Epoch != before.Epoch && withEvents(eventsExact)(e)
	})
	r.eventually("the snapshot is of that epoch, and empty", func() bool {
		epoch, held, ok := r.snapshot()
		return ok && epoch == after.Epoch && len(held) == 0
	})
	r.eventually("the new epoch begins with a cleared cache", func() bool {
		return h.has(func(c kvevents.Change) bool { return c.Epoch == after.Epoch && c.Seq == 1 && cleared(c) })
	})
	q := prompt(2, 256)
	r.ran("0002", q)
	r.holds("what it computes now is in the view", q, 4)
	r.holds("what it had is not", p, 0)
}

// An outage of the event feed: batches are lost, the gap is found with the next
// one and filled by a replay.
func TestAGapInTheEventsIsFilledByAReplay(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t)
	r.agent(f.URL(), vllm(t, f.URL()))
	r.registered("its events are followed", withEvents(eventsExact))
	r.eventually("somebody has subscribed", func() bool { return f.Subscribers(0) == 1 })
	f.Lose(0, 1<<20)
	p, q := prompt(1, 256), prompt(2, 256)
	r.ran("0001", p)
	f.Lose(0, 0)
	r.ran("0002", q)
	r.holds("the prompt of the gap is in the view", p, 4)
	r.holds("and the one after it", q, 4)
}

// Without a replay endpoint, which is the engines' default, nothing can fill it:
// no credit is better than false credit.
func TestAGapThatNothingFillsEndsTheCredit(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Events.NoReplay = true })
	a := r.agent(f.URL(), vllm(t, f.URL()))
	r.registered("its events are followed", withEvents(eventsExact))
	r.eventually("somebody has subscribed", func() bool { return f.Subscribers(0) == 1 })
	p := prompt(1, 256)
	r.ran("0001", p)
	r.holds("its prompt is in the view", p, 4)
	f.Lose(0, 1)
	r.ran("0002", prompt(2, 256))
	r.ran("0003", prompt(3, 256))
	r.holds("nothing counts any more", p, 0)
	if a.alarms(kvevents.AlarmDegraded) == 0 {
		t.Error("nobody is told")
	}
}

// What changed while NATS was away was not told: whoever follows the changes is
// made to ask for a snapshot.
func TestAfterAnOutageOfNATSTheChangesShowAGap(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t)
	l := &line{}
	h := r.listen()
	a := r.along(l, f.URL(), vllm(t, f.URL()))
	r.registered("its events are followed", withEvents(eventsExact))
	p, q := prompt(1, 256), prompt(2, 256)
	r.ran("0001", p)
	r.holds("its prompt is in the view", p, 4)
	l.sever()
	r.eventually("the agent has no contact", func() bool { return !a.nc.IsConnected() })
	if _, err := controlled(t, f.URL()).Generate(r.ctx(), requestOf("x", q, 8), engine.Run{ID: "behind-the-back"}, nil); err != nil {
		t.Fatal(err)
	}
	u := a.units[0]
	r.eventually("the agent knows of the change", func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		n, _ := u.audited.view.Match(chain(q))
		return n == 4
	})
	l.mend()
	r.eventually("a gap shows", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for i := 1; i < len(h.changes); i++ {
			if a, b := h.changes[i-1], h.changes[i]; a.Epoch == b.Epoch && b.Seq > a.Seq+1 {
				return true
			}
		}
		return false
	})
	r.holds("the snapshot has it", q, 4)
}

// A worker that is taken away and comes again: of its old life nothing is left,
// of the engine's cache all is known again.
func TestAnEngineThatIsRemovedAndAddedAgainIsKnownAnew(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t)
	a := r.agent(f.URL(), vllm(t, f.URL()))
	before := r.registered("its events are followed", withEvents(eventsExact))
	p := prompt(1, 256)
	r.ran("0001", p)
	r.holds("its prompt is in the view", p, 4)
	if err := a.Stop(r.ctx()); err != nil {
		t.Fatal(err)
	}
	if _, _, ok := r.snapshot(); ok {
		t.Error("a removed engine answers for its cache")
	}
	loads := r.loads()
	r.agent(f.URL(), vllm(t, f.URL()))
	after := r.registered("its events are followed", withEvents(eventsExact))
	r.holds("the replay tells what it has", p, 4)
	epoch, _, _ := r.snapshot()
	if after.Epoch == before.Epoch || epoch != after.Epoch {
		t.Errorf("epoch %s after %s, the view's is %s", after.Epoch, before.Epoch, epoch)
	}
	r.load(loads, "the new epoch and a whole picture", func(l subjects.Load) bool {
		return l.Epoch == after.Epoch && l.Problem == "" && l.Ranks[0].Running != nil
	})
}

// Where nothing is published what ran is taken to be there: a guess, told as one.
func TestWithoutEventsTheViewIsAGuessThatExpires(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Events, c.Sources = nil, false })
	r.agent(f.URL(), vllm(t, f.URL()), func(c *Config) { c.Timings.CacheGuess = 2 * time.Second })
	e := r.registered("it is marked as a guess", withEvents(eventsApproximate))
	p := prompt(1, 256)
	r.ran("0001", p)
	r.holds("what ran is in the view", p, 4)
	if epoch, _, _ := r.snapshot(); epoch != e.Epoch {
		t.Errorf("the view is of epoch %s, the engine of %s", epoch, e.Epoch)
	}
	r.holds("it expires", p, 0)
	behind := controlled(t, f.URL())
	r.ran("0002", p)
	r.holds("it is there again", p, 4)
	if err := behind.Sleep(r.ctx(), 1); err != nil {
		t.Fatal(err)
	}
	r.holds("whoever sleeps has no cache", p, 0)
}

func TestTheConfiguredPortsOfServersThatDoNotTellAreFollowed(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Sources, c.Engine.Ranks = false, 1 })
	at := engine.EventsConfig{Endpoint: f.Endpoint(0), Replay: f.Replay(0)}
	r.agent(f.URL(), vllm(t, f.URL(), func(c *engine.VLLMConfig) { c.Events = at }))
	r.registered("the port that the flag names is followed", withEvents(eventsExact))
	p := prompt(1, 256)
	r.ran("0001", p)
	r.holds("its prompt is in the view", p, 4)
}

// scenario C9: a port that is advertised and mute holds up nothing but its credit.
func TestAMutePortOfCacheEventsIsAlarmedAndTheEngineServesAllTheSame(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Events, c.Sources = nil, false })
	a := r.agent(f.URL(), vllm(t, f.URL(), func(c *engine.VLLMConfig) { c.Events.Endpoint = "tcp://127.0.0.1:1" }))
	p := prompt(1, 256)
	r.ran("0001", p)
	r.eventually("the mute port is told", func() bool { return a.alarms(kvevents.AlarmMute) > 0 })
	r.holds("it is credited with nothing", p, 0)
	if err := a.Ready(); err != nil {
		t.Error(err)
	}
}

// scenario C6: the model has another name here than in the requests, so no prompt
// ever matches a block.
func TestAViewThatNoPromptEverMatchesIsAlarmed(t *testing.T) {
	r := newRig(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Engine.TimeScale = 500 })
	a := r.agent(f.URL(), vllm(t, f.URL()), func(c *Config) { c.Engines[0].Model = "another" })
	r.registered("its events are followed", withEvents(eventsExact))
	r.eventually("runs are held against the view", func() bool {
		u := a.units[0]
		u.mu.Lock()
		defer u.mu.Unlock()
		return u.audited != nil
	})
	for i := range 60 {
		r.ran(fmt.Sprintf("%04d", i), prompt(i, 128))
	}
	r.eventually("it is told", func() bool { return a.alarms(kvevents.AlarmNoMatch) > 0 })
	if a.alarms(kvevents.AlarmFalseHits) > 0 {
		t.Error("what never matched is told as false hits")
	}
}

// sizes are what a server of SGLang may tell of itself, and may not.
const sizes = `,"max_total_num_tokens":5000,"internal_states":[{"effective_max_running_requests_per_dp":4},{"effective_max_running_requests_per_dp":4}]`

// sglangStub is a server of two ranks that a test answers for; more are further
// fields of its server info.
func sglangStub(t *testing.T, more, loads string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/server_info":
			fmt.Fprintf(w, `{"model_path":"/m","served_model_name":"m","dp_size":2,"page_size":64,"context_length":4096,"weight_version":"3"%s}`, more)
		case "/v1/loads":
			fmt.Fprintf(w, `{"loads":[%s]}`, loads)
		default:
			http.NotFound(w, q)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func rankLoad(rank, running int) string {
	return fmt.Sprintf(`{"dp_rank":%d,"num_running_reqs":%d,"num_waiting_reqs":0,"num_used_tokens":10,"num_total_tokens":10,"max_total_num_tokens":5000,"max_running_requests":4}`, rank, running)
}

func sglang(t *testing.T, url string, change ...func(*engine.SGLangConfig)) func(*Config) {
	t.Helper()
	cfg := engine.SGLangConfig{OpenAIConfig: engine.OpenAIConfig{URL: url}}
	for _, f := range change {
		f(&cfg)
	}
	a, err := engine.NewSGLang(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return func(c *Config) { c.Engines[0].Adapter, c.Engines[0].Slots = a, 0 }
}

func TestALoadInWhichARankIsMissingDoesNotCountAndSaysSo(t *testing.T) {
	r := newRig(t)
	url := sglangStub(t, sizes, rankLoad(1, 2))
	loads := r.loads()
	r.agent(url, sglang(t, url))
	l := r.load(loads, "a problem", func(l subjects.Load) bool { return l.Problem != "" })
	if !strings.Contains(l.Problem, "1 of 2 ranks") || len(l.Ranks) != 1 || l.RanksAdvertised == nil || *l.RanksAdvertised != 2 {
		t.Errorf("%+v", l)
	}
}

// A port for pushed load that is advertised and mute, as a failed bind leaves it:
// the engine is polled.
func TestAMutePortOfPushedLoadIsPolledInstead(t *testing.T) {
	r := newRig(t)
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mute.Close() })
	_, port, err := net.SplitHostPort(mute.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	pushed := `,"kv_events":{"publisher":"zmq","endpoint_host":"127.0.0.1","endpoint_port_base":1,"topic":"","block_size":64,"dp_size":2,` +
		`"load_endpoint_port_base":` + port + `,"load_topic":"load"}`
	url := sglangStub(t, sizes+pushed, rankLoad(0, 1)+","+rankLoad(1, 2))
	loads := r.loads()
	r.agent(url, sglang(t, url))
	l := r.load(loads, "both ranks", func(l subjects.Load) bool { return len(l.Ranks) == 2 && l.Problem == "" })
	if l.Source != "sglang:/v1/loads" || *l.Ranks[0].Running != 1 || *l.Ranks[1].Running != 2 {
		t.Errorf("%+v", l)
	}
	e := r.registered("its capacity is told", func(e subjects.Engine) bool { return e.CapacityTokens != nil })
	if *e.CapacityTokens != 10_000 || e.CapacitySource != "reported" || e.Slots != 8 || e.Ranks != 2 || *e.WeightVersion != 3 {
		t.Errorf("%+v", e)
	}
}

// SGLang by its own wire: events of pages, pushed load, its own words for weights.
// Its load's subscription may end without that of its cache.
func TestAnEngineOfTheOtherKindIsFollowedByItsOwnWire(t *testing.T) {
	r := newRig(t)
	f, err := fakes.SGLang(fakes.SGLangConfig{
		Engine: simengine.Config{Model: "m", TimeScale: 50, WeightVersion: 7, Engine: model.Config{MaxRunning: 4, BlockTokens: 16, KVTokens: 1 << 15}},
		Events: &fakes.EventsConfig{}, Loads: true, Metrics: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	loads := r.loads()
	r.agent(f.URL(), sglang(t, f.URL(), func(c *engine.SGLangConfig) { c.Events.Replay = f.Replay(0) }))
	e := r.registered("its events are followed", withEvents(eventsExact))
	if e.Kind != "sglang" || *e.CapacityTokens != 1<<15 || e.Slots != 4 {
		t.Errorf("%+v", e)
	}
	r.load(loads, "a pushed picture", func(l subjects.Load) bool { return l.Source == "sglang:LoadStat" && l.Problem == "" })
	p, q := prompt(1, 256), prompt(2, 256)
	r.ran("0001", p)
	r.holds("its prompt is in the view", p, 4)
	f.MuteLoad(0)
	r.load(loads, "a polled picture", func(l subjects.Load) bool { return l.Source == "sglang:/v1/loads" && l.Problem == "" })
	r.ran("0002", q)
	r.holds("the cache is followed all the same", q, 4)
	behind, err := engine.NewSGLang(engine.SGLangConfig{OpenAIConfig: engine.OpenAIConfig{URL: f.URL()}, NoPush: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = behind.Close() })
	if err := behind.SetWeightVersion(r.ctx(), "8"); err != nil {
		t.Fatal(err)
	}
	r.registered("version 8 is registered", func(e subjects.Engine) bool { return e.WeightVersion != nil && *e.WeightVersion == 8 })
	r.holds("nothing of the old weights is left", q, 0)
}
