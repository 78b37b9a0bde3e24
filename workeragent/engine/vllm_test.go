package engine

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/workeragent/kvevents"
)

func vllmFor(t *testing.T, url string, change ...func(*VLLMConfig)) *VLLM {
	t.Helper()
	cfg := VLLMConfig{OpenAIConfig: OpenAIConfig{URL: url, StopCheck: 2 * time.Millisecond}}
	for _, f := range change {
		f(&cfg)
	}
	a, err := NewVLLM(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

// scenario R16
func TestEveryRecordedAnswerOfVLLMMeansWhatItsTableSays(t *testing.T) {
	seen := 0
	for name, want := range streams(t) {
		if !strings.HasPrefix(name, "vllm-") {
			continue
		}
		seen++
		t.Run(name, func(t *testing.T) {
			got, err := vllmFor(t, serveFile(t, name, want.Status).URL).Generate(t.Context(), tokenRequest(), Run{ID: "a1"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			check(t, want, got)
		})
	}
	if seen < 6 {
		t.Errorf("only %d recordings were read", seen)
	}
}

const vllmModels = `{"data": [{"id": "m", "max_model_len": 4096, "owned_by": "vllm"}, {"id": "ad", "parent": "m"}]}`

func TestTokensGoInAndOutWhereTheServerTakesThem(t *testing.T) {
	body, _ := io.ReadAll(strings.NewReader("data: {\"request_id\": \"generate-tokens-x\", \"choices\": [{\"index\": 0, \"token_ids\": [5, 6], \"finish_reason\": \"length\"}], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 2}}\n\ndata: [DONE]\n\n"))
	var sent map[string]any
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/v1/models":
			_, _ = io.WriteString(w, vllmModels)
		case generatePath:
			var in map[string]any
			_ = json.NewDecoder(q.Body).Decode(&in)
			if in["token_ids"] == nil {
				http.Error(w, `{"error": {"message": "token_ids: field required"}}`, http.StatusUnprocessableEntity)
				return
			}
			sent = in
			_, _ = w.Write(body)
		default:
			http.NotFound(w, q)
		}
	}))
	defer s.Close()
	a := vllmFor(t, s.URL, func(c *VLLMConfig) { c.TokensOnly = true })
	if c, err := a.Capabilities(t.Context()); err != nil || c.Kind != "vllm" || c.Events != "none" || len(c.LoRAs) != 1 {
		t.Fatalf("%+v %v", c, err)
	}
	r := tokenRequest()
	r.CacheSalt = "s"
	got, err := a.Generate(t.Context(), r, Run{ID: "x"}, nil)
	if err != nil || got.Kind != Completed || !cmp.Equal(got.TokenIDs, []uint32{5, 6}) {
		t.Fatalf("%+v %v", got, err)
	}
	want := map[string]any{"request_id": "x", "token_ids": []any{1.0, 2.0, 3.0}, "model": "m", "stream": true, "cache_salt": "s",
		"stream_options": map[string]any{"include_usage": true}, "sampling_params": map[string]any{"max_tokens": 8.0, "logprobs": 1.0}}
	if d := cmp.Diff(want, sent); d != "" {
		t.Error(d)
	}
}

func TestVLLMTellsWhereItsEventsAre(t *testing.T) {
	s := record(t, map[string]string{"GET /v1/models": vllmModels, "GET /kv_event_sources": telemetryFile(t, "kv_event_sources-vllm-map.json")})
	a := vllmFor(t, s.URL)
	if c, err := a.Capabilities(t.Context()); err != nil || c.Events != "exact" {
		t.Errorf("%+v %v", c, err)
	}
	got, err := a.EventSources(t.Context())
	want := []kvevents.Source{{Rank: 0, Endpoint: "tcp://192.0.2.1:41233", Replay: "tcp://192.0.2.1:41235", Topic: "kv-events"},
		{Rank: 1, Endpoint: "tcp://192.0.2.1:41234", Topic: "kv-events"}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(err, d)
	}
	s.with["GET /kv_event_sources"] = `{}`
	if got, err := a.EventSources(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("events are off: %v %v", got, err)
	}
	delete(s.with, "GET /kv_event_sources") // older: base port and rank, of the configuration
	s.with["GET /metrics"] = telemetryFile(t, "vllm-dp2-current.prom")
	b := vllmFor(t, s.URL, func(c *VLLMConfig) { c.Events = EventsConfig{Endpoint: "tcp://*:5557", Replay: "tcp://*:5600"} })
	if c, err := b.Capabilities(t.Context()); err != nil || c.Events != "exact" || c.Ranks != 2 || *c.CapacityTokens != 2_000_000 {
		t.Errorf("%+v %v", c, err)
	}
	if got, err := b.EventSources(t.Context()); err != nil || len(got) != 2 || got[1].Endpoint != "tcp://127.0.0.1:5558" || got[1].Replay != "tcp://127.0.0.1:5601" {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := NewVLLM(VLLMConfig{OpenAIConfig: OpenAIConfig{URL: s.URL}, Events: EventsConfig{Endpoint: "5557"}}); err == nil {
		t.Error("an endpoint without a scheme is accepted")
	}
}

func TestVLLMsControlCalls(t *testing.T) {
	s := record(t, map[string]string{"POST /pause": "{}", "POST /resume": "", "POST /sleep": "", "POST /wake_up": "", "POST /reset_prefix_cache": "",
		"POST /update_weight_version": "", "GET /is_paused": `{"is_paused": true}`, "GET /weight_info": `{"weight_version": "7"}`})
	a := vllmFor(t, s.URL)
	ctx := t.Context()
	for want, call := range map[string]func() error{
		"POST /pause?mode=keep ":                          func() error { return a.Pause(ctx, PauseKeep) },
		"POST /resume ":                                   func() error { return a.Resume(ctx) },
		"POST /sleep?level=1 ":                            func() error { return a.Sleep(ctx, 1) },
		"POST /wake_up ":                                  func() error { return a.Wake(ctx) },
		"POST /reset_prefix_cache ":                       func() error { return a.Flush(ctx) },
		`POST /update_weight_version {"new_version":"7"}`: func() error { return a.SetWeightVersion(ctx, "7") },
	} {
		if err := call(); err != nil || s.last() != want {
			t.Errorf("sent %q, want %q: %v", s.last(), want, err)
		}
	}
	st, err := a.State(ctx)
	if err != nil || st.Paused == nil || !*st.Paused || st.Sleeping != nil || st.WeightVersion != "7" {
		t.Errorf("%+v %v", st, err)
	}
	delete(s.with, "POST /pause")
	if err := a.Pause(ctx, PauseKeep); !errors.Is(err, ErrNoControl) {
		t.Errorf("a missing call: %v", err)
	}
}

func TestAnEngineIsKnownByTheShapeOfItsAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		with map[string]string
		want string
	}{
		"sglang":            {map[string]string{"GET /v1/models": `{"data":[{"id":"m","owned_by":"sglang"}]}`, "GET /server_info": telemetryFile(t, "server_info-sglang-kv-events.json")}, "sglang"},
		"old sglang":        {map[string]string{"GET /get_server_info": telemetryFile(t, "server_info-sglang-kv-events.json")}, "sglang"},
		"vllm":              {map[string]string{"GET /v1/models": vllmModels, "GET /metrics": telemetryFile(t, "vllm-dp2-current.prom")}, "vllm"},
		"vllm, dev mode":    {map[string]string{"GET /v1/models": vllmModels, "GET /server_info": `{"vllm_config": {}}`}, "vllm"},
		"vllm, bare":        {map[string]string{"GET /v1/models": vllmModels}, "vllm"},
		"llama.cpp":         {map[string]string{"GET /v1/models": telemetryFile(t, "llamacpp-models.json"), "GET /props": telemetryFile(t, "llamacpp-props.json")}, "llamacpp"},
		"simulated":         {map[string]string{"GET /v1/models": vllmModels, "GET /server_info": `{"simulated": true, "vllm_config": {}}`}, "sim"},
		"something else":    {map[string]string{"GET /v1/models": `{"data":[{"id":"m","owned_by":"me"}]}`}, "openai"},
		"a router":          {map[string]string{"GET /v1/models": `{"data":[{"id":"m"}]}`, "GET /metrics": `sglang:num_running_reqs{worker_addr="http://a"} 1`}, ""},
		"a web server":      {map[string]string{"GET /v1/models": `<html>`}, ""},
		"nothing but paths": {map[string]string{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := record(t, c.with)
			d, err := Detect(t.Context(), OpenAIConfig{URL: s.URL})
			if d.Kind != c.want && err == nil || (err != nil) != (c.want == "") {
				t.Errorf("detected %q, want %q: %v %q", d.Kind, c.want, err, d.Found)
			}
			if err != nil {
				return
			}
			a, _, err := Open(t.Context(), "auto="+s.URL, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			_, isVLLM := a.(*VLLM)
			_, isSGLang := a.(*SGLang)
			if isVLLM != (c.want == "vllm" || c.want == "sim") || isSGLang != (c.want == "sglang") {
				t.Errorf("opened a %T for %s", a, c.want)
			}
		})
	}
	if _, _, err := Open(t.Context(), "triton=http://h:1", Options{}); err == nil {
		t.Error("an unknown kind is opened")
	}
	if _, _, err := Open(t.Context(), "http://127.0.0.1:1", Options{}); !errors.Is(err, ErrNoEngine) {
		t.Errorf("nobody there: %v", err)
	}
}
