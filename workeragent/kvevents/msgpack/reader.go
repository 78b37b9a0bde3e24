// Package msgpack reads MessagePack that other programs wrote: a cursor over a
// byte slice, no reflection, no allocation of its own. It exists because the
// events of an engine are numbers by the million: a general decoder spends its
// time on interfaces (see BenchmarkTokens).
//
// Nothing here trusts the input. Lengths are compared with what is left, nesting
// is bounded, and every failure is ErrShort, ErrType or ErrDepth. After a failure
// the cursor stands at the value that failed.
package msgpack

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
)

// What can be wrong with a value.
var (
	ErrShort = errors.New("msgpack: the data ends inside a value")
	ErrType  = errors.New("msgpack: a value of another type was expected")
	ErrDepth = errors.New("msgpack: nested deeper than 32")
)

// maxDepth bounds nesting while skipping.
const maxDepth = 32

// Kind is the type of a value.
type Kind uint8

// Kinds.
const (
	Invalid Kind = iota // end of data, or the byte 0xc1 that no type has
	Nil
	Bool
	Int
	Float
	Str
	Bin
	Array
	Map
	Ext
)

// Reader is a cursor. The zero value with B set is ready.
type Reader struct {
	B []byte
	I int // offset of the next value
}

// Left is how many bytes are not read yet.
func (r *Reader) Left() int { return len(r.B) - r.I }

// Kind tells what comes next without reading it.
func (r *Reader) Kind() Kind {
	if r.I >= len(r.B) {
		return Invalid
	}
	c := r.B[r.I]
	switch {
	case c < 0x80 || c >= 0xe0:
		return Int
	case c < 0x90:
		return Map
	case c < 0xa0:
		return Array
	case c < 0xc0:
		return Str
	}
	return kinds[c-0xc0]
}

var kinds = [0x20]Kind{
	Nil, Invalid, Bool, Bool, Bin, Bin, Bin, Ext, Ext, Ext, Float, Float, Int, Int, Int, Int,
	Int, Int, Int, Int, Ext, Ext, Ext, Ext, Ext, Str, Str, Str, Array, Array, Map, Map,
}

// take gives the n bytes after the head byte and moves behind them.
func (r *Reader) take(n int) ([]byte, bool) {
	if r.Left() < 1+n {
		return nil, false
	}
	b := r.B[r.I+1 : r.I+1+n]
	r.I += 1 + n
	return b, true
}

// length reads the head of a sized value; each of its items takes at least
// itemBytes, so a length that cannot fit is refused before anyone allocates.
func (r *Reader) length(width, itemBytes int) (int, error) {
	at := r.I
	b, ok := r.take(width)
	if !ok {
		return 0, ErrShort
	}
	var n uint64
	for _, c := range b {
		n = n<<8 | uint64(c)
	}
	if n > uint64(r.Left())/uint64(itemBytes) {
		r.I = at
		return 0, ErrShort
	}
	return int(n), nil
}

// Nil reads a nil if one comes next.
func (r *Reader) Nil() bool {
	if r.I < len(r.B) && r.B[r.I] == 0xc0 {
		r.I++
		return true
	}
	return false
}

// Array reads the head of an array: how many values follow.
func (r *Reader) Array() (int, error) {
	if r.I >= len(r.B) {
		return 0, ErrShort
	}
	c := r.B[r.I]
	switch {
	case c&0xf0 == 0x90:
		if int(c&0x0f) > r.Left()-1 {
			return 0, ErrShort
		}
		r.I++
		return int(c & 0x0f), nil
	case c == 0xdc:
		return r.length(2, 1)
	case c == 0xdd:
		return r.length(4, 1)
	}
	return 0, ErrType
}

// Map reads the head of a map: how many pairs follow.
func (r *Reader) Map() (int, error) {
	if r.I >= len(r.B) {
		return 0, ErrShort
	}
	c := r.B[r.I]
	switch {
	case c&0xf0 == 0x80:
		if 2*int(c&0x0f) > r.Left()-1 {
			return 0, ErrShort
		}
		r.I++
		return int(c & 0x0f), nil
	case c == 0xde:
		return r.length(2, 2)
	case c == 0xdf:
		return r.length(4, 2)
	}
	return 0, ErrType
}

// Str reads a string; the bytes are those of the input, not a copy.
func (r *Reader) Str() ([]byte, error) {
	if r.I >= len(r.B) {
		return nil, ErrShort
	}
	at, c := r.I, r.B[r.I]
	var n int
	var err error
	switch {
	case c&0xe0 == 0xa0:
		n = int(c & 0x1f)
		r.I++
	case c == 0xd9:
		n, err = r.length(1, 1)
	case c == 0xda:
		n, err = r.length(2, 1)
	case c == 0xdb:
		n, err = r.length(4, 1)
	default:
		return nil, ErrType
	}
	return r.body(at, n, err)
}

// Bin reads a byte string; the bytes are those of the input, not a copy.
func (r *Reader) Bin() ([]byte, error) {
	if r.I >= len(r.B) {
		return nil, ErrShort
	}
	at := r.I
	var n int
	var err error
	switch r.B[r.I] {
	case 0xc4:
		n, err = r.length(1, 1)
	case 0xc5:
		n, err = r.length(2, 1)
	case 0xc6:
		n, err = r.length(4, 1)
	default:
		return nil, ErrType
	}
	return r.body(at, n, err)
}

func (r *Reader) body(at, n int, err error) ([]byte, error) {
	if err != nil || n > r.Left() {
		r.I = at
		return nil, ErrShort
	}
	b := r.B[r.I : r.I+n : r.I+n]
	r.I += n
	return b, nil
}

// Bits reads an integer of any width and sign as its 64 bits: a negative
// number is its two's complement. It is how the hash of a block is read.
func (r *Reader) Bits() (uint64, error) {
	if r.I >= len(r.B) {
		return 0, ErrShort
	}
	c := r.B[r.I]
	if c < 0x80 {
		r.I++
		return uint64(c), nil
	}
	if c >= 0xe0 {
		r.I++
		return uint64(int64(int8(c))), nil
	}
	if c < 0xcc || c > 0xd3 {
		return 0, ErrType
	}
	width := 1 << ((c - 0xcc) & 3)
	b, ok := r.take(width)
	if !ok {
		return 0, ErrShort
	}
	signed := c >= 0xd0
	switch width {
	case 1:
		if signed {
			return uint64(int64(int8(b[0]))), nil
		}
		return uint64(b[0]), nil
	case 2:
		v := binary.BigEndian.Uint16(b)
		if signed {
			return uint64(int64(int16(v))), nil
		}
		return uint64(v), nil
	case 4:
		v := binary.BigEndian.Uint32(b)
		if signed {
			return uint64(int64(int32(v))), nil
		}
		return uint64(v), nil
	}
	return binary.BigEndian.Uint64(b), nil
}

// Int64 reads an integer; one above int64's range is ErrType.
func (r *Reader) Int64() (int64, error) {
	at := r.I
	unsigned := r.I < len(r.B) && r.B[r.I] == 0xcf
	v, err := r.Bits()
	if err != nil {
		return 0, err
	}
	if unsigned && v > math.MaxInt64 {
		r.I = at
		return 0, ErrType
	}
	return int64(v), nil
}

// Float reads a float or an integer as a float64.
func (r *Reader) Float() (float64, error) {
	if r.I >= len(r.B) {
		return 0, ErrShort
	}
	switch r.B[r.I] {
	case 0xca:
		b, ok := r.take(4)
		if !ok {
			return 0, ErrShort
		}
		return float64(math.Float32frombits(binary.BigEndian.Uint32(b))), nil
	case 0xcb:
		b, ok := r.take(8)
		if !ok {
			return 0, ErrShort
		}
		return math.Float64frombits(binary.BigEndian.Uint64(b)), nil
	}
	v, err := r.Int64()
	return float64(v), err
}

// Skip passes over one value of any type.
func (r *Reader) Skip() error {
	at := r.I
	if err := r.skip(0); err != nil {
		r.I = at
		return err
	}
	return nil
}

func (r *Reader) skip(depth int) error {
	if depth > maxDepth {
		return ErrDepth
	}
	var n int
	var err error
	switch r.Kind() {
	case Nil, Bool:
		r.I++
		return nil
	case Int:
		_, err = r.Bits()
		return err
	case Float:
		_, err = r.Float()
		return err
	case Str:
		_, err = r.Str()
		return err
	case Bin:
		_, err = r.Bin()
		return err
	case Ext:
		return r.skipExt()
	case Array:
		n, err = r.Array()
	case Map:
		n, err = r.Map()
		n *= 2
	default:
		if r.I >= len(r.B) {
			return ErrShort
		}
		return ErrType
	}
	for ; n > 0 && err == nil; n-- {
		err = r.skip(depth + 1)
	}
	return err
}

func (r *Reader) skipExt() error {
	c := r.B[r.I]
	if c >= 0xd4 { // fixext 1, 2, 4, 8, 16 and a type byte
		if _, ok := r.take(1 + 1<<(c-0xd4)); !ok {
			return ErrShort
		}
		return nil
	}
	at := r.I
	n, err := r.length(1<<(c-0xc7), 1)
	if err != nil || n+1 > r.Left() {
		r.I = at
		return ErrShort
	}
	r.I += n + 1
	return nil
}

// AppendUint32s reads n integers of 0..2^32-1 and appends them to dst. It is
// the inner loop of event decoding: token ids.
func (r *Reader) AppendUint32s(dst []uint32, n int) ([]uint32, error) {
	if n > r.Left() {
		return dst, ErrShort
	}
	at := len(dst)
	dst = slices.Grow(dst, n)[:at+n]
	b, i := r.B, r.I
	for k := at; k < len(dst); k++ {
		if i+5 > len(b) { // near the end: no room for the short cuts below
			r.I = i
			return r.appendSlow(dst[:k], at+n-k)
		}
		switch c := b[i]; {
		case c < 0x80:
			dst[k] = uint32(c)
			i++
		case c == 0xce:
			dst[k] = binary.BigEndian.Uint32(b[i+1:])
			i += 5
		case c == 0xcd:
			dst[k] = uint32(binary.BigEndian.Uint16(b[i+1:]))
			i += 3
		case c == 0xcc:
			dst[k] = uint32(b[i+1])
			i += 2
		default:
			r.I = i
			return r.appendSlow(dst[:k], at+n-k)
		}
	}
	r.I = i
	return dst, nil
}

func (r *Reader) appendSlow(dst []uint32, n int) ([]uint32, error) {
	for range n {
		at := r.I
		v, err := r.Bits()
		if err != nil {
			return dst, err
		}
		if v > math.MaxUint32 {
			r.I = at
			return dst, ErrType
		}
		dst = append(dst, uint32(v))
	}
	return dst, nil
}
