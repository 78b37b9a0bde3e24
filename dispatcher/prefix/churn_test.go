package prefix

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// Engines come, go and clear while the sweep is at every possible point: what
// is held is always exactly what was stored, and nothing is left in the end.
func TestSweepingUnderChurnNeverChangesWhatIsHeld(t *testing.T) {
	const universe, engines = 1200, 12
	rng := rand.New(rand.NewPCG(1, 2))
	x := New(Options{JumpFrom: -1, LowerTTL: 1000})
	type held [3]map[uint64]bool
	truth := map[string]*held{}
	seq := map[string]uint64{}
	epochs := 0
	name := func() string { return fmt.Sprint("e", rng.IntN(engines)) }
	join := func(n string) {
		if _, in := truth[n]; in {
			return
		}
		epochs++
		x.Put(Registration{Engine: n, Tag: tagOf(n), Epoch: "x", Events: true})
		x.Begin(n, "x", 0)
		x.End(0, n, "x")
		truth[n], seq[n] = &held{{}, {}, {}}, 0
	}
	check := func(b uint64) {
		t.Helper()
		got := map[string]Tier{}
		for _, h := range x.Match([]uint64{b}, nil) {
			switch {
			case h.GPU > 0:
				got[nameOfTag(h.Tag)] = GPU
			case h.CPU > 0:
				got[nameOfTag(h.Tag)] = CPU
			default:
				got[nameOfTag(h.Tag)] = SSD
			}
		}
		for n, h := range truth {
			tier, in := got[n]
			for i := range 3 {
				if h[i][b] {
					if !in || tier != Tier(i) {
						t.Fatalf("block %x: engine %s holds it in tier %d, the index says %v %d", b, n, i, in, tier)
					}
					in = false
					delete(got, n)
					break
				}
			}
			if in {
				t.Fatalf("block %x: engine %s does not hold it, the index says tier %d", b, n, tier)
			}
		}
		if len(got) > 0 {
			t.Fatalf("block %x: the index names engines that are not there: %v", b, got)
		}
	}
	block := func() uint64 { return mix(rng.Uint64N(universe)) }
	for step := range 30_000 {
		n := name()
		h := truth[n]
		if h == nil {
			join(n)
			continue
		}
		switch r := rng.IntN(1000); {
		case r < 3:
			x.Remove(n)
			delete(truth, n)
		case r < 6:
			seq[n]++
			x.Apply(0, Event{Engine: n, Epoch: "x", Seq: seq[n], Op: Cleared})
			*h = held{{}, {}, {}}
		case r < 700:
			seq[n]++
			tier := Tier(rng.IntN(3))
			first := rng.Uint64N(universe)
			var bs []uint64
			for i := range 1 + rng.Uint64N(12) {
				b := mix((first + i) % universe)
				bs = append(bs, b)
				h[tier][b] = true
			}
			x.Apply(0, Event{Engine: n, Epoch: "x", Seq: seq[n], Op: Stored, Tier: tier, Blocks: bs})
		case r < 950:
			seq[n]++
			tier := Tier(rng.IntN(3))
			b := block()
			delete(h[tier], b)
			x.Apply(0, Event{Engine: n, Epoch: "x", Seq: seq[n], Op: Removed, Tier: tier, Blocks: []uint64{b}})
		default:
			x.step(rng.IntN(400))
		}
		check(block())
		if step%1000 == 0 {
			for b := range uint64(universe) {
				check(mix(b))
			}
			x.verify(t)
		}
	}
	for n := range truth {
		x.Remove(n)
	}
	for range 100 {
		x.Tick(0)
	}
	x.verify(t)
	if s := x.Stats(); s.Blocks != 0 || s.Sets != 0 || x.dead != 0 || len(x.noSlots) != len(x.slots) {
		t.Fatalf("left over: %d blocks, %d sets, %d dead slots, %d of %d slots free", s.Blocks, s.Sets, x.dead, len(x.noSlots), len(x.slots))
	}
}

// verify checks what the index keeps about itself.
func (x *Index) verify(t *testing.T) {
	t.Helper()
	refs := map[uint32]uint32{}
	seen := map[*segment]bool{}
	for _, s := range x.blocks.dir {
		if seen[s] {
			continue
		}
		seen[s] = true
		for i, k := range s.keys {
			if k != 0 {
				refs[s.vals[i]]++
			}
		}
	}
	var bytes int64
	for id := range uint32(len(x.sets.pages) * pageSets) {
		e := x.sets.at(id)
		bytes += int64(cap(e.members)) * 4
		if e.refs != refs[id] {
			t.Fatalf("set %d counts %d blocks, %d have it", id, e.refs, refs[id])
		}
		h := uint64(0)
		for i, m := range e.members {
			h ^= hashSlot(m)
			if i > 0 && e.members[i-1] >= m {
				t.Fatalf("set %d is not in order: %v", id, e.members)
			}
			if x.slots[m].state == slotFree {
				t.Fatalf("set %d has slot %d, which is free", id, m)
			}
		}
		if h != e.hash {
			t.Fatalf("set %d has hash %x, its members make %x", id, e.hash, h)
		}
		if e.listed && x.sets.byHash.get(e.hash) != id {
			t.Fatalf("set %d is listed and not found", id)
		}
	}
	if bytes += int64(len(x.sets.pages)) * pageBytes; bytes != x.sets.bytes {
		t.Fatalf("sets account for %d bytes and hold %d", x.sets.bytes, bytes)
	}
}

// A sweep that merges segments on its way leaves nothing unswept.
func TestOneSweepReclaimsAllOfASparseTable(t *testing.T) {
	x := New(Options{})
	x.Put(Registration{Engine: "e", Tag: tagOf("e"), Epoch: "x", Events: true})
	x.Begin("e", "x", 0)
	all := make([]uint64, 20_000)
	for i := range all {
		all[i] = mix(uint64(i))
	}
	x.Part(0, "e", "x", GPU, all)
	x.End(0, "e", "x")
	x.Apply(0, Event{Engine: "e", Epoch: "x", Seq: 1, Op: Removed, Blocks: all[2000:]})
	segs := x.blocks.segs
	x.Remove("e")
	x.step(1)
	for x.sweep.on {
		x.step(1)
	}
	if x.blocks.n != 0 || x.dead != 0 || x.blocks.segs >= segs {
		t.Fatalf("one sweep leaves %d blocks, %d dead slots and %d of %d segments", x.blocks.n, x.dead, x.blocks.segs, segs)
	}
	x.verify(t)
}

// Forgetting for the budget in the midst of everything invents nothing.
func TestEvictionUnderChurnNeverInventsAHolder(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	x := New(Options{MaxBytes: 160 << 10, JumpFrom: -1})
	truth := map[string]map[uint64]bool{}
	seq := map[string]uint64{}
	for e := range 8 {
		n := fmt.Sprint("e", e)
		truth[n] = map[uint64]bool{}
		x.Put(Registration{Engine: n, Tag: tagOf(n), Epoch: "x", Events: true})
		x.Begin(n, "x", 0)
		x.End(0, n, "x")
	}
	for step := range 20_000 {
		n := fmt.Sprint("e", rng.IntN(8))
		seq[n]++
		first := rng.Uint64N(20_000)
		ev := Event{Engine: n, Epoch: "x", Seq: seq[n], Op: Stored}
		for i := range 1 + rng.Uint64N(24) {
			ev.Blocks = append(ev.Blocks, mix(first+i))
		}
		if rng.IntN(4) == 0 {
			ev.Op = Removed
		}
		for _, b := range ev.Blocks {
			truth[n][b] = ev.Op == Stored
		}
		x.Apply(0, ev)
		for _, h := range x.Match(ev.Blocks[:1], nil) {
			if !truth[nameOfTag(h.Tag)][ev.Blocks[0]] {
				t.Fatalf("step %d: the index says that %s holds a block which it does not", step, nameOfTag(h.Tag))
			}
		}
		if step%500 == 0 {
			x.verify(t)
		}
	}
	if x.evicted == 0 {
		t.Fatal("the budget was never reached")
	}
}

// After an eviction for the budget an unknown parent proves nothing.
func TestAnUnknownParentAfterAnEvictionIsNoLoss(t *testing.T) {
	x := New(Options{MaxBytes: 128 << 10})
	x.Put(Registration{Engine: "e", Tag: tagOf("e"), Epoch: "x", Events: true})
	x.Begin("e", "x", 0)
	x.End(0, "e", "x")
	seq := uint64(0)
	for x.evicted == 0 {
		seq++
		x.Apply(0, Event{Engine: "e", Epoch: "x", Seq: seq, Op: Stored, Blocks: []uint64{mix(seq)}})
	}
	v := x.Apply(0, Event{Engine: "e", Epoch: "x", Seq: seq + 1, Op: Stored, Parent: 12345, HasParent: true, Blocks: []uint64{6789}})
	if v.Did != Applied {
		t.Fatalf("a block whose parent we may have forgotten ourselves: %+v, want it applied", v)
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
