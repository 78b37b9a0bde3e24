package subjects

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

var (
	// ErrInvalid says that a message can never run as it is. Every problem is a
	// FieldError in the joined error.
	ErrInvalid = errors.New("invalid message")
	// ErrTooLarge says that a message is over MaxRequestBytes.
	ErrTooLarge = errors.New("message too large")
)

// FieldError is one problem of one field.
type FieldError struct {
	Field   string // as it is spelled in JSON, with dots: sampling_params.top_p
	Problem string // what is wrong and what to give
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// Unwrap makes errors.Is(err, ErrInvalid) true.
func (e *FieldError) Unwrap() error { return ErrInvalid }

// FieldErrors lists the problems of an error of DecodeRequest or Validate.
func FieldErrors(err error) []*FieldError {
	var out []*FieldError
	collect(err, &out)
	return out
}

// collect walks the whole tree: errors.As ends at the first.
func collect(err any, out *[]*FieldError) {
	switch e := err.(type) {
	case *FieldError:
		*out = append(*out, e)
	case interface{ Unwrap() []error }:
		for _, sub := range e.Unwrap() {
			collect(sub, out)
		}
	case interface{ Unwrap() error }:
		collect(e.Unwrap(), out)
	}
}

// DecodeRequest reads and validates a request. All problems come joined, each a
// FieldError; when the body is JSON at all, the request comes back beside the
// error with the fields that could be read, so that it can be answered.
func DecodeRequest(b []byte) (*Request, error) {
	if len(b) > MaxRequestBytes {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are allowed: shorten the prompt or the meta field", ErrTooLarge, len(b), MaxRequestBytes)
	}
	if err := checkText(b); err != nil {
		return nil, err
	}
	r := new(Request)
	if err := r.UnmarshalJSON(b); err != nil {
		return r, err
	}
	if err := r.Validate(); err != nil {
		return r, err
	}
	return r, nil
}

// DecodeResult reads a result. It takes what it does not know, and insists on
// what a reader acts on: id, job and status.
func DecodeResult(b []byte) (*Result, error) {
	if err := checkText(b); err != nil {
		return nil, err
	}
	r := new(Result)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%w: result: %s", ErrInvalid, plain(err))
	}
	var errs []error
	for _, f := range [...]struct{ name, v string }{{"id", r.ID}, {"job", r.Job}} {
		if err := CheckToken(f.name, f.v); err != nil {
			errs = append(errs, &FieldError{f.name, err.Error()})
		}
	}
	if !r.Status.Valid() {
		errs = append(errs, &FieldError{"status", quote(string(r.Status)) + " is not known"})
	}
	return r, errors.Join(errs...)
}

func checkText(b []byte) error {
	switch {
	case len(b) == 0:
		return fmt.Errorf("%w: the body is empty: give a JSON object", ErrInvalid)
	case !utf8.Valid(b):
		return fmt.Errorf("%w: the body is not valid UTF-8", ErrInvalid)
	case bytes.HasPrefix(b, []byte("\xef\xbb\xbf")):
		return fmt.Errorf("%w: the body begins with a byte order mark: write UTF-8 without one", ErrInvalid)
	}
	return nil
}

// UnmarshalJSON reads every field on its own, so that all problems are named at
// once, and keeps unknown ones in Extra. It checks types, not ranges: see
// Validate.
func (r *Request) UnmarshalJSON(b []byte) error {
	*r = Request{}
	raw, err := object(b, "request")
	if err != nil {
		return err
	}
	var errs []error
	r.Extra, errs = decodeStruct(raw, reflect.ValueOf(r).Elem(), "")
	if r.SchemaVersion == 0 {
		r.SchemaVersion = SchemaVersion
	}
	return errors.Join(errs...)
}

// MarshalJSON writes the fields of Extra beside the known ones.
func (r Request) MarshalJSON() ([]byte, error) {
	type plain Request
	return withExtra(plain(r), r.Extra, reflect.TypeFor[Request](), "")
}

const aliasMaxTokens = "max_new_tokens"

// UnmarshalJSON reads max_new_tokens as max_tokens and keeps unknown fields.
func (p *SamplingParams) UnmarshalJSON(b []byte) error {
	return errors.Join(p.decode(b, "")...)
}

func (p *SamplingParams) decode(b []byte, at string) []error {
	*p = SamplingParams{}
	raw, err := object(b, at)
	if err != nil {
		return []error{err}
	}
	var errs []error
	if alias, ok := raw[aliasMaxTokens]; ok {
		if _, both := raw["max_tokens"]; both {
			errs = append(errs, &FieldError{join(at, aliasMaxTokens), "is another name of max_tokens: give one of the two"})
		} else {
			raw["max_tokens"] = alias
		}
		delete(raw, aliasMaxTokens)
	}
	extra, more := decodeStruct(raw, reflect.ValueOf(p).Elem(), at)
	p.Extra = extra
	return append(errs, more...)
}

// MarshalJSON writes the fields of Extra beside the known ones.
func (p SamplingParams) MarshalJSON() ([]byte, error) {
	type plain SamplingParams
	return withExtra(plain(p), p.Extra, reflect.TypeFor[SamplingParams](), "sampling_params")
}

// UnmarshalJSON keeps unknown fields in Extra.
func (t *Return) UnmarshalJSON(b []byte) error { return errors.Join(t.decode(b, "")...) }

func (t *Return) decode(b []byte, at string) []error {
	*t = Return{}
	raw, err := object(b, at)
	if err != nil {
		return []error{err}
	}
	var errs []error
	t.Extra, errs = decodeStruct(raw, reflect.ValueOf(t).Elem(), at)
	return errs
}

// MarshalJSON writes the fields of Extra beside the known ones.
func (t Return) MarshalJSON() ([]byte, error) {
	type plain Return
	return withExtra(plain(t), t.Extra, reflect.TypeFor[Return](), "return")
}

// object splits an object into its members. What it returns is part of b.
func object(b []byte, at string) (map[string]json.RawMessage, error) {
	raw, again, ok := members(b)
	if !ok {
		if err := json.Unmarshal(b, &raw); err != nil {
			return nil, &FieldError{atOr(at, "request"), "is no JSON object: " + plain(err)}
		}
		again = repeated(b)
	}
	switch {
	case raw == nil:
		return nil, &FieldError{atOr(at, "request"), "is null: give a JSON object"}
	case again != "":
		// Readers differ in which one counts.
		return nil, &FieldError{atOr(at, "request"), "has the member " + quote(again) + " twice: give it once"}
	}
	return raw, nil
}

// repeated is a member's name that an object has twice, "" = none.
func repeated(b []byte) string {
	seen := map[string]bool{}
	dec := json.NewDecoder(bytes.NewReader(b))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return ""
	}
	for dec.More() {
		t, err := dec.Token()
		name, ok := t.(string)
		if err != nil || !ok {
			return ""
		}
		if seen[name] {
			return name
		}
		seen[name] = true
		var skip json.RawMessage
		if dec.Decode(&skip) != nil {
			return ""
		}
	}
	return ""
}

// members is object without its errors, and without names that need decoding:
// it looks at every byte once where encoding/json does so thrice. Of a member
// that is there again the last one stands, and again names it.
func members(b []byte) (raw map[string]json.RawMessage, again string, ok bool) {
	if !json.Valid(b) {
		return nil, "", false
	}
	i := blank(b, 0)
	if b[i] != '{' {
		return nil, "", false
	}
	raw = make(map[string]json.RawMessage, 8)
	for {
		// b is valid JSON: what must follow does.
		if i = blank(b, i+1); b[i] == '}' {
			return raw, again, true
		}
		end := stringEnd(b, i)
		name := b[i+1 : end-1]
		if bytes.IndexByte(name, '\\') >= 0 || !utf8.Valid(name) {
			return nil, "", false
		}
		i = blank(b, blank(b, end)+1) // the colon is between
		end = valueEnd(b, i)
		if _, there := raw[string(name)]; there {
			again = string(name)
		}
		raw[string(name)] = b[i:end:end]
		if i = blank(b, end); b[i] == '}' {
			return raw, again, true
		}
	}
}

// blank is where the next byte that is no white space stands.
func blank(b []byte, i int) int {
	for b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r' {
		i++
	}
	return i
}

// stringEnd is the index behind a string that begins at i.
func stringEnd(b []byte, i int) int {
	for i++; b[i] != '"'; i++ {
		if b[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// valueEnd is the index behind a member's value that begins at i.
func valueEnd(b []byte, i int) int {
	depth := 0
	for {
		switch c := b[i]; c {
		case '"':
			if i = stringEnd(b, i); depth == 0 {
				return i
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return i // of a number or a word before it
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return i
			}
		}
		i++
	}
}

func atOr(at, other string) string {
	if at == "" {
		return other
	}
	return at
}

func join(at, name string) string {
	if at == "" {
		return name
	}
	return at + "." + name
}

var fieldsOf sync.Map // reflect.Type -> map[string]int: built once a type

// jsonFields maps JSON names to the fields of a struct type.
func jsonFields(t reflect.Type) map[string]int {
	if v, ok := fieldsOf.Load(t); ok {
		if m, ok := v.(map[string]int); ok {
			return m
		}
	}
	m := make(map[string]int, t.NumField())
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if name != "" && name != "-" {
			m[name] = i
		}
	}
	fieldsOf.Store(t, m)
	return m
}

// decodeStruct fills the known fields and gives back the unknown ones. null is
// the same as absent. Problems come in the order of the fields' names.
func decodeStruct(raw map[string]json.RawMessage, into reflect.Value, at string) (extra map[string]json.RawMessage, errs []error) {
	fields := jsonFields(into.Type())
	var broken []string
	for name, b := range raw {
		i, known := fields[name]
		if !known {
			if extra == nil {
				extra = make(map[string]json.RawMessage)
			}
			extra[name] = bytes.Clone(b)
			continue
		}
		if string(b) != "null" && len(decodeField(b, into.Field(i), join(at, name))) > 0 {
			broken = append(broken, name)
		}
	}
	slices.Sort(broken)
	for _, name := range broken {
		errs = append(errs, decodeField(raw[name], into.Field(fields[name]), join(at, name))...)
	}
	return extra, errs
}

func decodeField(b []byte, into reflect.Value, at string) []error {
	switch p := into.Addr().Interface().(type) {
	case *[]uint32:
		ids, err := tokenIDs(b)
		if err != nil {
			return []error{&FieldError{at, err.Error()}}
		}
		*p = ids
		return nil
	case *SamplingParams:
		return p.decode(b, at)
	case **Return:
		*p = new(Return)
		return (*p).decode(b, at)
	case **Resume:
		*p = new(Resume)
		raw, err := object(b, at)
		if err != nil {
			return []error{err}
		}
		_, errs := decodeStruct(raw, reflect.ValueOf(*p).Elem(), at)
		return errs
	case *string:
		if at == "prompt" && b[0] == '[' {
			return []error{&FieldError{at, "is a list: give token ids as prompt_token_ids, and one prompt a request"}}
		}
		if plainText(b) {
			*p = string(b[1 : len(b)-1])
			return nil
		}
	case *int:
		if n, ok := tokenID(b); ok && (b[0] != '0' || len(b) == 1) {
			*p = int(n)
			return nil
		}
	}
	if err := json.Unmarshal(b, into.Addr().Interface()); err != nil {
		return []error{&FieldError{at, plain(err)}}
	}
	return nil
}

// plainText tells whether a string stands for its own bytes.
func plainText(b []byte) bool {
	if len(b) < 2 || b[0] != '"' {
		return false
	}
	for _, c := range b[1 : len(b)-1] {
		if c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// tokenIDs reads a list of token ids. It is several times as fast as
// encoding/json, which matters for prompts of 100,000 tokens, and says which
// element is wrong. b is valid JSON already.
func tokenIDs(b []byte) ([]uint32, error) {
	if len(b) == 0 || b[0] != '[' {
		return nil, fmt.Errorf("%s is no list of token ids", quote(string(b)))
	}
	out := make([]uint32, 0, len(b)/6+1)
	for i := 1; i < len(b); {
		switch c := b[i]; {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == ',':
			i++
		case c == ']':
			return out, nil
		default:
			end := i
			for end < len(b) && b[end] != ',' && b[end] != ']' && b[end] > ' ' {
				end++
			}
			n, ok := tokenID(b[i:end])
			if !ok {
				return nil, fmt.Errorf("element %d, %s, is no whole number from 0 to 4294967295", len(out), quote(string(b[i:end])))
			}
			out = append(out, n)
			i = end
		}
	}
	return nil, errors.New("ends before its closing bracket")
}

func tokenID(b []byte) (uint32, bool) {
	if len(b) == 0 || len(b) > 10 {
		return 0, false
	}
	var n uint64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return uint32(n), n <= 1<<32-1
}

// plain says in the wire's words what encoding/json says in Go's.
func plain(err error) string {
	if t, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		got := t.Value
		if num, isNum := strings.CutPrefix(got, "number "); isNum {
			got = "the number " + quoteNumber(num)
		}
		s := "is " + article(got) + ", want " + jsonType(t.Type)
		if t.Field != "" {
			return t.Field + " " + s
		}
		return s
	}
	if s, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Sprintf("broken at byte %d: %v", s.Offset, s)
	}
	return err.Error()
}

func article(got string) string {
	switch got {
	case "string", "bool", "number":
		return "a " + got
	case "array", "object":
		return "an " + got
	}
	return got
}

func quoteNumber(s string) string {
	if len(s) > 24 {
		return s[:24] + "..."
	}
	return s
}

func jsonType(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int, reflect.Int64, reflect.Int32, reflect.Uint32, reflect.Uint64:
		return "a whole number of " + strconv.Itoa(t.Bits()) + " bits"
	case reflect.Float64:
		return "a number"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice:
		return "a list"
	}
	return "an object"
}

// withExtra writes a struct and the unknown fields that came with it.
func withExtra(v any, extra map[string]json.RawMessage, t reflect.Type, at string) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil || len(extra) == 0 {
		return b, err
	}
	known := jsonFields(t)
	b = b[:len(b)-1]
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		if _, ok := known[name]; ok {
			return nil, &FieldError{join(at, name), "stands in Extra and is a known field: set the field"}
		}
		val := extra[name]
		if len(val) == 0 {
			val = json.RawMessage("null")
		}
		key, err := json.Marshal(name)
		if err != nil {
			return nil, err
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(append(b, key...), ':'), val...)
	}
	b = append(b, '}')
	if !json.Valid(b) {
		return nil, &FieldError{atOr(at, "request"), "has a value in Extra that is no JSON"}
	}
	return b, nil
}
