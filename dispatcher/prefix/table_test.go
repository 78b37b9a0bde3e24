package prefix

import (
	"maps"
	"testing"

	"pgregory.net/rapid"
)

// A table is a map, whatever order keys come, go and merge in.
func TestTableBehavesLikeAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab, want := newTable(), map[uint64]uint32{}
		key := func() uint64 {
			k := mix(rapid.Uint64Range(0, 1<<13).Draw(t, "key"))
			if rapid.IntRange(0, 40).Draw(t, "odd") == 0 {
				k = rapid.SampledFrom([]uint64{0, 1, 1024, 1 << 63, ^uint64(0)}).Draw(t, "edge")
			}
			return k
		}
		t.Repeat(map[string]func(*rapid.T){
			"set many": func(t *rapid.T) {
				from := rapid.Uint64Range(0, 1<<12).Draw(t, "from")
				for i := range rapid.Uint64Range(1, 3000).Draw(t, "n") {
					k := mix(from + i)
					tab.set(k, uint32(i+1))
					want[clean(k)] = uint32(i + 1)
				}
			},
			"set": func(t *rapid.T) {
				k, v := key(), rapid.Uint32Range(1, 99).Draw(t, "val")
				tab.set(k, v)
				want[clean(k)] = v
			},
			"remove": func(t *rapid.T) {
				k := key()
				tab.remove(k)
				delete(want, clean(k))
			},
			"remove many": func(t *rapid.T) {
				from := rapid.Uint64Range(0, 1<<12).Draw(t, "from")
				for i := range rapid.Uint64Range(1, 3000).Draw(t, "n") {
					tab.remove(mix(from + i))
					delete(want, clean(mix(from+i)))
				}
			},
			"merge": func(t *rapid.T) {
				for place := 0; place < len(tab.dir); {
					tab.merge(place)
					first, n := tab.spanAt(tab.dir[place], place)
					place = first + n
				}
				tab.shrink()
			},
			"": func(t *rapid.T) {
				if tab.n != len(want) {
					t.Fatalf("the table counts %d entries, a map has %d", tab.n, len(want))
				}
				for k, v := range want {
					if got := tab.get(k); got != v {
						t.Fatalf("key %x gives %d, a map gives %d", k, got, v)
					}
				}
				got := map[uint64]uint32{}
				segs := map[*segment]bool{}
				for _, s := range tab.dir {
					segs[s] = true
				}
				for s := range segs {
					n := 0
					for i, k := range s.keys {
						if k != 0 {
							got[k] = s.vals[i]
							n++
						}
					}
					if n != s.n {
						t.Fatalf("a segment counts %d entries and has %d", s.n, n)
					}
				}
				if len(segs) != tab.segs || !maps.Equal(got, want) {
					t.Fatalf("%d segments counted, %d there; walking them finds %d entries of %d", tab.segs, len(segs), len(got), len(want))
				}
			},
		})
	})
}

// Keys that agree in the bits a table reads are kept up to a segment's places;
// nothing runs for ever and nothing is mixed up.
func TestTableSurvivesKeysThatAreNoHashes(t *testing.T) {
	tab := newTable()
	for i := range uint64(5000) {
		tab.set(i<<20|7, uint32(i+1))
	}
	for i := range uint64(5000) {
		if got := tab.get(i<<20 | 7); got != 0 && got != uint32(i+1) {
			t.Fatalf("key %d gives another key's number %d", i, got)
		}
	}
	if len(tab.dir) > 16*tab.segs+128 {
		t.Fatalf("the directory has %d entries for %d segments", len(tab.dir), tab.segs)
	}
}
