package journal

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// decoder reads what an encoder wrote, by the writer's schema.
type decoder struct {
	buf    []byte
	at     int
	hashes []uint64 // by number
	err    error
	depth  int
	names  []string // the last strings read, by their ends
}

const (
	maxName  = 48 // bytes of a string that is kept
	nameBits = 10 // of the number of strings kept
)

// text is a string of a journal. Names of jobs, engines, epochs and rollouts come
// again and again: one that was read lately is not made anew.
func (d *decoder) text() string {
	b := d.bytes(d.uint())
	if len(b) == 0 {
		return ""
	}
	if len(b) > maxName {
		return string(b)
	}
	if d.names == nil {
		d.names = make([]string, 1<<nameBits)
	}
	end := uint64(len(b))
	for _, c := range b[max(0, len(b)-8):] {
		end = end<<7 ^ end>>57 ^ uint64(c)
	}
	at := &d.names[end*0x9e3779b97f4a7c15>>(64-nameBits)]
	if *at != string(b) {
		*at = string(b)
	}
	return *at
}

// maxDepth of nested values: what stands in journals has five.
const maxDepth = 32

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: at byte %d of the batch: "+format, append([]any{ErrCorrupt, d.at}, args...)...)
	}
}

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.buf[d.at:])
	if n <= 0 {
		d.fail("no number")
		d.at = len(d.buf)
		return 0
	}
	d.at += n
	return v
}

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.buf[d.at:])
	if n <= 0 {
		d.fail("no number")
		d.at = len(d.buf)
		return 0
	}
	d.at += n
	return v
}

func (d *decoder) bytes(n uint64) []byte {
	if n > uint64(len(d.buf)-d.at) {
		d.fail("%d bytes are missing", n-uint64(len(d.buf)-d.at))
		d.at = len(d.buf)
		return nil
	}
	b := d.buf[d.at : d.at+int(n)]
	d.at += int(n)
	return b
}

func (d *decoder) byte() byte {
	if b := d.bytes(1); len(b) == 1 {
		return b[0]
	}
	return 0
}

// value reads into v, or over it when the plan has no type.
func (d *decoder) value(p *readPlan, v reflect.Value) {
	if d.err != nil {
		return
	}
	if d.depth++; d.depth > maxDepth {
		d.fail("values are nested too deep")
	}
	d.read(p, v, p.typ != nil)
	d.depth--
}

// read is value, and keeps what it reads or not.
func (d *decoder) read(p *readPlan, v reflect.Value, keep bool) {
	switch p.kind {
	case 'b':
		if b := d.byte() == 1; keep {
			v.SetBool(b)
		}
	case 'i':
		if x := d.int(); keep {
			v.SetInt(x)
		}
	case 'u':
		if x := d.uint(); keep {
			v.SetUint(x)
		}
	case 'f':
		if b := d.bytes(8); keep && b != nil {
			v.SetFloat(math.Float64frombits(binary.LittleEndian.Uint64(b)))
		}
	case 's':
		if s := d.text(); keep {
			v.SetString(s)
		}
	case 'y':
		if b := d.bytes(d.uint()); keep {
			v.SetBytes(append([]byte{}, b...))
		}
	case '*':
		if d.byte() == 0 {
			return
		}
		var x reflect.Value
		if keep {
			v.Set(reflect.New(p.typ.Elem()))
			x = v.Elem()
		}
		d.value(p.elem, x)
	case '[':
		n := d.uint()
		if n > uint64(len(d.buf)-d.at) { // each takes a byte at least
			d.fail("a list of %d", n)
			return
		}
		if keep {
			v.Set(reflect.MakeSlice(p.typ, int(n), int(n)))
		}
		for i := range int(n) {
			var x reflect.Value
			if keep {
				x = v.Index(i)
			}
			d.value(p.elem, x)
		}
	case '#':
		if h := d.list(); keep && d.err == nil {
			v.Set(reflect.ValueOf(h).Convert(p.typ))
		}
	case 'm':
		n := d.uint()
		if keep {
			v.Set(reflect.MakeMap(p.typ))
		}
		for range n {
			key := d.text()
			var x reflect.Value
			if keep {
				x = reflect.New(p.typ.Elem()).Elem()
			}
			if d.value(p.elem, x); d.err != nil {
				return
			}
			if keep {
				v.SetMapIndex(reflect.ValueOf(key).Convert(p.typ.Key()), x)
			}
		}
	case '{':
		for i := -1; ; {
			step := d.uint()
			if step == 0 || d.err != nil {
				return
			}
			if step > uint64(len(p.fields)-1-i) {
				d.fail("field %d of a struct of %d", uint64(i)+step, len(p.fields))
				return
			}
			i += int(step)
			f := &p.fields[i]
			var x reflect.Value
			if keep && f.at >= 0 {
				x = v.Field(f.at)
			}
			d.value(f.plan, x)
		}
	}
}

func (d *decoder) list() []uint64 {
	n := d.uint()
	if n > math.MaxInt32 {
		d.fail("a list of %d", n)
		return nil
	}
	out := make([]uint64, 0, min(n, 4096))
	for uint64(len(out)) < n && d.err == nil {
		run := d.uint()
		count, known := run/2, run%2 == 0
		if count == 0 || count > n-uint64(len(out)) {
			d.fail("a run of %d hashes", count)
			return nil
		}
		if known {
			first := d.uint()
			if first > uint64(len(d.hashes)) || count > uint64(len(d.hashes))-first {
				d.fail("hashes %d and %d after it, of %d", first, count-1, len(d.hashes))
				return nil
			}
			out = append(out, d.hashes[first:first+count]...)
			continue
		}
		b := d.bytes(count * 8)
		for ; len(b) >= 8; b = b[8:] {
			h := binary.LittleEndian.Uint64(b)
			out, d.hashes = append(out, h), append(d.hashes, h)
		}
	}
	return out
}

// readPlans are those of one journal.
type readPlans struct {
	events     []*readPlan
	names      []string
	decision   *readPlan
	checkpoint *readPlan // nil: its checkpoints are of another shape, or none
}

func newReadPlans(s Schema) (*readPlans, error) {
	own := map[string]reflect.Type{}
	for _, t := range eventTypes {
		own[t.String()] = t
	}
	p := planner{schema: s, made: map[string]*readPlan{}}
	r := &readPlans{names: s.Events}
	for _, name := range s.Events {
		// An event that this program does not know is an error only where one stands.
		ep, err := p.plan("{"+name+"}", own[name])
		if err != nil {
			return nil, err
		}
		r.events = append(r.events, ep)
	}
	var err error
	r.decision, err = p.plan("{"+decisionType.String()+"}", decisionType)
	if cp, err := p.plan("{"+checkpointType.String()+"}", checkpointType); err == nil {
		r.checkpoint = cp
	}
	return r, err
}

func (r *readPlans) event(d *decoder) core.Event {
	n := d.uint()
	if n >= uint64(len(r.events)) {
		d.fail("event type %d, the schema has %d", n, len(r.events))
		return nil
	}
	p := r.events[n]
	if p.typ == nil {
		d.fail("event %s, which this program does not know", r.names[n])
		return nil
	}
	if !p.scratch.IsValid() {
		p.scratch = reflect.New(p.typ).Elem()
	}
	p.scratch.SetZero()
	d.value(p, p.scratch)
	if d.err != nil {
		return nil
	}
	return p.scratch.Interface().(core.Event) // a copy
}

func (r *Reader) decision(to *core.Decision) {
	r.dec.value(r.plans.decision, reflect.ValueOf(to).Elem())
}
