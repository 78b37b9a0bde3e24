package kvevents

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestTheTableAgreesWithAMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var x table[uint32]
		want := map[uint64]uint32{}
		for range rapid.IntRange(0, 400).Draw(rt, "steps") {
			key := rapid.Uint64Range(0, 40).Draw(rt, "key")
			if rapid.Bool().Draw(rt, "put") {
				v := rapid.Uint32Range(0, 3).Draw(rt, "value")
				x.put(key, v)
				if want[key] = v; v == 0 {
					delete(want, key)
				}
			} else {
				x.del(key)
				delete(want, key)
			}
			if x.get(key) != want[key] || x.len() != len(want) {
				rt.Fatalf("key %d: %d of %d, want %d of %d", key, x.get(key), x.len(), want[key], len(want))
			}
		}
		if d := cmp.Diff(want, maps.Collect(x.all())); d != "" {
			rt.Fatal(d)
		}
	})
}
