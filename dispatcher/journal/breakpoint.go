package journal

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// ErrBreak is wrapped by every refusal of ParseBreak.
var ErrBreak = errors.New("bad break expression")

// Break tells at which steps a replay stops. It is a list of terms joined by
// "&&" or "and", each a name, an operator and a value:
//
//	n        number of the event                  == != < <= > >=
//	at       seconds of the core's time           == != < <= > >=
//	bind     a bind number of its decisions       == != < <= > >=
//	event    type of the event, as Fetched        == != ~
//	effect   type of one of its effects, as Bind  == != ~
//	job id   of the event or of one of its effects; id also as <job>.<id>   == != ~
//	engine   of the event or of one of its effects                          == != ~
//	reason policy mode basis shadow   of one of its decisions               == != ~
//
// == holds when one of the step's values is equal, != when none is, ~ when one
// contains the value. Values with spaces stand in double quotes.
type Break []breakTerm

type breakTerm struct {
	name, op, value string
	number          float64
}

var (
	breakNumbers = []string{"n", "at", "bind"}
	breakTexts   = []string{"event", "effect", "job", "id", "engine", "reason", "policy", "mode", "basis", "shadow"}
	breakOps     = []string{"==", "!=", "<=", ">=", "<", ">", "~", "="}
)

// ParseBreak reads an expression.
func ParseBreak(s string) (Break, error) {
	var out Break
	for _, part := range splitTerms(s) {
		part = strings.TrimSpace(part)
		at, op := -1, ""
		for _, o := range breakOps { // the longest at the first place
			if i := strings.Index(part, o); i >= 0 && (at < 0 || i < at || i == at && len(o) > len(op)) {
				at, op = i, o
			}
		}
		if at < 0 {
			return nil, fmt.Errorf("%w: %q: want name, operator (== != < <= > >= ~) and value, as engine==e1", ErrBreak, part)
		}
		t := breakTerm{name: strings.TrimSpace(part[:at]), op: op, value: strings.TrimSpace(part[at+len(op):])}
		if t.op == "=" {
			t.op = "=="
		}
		if u, err := strconv.Unquote(t.value); err == nil {
			t.value = u
		}
		switch {
		case slices.Contains(breakNumbers, t.name) && t.op != "~":
			n, err := strconv.ParseFloat(t.value, 64)
			if err != nil {
				return nil, fmt.Errorf("%w: %s is a number, %q is none", ErrBreak, t.name, t.value)
			}
			t.number = n
		case slices.Contains(breakTexts, t.name) && (t.op == "==" || t.op == "!=" || t.op == "~"):
		case slices.Contains(breakNumbers, t.name), slices.Contains(breakTexts, t.name):
			return nil, fmt.Errorf("%w: %s cannot be compared with %s", ErrBreak, t.name, t.op)
		default:
			return nil, fmt.Errorf("%w: %q is no name: want one of %s", ErrBreak, t.name, strings.Join(slices.Concat(breakNumbers, breakTexts), ", "))
		}
		out = append(out, t)
	}
	return out, nil
}

// splitTerms cuts at && and and, outside of quotes.
func splitTerms(s string) (out []string) {
	quoted, from := false, 0
	for i := 0; i < len(s); i++ {
		if s[i] == '"' {
			quoted = !quoted
		}
		for _, sep := range []string{"&&", " and "} {
			if !quoted && strings.HasPrefix(s[i:], sep) {
				out = append(out, s[from:i])
				i += len(sep) - 1
				from = i + 1
				break
			}
		}
	}
	return append(out, s[from:])
}

// Hit tells whether all terms hold at a step.
func (b Break) Hit(s *Step, effects []core.Effect) bool {
	for i := range b {
		if !b[i].holds(s, effects) {
			return false
		}
	}
	return true
}

func (t *breakTerm) holds(s *Step, effects []core.Effect) bool {
	if slices.Contains(breakNumbers, t.name) {
		return t.anyNumber(s, effects)
	}
	some := false
	for v := range t.texts(s, effects) {
		if t.op == "~" {
			some = some || strings.Contains(v, t.value)
		} else {
			some = some || v == t.value
		}
	}
	return some != (t.op == "!=")
}

func (t *breakTerm) anyNumber(s *Step, effects []core.Effect) bool {
	var of []float64
	switch t.name {
	case "n":
		of = append(of, float64(s.N))
	case "at":
		of = append(of, s.Now.Seconds())
	default:
		for _, d := range Decisions(effects) {
			of = append(of, float64(d.Bind))
		}
	}
	if t.op == "!=" {
		return !slices.Contains(of, t.number)
	}
	return slices.ContainsFunc(of, func(v float64) bool {
		c := cmp.Compare(v, t.number)
		switch t.op {
		case "<":
			return c < 0
		case "<=":
			return c <= 0
		case ">":
			return c > 0
		case ">=":
			return c >= 0
		}
		return c == 0
	})
}

func (t *breakTerm) texts(s *Step, effects []core.Effect) map[string]bool {
	out := map[string]bool{}
	switch t.name {
	case "event":
		out[Name(s.Event)] = true
	case "effect":
		for _, e := range effects {
			out[reflect.TypeOf(e).Name()] = true
		}
	case "job", "id", "engine":
		t.collect(reflect.ValueOf(s.Event), out)
		for _, e := range effects {
			if d, ok := e.(core.Decision); ok {
				job, id, _ := strings.Cut(d.Rollout, ".")
				t.add(job, id, d.Engine, out)
				continue
			}
			t.collect(reflect.ValueOf(e), out)
		}
	default:
		for _, d := range Decisions(effects) {
			out[map[string]string{"reason": d.Reason, "policy": d.Policy, "mode": d.Mode, "basis": d.Basis, "shadow": d.Shadow}[t.name]] = true
		}
	}
	return out
}

func (t *breakTerm) add(job, id, engine string, out map[string]bool) {
	switch {
	case t.name == "job" && job != "":
		out[job] = true
	case t.name == "engine" && engine != "":
		out[engine] = true
	case t.name == "id" && id != "":
		out[id], out[job+"."+id] = true, true
	}
}

// collect finds the names in an event or effect, wherever they stand.
func (t *breakTerm) collect(v reflect.Value, out map[string]bool) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			t.collect(v.Elem(), out)
		}
	case reflect.Slice:
		for i := range v.Len() {
			t.collect(v.Index(i), out)
		}
	case reflect.Struct:
		text := func(name string) string {
			for i := range v.NumField() {
				if f := v.Type().Field(i); f.Name == name && f.Type.Kind() == reflect.String {
					return v.Field(i).String()
				}
			}
			return ""
		}
		t.add(text("Job"), text("ID"), text("Engine"), out)
		for i := range v.NumField() {
			t.collect(v.Field(i), out)
		}
	}
}
