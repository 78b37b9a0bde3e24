package subjects_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

func decode(t *testing.T, body string) *subjects.Request {
	t.Helper()
	r, err := subjects.DecodeRequest([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestTextCountsAQuarterOfItsCharactersRoundedUp(t *testing.T) {
	for _, c := range []struct {
		prompt string
		want   int
	}{{`"prompt":"a"`, 1}, {`"prompt":"abcd"`, 1}, {`"prompt":"abcde"`, 2}, {`"prompt":"äöüß"`, 1},
		{`"messages":[{"role":"user","content":"abcdefgh"}]`, 2},
		{`"messages":[{"role":"user","content":[{"type":"text","text":"abcd"},{"type":"text","text":"efghi"}]}]`, 3},
		{`"messages":[{"role":"assistant","content":null}]`, 1},
		{`"prompt_token_ids":[1,2,3,4,5]`, 5},
	} {
		r := decode(t, `{"id":"1","job":"j",`+c.prompt+`,"sampling_params":{"max_tokens":8}}`)
		if got := subjects.FactsFromRequest(r, subjects.Settings{}).PromptTokens; got != c.want {
			t.Errorf("%s: %d tokens, want %d", c.prompt, got, c.want)
		}
	}
}

// scenario R14
func TestAResumedRolloutHasTheLongerPromptAndTheRestOfItsBudget(t *testing.T) {
	r := decode(t, `{"id":"1","job":"j","prompt_token_ids":[1,2,3],"resume":{"token_ids":[4,5]},"sampling_params":{"max_tokens":8}}`)
	f := subjects.FactsFromRequest(r, subjects.Settings{BlockTokens: 2, Model: "m"})
	if f.PromptTokens != 5 || f.MaxTokens != 6 {
		t.Errorf("prompt %d, output %d", f.PromptTokens, f.MaxTokens)
	}
	want := blockhash.Chain(nil, blockhash.Namespace("m", "", ""), []uint32{1, 2, 3, 4, 5}, 2)
	if d := cmp.Diff(want, f.Blocks); d != "" {
		t.Error(d)
	}
}

func TestAHugePromptNamesTheBlocksOfItsBeginning(t *testing.T) {
	r := &subjects.Request{ID: "1", Job: "j", PromptTokenIDs: make([]uint32, 200_000), Resume: &subjects.Resume{TokenIDs: make([]uint32, 100)}}
	r.Sampling.MaxTokens = 200
	f := subjects.FactsFromRequest(r, subjects.Settings{})
	if len(f.Blocks) != subjects.MaxHeaderBlocks || f.PromptTokens != 200_100 {
		t.Errorf("%d blocks of %d tokens", len(f.Blocks), f.PromptTokens)
	}
	size := 0
	for k, v := range f.Header() {
		size += len(k) + len(v[0]) + 4
	}
	if size > 60<<10 {
		t.Errorf("%d bytes of headers", size)
	}
}

func TestABodyAndItsHeadersTellTheSameFacts(t *testing.T) {
	r := decode(t, `{"id":"1","job":"j","model":"m","lora":"l","prompt_token_ids":[1,2,3],"sampling_params":{"max_tokens":8},
		"group":{"id":"g 1","index":0},"trajectory":{"id":"t","turn":3},"step":4,"weight_version":{"min":0,"max_staleness":2},
		"deadline":"90s","attempt_timeout":5,"max_attempts":2,"expected_tokens":7,"affinity":"ä","reader":"r2","cache_salt":"s"}`)
	want := subjects.FactsFromRequest(r, subjects.Settings{BlockTokens: 2})
	got, complete, err := subjects.FactsFromHeader("j", "1", r.Lane(), want.Header())
	if err != nil || !complete {
		t.Fatal(complete, err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got.DeadlineMS != 90_000 || got.AttemptTimeoutMS != 5_000 || got.Lane != subjects.LaneContinue || got.Reader != "r2" {
		t.Errorf("%+v", got)
	}
}

func TestBadSettingsAreNamedTogether(t *testing.T) {
	if err := (subjects.Settings{}).Validate(); err != nil {
		t.Errorf("empty settings: %v", err)
	}
	err := subjects.Settings{
		Mode: "on", BlockTokens: -1, Deadline: 25 * subjects.Hour, MaxAttempts: -3, Prefetch: -2,
		JobWeights: map[string]float64{"a": 0, "B": 1}, ResultsKeep: subjects.Duration(time.Second),
	}.Validate()
	for _, field := range []string{"mode", "block_tokens", "deadline", "max_attempts", "prefetch", "job_weights.a", "job_weights.B", "results_keep"} {
		if err == nil || !strings.Contains(err.Error(), field+": ") {
			t.Errorf("%s is not named: %v", field, err)
		}
	}
}

func TestBadLayoutsAreNamedTogether(t *testing.T) {
	if err := (subjects.Layout{}).Validate(); err != nil {
		t.Errorf("an empty layout: %v", err)
	}
	err := subjects.Layout{Replicas: 9, Storage: 7, LivenessTTL: time.Millisecond, Budget: 1, MaxConsumers: 2}.Validate()
	for _, field := range []string{"replicas", "storage", "liveness_ttl", "budget", "max_consumers"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named: %v", field, err)
		}
	}
}
