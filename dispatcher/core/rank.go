package core

import (
	"cmp"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// rendezvous is the weight of b for a. Every dispatcher computes the same, so
// the highest weight over a set is an agreement that costs no message.
func rendezvous(a, b string) uint64 {
	var d xxhash.Digest
	d.Reset()
	d.WriteString(a)
	d.Write([]byte{0})
	d.WriteString(b)
	return d.Sum64()
}

// turn is this dispatcher's place in the queue of those who may act on a
// rollout: 0 acts at once, k waits k stagger intervals. live holds every live
// dispatcher, self included.
func turn(rollout, self string, live []string) int {
	mine, place := rendezvous(rollout, self), 0
	for _, d := range live {
		if w := rendezvous(rollout, d); w > mine || w == mine && d < self {
			place++
		}
	}
	return place
}

// sortedKeys are the keys of m in order: whatever leaves the core must not
// depend on map order.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
