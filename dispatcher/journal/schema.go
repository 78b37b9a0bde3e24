package journal

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Types that stand in a journal, by their number. New ones are added at the end:
// a number is never used twice.
var eventTypes = []reflect.Type{
	reflect.TypeFor[core.Tick](), reflect.TypeFor[core.ServerTime](), reflect.TypeFor[core.Contact](),
	reflect.TypeFor[core.ViewSwap](), reflect.TypeFor[core.ReservationPut](), reflect.TypeFor[core.ReservationGone](),
	reflect.TypeFor[core.Answered](), reflect.TypeFor[core.EnginePut](), reflect.TypeFor[core.EngineGone](),
	reflect.TypeFor[core.DispatcherPut](), reflect.TypeFor[core.DispatcherGone](), reflect.TypeFor[core.CancelPut](),
	reflect.TypeFor[core.PoolPut](), reflect.TypeFor[core.Jobs](), reflect.TypeFor[core.Fetched](),
	reflect.TypeFor[core.Acquire](), reflect.TypeFor[core.FetchDone](), reflect.TypeFor[core.BindAnswer](),
	reflect.TypeFor[core.LeaderAnswer](), reflect.TypeFor[core.RetryAnswer](), reflect.TypeFor[core.DeleteAnswer](),
	reflect.TypeFor[core.ResultAnswer](), reflect.TypeFor[core.DeadAnswer](), reflect.TypeFor[core.Load](),
	reflect.TypeFor[core.Cache](), reflect.TypeFor[core.Snapshot](), reflect.TypeFor[core.Stop](),
	reflect.TypeFor[core.SeedPut](), reflect.TypeFor[core.SeedGone](), reflect.TypeFor[core.OwnerPut](),
	reflect.TypeFor[core.OwnersGone](), reflect.TypeFor[core.SeedAnswer](), reflect.TypeFor[core.OwnersAnswer](),
}

var (
	decisionType   = reflect.TypeFor[core.Decision]()
	checkpointType = reflect.TypeFor[core.Checkpoint]()
)

// Schema tells how a journal's writer saw its types: the fields of each struct
// in the order of their numbers, as "Name kind". Kinds: b bool, i integer, u
// unsigned, f float, s string, [k a slice, *k a pointer, mk a map by strings,
// #u a list of block hashes, y bytes, {name} a struct.
type Schema struct {
	Events  []string            `json:"events"` // names by number
	Structs map[string][]string `json:"structs"`
}

func ownSchema() Schema {
	s := Schema{Structs: map[string][]string{}}
	for _, t := range eventTypes {
		s.Events = append(s.Events, t.String())
		s.add(t)
	}
	s.add(decisionType)
	s.add(checkpointType)
	return s
}

func (s *Schema) add(t reflect.Type) {
	switch t.Kind() {
	case reflect.Slice, reflect.Pointer, reflect.Map:
		s.add(t.Elem())
	case reflect.Struct:
		if _, ok := s.Structs[t.String()]; ok {
			return
		}
		fields := make([]string, 0, t.NumField())
		s.Structs[t.String()] = fields // ends a recursion
		for i := range t.NumField() {
			f := t.Field(i)
			fields = append(fields, f.Name+" "+kindOf(f.Type))
			s.add(f.Type)
		}
		s.Structs[t.String()] = fields
	}
}

func kindOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "b"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return "i"
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "u"
	case reflect.Float32, reflect.Float64:
		return "f"
	case reflect.String:
		return "s"
	case reflect.Pointer:
		return "*" + kindOf(t.Elem())
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint64 {
			return "#u"
		}
		if t.Elem().Kind() == reflect.Uint8 {
			return "y"
		}
		return "[" + kindOf(t.Elem())
	case reflect.Map:
		if t.Key().Kind() == reflect.String {
			return "m" + kindOf(t.Elem())
		}
	case reflect.Struct:
		return "{" + t.String() + "}"
	}
	panic("journal: no encoding for " + t.String()) // a bug of ours, met by every test
}

// plan is how one type of this program is written.
type plan struct {
	kind   byte
	elem   *plan
	fields []field
	typ    reflect.Type
}

type field struct {
	at   int
	tag  uint16 // of its name, for digests: a field added later moves no other
	plan *plan
}

var plans = map[reflect.Type]*plan{} // filled by init, read only after it

func init() {
	for _, t := range eventTypes {
		planOf(t)
	}
	planOf(checkpointType)
	for _, v := range []core.Effect{core.EnsureConsumer{}, core.Fetch{}, core.Bind{}, core.GetFromLeader{}, core.Retry{},
		core.DeleteKey{}, core.PublishResult{}, core.PublishDead{}, core.Ack{}, core.NakDelay{}, core.Granted{}, core.Refused{},
		core.AskSnapshot{}, core.Rebuild{}, core.Decision{}, core.Count{},
		core.SeedBind{}, core.WriteSeed{}, core.WriteOwners{}, core.Transition{}} {
		planOf(reflect.TypeOf(v))
	}
}

func planOf(t reflect.Type) *plan {
	if p := plans[t]; p != nil {
		return p
	}
	p := &plan{kind: kindOf(t)[0], typ: t}
	plans[t] = p
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		if p.kind != '#' && p.kind != 'y' {
			p.elem = planOf(t.Elem())
		}
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			p.fields = append(p.fields, field{i, uint16(xxhash.Sum64String(f.Name)), planOf(f.Type)})
		}
	}
	return p
}

// readPlan is how a type of the writer's is read into one of ours. Without a
// type of ours it is read over.
type readPlan struct {
	kind   byte
	elem   *readPlan
	fields []readField
	typ    reflect.Type // nil = skip

	scratch reflect.Value // of an event: it is read here and copied out
}

type readField struct {
	at   int // in our struct, -1 = unknown here
	plan *readPlan
}

type planner struct {
	schema Schema
	made   map[string]*readPlan
}

func (p *planner) plan(kind string, t reflect.Type) (*readPlan, error) {
	if kind == "" {
		return nil, fmt.Errorf("%w: the schema has an empty kind", ErrCorrupt)
	}
	if t != nil && kindOf(t) != kind {
		return nil, fmt.Errorf("%w: it has %s as kind %q, this program as %q", ErrVersion, t, kind, kindOf(t))
	}
	r := &readPlan{kind: kind[0], typ: t}
	var err error
	switch kind[0] {
	case 'b', 'i', 'u', 'f', 's', '#', 'y':
	case '[', '*', 'm':
		var e reflect.Type
		if t != nil {
			e = t.Elem()
		}
		r.elem, err = p.plan(kind[1:], e)
	case '{':
		name := strings.TrimSuffix(kind[1:], "}")
		key := name
		if t == nil {
			key = "-" + name
		}
		if made := p.made[key]; made != nil {
			return made, nil
		}
		fields, ok := p.schema.Structs[name]
		if !ok {
			return nil, fmt.Errorf("%w: the schema has no struct %q", ErrCorrupt, name)
		}
		p.made[key] = r
		for _, f := range fields {
			fname, fkind, _ := strings.Cut(f, " ")
			at, ft := -1, reflect.Type(nil)
			if t != nil {
				if sf, ok := t.FieldByName(fname); ok && len(sf.Index) == 1 {
					at, ft = sf.Index[0], sf.Type
				}
			}
			fp, err := p.plan(fkind, ft)
			if err != nil {
				return nil, fmt.Errorf("%s.%s: %w", name, fname, err)
			}
			r.fields = append(r.fields, readField{at, fp})
		}
	default:
		return nil, fmt.Errorf("%w: unknown kind %q in the schema", ErrVersion, kind)
	}
	return r, err
}
