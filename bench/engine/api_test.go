package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/rollbus/rollbus/bench/engine"
	sim "github.com/rollbus/rollbus/bench/engine/model"
)

func TestAChatTurnFindsTheWholeConversationBeforeIt(t *testing.T) {
	r := start(t, fast())
	question := strings.Repeat("how many primes are there below a hundred? ", 10)
	msgs := []m{{"role": "user", "content": question}}
	first := r.ok("/v1/chat/completions", m{"messages": msgs, "max_tokens": 64, "sim_output_tokens": 40})
	answer := first.Choices[0].Message
	if answer.Role != "assistant" || *first.Choices[0].FinishReason != "stop" || !strings.HasPrefix(first.ID, "chatcmpl-") {
		t.Fatalf("got %+v", first)
	}
	msgs = append(msgs, m{"role": "assistant", "content": answer.Content},
		m{"role": "user", "content": []m{{"type": "text", "text": "and above?"}}})
	second := r.ok("/v1/chat/completions", m{"messages": msgs, "max_tokens": 8})
	before := first.Usage.Prompt + first.Usage.Completion - 1 // the last token was never computed
	if got, want := second.Usage.Details.Cached, before/16*16; got != want {
		t.Errorf("the second turn found %d tokens, want the %d whole blocks of the first", got, want)
	}
	s := r.stream("/v1/chat/completions", m{"messages": msgs[:1], "max_tokens": 64, "sim_output_tokens": 40})
	if s.chunks[0].Choices[0].Delta.Role != "assistant" || s.text != answer.Content || !s.done || s.reason != "stop" {
		t.Errorf("the stream said %q (%s), the whole answer %q", s.text, s.reason, answer.Content)
	}
}

func TestAResumedRequestGoesOnAsItWouldHave(t *testing.T) {
	r := start(t, fast())
	whole := r.ok("/v1/completions", m{"prompt": ids(50), "max_tokens": 2000, "seed": 7, "sim_total_tokens": 150, "return_token_ids": true})
	out := whole.Choices[0].TokenIDs
	if len(out) != 100 || *whole.Choices[0].FinishReason != "stop" {
		t.Fatalf("%d tokens, %s", len(out), *whole.Choices[0].FinishReason)
	}
	rest := r.ok("/v1/completions", m{"prompt": append(ids(50), out[:30]...), "max_tokens": 1970, "seed": 7, "sim_total_tokens": 150, "return_token_ids": true})
	if !slices.Equal(rest.Choices[0].TokenIDs, out[30:]) {
		t.Error("the rest differs from what would have come")
	}
	other := r.ok("/v1/completions", m{"prompt": ids(50), "max_tokens": 100, "seed": 8, "ignore_eos": true, "return_token_ids": true})
	if slices.Equal(other.Choices[0].TokenIDs, out) {
		t.Error("another seed gave the same output")
	}
	other = r.ok("/v1/completions", m{"prompt": ids(51)[1:], "max_tokens": 100, "seed": 7, "ignore_eos": true, "return_token_ids": true})
	if slices.Equal(other.Choices[0].TokenIDs, out) {
		t.Error("another prompt gave the same output")
	}
}

func TestAnOutputThatNamesNoLengthEndsWhereItsTokensSay(t *testing.T) {
	c := fast()
	c.MeanOutput = 20
	r := start(t, c)
	lengths := map[int]int{}
	for seed := range 40 {
		got := r.ok("/v1/completions", m{"prompt": "one two three", "max_tokens": 500, "seed": seed})
		if *got.Choices[0].FinishReason != "stop" {
			t.Errorf("seed %d ended by %s after %d", seed, *got.Choices[0].FinishReason, got.Usage.Completion)
		}
		lengths[got.Usage.Completion]++
	}
	if len(lengths) < 10 {
		t.Errorf("40 seeds gave only %d lengths", len(lengths))
	}
	if got := r.ok("/v1/completions", m{"prompt": "x", "max_tokens": 5, "min_tokens": 5}); got.Usage.Completion != 5 {
		t.Errorf("min_tokens 5 gave %d", got.Usage.Completion)
	}
}

func TestStopStringsAndStopTokensEndTheOutput(t *testing.T) {
	r := start(t, fast())
	base := m{"prompt": ids(10), "max_tokens": 60, "ignore_eos": true, "return_token_ids": true}
	all := r.ok("/v1/completions", base).Choices[0]
	word := all.Text[4*30+2 : 4*31+2] // crosses two tokens
	base["stop"] = []string{"not there", word}
	got := r.ok("/v1/completions", base).Choices[0]
	at := strings.Index(all.Text, word)
	if *got.FinishReason != "stop" || got.StopReason != word || got.Text != all.Text[:at] {
		t.Errorf("stop %q: reason %s %v, text %q", word, *got.FinishReason, got.StopReason, got.Text)
	}
	if s := r.stream("/v1/completions", base); s.text != got.Text || len(s.tokens) != len(got.TokenIDs) {
		t.Errorf("the stream's text is %q, want %q", s.text, got.Text)
	}
	delete(base, "stop")
	base["stream"] = false
	base["stop_token_ids"] = []uint32{all.TokenIDs[12]}
	got = r.ok("/v1/completions", base).Choices[0]
	if first := slices.Index(all.TokenIDs, all.TokenIDs[12]); len(got.TokenIDs) != first+1 || *got.FinishReason != "stop" {
		t.Errorf("stop token: %d tokens, want %d", len(got.TokenIDs), first+1)
	}
}

func TestTokenizeReadsItsOwnTextBackAndIsNotChangedByWhatFollows(t *testing.T) {
	r := start(t, fast())
	text := r.ok("/v1/completions", m{"prompt": "a", "max_tokens": 50, "ignore_eos": true, "return_token_ids": true}).Choices[0]
	if got := engine.Tokenize(nil, text.Text); !slices.Equal(got, text.TokenIDs) {
		t.Error("the text of an output reads back as other tokens")
	}
	prompt := "héllo wörld, this is odd"
	if a, b := engine.Tokenize(nil, prompt), engine.Tokenize(nil, prompt+text.Text); !slices.Equal(a, b[:len(a)]) {
		t.Error("what was appended changed the tokens before it")
	}
	status, b := r.call("POST", "/tokenize", m{"prompt": prompt})
	var got struct{ Count int }
	if err := json.Unmarshal([]byte(b), &got); err != nil || status != 200 || got.Count != len(engine.Tokenize(nil, prompt)) {
		t.Errorf("/tokenize: %d %s", status, b)
	}
}

func TestLogprobsComeOneATokenInBothShapes(t *testing.T) {
	r := start(t, fast())
	var flat struct {
		Tokens  []string
		Values  []float64 `json:"token_logprobs"`
		Offsets []int     `json:"text_offset"`
	}
	c := r.ok("/v1/completions", m{"prompt": "a", "max_tokens": 9, "ignore_eos": true, "logprobs": 1}).Choices[0]
	if err := json.Unmarshal(c.Logprobs, &flat); err != nil {
		t.Fatal(err)
	}
	if strings.Join(flat.Tokens, "") != c.Text || len(flat.Values) != 9 || flat.Offsets[8] != 32 {
		t.Errorf("got %+v for %q", flat, c.Text)
	}
	var nested struct{ Content []struct{ Logprob float64 } }
	c = r.ok("/v1/chat/completions", m{"messages": []m{{"role": "user", "content": "a"}}, "max_tokens": 9, "ignore_eos": true, "logprobs": true}).Choices[0]
	if err := json.Unmarshal(c.Logprobs, &nested); err != nil || len(nested.Content) != 9 {
		t.Errorf("chat: %v, %d entries", err, len(nested.Content))
	}
}

func TestWrongRequestsAreRefusedInTheShapeOfVLLM(t *testing.T) {
	c := fast()
	c.MaxModelLen, c.LoRAs = 1000, []string{"adapter"}
	r := start(t, c)
	for _, x := range []struct {
		name   string
		body   any
		status int
		kind   string
		has    string
	}{
		{"context", m{"prompt": ids(900), "max_tokens": 101}, 400, "BadRequestError", "maximum context length is 1000 tokens"},
		{"model", m{"model": "nope", "prompt": "a"}, 404, "NotFoundError", "`nope` does not exist"},
		{"no prompt", m{"max_tokens": 1}, 400, "BadRequestError", "prompt is missing"},
		{"empty prompt", m{"prompt": []int{}}, 400, "BadRequestError", "empty"},
		{"negative id", m{"prompt": []int{-1}}, 400, "BadRequestError", "neither a string"},
		{"two prompts", m{"prompt": [][]int{{1}, {2}}}, 400, "BadRequestError", "several prompts"},
		{"n", m{"prompt": "a", "n": 2}, 400, "BadRequestError", "n is 2"},
		{"max_tokens", m{"prompt": "a", "max_tokens": 0}, 400, "BadRequestError", "max_tokens is 0"},
		{"stream_options", m{"prompt": "a", "stream_options": m{}}, 400, "BadRequestError", "Stream options"},
		{"priority", m{"prompt": "a", "priority": 3}, 400, "BadRequestError", "priority scheduling"},
		{"long stop", m{"prompt": "a", "stop": strings.Repeat("x", 257)}, 400, "BadRequestError", "over 256 bytes"},
		{"no object", []int{1}, 400, "BadRequestError", "not the JSON"},
	} {
		t.Run(x.name, func(t *testing.T) {
			status, b := r.call("POST", "/v1/completions", x.body)
			var got reply
			if err := json.Unmarshal([]byte(b), &got); err != nil || got.Error == nil {
				t.Fatalf("%d %s", status, b)
			}
			if status != x.status || got.Error.Code != x.status || got.Error.Type != x.kind || !strings.Contains(got.Error.Message, x.has) {
				t.Errorf("got %d %s", status, b)
			}
		})
	}
	if status, _ := r.call("GET", "/nothing", nil); status != 404 {
		t.Errorf("an unknown path answers %d", status)
	}
	r.ok("/v1/completions", m{"model": "adapter", "prompt": ids(900), "max_tokens": 100})
	if got := r.ok("/v1/completions", m{"prompt": ids(900), "max_tokens": 100}); got.Usage.Details.Cached != 0 {
		t.Error("the base model found what the adapter had cached (scenario C7)")
	}
}

func TestAFullQueueAnswers503(t *testing.T) {
	r := start(t, engine.Config{Engine: sim.Config{MaxRunning: 1}, MaxQueued: 2})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if res, err := r.try(ctx, "POST", "/v1/completions", m{"prompt": "a", "max_tokens": 100000, "ignore_eos": true}); err == nil {
				res.Body.Close()
			}
		})
	}
	eventually(t, "one runs and two wait", func() bool { s := r.stats(); return s.Running == 1 && s.Waiting == 2 })
	if status, b := r.call("POST", "/v1/completions", m{"prompt": "a"}); status != 503 {
		t.Errorf("the fourth got %d %s", status, b)
	}
	cancel()
	wg.Wait()
	eventually(t, "clients that left free their places", func() bool { s := r.stats(); return s.Running+s.Waiting == 0 && s.KVUsed == 0 })
}

func (r *rig) metrics() map[string]float64 {
	r.Helper()
	status, b := r.call("GET", "/metrics", nil)
	if status != 200 {
		r.Fatalf("/metrics: %d %s", status, b)
	}
	p := expfmt.NewTextParser(model.UTF8Validation)
	fams, err := p.TextToMetricFamilies(strings.NewReader(b))
	if err != nil {
		r.Fatal(err)
	}
	out := map[string]float64{}
	for name, f := range fams {
		for _, x := range f.Metric {
			var key strings.Builder
			key.WriteString(name)
			for _, l := range x.Label {
				switch l.GetName() {
				case "model_name":
				case "engine":
					key.WriteString("/" + l.GetValue())
				default:
					key.WriteString("," + l.GetName() + "=" + l.GetValue())
				}
			}
			v := x.GetGauge().GetValue()
			if f.GetType().String() == "COUNTER" {
				v = x.GetCounter().GetValue()
			}
			out[key.String()] = v
		}
	}
	return out
}

func TestMetricsCarryTheNamesOfVLLMAndAddUp(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 1000, Engine: sim.Config{KVTokens: 16000}})
	for range 2 {
		r.ok("/v1/completions", m{"prompt": ids(160), "max_tokens": 50, "ignore_eos": true})
	}
	r.ok("/v1/completions", m{"prompt": ids(160), "max_tokens": 50, "sim_output_tokens": 5})
	got := r.metrics()
	for name, want := range map[string]float64{
		"vllm:num_requests_running/0": 0, "vllm:num_requests_waiting/0": 0, "vllm:kv_cache_usage_perc/0": 0,
		"vllm:prefix_cache_queries_total/0": 480, "vllm:prefix_cache_hits_total/0": 2 * 144,
		"vllm:prompt_tokens_total/0": 480, "vllm:generation_tokens_total/0": 105, "vllm:num_preemptions_total/0": 0,
		"vllm:request_success_total/0,finished_reason=length": 2, "vllm:request_success_total/0,finished_reason=stop": 1,
		"vllm:engine_sleep_state/0,sleep_state=awake": 1,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (there: %v), want %v", name, v, ok, want)
		}
	}
	if _, b := r.call("GET", "/metrics", nil); !strings.Contains(b, `kv_cache_size_tokens="16000"`) || !strings.Contains(b, `block_size="16"`) {
		t.Error("cache_config_info does not tell capacity and block size")
	}
	if got["process_start_time_seconds"] == 0 {
		t.Error("no process start time")
	}
}

func TestTheServerSaysWhatItIs(t *testing.T) {
	r := start(t, engine.Config{Engine: sim.Config{MaxRunning: 7}})
	if status, _ := r.call("GET", "/health", nil); status != 200 {
		t.Errorf("/health: %d", status)
	}
	_, b := r.call("GET", "/v1/models", nil)
	if !strings.Contains(b, `"id":"sim"`) || !strings.Contains(b, `"max_model_len":131072`) {
		t.Errorf("/v1/models: %s", b)
	}
	if _, b := r.call("GET", "/version", nil); !strings.Contains(b, "simulated") {
		t.Errorf("/version: %s", b)
	}
	_, b = r.call("GET", "/server_info?config_format=json", nil)
	var info struct {
		Simulated bool
		VLLM      struct {
			Scheduler struct {
				Slots int `json:"max_num_seqs"`
			} `json:"scheduler_config"`
		} `json:"vllm_config"`
	}
	if err := json.Unmarshal([]byte(b), &info); err != nil || !info.Simulated || info.VLLM.Scheduler.Slots != 7 {
		t.Errorf("/server_info: %v %s", err, b)
	}
	none := start(t, engine.Config{NoControl: true})
	if status, _ := none.call("GET", "/server_info?config_format=json", nil); status != 404 {
		t.Errorf("without control endpoints /server_info answers %d", status)
	}
}

// background sends a request and hands its stream over when it has ended.
func (r *rig) background(ctx context.Context, body m) <-chan sse {
	out := make(chan sse, 1)
	body["stream"] = true
	go func() {
		res, err := r.try(ctx, "POST", "/v1/completions", body)
		if err != nil {
			out <- sse{err: err}
			return
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			out <- sse{err: errors.New(res.Status)}
			return
		}
		out <- read(res.Body)
	}()
	return out
}

func wait[T any](t *testing.T, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatalf("not within %v: %s", patience, what)
	}
	panic("unreachable")
}

func long() m {
	return m{"prompt": ids(64), "max_tokens": 100_000, "ignore_eos": true, "return_token_ids": true}
}

func TestRanksHaveEnginesOfTheirOwnAndCanBePinned(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 1000, Ranks: 2})
	send := func(rank string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL()+"/v1/completions", strings.NewReader(`{"prompt":"a b c","max_tokens":4,"ignore_eos":true}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-data-parallel-rank", rank)
		res, err := r.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode, res.Header.Get("X-Request-Id")
	}
	for range 3 {
		if status, id := send("1"); status != 200 || id == "" {
			t.Errorf("pinned: %d, id %q", status, id)
		}
	}
	if got := r.metrics(); got["vllm:generation_tokens_total/0"] != 0 || got["vllm:generation_tokens_total/1"] != 12 {
		t.Errorf("pinned to rank 1: %v", got)
	}
	var all []<-chan sse
	for range 6 {
		all = append(all, r.background(t.Context(), m{"prompt": ids(2000), "max_tokens": 5000, "ignore_eos": true}))
	}
	for _, s := range all {
		wait(t, "a request without a rank", s)
	}
	if got := r.metrics(); got["vllm:generation_tokens_total/0"] == 0 || got["vllm:generation_tokens_total/1"] == 12 {
		t.Errorf("without a rank they went to one: %v", got)
	}
	if status, _ := send("2"); status != 400 {
		t.Errorf("rank out of range: %d", status)
	}
	if status, _ := send("first"); status != 200 {
		t.Errorf("a rank that is no number is ignored, got %d", status)
	}
}

func TestAThousandStreamsShareOneEngine(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 20, Engine: sim.Config{MaxRunning: 1000, KVTokens: 1 << 20}})
	var streams []<-chan sse
	for i := range 1000 {
		streams = append(streams, r.background(t.Context(), m{"prompt": append([]uint32{uint32(i)}, ids(200)...),
			"max_tokens": 200, "ignore_eos": true, "return_token_ids": true}))
	}
	for i, s := range streams {
		if got := wait(t, "a stream", s); len(got.tokens) != 200 || !got.done || got.err != nil {
			t.Fatalf("stream %d: %d tokens, %v", i, len(got.tokens), got.err)
		}
	}
	if s := r.stats(); s.KVUsed != 0 || s.Finished != 1000 {
		t.Errorf("after them: %+v", s)
	}
}
