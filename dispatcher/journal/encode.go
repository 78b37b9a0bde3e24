package journal

import (
	"encoding/binary"
	"math"
	"reflect"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// maxBlocks bounds the block hashes that a journal refers back to. When they
// are reached both sides forget all: 24 bytes each here, 8 in a reader.
const maxBlocks = 1 << 18

// blockIDs numbers block hashes in the order in which they first appear.
type blockIDs struct {
	id map[uint64]uint32
}

func (b *blockIDs) reset() { b.id = map[uint64]uint32{} }

// encoder appends values to buf. Zero fields are left out; a struct is a list of
// (distance to the next field's number, value) ended by 0.
type encoder struct {
	buf    []byte
	blocks *blockIDs // nil: hashes stand as they are
	tags   bool      // for digests: fields by the tag of their name
}

func (e *encoder) uint(v uint64) { e.buf = binary.AppendUvarint(e.buf, v) }

func (e *encoder) value(p *plan, v reflect.Value) {
	switch p.kind {
	case 'b':
		b := byte(0)
		if v.Bool() {
			b = 1
		}
		e.buf = append(e.buf, b)
	case 'i':
		e.buf = binary.AppendVarint(e.buf, v.Int())
	case 'u':
		e.uint(v.Uint())
	case 'f':
		e.buf = binary.LittleEndian.AppendUint64(e.buf, math.Float64bits(v.Float()))
	case 's':
		s := v.String()
		e.uint(uint64(len(s)))
		e.buf = append(e.buf, s...)
	case 'y':
		e.uint(uint64(v.Len()))
		e.buf = append(e.buf, v.Bytes()...)
	case '*':
		if v.IsNil() {
			e.buf = append(e.buf, 0)
			return
		}
		e.buf = append(e.buf, 1)
		e.value(p.elem, v.Elem())
	case '[':
		e.uint(uint64(v.Len()))
		for i := range v.Len() {
			e.value(p.elem, v.Index(i))
		}
	case '#':
		e.hashes(v)
	case 'm':
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int {
			if a.String() < b.String() {
				return -1
			}
			return 1
		})
		e.uint(uint64(len(keys)))
		for _, k := range keys {
			e.uint(uint64(k.Len()))
			e.buf = append(e.buf, k.String()...)
			e.value(p.elem, v.MapIndex(k))
		}
	case '{':
		last := -1
		for i := range p.fields {
			f := &p.fields[i]
			x := v.Field(f.at)
			if empty(x) {
				continue
			}
			if e.tags {
				e.buf = append(e.buf, 1, byte(f.tag), byte(f.tag>>8))
			} else {
				e.uint(uint64(i - last))
			}
			last = i
			e.value(f.plan, x)
		}
		e.buf = append(e.buf, 0)
	}
}

// empty tells whether a field may be left out. A slice without elements counts
// as none: the core treats both alike.
func empty(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	case reflect.Struct:
		return false // its own fields are looked at once
	case reflect.Float32, reflect.Float64:
		return v.Float() == 0 && !math.Signbit(v.Float())
	}
	return v.IsZero()
}

// hashes writes block hashes as runs: known ones that follow each other as
// (2n, number of the first), new ones as (2n+1, hashes).
func (e *encoder) hashes(v reflect.Value) {
	all, ok := v.Interface().([]uint64)
	if !ok {
		all = v.Convert(reflect.TypeFor[[]uint64]()).Interface().([]uint64)
	}
	e.uint(uint64(len(all)))
	if e.blocks == nil {
		for _, h := range all {
			e.buf = binary.LittleEndian.AppendUint64(e.buf, h)
		}
		return
	}
	ids := e.blocks.id
	for i := 0; i < len(all); {
		start := i
		if first, ok := ids[all[i]]; ok {
			for i++; i < len(all); i++ {
				if id, ok := ids[all[i]]; !ok || id != first+uint32(i-start) {
					break
				}
			}
			e.uint(uint64(i-start) * 2)
			e.uint(uint64(first))
			continue
		}
		for ; i < len(all); i++ {
			if _, ok := ids[all[i]]; ok {
				break
			}
			ids[all[i]] = uint32(len(ids))
		}
		e.uint(uint64(i-start)*2 + 1)
		for _, h := range all[start:i] {
			e.buf = binary.LittleEndian.AppendUint64(e.buf, h)
		}
	}
}

var eventNumber = func() map[reflect.Type]int {
	m := map[reflect.Type]int{}
	for i, t := range eventTypes {
		m[t] = i
	}
	return m
}()

// digest chains the effects of steps: its value after a step covers all before.
type digest struct {
	sum uint64
	enc encoder
}

// step adds the effects of one step. Candidates play no part: whether a core
// explains is no difference.
func (d *digest) step(effects []core.Effect) {
	d.enc.tags = true
	d.enc.buf = binary.LittleEndian.AppendUint64(d.enc.buf[:0], d.sum)
	for _, e := range effects {
		if x, ok := e.(core.Decision); ok {
			x.Candidates, x.Filtered = nil, nil
			e = x
		}
		t := reflect.TypeOf(e)
		p := plans[t]
		if p == nil {
			continue
		}
		d.enc.buf = append(d.enc.buf, t.Name()...)
		d.enc.value(p, reflect.ValueOf(e))
	}
	d.sum = xxhash.Sum64(d.enc.buf)
}
