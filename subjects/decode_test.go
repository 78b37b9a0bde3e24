package subjects_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/subjects"
)

const good = `{"id":"0001","job":"j","prompt_token_ids":[1,2,3],"sampling_params":{"max_tokens":16}}`

func with(t *testing.T, changes string) string {
	t.Helper()
	var m, c map[string]json.RawMessage
	if err := json.Unmarshal([]byte(good), &m); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(changes), &c); err != nil {
		t.Fatal(err)
	}
	for k, v := range c {
		if string(v) == `"-"` {
			delete(m, k)
		} else {
			m[k] = v
		}
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// scenario F14
func TestABadRequestIsRefusedByTheNameOfItsField(t *testing.T) {
	for _, c := range []struct{ name, change, field string }{
		{"wrong type of id", `{"id":7}`, "id"},
		{"no id", `{"id":"-"}`, "id"},
		{"capitals in the id", `{"id":"A"}`, "id"},
		{"a dot in the job", `{"job":"a.b"}`, "job"},
		{"a reserved reader", `{"reader":"_x"}`, "reader"},
		{"no prompt", `{"prompt_token_ids":"-"}`, "prompt"},
		{"an empty prompt", `{"prompt_token_ids":"-","prompt":""}`, "prompt"},
		{"an empty list of tokens", `{"prompt_token_ids":[]}`, "prompt_token_ids"},
		{"two kinds of prompt", `{"prompt":"x"}`, "prompt"},
		{"an empty list beside a prompt", `{"prompt_token_ids":[],"prompt":"x"}`, "prompt"},
		{"a negative token", `{"prompt_token_ids":[1,-2]}`, "prompt_token_ids"},
		{"a token of 33 bits", `{"prompt_token_ids":[4294967296]}`, "prompt_token_ids"},
		{"a fraction as token", `{"prompt_token_ids":[1.5]}`, "prompt_token_ids"},
		{"a nested list of tokens", `{"prompt_token_ids":[[1,2],[3]]}`, "prompt_token_ids"},
		{"tokens as prompt", `{"prompt_token_ids":"-","prompt":[1,2]}`, "prompt"},
		{"no messages", `{"prompt_token_ids":"-","messages":[]}`, "messages"},
		{"messages of numbers", `{"prompt_token_ids":"-","messages":[1]}`, "messages"},
		{"no max_tokens", `{"sampling_params":{}}`, "sampling_params.max_tokens"},
		{"negative max_tokens", `{"sampling_params":{"max_tokens":-1}}`, "sampling_params.max_tokens"},
		{"huge max_tokens", `{"sampling_params":{"max_tokens":1e99}}`, "sampling_params.max_tokens"},
		{"both names of max_tokens", `{"sampling_params":{"max_tokens":1,"max_new_tokens":1}}`, "sampling_params.max_new_tokens"},
		{"max_tokens outside", `{"max_tokens":3}`, "max_tokens"},
		{"top_p above one", `{"sampling_params":{"max_tokens":1,"top_p":1.5}}`, "sampling_params.top_p"},
		{"top_p zero", `{"sampling_params":{"max_tokens":1,"top_p":0}}`, "sampling_params.top_p"},
		{"negative temperature", `{"sampling_params":{"max_tokens":1,"temperature":-1}}`, "sampling_params.temperature"},
		{"n of two", `{"sampling_params":{"max_tokens":1,"n":2}}`, "sampling_params.n"},
		{"n of two outside", `{"n":2}`, "n"},
		{"an empty stop", `{"sampling_params":{"max_tokens":1,"stop":[""]}}`, "sampling_params.stop[0]"},
		{"a group without id", `{"group":{"index":0}}`, "group.id"},
		{"an index past the group", `{"group":{"id":"g","index":4,"size":4}}`, "group.index"},
		{"a turn before the first", `{"trajectory":{"id":"t","turn":0}}`, "trajectory.turn"},
		{"a deadline over a day", `{"deadline":"25h"}`, "deadline"},
		{"a negative deadline", `{"deadline":-1}`, "deadline"},
		{"a deadline in words", `{"deadline":"tomorrow"}`, "deadline"},
		{"a resume that leaves nothing", `{"resume":{"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}}`, "resume.token_ids"},
		{"exact and min weights", `{"weight_version":{"exact":1,"min":1}}`, "weight_version.exact"},
		{"a NUL in the salt", `{"cache_salt":"a\u0000b"}`, "cache_salt"},
		{"a version of tomorrow", `{"schema_version":9}`, "schema_version"},
		{"sampling as a list", `{"sampling_params":[]}`, "sampling_params"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := subjects.DecodeRequest([]byte(with(t, c.change)))
			if !errors.Is(err, subjects.ErrInvalid) {
				t.Fatalf("got %v, want ErrInvalid", err)
			}
			for _, f := range subjects.FieldErrors(err) {
				if f.Field == c.field {
					return
				}
			}
			t.Fatalf("no error names %s: %v", c.field, err)
		})
	}
}

func TestEveryProblemIsNamedAtOnce(t *testing.T) {
	r, err := subjects.DecodeRequest([]byte(`{"id":"x","job":3,"prompt":"p","reader":7,"sampling_params":{"max_tokens":"a","top_p":"b"}}`))
	var got []string
	for _, f := range subjects.FieldErrors(err) {
		got = append(got, f.Field)
	}
	want := []string{"job", "reader", "sampling_params.max_tokens", "sampling_params.top_p"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if r == nil || r.ID != "x" {
		t.Error("the readable fields of a bad request are lost: it could not be answered")
	}
}

func TestWhatIsNoJSONIsRefused(t *testing.T) {
	for name, body := range map[string]string{
		"empty": "", "text": "hello", "list": "[]", "null": "null", "half": good[:20],
		"bad UTF-8": "{\"id\":\"\xff\"}", "two objects": good + good,
		"NaN": strings.Replace(good, "16", "NaN", 1),
	} {
		if _, err := subjects.DecodeRequest([]byte(body)); !errors.Is(err, subjects.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	if _, err := subjects.DecodeRequest(make([]byte, subjects.MaxRequestBytes+1)); !errors.Is(err, subjects.ErrTooLarge) {
		t.Errorf("too large: got %v", err)
	}
}

func TestNaNIsRefusedWhenARequestIsBuiltInCode(t *testing.T) {
	r, err := subjects.DecodeRequest([]byte(good))
	if err != nil {
		t.Fatal(err)
	}
	nan := math.NaN()
	r.Sampling.Temperature = &nan
	if err := r.Validate(); !errors.Is(err, subjects.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

func TestUnknownFieldsComeThroughUnchanged(t *testing.T) {
	in := `{"id":"1","job":"j","prompt":"p","ignore":{"a":[1,2.50]},"sampling_params":{"max_new_tokens":4,"n":1,"guided_json":{"x":null}},"return":{"logprobs":true,"hidden":2}}`
	r, err := subjects.DecodeRequest([]byte(in))
	if err != nil {
		t.Fatal(err)
	}
	if r.Sampling.MaxTokens != 4 {
		t.Errorf("max_new_tokens was not read as max_tokens: %d", r.Sampling.MaxTokens)
	}
	// By value and by pointer: neither may lose the unknown fields.
	for _, v := range []any{r, *r} {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`"ignore":{"a":[1,2.50]}`, `"guided_json":{"x":null}`, `"hidden":2`, `"max_tokens":4`} {
			if !strings.Contains(string(b), want) {
				t.Errorf("%s is missing in %s", want, b)
			}
		}
		again, err := subjects.DecodeRequest(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(r, again); d != "" {
			t.Error(d)
		}
	}
}

func TestAKnownFieldInExtraIsRefused(t *testing.T) {
	r, _ := subjects.DecodeRequest([]byte(good))
	r.Extra = map[string]json.RawMessage{"job": json.RawMessage(`"other"`)}
	if _, err := json.Marshal(r); err == nil {
		t.Error("a second job field was written")
	}
}

func TestAResultWithAnUnknownStatusIsNoAnswer(t *testing.T) {
	if _, err := subjects.DecodeResult([]byte(`{"id":"1","job":"j","status":"completed","new_field":1}`)); err != nil {
		t.Errorf("an unknown field: %v", err)
	}
	if _, err := subjects.DecodeResult([]byte(`{"id":"1","job":"j","status":"great"}`)); !errors.Is(err, subjects.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

func FuzzDecodeRequest(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte(`{"id":"1","job":"j","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"sampling_params":{"max_new_tokens":4}}`))
	f.Add([]byte(`{"prompt_token_ids":[1,,2],"resume":{"token_ids":[1]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := subjects.DecodeRequest(b)
		if err != nil {
			return
		}
		facts := subjects.FactsFromRequest(r, subjects.Settings{})
		_, complete, err := subjects.FactsFromHeader(r.Job, r.ID, r.Lane(), facts.Header())
		if err != nil || !complete {
			t.Fatalf("the headers of a valid request do not parse: %v %v", complete, err)
		}
		out, err := json.Marshal(r)
		if err != nil {
			t.Fatalf("a valid request does not encode: %v", err)
		}
		again, err := subjects.DecodeRequest(out)
		if err != nil {
			t.Fatalf("an encoded request is refused: %v\n%s", err, out)
		}
		if again.Key() != r.Key() || len(again.PromptTokenIDs) != len(r.PromptTokenIDs) {
			t.Fatal("encoding changed the request")
		}
	})
}

// scenario F14
func TestAMemberThatIsThereTwiceIsRefusedWhereverItStands(t *testing.T) {
	for _, c := range []struct{ body, problem string }{
		{`{"id":"0001","job":"j","prompt":"x","id":"0002","sampling_params":{"max_tokens":1}}`, `request: has the member "id" twice: give it once`},
		{`{"id":"0001","job":"j","prompt":"x","\u0069d":"0002","sampling_params":{"max_tokens":1}}`, `request: has the member "id" twice: give it once`},
		{`{"id":"0001","job":"j","prompt":"x","sampling_params":{"max_tokens":1,"max_tokens":2}}`, `sampling_params: has the member "max_tokens" twice: give it once`},
		{`{"id":"0001","job":"j","prompt":"x","mine":1,"mine":2,"sampling_params":{"max_tokens":1}}`, `request: has the member "mine" twice: give it once`},
		{"\xef\xbb\xbf" + good, `begins with a byte order mark: write UTF-8 without one`},
	} {
		if _, err := subjects.DecodeRequest([]byte(c.body)); !errors.Is(err, subjects.ErrInvalid) || !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%s: %v, want %s", c.body, err, c.problem)
		}
	}
	// What is only passed on is its reader's to judge.
	if _, err := subjects.DecodeRequest([]byte(`{"id":"0001","job":"j","prompt":"x","meta":{"a":1,"a":2},"sampling_params":{"max_tokens":1}}`)); err != nil {
		t.Error(err)
	}
}
