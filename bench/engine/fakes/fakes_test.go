package fakes

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
	wire "github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/kvevents"
	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// within bounds every wait of these tests.
const within = 20 * time.Second

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	natstest.Eventually(t, within, what, ok)
}

// follow runs a feed on a fake's events.
func follow(t *testing.T, f *Fake, change ...func(*kvevents.Config)) *kvevents.Feed {
	t.Helper()
	cfg := kvevents.Config{Epoch: "e", Index: kvevents.IndexConfig{Model: "sim"}, Sources: f.Sources(), Tick: 2 * time.Millisecond,
		CoolDown: 30 * time.Millisecond, BackoffMin: 2 * time.Millisecond, BackoffMax: 20 * time.Millisecond}
	for _, c := range change {
		c(&cfg)
	}
	feed, err := kvevents.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = feed.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	eventually(t, "following every rank", func() bool {
		for i := range f.ranks {
			if f.Subscribers(i) == 0 {
				return false
			}
		}
		return feed.Exact()
	})
	return feed
}

func small() engine.Config {
	return engine.Config{TimeScale: 200, Engine: model.Config{BlockTokens: 16, KVTokens: 1 << 14}}
}

func prompt(seed, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(seed*100_000 + i)
	}
	return out
}

func request(tokens []uint32) *subjects.Request {
	return &subjects.Request{ID: "0001", Job: "j", PromptTokenIDs: tokens, Sampling: subjects.SamplingParams{MaxTokens: 8, IgnoreEOS: true}}
}

// generate runs one request to its end.
func generate(t *testing.T, a wire.Adapter, r *subjects.Request, rank *int) wire.Outcome {
	t.Helper()
	o, err := a.Generate(t.Context(), r, wire.Run{ID: fmt.Sprintf("%016x", time.Now().UnixNano()), Rank: rank}, nil)
	if err != nil || o.Kind != wire.Completed || o.Usage == nil {
		t.Fatalf("%+v %v", o, err)
	}
	return o
}

func blocks(tokens []uint32, salt string) []uint64 {
	return blockhash.Chain(nil, blockhash.Namespace("sim", "", salt), tokens, 64)
}

// open makes the adapter that detection chooses.
func open(t *testing.T, f *Fake, opts wire.Options, kind string) wire.Adapter {
	t.Helper()
	a, d, err := wire.Open(t.Context(), "auto="+f.URL(), opts)
	if err != nil || d.Kind != kind {
		t.Fatalf("%+v %v", d, err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func close1(t *testing.T, f *Fake) { t.Cleanup(func() { f.Close() }) }

// TestWhatTheEventsSayIsWhatTheEngineHas runs prompts and compares the view with
// the cached tokens that the engine reports, for each dialect.
func TestWhatTheEventsSayIsWhatTheEngineHas(t *testing.T) {
	for name, start := range map[string]func() (*Fake, error){
		"vllm maps": func() (*Fake, error) {
			return VLLM(VLLMConfig{Engine: small(), Events: &EventsConfig{Topic: "kv-events", NewFraming: true}})
		},
		"vllm arrays": func() (*Fake, error) {
			return VLLM(VLLMConfig{Engine: small(), Events: &EventsConfig{}, Dialect: kvevents.VLLMArrays})
		},
		"vllm v0.11": func() (*Fake, error) {
			return VLLM(VLLMConfig{Engine: small(), Events: &EventsConfig{NoReplay: true}, Dialect: kvevents.VLLMMedium})
		},
		"sglang maps": func() (*Fake, error) {
			return SGLang(SGLangConfig{Engine: small(), Events: &EventsConfig{}, Metrics: true})
		},
		"sglang arrays": func() (*Fake, error) {
			return SGLang(SGLangConfig{Engine: small(), Events: &EventsConfig{}, Dialect: kvevents.SGLangArrays, Incremental: true})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := start()
			if err != nil {
				t.Fatal(err)
			}
			close1(t, f)
			kind := "sglang"
			if name[0] == 'v' {
				kind = "sim"
			}
			a := open(t, f, wire.Options{}, kind)
			feed := follow(t, f)
			p := prompt(1, 640)
			if o := generate(t, a, request(p), nil); o.Usage.CachedTokens != nil && *o.Usage.CachedTokens != 0 {
				t.Errorf("a first prompt is cached: %+v", o.Usage)
			}
			matches := func(p []uint32, want int) func() bool {
				return func() bool { n, _ := feed.View().Match(blocks(p, "")); return n == want }
			}
			eventually(t, "the prompt's ten blocks", matches(p, 10))
			longer := append(append([]uint32(nil), p...), prompt(2, 64)...)
			n, _ := feed.View().Match(blocks(longer, ""))
			if o := generate(t, a, request(longer), nil); o.Usage.CachedTokens == nil || *o.Usage.CachedTokens != n*64 {
				t.Errorf("predicted %d cached tokens, the engine had %v", n*64, o.Usage.CachedTokens)
			}
			r := request(p)
			r.CacheSalt = "tenant" // scenario C7
			if name != "vllm v0.11" {
				generate(t, a, r, nil)
				eventually(t, "the salted one", func() bool { n, _ := feed.View().Match(blocks(p, "tenant")); return n == 10 })
			}
			f.Lose(0, 1)
			generate(t, a, request(prompt(3, 640)), nil)
			generate(t, a, request(prompt(4, 640)), nil)
			if name == "vllm v0.11" { // no replay endpoint
				eventually(t, "the gap ends the credit", func() bool { return !feed.Exact() || feed.View().Len() == 0 })
			} else {
				eventually(t, "the gap is filled", func() bool { return matches(prompt(3, 640), 10)() && matches(prompt(4, 640), 10)() })
			}
			f.Die() // scenario C2
			if err := f.Restart(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the dead blocks are gone", func() bool { return feed.View().Len() == 0 && feed.Exact() && f.Subscribers(0) == 1 })
			generate(t, a, request(p), nil)
			eventually(t, "the next life", matches(p, 10))
			for i := range 40 { // more than fits: evictions
				generate(t, a, request(prompt(10+i, 640)), nil)
			}
			n = 0
			eventually(t, "the view is no larger than the cache", func() bool { n = feed.View().Len(); return n > 100 && n <= (1<<14)/64 })
			if s := feed.Status()[0]; s.Broken+s.Unknown+s.Malformed > 0 || s.Index.Mismatched+s.Index.Ambiguous > 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestRanksPublishEachForItself(t *testing.T) {
	c := small()
	c.Ranks = 2
	f, err := VLLM(VLLMConfig{Engine: c, Events: &EventsConfig{}, Sources: true, TokensAPI: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, f)
	a := open(t, f, wire.Options{TokensOnly: true}, "sim").(*wire.VLLM)
	caps, err := a.Capabilities(t.Context())
	if err != nil || caps.Events != "exact" || caps.Ranks != 2 {
		t.Fatalf("%+v %v", caps, err)
	}
	src, err := a.EventSources(t.Context())
	if err != nil || len(src) != 2 || src[1] != f.Sources()[1] {
		t.Fatalf("%+v %v, want %+v", src, err, f.Sources())
	}
	feed := follow(t, f)
	for rank := range 2 {
		p := prompt(rank, 640)
		o := generate(t, a, request(p), &rank)
		if o.Text != "" || len(o.TokenIDs) != 8 {
			t.Errorf("tokens in, %q and %v out", o.Text, o.TokenIDs)
		}
		eventually(t, "stored", func() bool {
			n, _ := feed.View().Match(blocks(p, ""))
			return n == 10 && feed.Status()[rank].Index.Nodes >= 40
		})
	}
}

func TestAPublisherThatDials(t *testing.T) {
	path := "ipc://" + t.TempDir() + "/kv"
	f, err := VLLM(VLLMConfig{Engine: small(), Events: &EventsConfig{Dial: []string{path}}})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, f)
	feed := follow(t, f, func(c *kvevents.Config) {
		c.Sources = []kvevents.Source{{Endpoint: path, Bind: true, Replay: f.Replay(0)}}
	})
	generate(t, open(t, f, wire.Options{}, "sim"), request(prompt(1, 640)), nil)
	eventually(t, "stored", func() bool { n, _ := feed.View().Match(blocks(prompt(1, 640), "")); return n == 10 })
}

// scenarios R4, R9, R14
func TestSGLangIsControlled(t *testing.T) {
	c := small()
	c.TimeScale, c.WeightVersion = 1, 3
	f, err := SGLang(SGLangConfig{Engine: c, Metrics: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, f)
	a := open(t, f, wire.Options{}, "sglang").(*wire.SGLang)
	caps, err := a.Capabilities(t.Context())
	if err != nil || *caps.WeightVersion != 3 || caps.Events != "none" || *caps.Slots != f.Config().Engine.MaxRunning {
		t.Fatalf("%+v %v", caps, err)
	}
	r := request(prompt(1, 64))
	r.Sampling.MaxTokens = 8000
	got := make(chan wire.Outcome, 1)
	begun := make(chan struct{}, 1)
	go func() {
		o, _ := a.Generate(t.Context(), r, wire.Run{ID: "run-0001"}, func(wire.Delta) {
			select {
			case begun <- struct{}{}:
			default:
			}
		})
		got <- o
	}()
	<-begun
	l, err := a.Load(t.Context())
	if err != nil || len(l.Ranks) != 1 || *l.Ranks[0].Running != 1 || *l.Ranks[0].KVCapacityTokens != 1<<14 {
		t.Errorf("%+v %v", l, err)
	}
	if err := a.SetWeightVersion(t.Context(), "4"); err != nil {
		t.Error(err)
	}
	if s, err := a.State(t.Context()); err != nil || s.WeightVersion != "4" {
		t.Errorf("%+v %v", s, err)
	}
	select {
	case o := <-got:
		t.Fatalf("a new version ended the run: %+v", o)
	default:
	}
	if err := a.Abort(t.Context(), wire.Run{ID: "run-0001"}); err != nil {
		t.Error(err)
	}
	o := <-got
	if o.Kind != wire.Aborted || len(o.TokenIDs) == 0 {
		t.Errorf("%+v", o)
	}
}

func TestSGLangsLoadIsPushed(t *testing.T) {
	f, err := SGLang(SGLangConfig{Engine: small(), Events: &EventsConfig{}, Loads: true, NoLoads: true})
	if err != nil {
		t.Fatal(err)
	}
	close1(t, f)
	a := open(t, f, wire.Options{}, "sglang")
	if _, err := a.Capabilities(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a pushed load", func() bool {
		l, err := a.Load(t.Context())
		return err == nil && l != nil && l.Source == "sglang:LoadStat" && *l.Ranks[0].MaxRunning > 0
	})
}

// TestFramesAreThoseOfTheRecordings compares what a subscriber and a replay get
// with recorded frames, byte for byte.
func TestFramesAreThoseOfTheRecordings(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "..", "workeragent", "kvevents", "testdata", "frames.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name   string
		Frames []string `json:"frames_hex"`
		Expect struct{ Topic string }
	}
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	recorded := map[string][]string{}
	for _, c := range cases {
		recorded[c.Name] = c.Frames
	}
	for _, c := range []struct {
		live, batch, end string
		topic            string
		newFraming       bool
	}{
		{"live_vllm", "replay_new_batch", "replay_new_end", "kv-events", true},
		{"live_empty_topic", "replay_new_batch_empty_topic", "replay_new_end", "", true},
		{"live_vllm", "replay_old_batch", "replay_old_end", "kv-events", false},
	} {
		p, err := newPublisher(EventsConfig{NewFraming: c.newFraming}.withDefaults(), c.topic, 0, true)
		if err != nil {
			t.Fatal(err)
		}
		sub, err := zmq.Dial(t.Context(), p.endpoint(), zmq.Options{Type: zmq.SUB})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "subscribed", func() bool { return p.subscribers() == 1 })
		live := recorded[c.live]
		var at uint64
		if _, err := fmt.Sscanf(live[1], "%x", &at); err != nil {
			t.Fatal(err)
		}
		p.next = at
		payload, _ := hex.DecodeString(live[2])
		p.send(payload)
		same(t, c.live, live, receive(t, sub))
		// A replay of one batch, at the recording's sequence.
		batch := recorded[c.batch]
		if _, err := fmt.Sscanf(batch[len(batch)-2], "%x", &at); err != nil {
			t.Fatal(err)
		}
		payload, _ = hex.DecodeString(batch[len(batch)-1])
		p.next, p.ring = at, nil
		p.send(payload)
		ask, err := zmq.Dial(t.Context(), p.replayEndpoint(), zmq.Options{Type: zmq.DEALER})
		if err != nil {
			t.Fatal(err)
		}
		if err := ask.Send([]byte("no delimiter")); err != nil { // never answered
			t.Fatal(err)
		}
		if err := ask.Send(kvevents.ReplayRequest(at)...); err != nil {
			t.Fatal(err)
		}
		same(t, c.batch, batch, receive(t, ask))
		same(t, c.end, recorded[c.end], receive(t, ask))
		sub.Close()
		ask.Close()
		p.close()
	}
}

func receive(t *testing.T, c *zmq.Conn) []string {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	m, err := c.Recv()
	if err != nil {
		t.Fatal(err)
	}
	out := make([]string, len(m))
	for i, f := range m {
		out[i] = hex.EncodeToString(f)
	}
	return out
}

func same(t *testing.T, name string, want, got []string) {
	t.Helper()
	if fmt.Sprint(want) != fmt.Sprint(got) {
		t.Errorf("%s:\n got %q\nwant %q", name, got, want)
	}
}
