package subjects

import (
	"bytes"
	"encoding/json"
	"maps"
	"testing"
	"unicode/utf8"
)

// Splitting an object by hand gives what encoding/json gives.
func FuzzMembers(f *testing.F) {
	for _, s := range []string{
		`{}`, ` { } `, `{"a":1}`, "{ \"a\" :\t[1,{\"b\":\"]}\"}] , \"c\":null\n}", `{"a":"x\\\"}","b":-1.5e3}`, `{"a":{},"a":[]}`, `{"a":1,"b":2,"a":3}`,
		`{"\u0061":1}`, `{"a":1,}`, `[1]`, `null`, `"x"`, `{"a":true}x`, `{"":""}`, `{"a":"\\"}`, ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, again, ok := members(b)
		var want map[string]json.RawMessage
		err := json.Unmarshal(b, &want)
		if ok && (err != nil || want == nil) {
			t.Fatalf("%q is split, and is no object: %v", b, err)
		}
		if ok && !maps.EqualFunc(got, want, func(a, b json.RawMessage) bool { return string(a) == string(b) }) {
			t.Errorf("%q is split into %q, want %q", b, got, want)
		}
		if ok && (again != "") != (repeated(b) != "") {
			t.Errorf("%q: split, %q is there again, and read %q", b, again, repeated(b))
		}
		if !ok && err == nil && want != nil && !bytes.ContainsRune(b, '\\') && utf8.Valid(b) {
			t.Errorf("%q is an object and was not split", b)
		}
	})
}
