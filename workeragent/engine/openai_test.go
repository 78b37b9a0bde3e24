package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const good = `data: {"choices":[{"index":0,"text":"ok","token_ids":[7],"finish_reason":null}]}

data: {"choices":[{"index":0,"text":"","token_ids":[],"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}

data: [DONE]

`

// serve runs one handler for generations.
func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

// capture answers well and keeps what was asked.
func capture(t *testing.T, answer string) (*httptest.Server, func() (path string, header http.Header, body map[string]any)) {
	t.Helper()
	type asked struct {
		path   string
		header http.Header
		body   map[string]any
	}
	ch := make(chan asked, 16)
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		var body map[string]any
		if err := json.Unmarshal(b, &body); err != nil {
			t.Errorf("the request is no JSON: %v", err)
		}
		ch <- asked{r.URL.Path, r.Header, body}
		fmt.Fprint(w, answer)
	})
	return s, func() (string, http.Header, map[string]any) {
		select {
		case a := <-ch:
			return a.path, a.header, a.body
		case <-time.After(10 * time.Second):
			t.Fatal("the engine was not asked")
		}
		return "", nil, nil
	}
}

func generate(t *testing.T, a *OpenAI, r *subjects.Request) Outcome {
	t.Helper()
	o, err := a.Generate(t.Context(), r, Run{ID: "run-1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestARequestReachesTheEngineWholeAndOnce(t *testing.T) {
	s, asked := capture(t, good)
	a := openaiFor(t, s.URL+"/v1/", func(c *OpenAIConfig) { c.APIKey = "k" })
	f, n, seed := 0.5, 3, int64(9)
	rank := 2
	r := tokenRequest()
	r.LoRA, r.CacheSalt = "", "salt"
	r.Sampling = subjects.SamplingParams{
		MaxTokens: 8, Temperature: &f, TopP: &f, TopK: &n, MinP: &f, Seed: &seed, Stop: []string{"x"},
		StopTokenIDs: []int64{5}, Logprobs: &n, IgnoreEOS: true,
		Extra: map[string]json.RawMessage{"repetition_penalty": json.RawMessage("1.5")},
	}
	r.Extra = map[string]json.RawMessage{"vllm_xargs": json.RawMessage(`{"a":1}`)}
	if o, err := a.Generate(t.Context(), r, Run{ID: "run-1", Rank: &rank}, nil); err != nil || o.Kind != Completed {
		t.Fatalf("%+v %v", o, err)
	}
	path, h, got := asked()
	want := map[string]any{
		"model": "m", "prompt": []any{1.0, 2.0, 3.0}, "max_tokens": 8.0, "stream": true,
		"stream_options": map[string]any{"include_usage": true}, "return_token_ids": true,
		"temperature": 0.5, "top_p": 0.5, "top_k": 3.0, "min_p": 0.5, "seed": 9.0, "stop": []any{"x"},
		"stop_token_ids": []any{5.0}, "logprobs": 3.0, "ignore_eos": true, "cache_salt": "salt",
		"repetition_penalty": 1.5, "vllm_xargs": map[string]any{"a": 1.0},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if path != "/v1/completions" || h.Get("X-Request-Id") != "run-1" || h.Get("X-Data-Parallel-Rank") != "2" || h.Get("Authorization") != "Bearer k" {
		t.Errorf("path %s, headers %v", path, h)
	}
}

func TestMessagesGoToChatAndTextToCompletions(t *testing.T) {
	s, asked := capture(t, good)
	a := openaiFor(t, s.URL, func(c *OpenAIConfig) { c.Model = "served"; c.NoTokenIDs = true })
	r := tokenRequest()
	r.PromptTokenIDs, r.Messages = nil, json.RawMessage(`[{"role":"user","content":"hi"}]`)
	generate(t, a, r)
	path, _, got := asked()
	if path != "/v1/chat/completions" || got["logprobs"] != true || got["top_logprobs"] != 1.0 || got["model"] != "served" || got["return_token_ids"] != nil {
		t.Errorf("%s %v", path, got)
	}
	r.Messages, r.Prompt, r.LoRA = nil, "hello", "adapter"
	generate(t, a, r)
	path, _, got = asked()
	if path != "/v1/completions" || got["prompt"] != "hello" || got["model"] != "adapter" {
		t.Errorf("%s %v", path, got)
	}
}

// scenario R14: a resumed run has prompt + tokens and the remaining budget.
func TestAResumedRunAsksForTheRestOfItsBudget(t *testing.T) {
	s, asked := capture(t, good)
	a := openaiFor(t, s.URL)
	r := tokenRequest()
	r.Resume = &subjects.Resume{TokenIDs: []uint32{8, 9}}
	generate(t, a, r)
	_, _, got := asked()
	if d := cmp.Diff([]any{1.0, 2.0, 3.0, 8.0, 9.0}, got["prompt"]); d != "" || got["max_tokens"] != 6.0 {
		t.Errorf("%s max_tokens %v", d, got["max_tokens"])
	}
	r.PromptTokenIDs, r.Prompt = nil, "text"
	if o := generate(t, a, r); o.Kind != DataError {
		t.Errorf("tokens resumed after a text: %s", o.Kind)
	}
}

func TestFieldsThatWouldChangeTheAnswersMeaningAreRefused(t *testing.T) {
	a := openaiFor(t, "http://127.0.0.1:1")
	for _, name := range []string{"n", "stream", "echo", "max_completion_tokens", "prompt"} {
		r := tokenRequest()
		r.Sampling.Extra = map[string]json.RawMessage{name: json.RawMessage("5")}
		o := generate(t, a, r)
		if o.Kind != DataError || !strings.Contains(o.Message, name) {
			t.Errorf("%s: %s %s", name, o.Kind, o.Message)
		}
	}
}

// scenario R17: 503 is no failure of a rollout. scenario R18: one outcome a cause.
func TestHTTPErrorsMeanWhatTheySay(t *testing.T) {
	const page = "<html><body>bad gateway</body></html>"
	for _, c := range []struct {
		status int
		body   string
		want   Kind
		code   string
	}{
		{400, `{"error":{"message":"too long","type":"BadRequestError","code":400}}`, DataError, "BadRequestError"},
		{400, page, Failed, codeHTML},
		{404, `{"error":{"message":"no such model"}}`, DataError, "http_404"},
		{404, `{"detail":"Not Found"}`, DataError, "http_404"},
		{422, `{"detail":[{"loc":["body"],"input":"secret prompt"}]}`, DataError, "http_422"},
		{429, `{"error":{"message":"full"}}`, NotAccepted, "http_429"},
		{503, `{"error":{"message":"Loading model","code":503}}`, NotAccepted, "http_503"},
		{503, page, NotAccepted, codeHTML},
		{500, `{"error":{"message":"EngineCore died"}}`, Failed, "http_500"},
		{502, page, Failed, codeHTML},
		{504, "", Failed, "http_504"},
		{401, `{"error":"no key"}`, Failed, "http_401"},
		{200, page, Failed, codeHTML},
		{200, "", Failed, codeTruncated},
		{200, `{"object":"error","message":"EngineCore died","code":500}`, Failed, "engine_error"},
		{200, `data: {"error":{"message":"queue full","code":429}}` + "\n\ndata: [DONE]\n\n", NotAccepted, "engine_error"},
		{200, "data: {broken}\n\n", Failed, codeMalformed},
		{200, `{"choices":[]}`, Aborted, codeNoReason},
	} {
		s := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(c.status)
			fmt.Fprint(w, c.body)
		})
		o := generate(t, openaiFor(t, s.URL), tokenRequest())
		if o.Kind != c.want || o.Code != c.code || o.Message == "" {
			t.Errorf("%d %.40s: got %s %s %q, want %s %s", c.status, c.body, o.Kind, o.Code, o.Message, c.want, c.code)
		}
		if strings.Contains(o.Message, "secret") {
			t.Errorf("a message carries the prompt: %s", o.Message)
		}
	}
}

func TestARedirectIsNotFollowed(t *testing.T) {
	followed := false
	other := serve(t, func(http.ResponseWriter, *http.Request) { followed = true })
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
	})
	o := generate(t, openaiFor(t, s.URL), tokenRequest())
	if o.Kind != Failed || o.Code != codeRedirect || followed {
		t.Errorf("got %s %s, followed %v", o.Kind, o.Code, followed)
	}
}

func TestAnEngineThatIsNotThereCostsNoAttempt(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	l.Close()
	if o := generate(t, openaiFor(t, url), tokenRequest()); o.Kind != NotAccepted || o.Code != codeUnreachable {
		t.Errorf("got %s %s", o.Kind, o.Code)
	}
}

func TestAConnectionLostBeforeTheAnswerIsAFailure(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	if o := generate(t, openaiFor(t, s.URL), tokenRequest()); o.Kind != Failed || o.Code != codeConnection {
		t.Errorf("got %s %s", o.Kind, o.Code)
	}
}

// scenario F7: cut at token k, the tokens until then are kept.
func TestAConnectionCutInTheMiddleKeepsWhatCame(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100000")
		fmt.Fprint(w, `data: {"choices":[{"index":0,"text":"a","token_ids":[7]}]}`+"\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	o := generate(t, openaiFor(t, s.URL), tokenRequest())
	if o.Kind != Failed || o.Code != codeTruncated || len(o.TokenIDs) != 1 || o.Text != "a" {
		t.Errorf("got %+v", o)
	}
}

func TestAnEngineThatDoesNotStopIsCutOff(t *testing.T) {
	gone := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(gone)
		for {
			if _, err := fmt.Fprint(w, `data: {"choices":[{"index":0,"text":"a","token_ids":[7]}]}`+"\n\n"); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	})
	o := generate(t, openaiFor(t, s.URL, func(c *OpenAIConfig) { c.TokenSlack = 4 }), tokenRequest())
	if o.Kind != Failed || o.Code != codeRunaway || len(o.TokenIDs) > 13 {
		t.Errorf("got %s %s with %d tokens", o.Kind, o.Code, len(o.TokenIDs))
	}
	wait(t, gone, "the engine still writes")
}

func wait(t *testing.T, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(10 * time.Second):
		t.Fatal(what)
	}
}

func TestAResponseOverItsLimitFails(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"text\":%q}]}\n\n", strings.Repeat("x", 1<<16))
		fmt.Fprint(w, good)
	})
	o := generate(t, openaiFor(t, s.URL, func(c *OpenAIConfig) { c.Limits.MaxTotal = 1 << 15 }), tokenRequest())
	if o.Kind != Failed || o.Code != codeTooLarge {
		t.Errorf("got %s %s", o.Kind, o.Code)
	}
}

func TestOutputThatNoAnswerCouldCarryEndsTheRun(t *testing.T) {
	gone := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(gone)
		chunk := fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":%q}]}\n\n", strings.Repeat("x", 1<<20))
		for {
			if _, err := fmt.Fprint(w, chunk); err != nil {
				return
			}
		}
	})
	o := generate(t, openaiFor(t, s.URL), tokenRequest())
	if o.Kind != DataError || o.Code != codeTooLarge || len(o.Text) > maxHeld {
		t.Errorf("got %s %s with %d bytes", o.Kind, o.Code, len(o.Text))
	}
	wait(t, gone, "the engine still writes")
}

// scenario R4: ending the context reaches the engine.
func TestEndingTheContextClosesTheConnectionAndKeepsWhatCame(t *testing.T) {
	gone := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(gone)
		fmt.Fprint(w, `data: {"choices":[{"index":0,"text":"a","token_ids":[7]}]}`+"\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	why := errors.New("cancelled by its trainer")
	ctx, cancel := context.WithCancelCause(t.Context())
	o, err := openaiFor(t, s.URL).Generate(ctx, tokenRequest(), Run{ID: "x"}, func(Delta) { cancel(why) })
	if !errors.Is(err, why) || o.Kind != Aborted || len(o.TokenIDs) != 1 {
		t.Errorf("got %+v, error %v", o, err)
	}
	wait(t, gone, "the engine did not see the connection close")
}

func TestKeepAlivesAreNoProgress(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, ":\n\n:\n\n"+good) })
	calls := 0
	o, err := openaiFor(t, s.URL).Generate(t.Context(), tokenRequest(), Run{ID: "x"}, func(Delta) { calls++ })
	if err != nil || o.Kind != Completed || calls != 2 {
		t.Errorf("%d calls for two chunks, outcome %s, error %v", calls, o.Kind, err)
	}
}

func TestAnEmptyCompletionIsNoSampleUnlessATokenWasCounted(t *testing.T) {
	body := func(usage string) string {
		return `data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]` + usage + "}\n\ndata: [DONE]\n\n"
	}
	for usage, want := range map[string]Kind{
		"": Failed,
		`,"usage":{"prompt_tokens":3,"completion_tokens":0}`: Failed,
		`,"usage":{"prompt_tokens":3,"completion_tokens":1}`: Completed,
	} {
		s := serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, body(usage)) })
		if o := generate(t, openaiFor(t, s.URL), tokenRequest()); o.Kind != want {
			t.Errorf("usage %q: got %s %s, want %s", usage, o.Kind, o.Code, want)
		}
	}
}

func TestAnAnswerWithoutUsageIsNoSample(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"text\":\"ok\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
	})
	if o := generate(t, openaiFor(t, s.URL), tokenRequest()); o.Kind != Failed || o.Code != codeNoUsage || o.Text != "ok" {
		t.Errorf("got %s %s with %q", o.Kind, o.Code, o.Text)
	}
}

func TestToolCallsAndReasoningAreJoined(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for _, d := range []string{
			`{"role":"assistant","content":null}`, `{"reasoning_content":"hm"}`, `{"reasoning_content":"m"}`,
			`{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\""}}]}`,
			`{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}`,
		} {
			fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":%s}]}\n\n", d)
		}
		fmt.Fprint(w, `data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":3,"completion_tokens":9}}`+"\n\ndata: [DONE]\n\n")
	})
	o := generate(t, openaiFor(t, s.URL), tokenRequest())
	var calls []apiToolCall
	if err := json.Unmarshal(o.Extra["tool_calls"], &calls); err != nil || o.Kind != Completed {
		t.Fatalf("%+v %v", o, err)
	}
	if len(calls) != 1 || calls[0].Function.Arguments != `{"a":1}` || calls[0].ID != "c1" || string(o.Extra["reasoning_content"]) != `"hmm"` {
		t.Errorf("%+v %s", calls, o.Extra["reasoning_content"])
	}
}

func TestTokenIDsWithAHoleAreNotReportedAsWhole(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, `data: {"choices":[{"index":0,"text":"a"}]}`+"\n\n"+good)
	})
	o := generate(t, openaiFor(t, s.URL), tokenRequest())
	if o.Kind != Completed || o.TokenIDs != nil || o.Text != "aok" || string(o.Extra["token_ids_absent"]) != "true" {
		t.Errorf("%+v", o)
	}
}

func TestLogprobsOfBothShapesAreJoinedOverChunks(t *testing.T) {
	var l logprobs
	for _, p := range []string{`null`, `{"tokens":["token_id:5"],"token_logprobs":[-1],"text_offset":[0]}`, `{"tokens":["token_id:6"],"token_logprobs":[-2],"text_offset":[3]}`} {
		if _, err := l.add(json.RawMessage(p)); err != nil {
			t.Fatal(err)
		}
	}
	want := `{"text_offset":[0,3],"token_logprobs":[-1,-2],"tokens":["token_id:5","token_id:6"]}`
	if string(l.json()) != want {
		t.Errorf("got %s", l.json())
	}
	joined := JoinLogprobs([]byte(`{"content":[{"id":1}]}`), []byte(`{"content":[]}`))
	joined = JoinLogprobs(joined, []byte(`{"content":[{"id":2}]}`))
	if string(joined) != `{"content":[{"id":1},{"id":2}]}` {
		t.Errorf("got %s", joined)
	}
	if ids, _ := l.add(json.RawMessage(`{"tokens":["token_id:5","token_id:6"]}`)); len(ids) != 2 || ids[1] != 6 {
		t.Errorf("ids %v", ids)
	}
}

func TestTheConfigurationNamesEverythingThatIsWrong(t *testing.T) {
	_, err := NewOpenAI(OpenAIConfig{URL: "ftp://x", TokenSlack: -1, ProbeTimeout: -1, StopCheck: -1, Connections: -1})
	for _, want := range []string{"ftp://x", "token slack", "probe timeout", "stop check", "connections"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
	for _, bad := range []string{"", "x", "http://", "http://u:p@h", "http://h/?a=1", "http://h/#f"} {
		if _, err := NewOpenAI(OpenAIConfig{URL: bad}); err == nil || strings.Contains(err.Error(), "p@") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// probed is a server with a file of recordings or a text a path.
func probed(t *testing.T, paths map[string]string) Capabilities {
	t.Helper()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		text, ok := paths[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	})
	c, err := openaiFor(t, s.URL).Capabilities(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCapabilitiesAreWhatTheServerTellsAndNoMore(t *testing.T) {
	c := probed(t, map[string]string{"/v1/models": `{"data":[{"id":"m"}]}`})
	if d := cmp.Diff(Capabilities{Kind: "openai", Model: "m", Ranks: 1, Events: "none"}, c); d != "" {
		t.Error(d)
	}
	c = probed(t, map[string]string{
		"/v1/models": `{"data":[{"id":"m","max_model_len":4096},{"id":"ad","parent":"m"}]}`,
		"/version":   `{"version":"0.9"}`,
		"/metrics": "# HELP x\nprocess_start_time_seconds 1.5e9\n" +
			`vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",x="None"} 1` + "\n" +
			`vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100",x="None"} 1` + "\n",
	})
	if *c.MaxModelLen != 4096 || c.LoRAs[0] != "ad" || c.Version != "0.9" || *c.StartedAt != 1.5e9 || *c.CapacityTokens != 3200 || *c.EngineBlock != 16 || c.Ranks != 2 || c.Slots != nil {
		t.Errorf("%+v", c)
	}
	c = probed(t, map[string]string{
		"/v1/models": `{"data":[{"id":"tiny","owned_by":"llamacpp","meta":{"n_ctx":2048}}]}`,
		"/props":     `{"total_slots":4,"default_generation_settings":{"n_ctx":512},"build_info":"b1"}`,
	})
	if c.Kind != "llamacpp" || *c.Slots != 4 || *c.MaxModelLen != 512 || c.Version != "b1" {
		t.Errorf("%+v", c)
	}
}

func TestTheSimulatedEngineTellsWhatItIs(t *testing.T) {
	c := probed(t, map[string]string{
		"/v1/models":   `{"data":[{"id":"sim","max_model_len":4096,"owned_by":"rollbus-simulated"}]}`,
		"/server_info": `{"simulated":true,"vllm_config":{"scheduler_config":{"max_num_seqs":8},"parallel_config":{"data_parallel_size":2}}}`,
		"/weight_info": `{"weight_version":"7"}`,
	})
	if c.Kind != "sim" || *c.Slots != 16 || c.Ranks != 2 || *c.WeightVersion != 7 {
		t.Errorf("%+v", c)
	}
}

func TestAServerThatDoesNotAnswerHasNoCapabilities(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	if _, err := openaiFor(t, s.URL).Capabilities(t.Context()); err == nil {
		t.Error("a 503 passed for an engine")
	}
	s = serve(t, func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	a := openaiFor(t, s.URL, func(c *OpenAIConfig) { c.ProbeTimeout = 20 * time.Millisecond })
	if _, err := a.Capabilities(t.Context()); err == nil {
		t.Error("silence passed for an engine")
	}
}

// scenario P7: what is absent is unknown, never zero.
func TestLoadIsReadByVLLMsNamesAndAbsentMeansUnknown(t *testing.T) {
	text := ""
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if text == "" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	})
	a := openaiFor(t, s.URL)
	if l, err := a.Load(t.Context()); l != nil || err != nil {
		t.Errorf("a server without metrics: %+v %v", l, err)
	}
	text = "process_start_time_seconds 5\n"
	if l, err := a.Load(t.Context()); l != nil || err != nil {
		t.Errorf("a server with other metrics: %+v %v", l, err)
	}
	text = `vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_waiting{engine="0",model_name="a b"} NaN
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_requests_running{engine="1"} 0
vllm:num_preemptions_total{engine="1"} 2
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
`
	l, err := a.Load(t.Context())
	if err != nil || l == nil || len(l.Ranks) != 2 || l.Source != telemetry.SourceVLLMMetrics {
		t.Fatalf("%+v %v", l, err)
	}
	r0, r1 := l.Ranks[0], l.Ranks[1]
	if *r0.Running != 3 || r0.Waiting != nil || *r0.KVUsage != 0.25 || *r0.KVCapacityTokens != 1600 {
		t.Errorf("rank 0: %+v", r0)
	}
	if *r1.Running != 0 || r1.KVUsedTokens != nil || *r1.PreemptionsTotal != 2 {
		t.Errorf("rank 1: %+v", r1)
	}
	// Where it does not say when it started, a counter that falls is a restart.
	text = "vllm:num_preemptions_total 1\n"
	if _, err := a.Load(t.Context()); err != nil || a.Health().Restarts != 0 {
		t.Errorf("%d restarts, %v", a.Health().Restarts, err)
	}
	text = "vllm:num_preemptions_total 0\n"
	if _, err := a.Load(t.Context()); err != nil || a.Health().Restarts != 1 {
		t.Errorf("%d restarts, %v", a.Health().Restarts, err)
	}
	text = "vllm:num_requests_running{worker_addr=\"a\"} 0\n"
	if _, err := a.Load(t.Context()); !errors.Is(err, telemetry.ErrRouter) {
		t.Errorf("a router's page: %v", err)
	}
}
