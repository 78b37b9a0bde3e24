package engine

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/subjects"
)

func sglangFor(t *testing.T, url string) *SGLang {
	t.Helper()
	a, err := NewSGLang(SGLangConfig{OpenAIConfig: OpenAIConfig{URL: url}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

// scenarios R14, R16
func TestEveryRecordedAnswerOfSGLangMeansWhatItsTableSays(t *testing.T) {
	checkSGLangStreams(t, filepath.Join("testdata", "streams"))
}

func checkSGLangStreams(t *testing.T, dir string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]struct {
		expectation
		Weights  string   `json:"weight_version"`
		Rank     *int     `json:"dp_rank"`
		Segments [][3]any `json:"segments"`
	}
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for name, want := range all {
		if !strings.HasPrefix(name, "sglang-") {
			continue
		}
		seen++
		t.Run(name, func(t *testing.T) {
			body, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) }))
			defer s.Close()
			pieces, ids := "", []uint32(nil)
			got, err := sglangFor(t, s.URL).Generate(t.Context(), tokenRequest(), Run{ID: "r1"}, func(d Delta) {
				pieces, ids = pieces+d.Text, append(ids, d.TokenIDs...)
			})
			if err != nil {
				t.Fatal(err)
			}
			check(t, want.expectation, got)
			if pieces != got.Text || len(ids) != len(got.TokenIDs) {
				t.Errorf("the deltas say %q and %d ids, the outcome %q and %d", pieces, len(ids), got.Text, len(got.TokenIDs))
			}
			if got.WeightVersion != want.Weights && want.Weights != "" {
				t.Errorf("weights %q, want %q", got.WeightVersion, want.Weights)
			}
			if want.Rank != nil && string(got.Extra["dp_rank"]) != fmt.Sprint(*want.Rank) {
				t.Errorf("rank %s, want %d", got.Extra["dp_rank"], *want.Rank)
			}
			if want.Segments != nil {
				var segs [][3]any
				for _, s := range got.Segments {
					segs = append(segs, [3]any{float64(s.Start), float64(s.End), s.WeightVersion})
				}
				if d := cmp.Diff(want.Segments, segs); d != "" {
					t.Error(d)
				}
			}
		})
	}
	if seen < 6 {
		t.Errorf("only %d recordings were read", seen)
	}
}

// readSGLang judges a body.
func readSGLang(body string, maxTokens int) (Outcome, []Delta) {
	var deltas []Delta
	a := sglangAnswer{maxTokens: maxTokens, onDelta: func(d Delta) { deltas = append(deltas, d) }}
	how, err := readAnswer(strings.NewReader(body), SSELimits{}, &a)
	return a.outcome(how, err, false), deltas
}

func event(ids, finish string, completion int, text string) string {
	return fmt.Sprintf("data: {\"text\": %q, \"output_ids\": %s, \"meta_info\": {\"finish_reason\": %s, \"prompt_tokens\": 5, \"completion_tokens\": %d}}\n\n", text, ids, finish, completion)
}

func TestIncrementalAndCumulativeStreamsGiveTheSame(t *testing.T) {
	const stop = `{"type": "stop"}`
	for name, body := range map[string]string{
		"cumulative":  event("[10]", "null", 1, "a") + event("[10, 10]", "null", 2, "aa") + event("[10, 10, 12]", stop, 3, "aab"),
		"incremental": event("[10]", "null", 1, "a") + event("[10]", "null", 2, "a") + event("[12]", stop, 3, "b"),
		"repeated":    event("[10]", "null", 1, "a") + event("[10]", "null", 1, "a") + event("[10, 10, 12]", stop, 3, "aab"),
		"empty end":   event("[10, 10, 12]", "null", 3, "aab") + event("[]", stop, 3, ""),
	} {
		got, deltas := readSGLang(body+"data: [DONE]\n\n", 8)
		var ids []uint32
		for _, d := range deltas {
			ids = append(ids, d.TokenIDs...)
		}
		if got.Kind != Completed || got.Text != "aab" || !cmp.Equal(got.TokenIDs, []uint32{10, 10, 12}) || !cmp.Equal(ids, got.TokenIDs) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestSGLangAnswersThatAreNoSample(t *testing.T) {
	const stop = `{"type": "stop"}`
	for name, c := range map[string]struct {
		body string
		want Kind
	}{
		"cut before the end mark":   {event("[1]", stop, 1, "a"), Failed},
		"end mark alone":            {"data: [DONE]\n\n", Aborted},
		"nothing":                   {"", Failed},
		"a web page":                {"<html></html>", Failed},
		"no finish reason":          {event("[1]", "null", 1, "a") + "data: [DONE]\n\n", Failed},
		"unknown finish reason":     {event("[1]", `{"type": "nap"}`, 1, "a") + "data: [DONE]\n\n", Failed},
		"too many tokens":           {event("[1,2,3,4,5,6,7,8,9]", stop, 9, "a") + "data: [DONE]\n\n", Failed},
		"numbers at odds":           {event("[1]", "null", 1, "a") + event("[2, 3]", stop, 9, "b") + "data: [DONE]\n\n", Failed},
		"empty and finished":        {event("[]", stop, 0, "") + "data: [DONE]\n\n", Failed},
		"output after the end":      {event("[1]", stop, 1, "a") + event("[1, 2]", stop, 2, "ab") + "data: [DONE]\n\n", Failed},
		"abort 503":                 {event("[]", `{"type": "abort", "status_code": 503}`, 0, ""), NotAccepted},
		"abort 400":                 {event("[]", `{"type": "abort", "status_code": 400, "message": "too long"}`, 0, ""), DataError},
		"abort 500":                 {event("[]", `{"type": "abort", "status_code": 500}`, 0, ""), Failed},
		"an error before output":    {`data: {"error": {"message": "queue full", "code": 429}}` + "\n\ndata: [DONE]\n\n", NotAccepted},
		"two answers to one":        {`[{"meta_info": {}}, {"meta_info": {}}]`, Failed},
		"two answers, both in bits": {`{"text": "a", "output_ids": [1], "meta_info": "x"}`, Failed},
	} {
		if got, _ := readSGLang(c.body, 8); got.Kind != c.want || got.Code == "" || got.Message == "" {
			t.Errorf("%s: %s %s %s, want %s", name, got.Kind, got.Code, got.Message, c.want)
		}
	}
	if got, _ := readSGLang(`[`+strings.TrimSuffix(strings.TrimPrefix(event("[1]", stop, 1, "a"), "data: "), "\n\n")+`]`, 8); got.Kind != Completed {
		t.Errorf("a list of one: %+v", got)
	}
}

// recorder is a server that answers paths from a table and keeps what it got.
type recorder struct {
	*httptest.Server
	mu   sync.Mutex
	got  []string // method, path and body
	with map[string]string
}

func record(t *testing.T, with map[string]string) *recorder {
	t.Helper()
	r := &recorder{with: with}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		b, _ := io.ReadAll(q.Body)
		r.mu.Lock()
		r.got = append(r.got, q.Method+" "+q.URL.RequestURI()+" "+string(b))
		body, ok := r.with[q.Method+" "+q.URL.Path]
		r.mu.Unlock()
		if !ok {
			http.NotFound(w, q)
			return
		}
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *recorder) last() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.got[len(r.got)-1]
}

func telemetryFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "telemetry", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// scenario P23: the rank is a field, both of its names are sent.
func TestARequestToSGLangSaysEverything(t *testing.T) {
	s := record(t, map[string]string{"POST /generate": `{"text": "a", "output_ids": [9], "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": 5, "completion_tokens": 1, "dp_rank": 0}}`})
	r := tokenRequest()
	r.Resume = &subjects.Resume{TokenIDs: []uint32{7, 8}}
	r.LoRA, r.CacheSalt = "ad", "tenant"
	r.Sampling.Extra = map[string]json.RawMessage{"repetition_penalty": json.RawMessage("1.1")}
	seed, rank := int64(4), 1
	r.Sampling.Seed = &seed
	got, err := sglangFor(t, s.URL).Generate(t.Context(), r, Run{ID: "j.1.1", Rank: &rank}, nil)
	if err != nil || got.Kind != Completed {
		t.Fatal(got, err)
	}
	var sent map[string]any
	if err := json.Unmarshal([]byte(strings.TrimPrefix(s.last(), "POST /generate ")), &sent); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"rid": "j.1.1", "input_ids": []any{1.0, 2.0, 3.0, 7.0, 8.0}, "stream": true, "lora_path": "ad", "cache_salt": "tenant", "extra_key": "tenant",
		"routed_dp_rank": 1.0, "data_parallel_rank": 1.0, "return_logprob": true, "logprob_start_len": -1.0, "top_logprobs_num": 1.0,
		"sampling_params": map[string]any{"max_new_tokens": 6.0, "n": 1.0, "sampling_seed": 4.0, "repetition_penalty": 1.1}}
	if d := cmp.Diff(want, sent); d != "" {
		t.Error(d)
	}
	if string(got.Extra["dp_rank"]) != "0" || string(got.Extra["dp_rank_asked"]) != "1" {
		t.Errorf("another rank than asked for goes unnoticed: %s", got.Extra)
	}
}

func TestSGLangsCapabilitiesComeFromItsServerInfo(t *testing.T) {
	s := record(t, map[string]string{"GET /server_info": telemetryFile(t, "server_info-sglang-kv-events.json")})
	a, err := NewSGLang(SGLangConfig{OpenAIConfig: OpenAIConfig{URL: s.URL}, NoPush: true, Events: EventsConfig{Replay: "tcp://*:6000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	c, err := a.Capabilities(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if c.Kind != "sglang" || c.Ranks != 2 || *c.Slots != 256 || *c.CapacityTokens != 2*442368 || *c.EngineBlock != 64 || c.Events != "exact" || c.WeightVersion != nil {
		t.Errorf("%+v", c)
	}
	src, err := a.EventSources(t.Context())
	if err != nil || len(src) != 2 || src[1].Endpoint != "tcp://127.0.0.1:5558" || src[1].Replay != "tcp://127.0.0.1:6001" {
		t.Errorf("%+v %v", src, err)
	}
	s.with["GET /server_info"] = strings.Replace(s.with["GET /server_info"], `"tp_size"`, `"disaggregation_mode": "prefill", "tp_size"`, 1)
	if _, err := a.Capabilities(t.Context()); err == nil {
		t.Error("a prefill engine is taken for a rollout engine")
	}
}

func TestSGLangsLoadComesFromTheBestEndpointItHas(t *testing.T) {
	info := telemetryFile(t, "server_info-sglang-kv-events.json")
	s := record(t, map[string]string{"GET /server_info": info, "GET /get_load": telemetryFile(t, "get_load-sglang-dp2.json")})
	a, err := NewSGLang(SGLangConfig{OpenAIConfig: OpenAIConfig{URL: s.URL}, NoPush: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, err := a.Capabilities(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := a.Load(t.Context())
	if err != nil || l.Source != "sglang:/get_load" || len(l.Ranks) != 2 || *l.Ranks[0].Running != 12 || *l.Ranks[0].MaxRunning != 128 || *l.Ranks[1].KVCapacityTokens != 442368 {
		t.Errorf("%+v %v", l, err)
	}
	n := len(s.got)
	if _, err := a.Load(t.Context()); err != nil || len(s.got) != n+1 {
		t.Errorf("%d requests for one load, the endpoint is known", len(s.got)-n)
	}
	s.mu.Lock()
	delete(s.with, "GET /get_load")
	s.with["GET /v1/loads"] = telemetryFile(t, "loads-sglang-current-dp2.json")
	s.mu.Unlock()
	if l, err := a.Load(t.Context()); err != nil || l.Source != "sglang:/v1/loads" {
		t.Errorf("%+v %v", l, err)
	}
}

func TestSGLangsControlCalls(t *testing.T) {
	ok := map[string]string{}
	for _, path := range []string{"pause_generation", "continue_generation", "flush_cache", "update_weight_version", "release_memory_occupation", "resume_memory_occupation", "abort_request"} {
		ok["POST /"+path] = "{}"
	}
	ok["GET /model_info"] = `{"weight_version": "9"}`
	s := record(t, ok)
	a := sglangFor(t, s.URL)
	ctx := t.Context()
	for _, c := range []struct {
		err  error
		want string
	}{
		{a.Pause(ctx, PauseKeep), `POST /pause_generation {"mode":"in_place"}`},
		{a.Pause(ctx, PauseAbort), `POST /pause_generation {"mode":"abort"}`},
		{a.Resume(ctx), `POST /continue_generation {}`},
		{a.Flush(ctx), `POST /flush_cache `},
		{a.Sleep(ctx, 2), `POST /release_memory_occupation {"tags":["kv_cache","weights"]}`},
		{a.Wake(ctx), `POST /resume_memory_occupation {}`},
		{a.SetWeightVersion(ctx, "8"), `POST /update_weight_version {"abort_all_requests":false,"new_version":"8"}`}, // scenario R9
		{a.Abort(ctx, Run{ID: "r1"}), `POST /abort_request {"abort_all":false,"rid":"r1"}`},                          // scenario R4
	} {
		if c.err != nil {
			t.Error(c.want, c.err)
		}
		s.mu.Lock()
		found := false
		for _, g := range s.got {
			found = found || g == c.want
		}
		s.mu.Unlock()
		if !found {
			t.Errorf("%s was never sent: %q", c.want, s.got)
		}
	}
	if st, err := a.State(ctx); err != nil || st.WeightVersion != "9" {
		t.Errorf("%+v %v", st, err)
	}
	if a.Abort(ctx, Run{}) == nil {
		t.Error("an abort without a name would abort everything")
	}
}

func FuzzSGLangAnswer(f *testing.F) {
	files, _ := filepath.Glob("testdata/streams/sglang-*")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Fuzz(func(t *testing.T, body string) {
		got, deltas := readSGLang(body, 100)
		n := 0
		for _, d := range deltas {
			n += len(d.TokenIDs)
		}
		if got.Kind == Completed && (got.FinishReason != "stop" && got.FinishReason != "length" || len(got.TokenIDs) > n) {
			t.Fatalf("%+v of %d ids", got, n)
		}
		if got.Kind == "" || got.Kind != Completed && got.Code == "" {
			t.Fatalf("%+v", got)
		}
	})
}
