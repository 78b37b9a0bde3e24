package prefix_test

import (
	"testing"

	"github.com/rollbus/rollbus/dispatcher/prefix"
)

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
