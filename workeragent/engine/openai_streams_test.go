package engine

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/subjects"
)

// expectation is one line of testdata/streams/expected.json.
type expectation struct {
	Outcome       string   `json:"outcome"`
	Status        int      `json:"status"`
	FinishReasons []string `json:"finish_reasons"`
	Usage         []*int   `json:"usage"`
	TokenIDs      []uint32 `json:"token_ids"`
	PartialTokens *int     `json:"partial_tokens"`
	PartialText   string   `json:"partial_text"`
}

func streams(t *testing.T) map[string]expectation {
	t.Helper()
	b, err := os.ReadFile("testdata/streams/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]expectation
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// serveFile answers every generation with a recorded body.
func serveFile(t *testing.T, name string, status int) *httptest.Server {
	t.Helper()
	body, err := os.ReadFile(filepath.Join("testdata/streams", name))
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind := "application/json"
		if strings.HasSuffix(name, ".sse") {
			kind = "text/event-stream; charset=utf-8"
		}
		w.Header().Set("Content-Type", kind)
		if status != 0 {
			w.WriteHeader(status)
		}
		_, _ = w.Write(body)
	}))
	t.Cleanup(s.Close)
	return s
}

func openaiFor(t *testing.T, url string, change ...func(*OpenAIConfig)) *OpenAI {
	t.Helper()
	cfg := OpenAIConfig{URL: url}
	for _, f := range change {
		f(&cfg)
	}
	a, err := NewOpenAI(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func tokenRequest() *subjects.Request {
	one := 1
	return &subjects.Request{ID: "0001", Job: "j", Model: "m", PromptTokenIDs: []uint32{1, 2, 3},
		Sampling: subjects.SamplingParams{MaxTokens: 8, Logprobs: &one}}
}

// kindsOf lists what the table of the recordings means in our words.
var kindsOf = map[string][]Kind{
	"completed": {Completed}, "aborted": {Aborted}, "failed": {Failed}, "data_error": {DataError},
	"not_accepted": {NotAccepted}, "our_own_bug": {DataError}, "aborted_or_failed": {Aborted, Failed},
	"failed_or_completed_by_config": {Failed},
}

// scenario R16: an error object inside a 200, [DONE] or not, is no completion.
// scenario F7: streams that end early are failures.
func TestEveryRecordedAnswerOfThisAPIMeansWhatItsTableSays(t *testing.T) {
	seen := 0
	for name, want := range streams(t) {
		if strings.HasPrefix(name, "sglang-") {
			continue // of another API: the sglang adapter reads them
		}
		seen++
		t.Run(name, func(t *testing.T) {
			a := openaiFor(t, serveFile(t, name, want.Status).URL)
			r := tokenRequest()
			if strings.Contains(name, "chat") {
				r.PromptTokenIDs, r.Messages = nil, json.RawMessage(`[{"role":"user","content":"hi"}]`)
			}
			pieces := ""
			got, err := a.Generate(t.Context(), r, Run{ID: "x"}, func(d Delta) { pieces += d.Text })
			if err != nil {
				t.Fatal(err)
			}
			check(t, want, got)
			if pieces != got.Text && strings.HasSuffix(name, ".sse") {
				t.Errorf("the deltas say %q, the outcome %q", pieces, got.Text)
			}
			if want.Outcome == "our_own_bug" && got.Code != codeOwnBug {
				t.Errorf("code %q, want %q", got.Code, codeOwnBug)
			}
			if got.Kind != Completed && (got.Code == "" || got.Message == "") {
				t.Errorf("no sample, and no reason: %+v", got)
			}
		})
	}
	if seen < 18 {
		t.Errorf("only %d recordings were read", seen)
	}
}

func check(t *testing.T, want expectation, got Outcome) {
	t.Helper()
	ok := false
	for _, k := range kindsOf[want.Outcome] {
		ok = ok || got.Kind == k
	}
	if !ok {
		t.Fatalf("outcome %s (%s: %s), want %s", got.Kind, got.Code, got.Message, want.Outcome)
	}
	if len(want.FinishReasons) > 0 && got.FinishReason != want.FinishReasons[0] {
		t.Errorf("finish reason %q, want %q", got.FinishReason, want.FinishReasons[0])
	}
	if want.Usage != nil {
		w := &subjects.Usage{PromptTokens: *want.Usage[0], CompletionTokens: *want.Usage[1], CachedTokens: want.Usage[2]}
		if d := cmp.Diff(w, got.Usage); d != "" {
			t.Errorf("usage: %s", d)
		}
	}
	if want.TokenIDs != nil {
		if d := cmp.Diff(want.TokenIDs, got.TokenIDs); d != "" {
			t.Errorf("token ids: %s", d)
		}
	}
	if want.PartialTokens != nil && len(got.TokenIDs) != *want.PartialTokens {
		t.Errorf("%d tokens came before the end, want %d", len(got.TokenIDs), *want.PartialTokens)
	}
	if want.PartialText != "" && got.Text != want.PartialText {
		t.Errorf("text %q came before the end, want %q", got.Text, want.PartialText)
	}
}

func TestAMissingEndMarkIsTakenOnlyWhereTheConfigurationSaysSo(t *testing.T) {
	url := serveFile(t, "finish-but-no-done.sse", 0).URL
	a := openaiFor(t, url, func(c *OpenAIConfig) { c.AcceptMissingDone = true })
	got, err := a.Generate(t.Context(), tokenRequest(), Run{ID: "x"}, nil)
	if err != nil || got.Kind != Completed {
		t.Errorf("got %s %s, error %v", got.Kind, got.Code, err)
	}
	cut := openaiFor(t, serveFile(t, "truncated-no-done.sse", 0).URL, func(c *OpenAIConfig) { c.AcceptMissingDone = true })
	if got, _ := cut.Generate(t.Context(), tokenRequest(), Run{ID: "x"}, nil); got.Kind != Failed {
		t.Errorf("a stream cut before its finish reason: got %s", got.Kind)
	}
}

func TestLlamaCppTokenIDsAreReadOutOfLogprobs(t *testing.T) {
	a := openaiFor(t, serveFile(t, "llamacpp-completion-logprobs.json", 0).URL)
	got, err := a.Generate(t.Context(), tokenRequest(), Run{ID: "x"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var l struct{ Content []struct{ Logprob float64 } }
	if err := json.Unmarshal(got.Logprobs, &l); err != nil || len(l.Content) != 3 {
		t.Errorf("logprobs %s: %v", got.Logprobs, err)
	}
	// Who did not ask for logprobs does not get them.
	r := tokenRequest()
	r.Sampling.Logprobs = nil
	if got, _ = a.Generate(t.Context(), r, Run{ID: "x"}, nil); got.Logprobs != nil || len(got.TokenIDs) != 3 {
		t.Errorf("logprobs %s, ids %v", got.Logprobs, got.TokenIDs)
	}
}

func FuzzAnswersOfAnyKindAreJudgedWithoutPanic(f *testing.F) {
	names, err := filepath.Glob("testdata/streams/*.[sj]s*")
	if err != nil {
		f.Fatal(err)
	}
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a := answer{maxTokens: 64}
		how, err := readAnswer(bytes.NewReader(b), SSELimits{MaxEvent: 1 << 16, MaxTotal: 1 << 20}, &a)
		o := a.outcome(how, err, false)
		if o.Kind == Completed && (o.FinishReason == "" || how != endMark || a.fault != nil) {
			t.Fatalf("a sample without a proof: %+v", o)
		}
		if o.Logprobs != nil && !json.Valid(o.Logprobs) {
			t.Fatalf("logprobs %s", o.Logprobs)
		}
	})
}
