package msgpack_test

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	lib "github.com/vmihailenco/msgpack/v5"

	"github.com/rollbus/rollbus/workeragent/kvevents/msgpack"
)

func enc(t testing.TB, v any) []byte {
	t.Helper()
	b, err := lib.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestIntegersOfEveryWidthKeepTheirBits(t *testing.T) {
	for _, v := range []any{int8(-1), int8(-33), int16(-300), int32(-70000), int64(math.MinInt64), uint8(255), uint16(65535),
		uint32(math.MaxUint32), uint64(math.MaxUint64), 0, 127, 128} {
		r := msgpack.Reader{B: enc(t, v)}
		got, err := r.Bits()
		if err != nil || r.Left() != 0 {
			t.Fatalf("%v (%T): %v, %d bytes left", v, v, err, r.Left())
		}
		var want uint64
		switch x := v.(type) {
		case int8:
			want = uint64(int64(x))
		case int16:
			want = uint64(int64(x))
		case int32:
			want = uint64(int64(x))
		case int64:
			want = uint64(x)
		case uint8:
			want = uint64(x)
		case uint16:
			want = uint64(x)
		case uint32:
			want = uint64(x)
		case uint64:
			want = x
		case int:
			want = uint64(x)
		}
		if got != want {
			t.Errorf("%v (%T) read as %d", v, v, got)
		}
	}
}

func TestSkipPassesOverEveryType(t *testing.T) {
	values := []any{nil, true, -5, 1.5, float32(2), "text", []byte{1, 2}, []any{1, []any{"a"}}, map[string]any{"k": []any{nil, 3}},
		make([]int, 70000), string(make([]byte, 300)), string(make([]byte, 70000)), make([]byte, 70000)}
	for _, v := range values {
		r := msgpack.Reader{B: append(enc(t, v), 0x07)}
		if err := r.Skip(); err != nil {
			t.Fatalf("%.40v: %v", v, err)
		}
		if n, err := r.Int64(); n != 7 || err != nil {
			t.Errorf("%.40v: the value behind it reads as %d, %v", v, n, err)
		}
	}
	for _, ext := range [][]byte{{0xd4, 1, 9}, {0xd8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0xc7, 2, 5, 1, 2}, {0xc8, 0, 1, 5, 1}} {
		r := msgpack.Reader{B: ext}
		if err := r.Skip(); err != nil || r.Left() != 0 {
			t.Errorf("ext % x: %v, %d bytes left", ext, err, r.Left())
		}
	}
}

func TestALengthThatCannotFitIsRefused(t *testing.T) {
	for _, b := range [][]byte{{0xdd, 0xff, 0xff, 0xff, 0xff}, {0xdf, 0xff, 0xff, 0xff, 0xff}, {0xdb, 0xff, 0xff, 0xff, 0xff}, {0xc6, 0xff, 0xff, 0xff, 0xff}, {0x92, 1}, {0xa5, 'a'}} {
		r := msgpack.Reader{B: b}
		if err := r.Skip(); err == nil || r.I != 0 {
			t.Errorf("% x: %v at %d", b, err, r.I)
		}
	}
	deep := make([]byte, 1000)
	for i := range deep {
		deep[i] = 0x91
	}
	r := msgpack.Reader{B: deep}
	if err := r.Skip(); !errors.Is(err, msgpack.ErrDepth) {
		t.Errorf("1,000 nested arrays: %v", err)
	}
}

func TestTokensOutOfRangeAreRefused(t *testing.T) {
	r := msgpack.Reader{B: enc(t, []any{1, 300, 70000, uint32(math.MaxUint32), uint64(9)})}
	n, _ := r.Array()
	got, err := r.AppendUint32s(nil, n)
	if diff := cmp.Diff([]uint32{1, 300, 70000, math.MaxUint32, 9}, got); diff != "" || err != nil {
		t.Fatalf("%v %s", err, diff)
	}
	for _, v := range []any{-1, uint64(1 << 32), "x", 1.0} {
		r := msgpack.Reader{B: enc(t, []any{v})}
		n, _ := r.Array()
		if _, err := r.AppendUint32s(nil, n); err == nil {
			t.Errorf("token %v accepted", v)
		}
	}
}

// FuzzReader compares with the general decoder: what that one accepts whole,
// Skip passes over whole.
func FuzzReader(f *testing.F) {
	for _, v := range []any{nil, 1, "a", []any{1, "b", nil}, map[string]any{"x": 1.5}} {
		f.Add(enc(f, v))
	}
	f.Add([]byte{0xc1})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := msgpack.Reader{B: b}
		err := r.Skip()
		if err == nil && (r.I < 1 || r.I > len(b)) {
			t.Fatalf("skipped to %d of %d", r.I, len(b))
		}
		var v any
		if len(b) < 64 && lib.Unmarshal(b, &v) == nil && err != nil && !errors.Is(err, msgpack.ErrDepth) {
			t.Fatalf("% x: the library reads %v, Skip says %v", b, v, err)
		}
		r.I = 0
		_, _ = r.Bits()
		_, _ = r.Str()
		_, _ = r.Bin()
		_, _ = r.Float()
		if n, err := r.Array(); err == nil {
			_, _ = r.AppendUint32s(nil, n)
		}
		_, _ = r.Map()
	})
}

func BenchmarkTokens(b *testing.B) {
	tokens := make([]uint32, 256)
	for i := range tokens {
		tokens[i] = uint32(i * 593)
	}
	data := enc(b, tokens)
	b.Run("reader", func(b *testing.B) {
		var dst []uint32
		for b.Loop() {
			r := msgpack.Reader{B: data}
			n, _ := r.Array()
			dst, _ = r.AppendUint32s(dst[:0], n)
		}
	})
	b.Run("library", func(b *testing.B) {
		var dst []uint32
		for b.Loop() {
			_ = lib.Unmarshal(data, &dst)
		}
	})
}
