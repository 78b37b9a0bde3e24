package subjects

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
)

// ErrBadHeader says that a header of rollbus does not parse. The error names
// the header and what is wrong with its value.
var ErrBadHeader = errors.New("bad header")

// Bounds of what a header may say. What is larger is refused, never cut.
const (
	// MaxString bounds a free string (group, affinity, model, ...), bytes
	// before escaping.
	MaxString = 512
	// MaxTried bounds the list of engines tried; a longer list is written with
	// its newest MaxTried entries.
	MaxTried = 64
	// MaxTokenCount bounds every count of tokens.
	MaxTokenCount = 1 << 30
	// MaxBind bounds bind numbers, attempts and turns.
	MaxBind = 1 << 30
)

const maxMS = math.MaxInt64 / 1_000_000 // milliseconds that fit a time.Duration

// EscapeHeader makes any string fit a header: bytes outside printable ASCII,
// the space, '%' and ',' become %XX. NATS headers carry neither line breaks nor
// leading and trailing space.
func EscapeHeader(s string) string {
	n := 0
	for i := range len(s) {
		if escaped(s[i]) {
			n++
		}
	}
	if n == 0 {
		return s
	}
	const hex = "0123456789ABCDEF"
	b := make([]byte, 0, len(s)+2*n)
	for i := range len(s) {
		if c := s[i]; escaped(c) {
			b = append(b, '%', hex[c>>4], hex[c&15])
		} else {
			b = append(b, c)
		}
	}
	return string(b)
}

func escaped(c byte) bool { return c <= ' ' || c > '~' || c == '%' || c == ',' }

// UnescapeHeader is the inverse of EscapeHeader. It takes whatever people write
// by hand (spaces, commas) and refuses a '%' that no two hex digits follow.
func UnescapeHeader(s string) (string, error) {
	if !strings.Contains(s, "%") {
		return s, nil
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b = append(b, s[i])
			continue
		}
		if i+2 >= len(s) {
			return "", errors.New("ends inside a %XX escape")
		}
		hi, lo := unhex(s[i+1]), unhex(s[i+2])
		if hi < 0 || lo < 0 {
			return "", fmt.Errorf("has %q where a %%XX escape should be", s[i:i+3])
		}
		b = append(b, byte(hi<<4|lo))
		i += 2
	}
	return string(b), nil
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// headerWriter sets headers, leaving out what is zero.
type headerWriter struct {
	nats.Header
	values []string // of all headers, one behind the other
}

// headers has room for n, those that whoever writes adds counted in.
func headers(n int) *headerWriter {
	return &headerWriter{make(nats.Header, n), make([]string, 0, n)}
}

func (w *headerWriter) set(name, v string) {
	w.values = append(w.values, v)
	n := len(w.values)
	w.Header[name] = w.values[n-1 : n : n]
}

func (w *headerWriter) text(name, v string) {
	if v != "" {
		w.set(name, EscapeHeader(v))
	}
}

func (w *headerWriter) num(name string, v int64) { w.set(name, strconv.FormatInt(v, 10)) }

func (w *headerWriter) nonzero(name string, v int64) {
	if v != 0 {
		w.num(name, v)
	}
}

func (w *headerWriter) ptr(name string, v *int) {
	if v != nil {
		w.num(name, int64(*v))
	}
}

func (w *headerWriter) tried(v []string) {
	if len(v) > MaxTried {
		v = v[len(v)-MaxTried:]
	}
	if len(v) > 0 {
		w.set(HdrTried, strings.Join(v, ","))
	}
}

func (w *headerWriter) blocks(v []uint64) {
	if len(v) == 0 {
		return
	}
	v = v[:min(len(v), MaxHeaderBlocks)]
	raw := make([]byte, 0, 8*len(v))
	for _, b := range v {
		raw = binary.LittleEndian.AppendUint64(raw, b)
	}
	w.set(HdrBlocks, base64.StdEncoding.EncodeToString(raw))
}

// headerReader reads headers and keeps every complaint.
type headerReader struct {
	h    nats.Header
	errs []error
}

func (r *headerReader) err() error { return errors.Join(r.errs...) }

func (r *headerReader) bad(name, format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf("%w: %s %s", ErrBadHeader, name, fmt.Sprintf(format, args...)))
}

// raw is the one value of a header; has is false when it is absent or empty.
func (r *headerReader) raw(name string) (v string, has bool) {
	vs := r.h[name]
	switch {
	case len(vs) == 0 || len(vs) == 1 && vs[0] == "":
		return "", false
	case len(vs) > 1:
		r.bad(name, "is given %d times: give it once", len(vs))
		return "", false
	}
	return vs[0], true
}

func (r *headerReader) has(name string) bool { return len(r.h[name]) > 0 && r.h[name][0] != "" }

func (r *headerReader) require(names ...string) {
	for _, n := range names {
		if !r.has(n) {
			r.bad(n, "is missing")
		}
	}
}

// num reads a number from lo to hi; absent = 0.
func (r *headerReader) num(name string, lo, hi int64) int64 {
	v, ok := r.raw(name)
	if !ok {
		return 0
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < lo || n > hi {
		r.bad(name, "%s is no whole number from %d to %d", quote(v), lo, hi)
		return 0
	}
	return n
}

func (r *headerReader) count(name string) int { return int(r.num(name, 0, MaxTokenCount)) }

func (r *headerReader) countPtr(name string) *int {
	if _, ok := r.raw(name); !ok {
		return nil
	}
	n := r.count(name)
	return &n
}

func (r *headerReader) ms(name string) int64 { return r.num(name, 0, maxMS) }

// text reads a free string.
func (r *headerReader) text(name string) string {
	v, ok := r.raw(name)
	if !ok {
		return ""
	}
	if len(v) > 3*MaxString {
		r.bad(name, "is %d bytes long: at most %d are allowed, %d before escaping", len(v), 3*MaxString, MaxString)
		return ""
	}
	s, err := UnescapeHeader(v)
	switch {
	case err != nil:
		r.bad(name, "%s %v", quote(v), err)
		return ""
	case len(s) > MaxString:
		r.bad(name, "is %d bytes long: at most %d are allowed", len(s), MaxString)
		return ""
	}
	return s
}

// token reads a string that may stand in a subject.
func (r *headerReader) token(name string) string {
	v, ok := r.raw(name)
	if !ok {
		return ""
	}
	if err := CheckToken("value", v); err != nil {
		r.bad(name, "%v", err)
		return ""
	}
	return v
}

func (r *headerReader) tried() []string {
	v, ok := r.raw(HdrTried)
	if !ok {
		return nil
	}
	if len(v) > MaxTried*(MaxToken+1) {
		r.bad(HdrTried, "is %d bytes long: at most %d engines are allowed", len(v), MaxTried)
		return nil
	}
	list := strings.Split(v, ",")
	if len(list) > MaxTried {
		r.bad(HdrTried, "names %d engines: at most %d are allowed", len(list), MaxTried)
		return nil
	}
	for _, e := range list {
		if err := CheckToken("engine", e); err != nil {
			r.bad(HdrTried, "%v", err)
			return nil
		}
	}
	return list
}

func (r *headerReader) lane() Lane {
	v, ok := r.raw(HdrLane)
	if !ok {
		return ""
	}
	if !Lane(v).Valid() {
		r.bad(HdrLane, "%s is no lane: give urgent, continue, normal or batch", quote(v))
		return ""
	}
	return Lane(v)
}

func (r *headerReader) blocks() []uint64 {
	v, ok := r.raw(HdrBlocks)
	if !ok {
		return nil
	}
	if len(v) > base64.StdEncoding.EncodedLen(8*MaxHeaderBlocks) {
		r.bad(HdrBlocks, "is %d bytes long: at most %d block hashes are allowed", len(v), MaxHeaderBlocks)
		return nil
	}
	raw, err := base64.StdEncoding.Strict().DecodeString(v)
	if err != nil || len(raw)%8 != 0 {
		r.bad(HdrBlocks, "is no base64 of 8-byte hashes")
		return nil
	}
	out := make([]uint64, len(raw)/8)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(raw[8*i:])
	}
	return out
}

func (r *headerReader) namespace() uint64 {
	return r.hash(HdrNamespace)
}

// quote shows a value in an error, cut where it is long.
func quote(s string) string {
	const most = 40
	if len(s) > most {
		return fmt.Sprintf("%q...", s[:most])
	}
	return strconv.Quote(s)
}

// FormatWeights spells which weights may answer: "min=3,max_staleness=2"; ""
// when any may.
func FormatWeights(w *WeightVersion) string {
	if w == nil {
		return ""
	}
	var b strings.Builder
	add := func(name string, v *int64) {
		if v == nil {
			return
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(name)
		b.WriteByte('=')
		b.WriteString(strconv.FormatInt(*v, 10))
	}
	add("min", w.Min)
	add("exact", w.Exact)
	add("max_staleness", w.MaxStaleness)
	return b.String()
}

// ParseWeights is the inverse of FormatWeights; nil for "".
func ParseWeights(s string) (*WeightVersion, error) {
	if s == "" {
		return nil, nil
	}
	if len(s) > 3*32 {
		return nil, fmt.Errorf("is %d bytes long: want min=,exact=,max_staleness= with numbers", len(s))
	}
	w := new(WeightVersion)
	for part := range strings.SplitSeq(s, ",") {
		name, num, _ := strings.Cut(part, "=")
		n, err := strconv.ParseInt(num, 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("has %s: want min=,exact=,max_staleness= with whole numbers of 0 or more", quote(part))
		}
		var into **int64
		switch name {
		case "min":
			into = &w.Min
		case "exact":
			into = &w.Exact
		case "max_staleness":
			into = &w.MaxStaleness
		default:
			return nil, fmt.Errorf("has %s: want min=,exact=,max_staleness=", quote(part))
		}
		if *into != nil {
			return nil, fmt.Errorf("gives %s twice", name)
		}
		*into = &n
	}
	return w, nil
}

// weights checks the header and gives it in both forms.
func (r *headerReader) weights() (string, WeightVersion) {
	v, ok := r.raw(HdrWeights)
	if !ok {
		return "", WeightVersion{}
	}
	w, err := ParseWeights(v)
	if err != nil {
		r.bad(HdrWeights, "%v", err)
		return "", WeightVersion{}
	}
	return v, *w
}

const maxRank = 1 << 16
