package prefix_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/prefix"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

func TestTiersCountApartAndTheQuickestOneCounts(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 5, 5, "a")
	ready(t, x, "e1", "x")
	ev := stored("e1", "x", 1, ns, p[:3]...)
	x.Apply(0, ev)
	for i, tier := range []prefix.Tier{prefix.CPU, prefix.SSD} {
		ev = stored("e1", "x", uint64(i+2), ns, p...)
		ev.Tier = tier
		x.Apply(0, ev)
	}
	tiers := func(g, c, s int) {
		t.Helper()
		if d := cmp.Diff([]prefix.Hit{{Tag: tagOf("e1"), GPU: g, CPU: c, SSD: s}}, x.Match(p, nil)); d != "" {
			t.Fatalf("blocks by tier (-want +got):\n%s", d)
		}
	}
	tiers(3, 2, 0)
	x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: 4, Op: prefix.Removed, Tier: prefix.CPU, Blocks: p[4:]})
	tiers(3, 1, 1)
	x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: 5, Op: prefix.Removed, Tier: prefix.GPU, Blocks: p[:1]})
	tiers(2, 2, 1)
}

// scenario C11
func TestLowerTiersExpireAndGPUDoesNot(t *testing.T) {
	const ttl = 20 * time.Minute
	x := prefix.New(prefix.Options{LowerTTL: ttl})
	p := prompt("a", 4, 4, "a")
	ready(t, x, "e1", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p[:1]...))
	ev := stored("e1", "x", 2, ns, p...)
	ev.Tier = prefix.CPU
	x.Apply(0, ev)
	x.Tick(ttl - time.Second)
	want(t, x, p, map[string]int{"e1": 4})
	// One of them is stored again before its time.
	ev = stored("e1", "x", 3, p[0], p[1])
	ev.Tier = prefix.CPU
	x.Apply(ttl-time.Second, ev)
	x.Tick(ttl + ttl/4 + time.Second)
	want(t, x, p, map[string]int{"e1": 2})
	x.Tick(3 * ttl)
	want(t, x, p, map[string]int{"e1": 1})
	if n := x.Stats().Blocks; n != 1 {
		x.Tick(3 * ttl)
		if n = x.Stats().Blocks; n != 1 {
			t.Fatalf("%d blocks are kept, want the one in GPU memory", n)
		}
	}
}

func TestAnAnswerCarriesTheCallersTag(t *testing.T) {
	x := prefix.New(prefix.Options{})
	ready(t, x, "e1", "x")
	x.Apply(0, stored("e1", "x", 1, ns, 5))
	x.Put(prefix.Registration{Engine: "e1", Epoch: "x", Events: true, Tag: 42})
	if h := x.Match([]uint64{5}, nil); len(h) != 1 || h[0].Tag != 42 {
		t.Fatalf("hits %+v, want the tag 42", h)
	}
}

// Under the conditions that Match names, jumping gives what walking gives.
func TestJumpingFindsWhatWalkingFinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		walk := prefix.New(prefix.Options{JumpFrom: -1})
		jump := prefix.New(prefix.Options{JumpFrom: rapid.IntRange(1, 8).Draw(t, "from")})
		p := prompt("a", 300, 300, "a")
		for e := range rapid.IntRange(1, 12).Draw(t, "engines") {
			n := rapid.IntRange(0, 300).Draw(t, "held")
			cpu := rapid.IntRange(0, n).Draw(t, "of that only in CPU memory, the tail")
			for _, x := range []*prefix.Index{walk, jump} {
				name := fmt.Sprint("e", e)
				x.Put(prefix.Registration{Engine: name, Tag: tagOf(name), Epoch: "x", Events: true})
				x.Begin(name, "x", 0)
				x.Part(0, name, "x", prefix.GPU, p[:n-cpu])
				x.Part(0, name, "x", prefix.CPU, p[n-cpu:n])
				x.End(0, name, "x")
			}
		}
		asked := p[:rapid.IntRange(0, 300).Draw(t, "asked")]
		if d := cmp.Diff(walk.Match(asked, nil), jump.Match(asked, nil)); d != "" {
			t.Fatalf("a jump finds other prefixes than a walk (-walk +jump):\n%s", d)
		}
	})
}

// Where the second condition fails, the error is a hole, not an invention.
func TestAJumpOverAHoleCreditsAtMostTheLastBlockHeld(t *testing.T) {
	x := prefix.New(prefix.Options{JumpFrom: 4})
	p := prompt("a", 100, 100, "a")
	ready(t, x, "e1", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p[:80]...))
	x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: 2, Op: prefix.Removed, Blocks: p[13:14]})
	if n := hits(x, p)["e1"]; n > 80 || n < 13 {
		t.Fatalf("credited %d blocks: the engine holds 13 in a row and 80 with a hole", n)
	}
}

// scenario C7
func TestTheSameTokensUnderAnotherSaltOrLoRAAreOtherBlocks(t *testing.T) {
	x := prefix.New(prefix.Options{})
	ready(t, x, "e1", "x")
	tokens := make([]uint32, 256)
	plain := blockhash.Chain(nil, blockhash.Namespace("m", "", ""), tokens, 64)
	x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: 1, Op: prefix.Stored, Blocks: plain})
	want(t, x, plain, map[string]int{"e1": 4})
	for _, other := range []uint64{blockhash.Namespace("m", "", "salt"), blockhash.Namespace("m", "lora", ""), blockhash.Namespace("n", "", "")} {
		want(t, x, blockhash.Chain(nil, other, tokens, 64), map[string]int{})
	}
}
