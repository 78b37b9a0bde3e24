package prefix_test

import (
	"fmt"
	"testing"

	"github.com/rollbus/rollbus/dispatcher/prefix"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

// scenario C8
func TestTheByteBudgetHoldsAndMemoryComesBackAfterChurn(t *testing.T) {
	const budget = 1 << 20
	x := prefix.New(prefix.Options{MaxBytes: budget})
	base := x.Stats().Bytes
	for round := range 4 {
		for e := range 16 {
			name := fmt.Sprintf("e%d", e)
			epoch := fmt.Sprintf("x%d", round)
			x.Put(prefix.Registration{Engine: name, Tag: tagOf(name), Epoch: epoch, Events: true})
			x.Begin(name, epoch, 0)
			x.End(0, name, epoch)
			for i := range 200 {
				p := prompt("a", 0, 64, string(rune('a'+(i*7+e*round)%26)))
				for j := range p {
					p[j] += uint64(i*1000 + e%3) // many blocks, some shared
				}
				x.Apply(0, prefix.Event{Engine: name, Epoch: epoch, Seq: uint64(i + 1), Op: prefix.Stored, Blocks: p})
				if got := x.Stats().Bytes; got > budget {
					t.Fatalf("round %d: the index holds %d bytes of a budget of %d", round, got, budget)
				}
			}
		}
	}
	if x.Stats().Evicted == 0 {
		t.Fatal("the test did not reach the budget")
	}
	for e := range 16 {
		x.Remove(fmt.Sprintf("e%d", e))
	}
	for range 200 {
		x.Tick(0)
	}
	s := x.Stats()
	if s.Blocks != 0 || s.Sets != 0 || s.Bytes > 2*base+1<<16 {
		t.Fatalf("after all engines have gone %d blocks, %d sets and %d bytes are left; empty it had %d bytes", s.Blocks, s.Sets, s.Bytes, base)
	}
}

// What is in use outlives what is not.
func TestEvictionKeepsThePrefixThatIsMatched(t *testing.T) {
	x := prefix.New(prefix.Options{MaxBytes: 256 << 10})
	ready(t, x, "e1", "x")
	hot := prompt("h", 8, 8, "h")
	x.Apply(0, stored("e1", "x", 1, ns, hot...))
	for i := range uint64(3000) {
		one := blockhash.Block(i, []uint32{uint32(i)})
		x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: i + 2, Op: prefix.Stored, Blocks: []uint64{one, one + 1, one + 2, one + 3, one + 4, one + 5, one + 6, one + 7}})
		if i%16 == 0 {
			want(t, x, hot, map[string]int{"e1": 8})
		}
	}
	if x.Stats().Evicted == 0 {
		t.Fatal("the test did not reach the budget")
	}
}
