package subjects_test

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/subjects"
)

func TestWhatTheDecoderTakesTheSchemaTakes(t *testing.T) {
	s := loadSchema(t)
	for name, body := range map[string]string{
		"the least":  good,
		"text":       `{"id":"1","job":"j","prompt":"p","sampling_params":{"max_new_tokens":4,"top_p":0.9,"guided":{}},"deadline":"1h30m","x":1}`,
		"everything": `{"schema_version":1,"id":"1","job":"j","messages":[{"role":"user"}],"sampling_params":{"max_tokens":4,"stop":["a"]},"group":{"id":"g","index":1,"size":2},"trajectory":{"id":"t","turn":2},"step":3,"weight_version":{"min":1},"deadline":60,"resume":{"token_ids":[1]},"labels":{"a":"b"},"meta":[1],"return":{"logprobs":true}}`,
	} {
		r, err := subjects.DecodeRequest([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := s.check([]byte(body), "#/$defs/Request"); err != nil {
			t.Errorf("%s: the schema refuses what the decoder takes: %v", name, err)
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.check(again, "#/$defs/Request"); err != nil {
			t.Errorf("%s: the schema refuses what rollbus writes: %v", name, err)
		}
	}
	res, err := json.Marshal(subjects.Result{SchemaVersion: 1, ID: "1", Job: "j", Status: subjects.Completed,
		Usage: &subjects.Usage{PromptTokens: 1}, Error: &subjects.ResultError{Class: subjects.ClassInfra}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.check(res, "#/$defs/Result"); err != nil {
		t.Errorf("the schema refuses a result: %v", err)
	}
}

func TestWhatTheSchemaForbidsTheDecoderRefuses(t *testing.T) {
	s := loadSchema(t)
	for _, change := range []string{
		`{"id":"-"}`, `{"id":7}`, `{"id":"A"}`, `{"prompt":"x"}`, `{"prompt_token_ids":[]}`, `{"prompt_token_ids":[-1]}`,
		`{"sampling_params":{}}`, `{"sampling_params":{"max_tokens":0}}`, `{"sampling_params":{"max_tokens":1,"top_p":2}}`,
		`{"group":{"index":1}}`, `{"trajectory":{"id":"t","turn":0}}`, `{"deadline":"soon"}`, `{"schema_version":2}`,
	} {
		body := []byte(with(t, change))
		if s.check(body, "#/$defs/Request") == nil {
			t.Errorf("the schema takes %s", change)
		}
		if _, err := subjects.DecodeRequest(body); err == nil {
			t.Errorf("the decoder takes %s", change)
		}
	}
}

// schemaDoc checks documents against the part of JSON Schema that we use.
type schemaDoc map[string]any

func loadSchema(t *testing.T) schemaDoc {
	t.Helper()
	var s schemaDoc
	if err := json.Unmarshal(subjects.Schema(), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func (d schemaDoc) check(body []byte, ref string) error {
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		return err
	}
	return d.valid(v, map[string]any{"$ref": ref}, "")
}

func (d schemaDoc) valid(v any, s map[string]any, at string) error {
	if ref, ok := s["$ref"].(string); ok {
		def := d["$defs"].(map[string]any)[strings.TrimPrefix(ref, "#/$defs/")].(map[string]any)
		if err := d.valid(v, def, at); err != nil {
			return err
		}
	}
	if want, ok := s["type"].(string); ok && !isType(v, want) {
		return fmt.Errorf("%s is no %s", at, want)
	}
	if c, ok := s["const"]; ok && v != c {
		return fmt.Errorf("%s is not %v", at, c)
	}
	if e, ok := s["enum"].([]any); ok && !slices.Contains(e, v) {
		return fmt.Errorf("%s is none of %v", at, e)
	}
	if err := d.anyOf(v, s, at); err != nil {
		return err
	}
	switch v := v.(type) {
	case float64:
		if lo, ok := s["minimum"].(float64); ok && v < lo {
			return fmt.Errorf("%s is below %v", at, lo)
		}
		if lo, ok := s["exclusiveMinimum"].(float64); ok && v <= lo {
			return fmt.Errorf("%s is not above %v", at, lo)
		}
		if hi, ok := s["maximum"].(float64); ok && v > hi {
			return fmt.Errorf("%s is above %v", at, hi)
		}
	case string:
		if p, ok := s["pattern"].(string); ok && !regexp.MustCompile(p).MatchString(v) {
			return fmt.Errorf("%s does not match %s", at, p)
		}
		if n, ok := s["minLength"].(float64); ok && float64(len(v)) < n {
			return fmt.Errorf("%s is too short", at)
		}
	case []any:
		if n, ok := s["minItems"].(float64); ok && float64(len(v)) < n {
			return fmt.Errorf("%s has too few items", at)
		}
		if items, ok := s["items"].(map[string]any); ok {
			for i, x := range v {
				if err := d.valid(x, items, fmt.Sprintf("%s[%d]", at, i)); err != nil {
					return err
				}
			}
		}
	case map[string]any:
		return d.object(v, s, at)
	}
	return nil
}

func (d schemaDoc) object(v, s map[string]any, at string) error {
	required, _ := s["required"].([]any)
	for _, r := range required {
		if _, ok := v[r.(string)]; !ok {
			return fmt.Errorf("%s.%s is missing", at, r)
		}
	}
	props, _ := s["properties"].(map[string]any)
	for name, x := range v {
		if p, ok := props[name].(map[string]any); ok {
			if err := d.valid(x, p, at+"."+name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d schemaDoc) anyOf(v any, s map[string]any, at string) error {
	for _, word := range []string{"anyOf", "oneOf"} {
		list, ok := s[word].([]any)
		if !ok {
			continue
		}
		n := 0
		var last error
		for _, alt := range list {
			if err := d.valid(v, alt.(map[string]any), at); err == nil {
				n++
			} else {
				last = err
			}
		}
		if n == 0 || n > 1 && word == "oneOf" {
			return fmt.Errorf("%s fits %d of %s: %w", at, n, word, last)
		}
	}
	return nil
}

func isType(v any, want string) bool {
	switch x := v.(type) {
	case nil:
		return want == "null"
	case bool:
		return want == "boolean"
	case string:
		return want == "string"
	case float64:
		return want == "number" || want == "integer" && x == math.Trunc(x)
	case []any:
		return want == "array"
	case map[string]any:
		return want == "object"
	}
	return false
}
