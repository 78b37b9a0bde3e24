package engine_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/engine"
	sim "github.com/rollbus/rollbus/bench/engine/model"
)

func (r *rig) arm(f m) {
	r.Helper()
	if status, b := r.call("POST", "/sim/fault", f); status != 200 {
		r.Fatalf("arming %v: %d %s", f, status, b)
	}
}

func short() m {
	return m{"prompt": ids(64), "max_tokens": 20, "ignore_eos": true, "return_token_ids": true}
}

func TestAFaultStrikesSoManyRequestsAndNoMore(t *testing.T) {
	r := start(t, fast())
	r.arm(m{"kind": "500", "count": 2})
	r.arm(m{"kind": "503", "count": 1, "retry_after_s": 3})
	r.arm(m{"kind": "429", "count": 1})
	r.arm(m{"kind": "html", "count": 1})
	var got []int
	for range 6 {
		status, b := r.call("POST", "/v1/completions", short())
		got = append(got, status)
		if isJSON := strings.HasPrefix(b, "{"); isJSON == (status == 502) {
			t.Errorf("%d came with %s", status, b)
		}
	}
	if want := []int{500, 500, 503, 429, 502, 200}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	r.arm(m{"kind": "500"})
	for range 3 {
		if status, _ := r.call("POST", "/v1/completions", short()); status != 500 {
			t.Errorf("without a count it strikes until cleared, got %d", status)
		}
	}
	if _, b := r.call("GET", "/sim/fault", nil); !strings.Contains(b, `"kind":"500"`) {
		t.Errorf("armed: %s", b)
	}
	r.arm(m{"kind": "clear"})
	r.ok("/v1/completions", short())
	if status, _ := r.call("POST", "/sim/fault", m{"kind": "explode"}); status != 400 {
		t.Errorf("an unknown fault: %d", status)
	}
}

func TestFaultsOfTheConfigurationAreArmedFromTheStart(t *testing.T) {
	c := fast()
	c.Faults = []engine.Fault{{Kind: engine.Fault500, Count: 1}}
	r := start(t, c)
	if status, _ := r.call("POST", "/v1/completions", short()); status != 500 {
		t.Errorf("got %d", status)
	}
	if _, err := engine.New(engine.Config{Faults: []engine.Fault{{Kind: "x", Count: -1}}, Ranks: -1, TimeScale: -1}); err == nil ||
		!strings.Contains(err.Error(), `"x"`) || !strings.Contains(err.Error(), "-1 ranks") || !strings.Contains(err.Error(), "time scale -1") {
		t.Errorf("a wrong configuration: %v", err)
	}
}

func TestAHangNeverAnswersAndTheClientMayLeave(t *testing.T) {
	r := start(t, fast())
	r.arm(m{"kind": "hang", "count": 1})
	ctx, cancel := context.WithCancelCause(t.Context())
	hung := r.background(ctx, short())
	eventually(t, "it was taken", func() bool { return len(r.Faults()) == 0 })
	r.ok("/v1/completions", short()) // others go on
	select {
	case got := <-hung:
		t.Fatalf("the hung request was answered: %+v", got)
	default:
	}
	cancel(errors.New("the client has waited enough"))
	if got := wait(t, "the hung client", hung); got.err == nil {
		t.Error("it ended without an error")
	}
}

// scenario R16: an error object after HTTP 200, then [DONE].
func TestStreamFaultsCutAtTheTokenAndLookAsTheyDoInTheField(t *testing.T) {
	for _, x := range []struct {
		kind   string
		after  int
		reason string
		done   bool
		failed bool // an error object
		broken bool // the body ends with an error
	}{
		{"truncate", 5, "", false, false, false},
		{"error_after", 5, "", true, true, false},
		{"error_after", 0, "", true, true, false},
		{"abort", 5, "abort", true, false, false},
		{"abort_silent", 0, "", true, false, false},
		{"disconnect_at", 5, "", false, false, true},
		{"disconnect_at", 0, "", false, false, true},
	} {
		t.Run(x.kind, func(t *testing.T) {
			r := start(t, fast())
			r.arm(m{"kind": x.kind, "count": 1, "after_tokens": x.after})
			got := r.stream("/v1/completions", short())
			failed := slices.ContainsFunc(got.chunks, func(c reply) bool { return c.Error != nil && c.Error.Code == 500 })
			if len(got.tokens) != x.after || got.reason != x.reason || got.done != x.done || failed != x.failed || (got.err != nil) != x.broken {
				t.Errorf("%d tokens, reason %q, done %v, error object %v, broken %v; want %+v", len(got.tokens), got.reason, got.done, failed, got.err, x)
			}
			eventually(t, "the engine is free again", func() bool { s := r.stats(); return s.Running == 0 && s.KVUsed == 0 })
			if again := r.stream("/v1/completions", short()); again.reason != "length" || !again.done {
				t.Errorf("the next request: %+v", again)
			}
		})
	}
}

func TestFaultsStrikeCallsThatDoNotStream(t *testing.T) {
	r := start(t, fast())
	r.arm(m{"kind": "error_after", "count": 1, "after_tokens": 3})
	if status, _ := r.call("POST", "/v1/completions", short()); status != 500 {
		t.Errorf("error_after: %d", status)
	}
	r.arm(m{"kind": "abort", "count": 1, "after_tokens": 3})
	if got := r.ok("/v1/completions", short()).Choices[0]; *got.FinishReason != "abort" || len(got.TokenIDs) != 3 {
		t.Errorf("abort: %+v", got)
	}
	r.arm(m{"kind": "truncate", "count": 1})
	if status, b := r.call("POST", "/v1/completions", short()); status != 200 || strings.HasSuffix(b, "}") {
		t.Errorf("truncate: %d %s", status, b)
	}
	r.arm(m{"kind": "disconnect_at", "count": 1})
	if res, err := r.try(t.Context(), "POST", "/v1/completions", short()); err == nil {
		res.Body.Close()
		t.Error("disconnect_at was answered")
	}
}

func TestADripGivesOneTokenAnInterval(t *testing.T) {
	r := start(t, fast())
	r.arm(m{"kind": "drip", "count": 1, "interval_ms": 10})
	body := short()
	body["max_tokens"] = 8
	began := time.Now()
	got := r.stream("/v1/completions", body)
	if took := time.Since(began); took < 80*time.Millisecond {
		t.Errorf("8 tokens dripped in %v", took)
	}
	for _, c := range got.chunks {
		if n := len(c.Choices[0].TokenIDs); n > 1 {
			t.Errorf("a drop of %d tokens", n)
		}
	}
	if len(got.tokens) != 8 || got.reason != "length" || !got.done {
		t.Errorf("%d tokens, %q", len(got.tokens), got.reason)
	}
}

func TestAWedgedEngineIsHealthyAndMakesNoStep(t *testing.T) {
	r := start(t, fast())
	r.arm(m{"kind": "wedge"})
	stuck := r.background(t.Context(), short())
	eventually(t, "it waits", func() bool { return r.stats().Waiting == 1 })
	if status, _ := r.call("GET", "/health", nil); status != 200 {
		t.Errorf("/health: %d", status)
	}
	if got := r.metrics(); got["vllm:num_requests_running/0"] != 0 || got["vllm:generation_tokens_total/0"] != 0 {
		t.Errorf("wedged: %v", got)
	}
	r.arm(m{"kind": "clear"})
	if got := wait(t, "the stuck request", stuck); got.reason != "length" {
		t.Errorf("after the wedge: %+v", got)
	}
}

func TestADeadCoreSaysSoUntilItIsCleared(t *testing.T) {
	r := start(t, fast())
	r.arm(m{"kind": "dead"})
	if status, _ := r.call("GET", "/health", nil); status != 503 {
		t.Errorf("/health: %d", status)
	}
	if status, _ := r.call("POST", "/v1/completions", short()); status != 500 {
		t.Errorf("a request: %d", status)
	}
	r.arm(m{"kind": "clear"})
	r.ok("/v1/completions", short())
}

// scenario R20: closing the client does not stop the engine.
func TestAClientThatLeavesStopsItsRequestUnlessTheEngineKeepsIt(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 20})
	ctx, cancel := context.WithCancel(t.Context())
	gone := r.background(ctx, long())
	eventually(t, "it runs", func() bool { return r.stats().Running == 1 })
	cancel()
	wait(t, "the client", gone)
	eventually(t, "the engine stopped it", func() bool { return r.stats().Running == 0 })

	r.arm(m{"kind": "keep", "count": 1})
	ctx, cancel = context.WithCancel(t.Context())
	gone = r.background(ctx, long())
	eventually(t, "it runs", func() bool { return r.stats().Running == 1 })
	cancel()
	wait(t, "the client", gone)
	before := r.stats().GenerationTokens
	eventually(t, "it goes on without its client", func() bool { return r.stats().GenerationTokens > before })
	r.call("POST", "/abort_requests", m{"request_ids": []string{"cmpl-t1"}})
	if s := r.stats(); s.Running != 0 {
		t.Error("an abort by id did not end it")
	}
}

func TestDieDropsEverythingAndRestartBeginsAnewOnTheSameAddress(t *testing.T) {
	lives := make(chan int, 10)
	r := start(t, engine.Config{TimeScale: 20, OnLife: func(n int) { lives <- n }})
	r.ok("/v1/completions", short())
	addr, before := r.Addr(), r.metrics()["process_start_time_seconds"]
	a := r.background(t.Context(), long())
	eventually(t, "it runs", func() bool { return r.stats().Running == 1 })
	if status, _ := r.call("POST", "/sim/fault", m{"kind": "die"}); status != 202 {
		t.Errorf("die: %d", status)
	}
	if got := wait(t, "the running request", a); got.err == nil || got.done {
		t.Errorf("it ended cleanly: %+v", got)
	}
	eventually(t, "the listener is closed", func() bool {
		res, err := r.try(t.Context(), "GET", "/health", nil)
		if err == nil {
			res.Body.Close()
		}
		return err != nil
	})
	if _, err := r.Stats(); !errors.Is(err, engine.ErrDown) {
		t.Errorf("stats of a dead engine: %v", err)
	}
	if err := r.Restart(); err != nil {
		t.Fatal(err)
	}
	got := r.metrics()
	if r.Addr() != addr || got["process_start_time_seconds"] == before || got["vllm:prompt_tokens_total/0"] != 0 {
		t.Errorf("after the restart: addr %s, %v", r.Addr(), got)
	}
	if u := r.ok("/v1/completions", short()).Usage; u.Details.Cached != 0 {
		t.Error("the cache survived the restart")
	}
	if status, _ := r.call("POST", "/sim/fault", m{"kind": "restart"}); status != 202 {
		t.Errorf("restart: %d", status)
	}
	for n := 1; n <= 3; n++ {
		if got := wait(t, "a life", lives); got != n {
			t.Errorf("life %d was announced as %d", n, got)
		}
	}
	eventually(t, "it answers again", func() bool {
		res, err := r.try(t.Context(), "GET", "/health", nil)
		if err == nil {
			res.Body.Close()
		}
		return err == nil
	})
}

func TestStartCloseAndRunKeepTheirContract(t *testing.T) {
	s, err := engine.New(fast())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Submit(engine.Generation{Prompt: ids(3), MaxTokens: 1}); !errors.Is(err, engine.ErrDown) || s.URL() != "" {
		t.Errorf("before Start: %v, %q", err, s.URL())
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); !errors.Is(err, engine.ErrRunning) {
		t.Errorf("a second Start: %v", err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if err := s.Restart(); !errors.Is(err, engine.ErrDown) {
		t.Errorf("Restart after Close: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	up := make(chan int, 1)
	go func() { done <- engine.Run(ctx, engine.Config{OnLife: func(n int) { up <- n }}) }()
	wait(t, "a life", up)
	cancel()
	if err := wait(t, "Run", done); err != nil {
		t.Errorf("Run: %v", err)
	}
	if err := engine.Run(t.Context(), engine.Config{Listen: "256.0.0.1:0"}); err == nil {
		t.Error("Run on an impossible address answered nil")
	}
}

func TestSubmitServesAPIsThatOthersAdd(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 1000, Without: []string{"/version"}, Routes: func(s *engine.Server, mux *http.ServeMux) {
		mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "mine") })
	}})
	if _, b := r.call("GET", "/version", nil); b != "mine" {
		t.Errorf("/version: %s", b)
	}
	j, err := r.Submit(engine.Generation{Prompt: ids(40), MaxTokens: 30, IgnoreEOS: true, Stream: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for {
		tokens, end, err := j.Next(t.Context(), -1, nil)
		if err != nil {
			t.Fatal(err)
		}
		n += len(tokens)
		if end != nil {
			if end.Tokens != 30 || n != 30 || end.Reason != "length" {
				t.Errorf("%d tokens read, end %+v", n, end)
			}
			break
		}
	}
	if _, err := r.Submit(engine.Generation{Prompt: ids(40), MaxTokens: 1 << 40}); !errors.Is(err, engine.ErrBadRequest) {
		t.Errorf("too long: %v", err)
	}
}

func TestCacheEventsCarryWhatARealEngineTells(t *testing.T) {
	var mu sync.Mutex
	var events []engine.KVEvent
	r := start(t, engine.Config{TimeScale: 1000, Engine: sim.Config{KVTokens: 160}, OnKV: func(rank int, step []engine.KVEvent) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, step...)
	}})
	first := r.ok("/v1/completions", m{"prompt": ids(40), "max_tokens": 30, "ignore_eos": true, "cache_salt": "s", "return_token_ids": true})
	r.ok("/v1/completions", m{"prompt": ids(100), "max_tokens": 20, "ignore_eos": true})
	r.call("POST", "/reset_prefix_cache", nil)
	var tokens []uint32
	held := map[uint64]bool{}
	cleared := false
	eventually(t, "the cleared event", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return events[len(events)-1].Kind == sim.Cleared
	})
	mu.Lock()
	defer mu.Unlock()
	for _, e := range events {
		switch e.Kind {
		case sim.Stored:
			if len(e.Tokens) != e.BlockTokens*len(e.Hashes) || e.HasParent != (e.Parent != 0) || e.HasParent && !held[e.Parent] {
				t.Errorf("stored %+v", e)
			}
			if e.Salt == "s" {
				tokens = append(tokens, e.Tokens...)
			}
			for _, h := range e.Hashes {
				held[h] = true
			}
		case sim.Removed:
			for _, h := range e.Hashes {
				if !held[h] {
					t.Errorf("removed a block that was never stored")
				}
				delete(held, h)
			}
		case sim.Cleared:
			cleared = true
		}
	}
	want := append(ids(40), first.Choices[0].TokenIDs...)[:64]
	if !slices.Equal(tokens, want) {
		t.Errorf("stored tokens of the first request: %d, want its 64 in whole blocks", len(tokens))
	}
	if !cleared || len(held) > 10 {
		t.Errorf("cleared %v, %d blocks left of a pool of 10", cleared, len(held))
	}
}
