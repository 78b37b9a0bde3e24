package prefix_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/prefix"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

const ns = 0x5eed

// prompt is a chain of block hashes; prompts with one root share a beginning.
func prompt(root string, shared, n int, tail string) []uint64 {
	out := make([]uint64, 0, n)
	h := uint64(ns)
	for i := range n {
		word := root
		if i >= shared {
			word = tail
		}
		h = blockhash.Block(h, []uint32{uint32(len(word)), uint32(word[0]), uint32(i)})
		out = append(out, h)
	}
	return out
}

func ready(t *testing.T, x *prefix.Index, name, epoch string) {
	t.Helper()
	if v := x.Put(prefix.Registration{Engine: name, Tag: tagOf(name), Epoch: epoch, Events: true}); !v.Resync {
		t.Fatalf("a new engine's verdict is %+v, want it to ask for a snapshot", v)
	}
	x.Begin(name, epoch, 0)
	if v := x.End(0, name, epoch); v.Did != prefix.Applied {
		t.Fatalf("an empty snapshot as of 0 gives %+v", v)
	}
}

func stored(engine, epoch string, seq uint64, parent uint64, blocks ...uint64) prefix.Event {
	return prefix.Event{Engine: engine, Epoch: epoch, Seq: seq, Op: prefix.Stored, Parent: parent, HasParent: true, Namespace: ns, Blocks: blocks}
}

func hits(x *prefix.Index, blocks []uint64) map[string]int {
	out := map[string]int{}
	for _, h := range x.Match(blocks, nil) {
		out[nameOfTag(h.Tag)] = h.Blocks()
	}
	return out
}

func want(t *testing.T, x *prefix.Index, blocks []uint64, w map[string]int) {
	t.Helper()
	if d := cmp.Diff(w, hits(x, blocks)); d != "" {
		t.Fatalf("blocks held by engine (-want +got):\n%s", d)
	}
}

// scenario C1
func TestAfterADumpOlderEventsAreDroppedAndTheNextOneApplies(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 9, 9, "a")
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true})
	// Events come while the snapshot is on its way; it is as of 3.
	for i := range 4 {
		if v := x.Apply(0, stored("e1", "x", uint64(i+1), pick(ns, p, i), p[i])); v.Did != prefix.Buffered {
			t.Fatalf("event %d before the snapshot: %+v, want it buffered", i+1, v)
		}
	}
	want(t, x, p, map[string]int{})
	x.Begin("e1", "x", 3)
	x.Part(0, "e1", "x", prefix.GPU, p[:3])
	want(t, x, p, map[string]int{})
	if v := x.End(0, "e1", "x"); v.Did != prefix.Applied || v.Resync {
		t.Fatalf("the end of the snapshot: %+v", v)
	}
	want(t, x, p, map[string]int{"e1": 4})
	for i := 4; i < 9; i++ {
		if v := x.Apply(0, stored("e1", "x", uint64(i+1), p[i-1], p[i])); v.Did != prefix.Applied {
			t.Fatalf("event %d after the snapshot: %+v, want it applied and no further recovery", i+1, v)
		}
	}
	want(t, x, p, map[string]int{"e1": 9})
	if n := x.Stats().Resyncs; n != 1 {
		t.Fatalf("%d recoveries, want the first alone", n)
	}
}

// pick is the parent of p[i].
func pick(root uint64, p []uint64, i int) uint64 {
	if i == 0 {
		return root
	}
	return p[i-1]
}

// scenario C1
func TestEventsThatWereInThePipeBehindASnapshotAreDropped(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 4, 4, "a")
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true})
	x.Begin("e1", "x", 100)
	x.Part(0, "e1", "x", prefix.GPU, p[:2])
	x.End(0, "e1", "x")
	for seq := uint64(98); seq <= 100; seq++ {
		ev := stored("e1", "x", seq, p[1], p[2])
		if v := x.Apply(0, ev); v.Did != prefix.Old {
			t.Fatalf("event %d of a dump as of 100: %+v, want it dropped as old", seq, v)
		}
	}
	if v := x.Apply(0, stored("e1", "x", 101, p[1], p[2])); v.Did != prefix.Applied {
		t.Fatalf("event 101: %+v, want it applied", v)
	}
	want(t, x, p, map[string]int{"e1": 3})
}

// scenario C2
func TestAFallingSequenceOrANewEpochClearsTheEngine(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 3, 3, "a")
	ready(t, x, "e1", "x")
	ready(t, x, "e2", "x")
	for _, e := range []string{"e1", "e2"} {
		for i := range 3 {
			x.Apply(0, stored(e, "x", uint64(i+1), pick(ns, p, i), p[i]))
		}
	}
	want(t, x, p, map[string]int{"e1": 3, "e2": 3})
	if v := x.Apply(0, stored("e1", "x", 1, ns, p[0])); !v.Resync || v.Why != prefix.WhyRestart {
		t.Fatalf("a sequence that falls to 1: %+v, want a restart that asks for a snapshot", v)
	}
	want(t, x, p, map[string]int{"e2": 3})
	if v := x.Put(prefix.Registration{Engine: "e2", Tag: tagOf("e2"), Epoch: "y", Events: true}); !v.Resync {
		t.Fatalf("a new epoch: %+v, want it to ask for a snapshot", v)
	}
	want(t, x, p, map[string]int{})
	if v := x.Apply(0, stored("e2", "x", 4, p[2], 99)); v.Did != prefix.Ignored {
		t.Fatalf("a late event of the old epoch: %+v, want it ignored", v)
	}
	if n := x.Stats(); n.Blocks != 0 {
		x.Tick(0)
		if n := x.Stats(); n.Blocks != 0 {
			t.Fatalf("%d blocks are left of engines that were cleared", n.Blocks)
		}
	}
}

func TestAnEventOfTheNextLifeEndsThisOneBeforeItIsRegistered(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 2, 2, "a")
	ready(t, x, "e1", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p...))
	if v := x.Apply(0, stored("e1", "y", 1, ns, p[0])); v.Did != prefix.Lost || v.Why != prefix.WhyEpoch || v.Resync {
		t.Fatalf("an event of an unregistered epoch: %+v, want the view lost and no snapshot yet", v)
	}
	want(t, x, p, map[string]int{})
	if v := x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true}); !v.Resync {
		t.Fatalf("the old epoch registers again (a stray event): %+v, want a snapshot", v)
	}
}

// scenario C3
func TestARemovedEngineHasNoHitsWhateverIsInThePipe(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 6, 6, "a")
	ready(t, x, "e1", "x")
	ready(t, x, "e2", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p...))
	x.Apply(0, stored("e2", "x", 1, ns, p[:2]...))
	x.Remove("e1")
	want(t, x, p, map[string]int{"e2": 2})
	for seq := uint64(2); seq < 5; seq++ {
		if v := x.Apply(0, stored("e1", "x", seq, p[5], p...)); v.Did != prefix.Ignored {
			t.Fatalf("an event after the removal: %+v, want it ignored", v)
		}
	}
	x.Part(0, "e1", "x", prefix.GPU, p)
	x.End(0, "e1", "x")
	want(t, x, p, map[string]int{"e2": 2})
	// It comes back, in the same life: nothing counts before its snapshot.
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true})
	x.Apply(0, stored("e1", "x", 5, p[5], p...))
	want(t, x, p, map[string]int{"e2": 2})
}

// scenario C4
func TestABlockUnderAnUnknownParentResyncsThatEngineAndGivesNoCreditMeanwhile(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 6, 6, "a")
	ready(t, x, "e1", "x")
	ready(t, x, "e2", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p[:2]...))
	x.Apply(0, stored("e2", "x", 1, ns, p[:3]...))
	if v := x.Apply(0, stored("e1", "x", 2, p[3], p[4])); !v.Resync || v.Why != prefix.WhyParent {
		t.Fatalf("a block under an unknown parent: %+v, want a resync", v)
	}
	want(t, x, p, map[string]int{"e2": 3})
	x.Begin("e1", "x", 2)
	x.Part(0, "e1", "x", prefix.GPU, p[:5])
	x.End(0, "e1", "x")
	want(t, x, p, map[string]int{"e1": 5, "e2": 3})
	if x.Apply(0, stored("e1", "x", 3, p[4], p[5])).Did != prefix.Applied {
		t.Fatal("the event after the resync does not apply")
	}
}

// scenario C5
func TestClearedOrANewWeightVersionLeavesNoHits(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 4, 4, "a")
	v1, v2 := int64(1), int64(2)
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true, WeightVersion: &v1})
	x.Begin("e1", "x", 0)
	x.End(0, "e1", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p...))
	want(t, x, p, map[string]int{"e1": 4})
	if v := x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: 2, Op: prefix.Cleared}); v.Did != prefix.Applied {
		t.Fatalf("cleared: %+v", v)
	}
	want(t, x, p, map[string]int{})
	if !x.Trusted("e1") {
		t.Fatal("an engine that said it is empty is known to be empty, not unknown")
	}
	x.Apply(0, stored("e1", "x", 3, ns, p...))
	want(t, x, p, map[string]int{"e1": 4})
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true, WeightVersion: &v2})
	want(t, x, p, map[string]int{})
	if v := x.Apply(0, stored("e1", "x", 4, p[3], 77)); v.Did != prefix.Applied {
		t.Fatalf("a block that hangs on what we emptied: %+v, want no recovery for it", v)
	}
	x.Apply(0, stored("e1", "x", 5, ns, p[:2]...))
	want(t, x, p, map[string]int{"e1": 2})
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

// scenario C9
func TestRemovalCancelsARecoveryAndOthersDoNotWaitForIt(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 4, 4, "a")
	x.Put(prefix.Registration{Engine: "dead", Tag: tagOf("dead"), Epoch: "x", Events: true})
	x.Begin("dead", "x", 10)
	x.Part(0, "dead", "x", prefix.GPU, p)
	ready(t, x, "e2", "y")
	x.Apply(0, stored("e2", "y", 1, ns, p[:1]...))
	want(t, x, p, map[string]int{"e2": 1})
	x.Remove("dead")
	for _, v := range []prefix.Verdict{x.Part(0, "dead", "x", prefix.GPU, p), x.End(0, "dead", "x"), x.Failed("dead", "x"), x.Begin("dead", "x", 3)} {
		if v.Did != prefix.Ignored || v.Resync {
			t.Fatalf("a snapshot of a removed engine: %+v, want it ignored", v)
		}
	}
	want(t, x, p, map[string]int{"e2": 1})
	if s := x.Stats(); s.Engines != 1 || s.Buffered != 0 {
		t.Fatalf("of the removed engine something is left: %+v", s)
	}
}

func TestAGapEndsTrustUntilASnapshotReachesBeyondIt(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 6, 6, "a")
	ready(t, x, "e1", "x")
	x.Apply(0, stored("e1", "x", 1, ns, p[0]))
	if v := x.Apply(0, stored("e1", "x", 3, p[1], p[2])); !v.Resync || v.Why != prefix.WhyGap {
		t.Fatalf("event 3 after event 1: %+v, want a gap", v)
	}
	want(t, x, p, map[string]int{})
	// A snapshot that does not know event 2 is no help...
	x.Begin("e1", "x", 1)
	x.Part(0, "e1", "x", prefix.GPU, p[:1])
	if v := x.End(0, "e1", "x"); !v.Resync || v.Why != prefix.WhyGap {
		t.Fatalf("a snapshot as of 1 under buffered event 3: %+v, want another", v)
	}
	want(t, x, p, map[string]int{})
	// ... one that does is, and what was lost before it does not matter.
	x.Apply(0, stored("e1", "x", 5, p[3], p[4]))
	x.Begin("e1", "x", 5)
	x.Part(0, "e1", "x", prefix.GPU, p[:5])
	if v := x.End(0, "e1", "x"); v.Did != prefix.Applied {
		t.Fatalf("a snapshot as of 5: %+v", v)
	}
	want(t, x, p, map[string]int{"e1": 5})
}

func TestABufferThatOverflowsAsksForALaterSnapshot(t *testing.T) {
	x := prefix.New(prefix.Options{MaxBuffered: 8})
	p := prompt("a", 30, 30, "a")
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true})
	for i := range 10 {
		x.Apply(0, stored("e1", "x", uint64(i+1), pick(ns, p, i), p[i]))
		if n := x.Stats().Buffered; n > 8 {
			t.Fatalf("%d hashes are buffered, at most 8 may be", n)
		}
	}
	x.Begin("e1", "x", 2)
	if v := x.End(0, "e1", "x"); !v.Resync || v.Why != prefix.WhyOverflow {
		t.Fatalf("a snapshot as of 2 after an overflow: %+v, want another", v)
	}
	x.Begin("e1", "x", 10)
	x.Part(0, "e1", "x", prefix.GPU, p[:10])
	x.End(0, "e1", "x")
	want(t, x, p, map[string]int{"e1": 10})
}

func TestASnapshotThatFailedLeavesNoCreditAndAsksAgain(t *testing.T) {
	x := prefix.New(prefix.Options{})
	p := prompt("a", 3, 3, "a")
	x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true})
	x.Begin("e1", "x", 1)
	x.Part(0, "e1", "x", prefix.GPU, p)
	if v := x.Failed("e1", "x"); !v.Resync {
		t.Fatalf("a failed snapshot: %+v, want it to be asked for again", v)
	}
	want(t, x, p, map[string]int{})
	if v := x.End(0, "e1", "x"); v.Did != prefix.Ignored {
		t.Fatalf("the end of a snapshot that was given up: %+v", v)
	}
}

func TestAnEngineWithoutEventsNeverCounts(t *testing.T) {
	x := prefix.New(prefix.Options{})
	if v := x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x"}); v.Resync {
		t.Fatalf("an engine without events: %+v, want no snapshot asked for", v)
	}
	x.Apply(0, stored("e1", "x", 1, ns, 7))
	want(t, x, []uint64{7}, map[string]int{})
	if x.Trusted("e1") {
		t.Fatal("an engine without events is trusted")
	}
	if v := x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true}); !v.Resync {
		t.Fatalf("it has events now: %+v, want a snapshot", v)
	}
}

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

// agent is the truth of one engine in the model test.
type agent struct {
	epoch   string
	seq     uint64
	holds   map[uint64]uint8            // block -> tiers
	history map[uint64]map[uint64]uint8 // by sequence
	pipe    []prefix.Event              // published, not yet delivered
	asked   bool
	reply   *reply
}

type reply struct {
	asOf  uint64
	holds map[uint64]uint8
	begun bool
}

// Whatever is lost, doubled, late or restarted: an engine that counts is known
// exactly as it was at its last event, and one that is not known does not count.
func TestAnEngineCountsOnlyWhileItsViewIsWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := prefix.New(prefix.Options{JumpFrom: -1, MaxBuffered: 40})
		prompts := [][]uint64{prompt("a", 6, 6, "a"), prompt("a", 2, 6, "b"), prompt("c", 6, 6, "c")}
		parent := map[uint64]uint64{}
		var all []uint64
		for _, p := range prompts {
			for i, b := range p {
				if _, dup := parent[b]; !dup {
					all = append(all, b)
				}
				parent[b] = pick(ns, p, i)
			}
		}
		agents := map[string]*agent{}
		names := []string{"e1", "e2", "e3"}
		lives := 0
		heard := map[string]uint64{} // last event delivered of this life, in order
		base := map[string]uint64{}  // sequence the view stands on
		holed := map[string]bool{}   // an event after base is missing
		note := func(n string, v prefix.Verdict) {
			if v.Resync {
				agents[n].asked, agents[n].reply = true, nil
			}
		}
		begin := func(n string) {
			lives++
			agents[n] = &agent{epoch: fmt.Sprint("x", lives), holds: map[uint64]uint8{}, history: map[uint64]map[uint64]uint8{0: {}}}
			heard[n], base[n], holed[n] = 0, 0, false
			note(n, x.Put(prefix.Registration{Engine: n, Tag: tagOf(n), Epoch: agents[n].epoch, Events: true}))
		}
		for _, n := range names {
			begin(n)
		}
		publish := func(a *agent, ev prefix.Event) {
			a.seq++
			ev.Epoch, ev.Seq, ev.Namespace = a.epoch, a.seq, ns
			a.history[a.seq] = maps.Clone(a.holds)
			a.pipe = append(a.pipe, ev)
		}
		pickName := func(t *rapid.T) string { return rapid.SampledFrom(names).Draw(t, "engine") }
		deliver := func(n string) {
			a := agents[n]
			ev := a.pipe[0]
			a.pipe = a.pipe[1:]
			if ev.Seq > max(heard[n], base[n])+1 {
				holed[n] = true
			}
			heard[n] = max(heard[n], ev.Seq)
			note(n, x.Apply(0, ev))
		}
		complete := func(n string) {
			a := agents[n]
			r := a.reply
			a.reply, a.asked = nil, false
			for tier := range prefix.Tier(2) {
				var part []uint64
				for _, b := range all {
					if r.holds[b]&(1<<tier) != 0 {
						part = append(part, b)
					}
				}
				x.Part(0, n, a.epoch, tier, part)
			}
			v := x.End(0, n, a.epoch)
			base[n] = r.asOf
			holed[n] = false
			note(n, v)
		}
		check := func(t *rapid.T) {
			for _, n := range names {
				a := agents[n]
				at := max(heard[n], base[n])
				for i, p := range prompts {
					var got prefix.Hit
					for _, h := range x.Match(p, nil) {
						if nameOfTag(h.Tag) == n {
							got = h
						}
					}
					if !x.Trusted(n) {
						if got.Blocks() != 0 {
							t.Fatalf("engine %s is not trusted and is credited %+v", n, got)
						}
						continue
					}
					if holed[n] {
						t.Fatalf("engine %s is trusted over a missing event", n)
					}
					var w prefix.Hit
					for _, b := range p {
						switch tiers := a.history[at][b]; {
						case tiers&1 != 0:
							w.GPU++
						case tiers != 0:
							w.CPU++
						default:
							goto done
						}
					}
				done:
					if got.GPU != w.GPU || got.CPU != w.CPU {
						t.Fatalf("engine %s at event %d holds %d+%d blocks of prompt %d, the index says %d+%d", n, at, w.GPU, w.CPU, i, got.GPU, got.CPU)
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				a := agents[pickName(t)]
				tier := prefix.Tier(rapid.IntRange(0, 1).Draw(t, "tier"))
				p := rapid.SampledFrom(prompts).Draw(t, "prompt")
				i := rapid.IntRange(0, 5).Draw(t, "from")
				if i > 0 && a.holds[p[i-1]] == 0 {
					i = 0
				}
				n := rapid.IntRange(1, 6-i).Draw(t, "n")
				for _, b := range p[i : i+n] {
					a.holds[b] |= 1 << tier
				}
				publish(a, prefix.Event{Engine: nameOf(agents, a), Op: prefix.Stored, Tier: tier, Parent: parent[p[i]], HasParent: true, Blocks: p[i : i+n]})
			},
			"remove a block": func(t *rapid.T) {
				a := agents[pickName(t)]
				tier := prefix.Tier(rapid.IntRange(0, 1).Draw(t, "tier"))
				b := rapid.SampledFrom(all).Draw(t, "block")
				a.holds[b] &^= 1 << tier
				publish(a, prefix.Event{Engine: nameOf(agents, a), Op: prefix.Removed, Tier: tier, Blocks: []uint64{b}})
			},
			"clear": func(t *rapid.T) {
				a := agents[pickName(t)]
				clear(a.holds)
				publish(a, prefix.Event{Engine: nameOf(agents, a), Op: prefix.Cleared})
			},
			"deliver": func(t *rapid.T) {
				n := pickName(t)
				for range rapid.IntRange(1, 4).Draw(t, "n") {
					if len(agents[n].pipe) > 0 {
						deliver(n)
					}
				}
			},
			"deliver twice": func(t *rapid.T) {
				n := pickName(t)
				if a := agents[n]; len(a.pipe) > 0 {
					ev := a.pipe[0]
					deliver(n)
					note(n, x.Apply(0, ev))
				}
			},
			"lose": func(t *rapid.T) {
				if a := agents[pickName(t)]; len(a.pipe) > 0 {
					a.pipe = a.pipe[1:]
				}
			},
			"answer a snapshot": func(t *rapid.T) {
				n := pickName(t)
				a := agents[n]
				if a.asked && a.reply == nil {
					a.reply = &reply{asOf: a.seq, holds: maps.Clone(a.holds)}
				}
			},
			"take the snapshot in": func(t *rapid.T) {
				n := pickName(t)
				a := agents[n]
				switch {
				case a.reply == nil:
				case !a.reply.begun:
					a.reply.begun = true
					x.Begin(n, a.epoch, a.reply.asOf)
				default:
					complete(n)
				}
			},
			"restart": func(t *rapid.T) { begin(pickName(t)) },
			"remove the engine": func(t *rapid.T) {
				n := pickName(t)
				x.Remove(n)
				begin(n)
			},
			"tick": func(*rapid.T) { x.Tick(0) },
			"":     check,
		})
		// Once nothing is lost any more, every engine is known again.
		for range 4 {
			for _, n := range names {
				a := agents[n]
				for len(a.pipe) > 0 {
					deliver(n)
				}
				if a.asked {
					if a.reply == nil {
						a.reply = &reply{asOf: a.seq, holds: maps.Clone(a.holds)}
					}
					if !a.reply.begun {
						x.Begin(n, a.epoch, a.reply.asOf)
					}
					complete(n)
				}
			}
		}
		check(t)
		for _, n := range names {
			if heard[n] == agents[n].seq || base[n] == agents[n].seq {
				if !x.Trusted(n) {
					t.Fatalf("engine %s is not trusted although all has been delivered", n)
				}
			}
		}
		for range 100 {
			x.Tick(0)
		}
		check(t)
	})
}

func nameOf(agents map[string]*agent, a *agent) string {
	for _, n := range slices.Sorted(maps.Keys(agents)) {
		if agents[n] == a {
			return n
		}
	}
	return ""
}

func TestAGapInsideTheBufferIsSeenWhenTheSnapshotIsOlder(t *testing.T) {
	for _, c := range []struct {
		asOf uint64
		good bool
	}{{4, false}, {5, false}, {6, true}, {7, true}} {
		x := prefix.New(prefix.Options{})
		p := prompt("a", 8, 8, "a")
		x.Put(prefix.Registration{Engine: "e1", Tag: tagOf("e1"), Epoch: "x", Events: true})
		x.Apply(0, stored("e1", "x", 5, p[3], p[4]))
		// 6 is lost
		x.Apply(0, prefix.Event{Engine: "e1", Epoch: "x", Seq: 7, Op: prefix.Removed, Blocks: p[7:]})
		x.Begin("e1", "x", c.asOf)
		x.Part(0, "e1", "x", prefix.GPU, p[:c.asOf])
		if v := x.End(0, "e1", "x"); v.Resync == c.good {
			t.Errorf("event 6 is lost and the snapshot is as of %d: %+v", c.asOf, v)
		}
	}
}

// tagOf and nameOfTag turn an engine's name into a tag and back.
func tagOf(name string) (n int) {
	for _, b := range []byte(name) {
		n = n<<8 | int(b)
	}
	return n
}

func nameOfTag(n int) (name string) {
	for ; n > 0; n >>= 8 {
		name = string(rune(n&255)) + name
	}
	return name
}
