package kvevents

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

// mirror follows a view's published changes, as a dispatcher does.
type mirror struct {
	t     testing.TB
	epoch string
	seq   uint64
	held  [3]map[uint64]bool

	parents map[uint64]uint64 // if not nil: what a named parent has to be, by block
	named   int               // stores that named one
}

func newMirror(t testing.TB) *mirror {
	m := &mirror{t: t}
	m.reset()
	return m
}

func (m *mirror) reset() {
	for i := range m.held {
		m.held[i] = map[uint64]bool{}
	}
}

func (m *mirror) take(b []byte) {
	c, err := DecodeChange(b, nil)
	if err != nil {
		m.t.Fatal(err)
	}
	if c.Epoch != m.epoch {
		m.epoch, m.seq = c.Epoch, 0
	}
	if c.Seq != m.seq+1 {
		m.t.Fatalf("change %d after %d", c.Seq, m.seq)
	}
	m.seq = c.Seq
	if c.HasParent {
		m.named++
		if c.Parent != c.Namespace && !m.held[GPU][c.Parent] {
			m.t.Fatalf("a store behind block %x, which was never told (scenario C4)", c.Parent)
		}
		if want, ok := m.parents[c.Blocks[0]]; m.parents != nil && (!ok || want != c.Parent) {
			m.t.Fatalf("block %x named behind %x, want %x", c.Blocks[0], c.Parent, want)
		}
	}
	for _, block := range c.Blocks {
		held := m.held[c.Tier]
		if held[block] == (c.Kind == Stored) {
			m.t.Fatalf("%v of a block that says nothing new", c.Kind)
		}
		if c.Kind == Stored {
			held[block] = true
		} else {
			delete(held, block)
		}
	}
	if c.Kind == Cleared {
		m.reset()
	}
}

// snapshot is the view's own answer, which must say the same.
func (m *mirror) same(v *View) error {
	var got [3]map[uint64]bool
	for i := range got {
		got[i] = map[uint64]bool{}
	}
	last := false
	err := v.Snapshot(func(b []byte) error {
		p, err := DecodePart(b, nil)
		if err != nil || last || p.AsOf != m.seq && p.AsOf != 0 {
			return fmt.Errorf("part %+v after the last: %v, or not as of %d: %w", p.Number, last, m.seq, err)
		}
		last = p.Last
		for _, block := range p.Blocks {
			got[p.Tier][block] = true
		}
		return nil
	})
	if err != nil || !last {
		return fmt.Errorf("last part seen: %v: %w", last, err)
	}
	if d := cmp.Diff(m.held, got); d != "" {
		return fmt.Errorf("snapshot and changes differ:\n%s", d)
	}
	return nil
}

func apply(x *Index, now time.Duration, events ...Event) {
	x.view.mu.Lock()
	defer x.view.mu.Unlock()
	x.Apply(now, &Batch{Events: events}, true)
	x.view.flush()
}

func stored(tier Tier, parent uint64, size int, tokens []uint32, hashes ...uint64) Event {
	return Event{Kind: Stored, Tier: tier, Parent: parent, HasParent: parent != 0, BlockSize: size, Tokens: tokens, Hashes: hashes, Group: -1}
}

func removed(tier Tier, hashes ...uint64) Event {
	return Event{Kind: Removed, Tier: tier, Hashes: hashes, Group: -1}
}

func seq(from, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(from + i)
	}
	return out
}

func newIndex(t testing.TB, cfg IndexConfig) (*Index, *mirror) {
	m := newMirror(t)
	v := NewView("e", m.take)
	return NewIndex(cfg, v, nil), m
}

func (m *mirror) wantGPU(t *testing.T, what string, want []uint64) {
	t.Helper()
	got := slices.Sorted(maps.Keys(m.held[GPU]))
	want = slices.Sorted(slices.Values(want))
	if !slices.Equal(got, want) {
		t.Errorf("%s: %d blocks held, want %d", what, len(got), len(want))
	}
}

func TestEngineBlocksOfAnySizeBecomePoolBlocks(t *testing.T) {
	const n = 1536 * 3
	tokens := seq(7, n)
	ns := blockhash.Namespace("m", "", "")
	for _, size := range []int{1, 3, 16, 48, 64, 100, 128, 256, 784, 1536} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			x, m := newIndex(t, IndexConfig{Model: "m"})
			whole := n / size * size
			hash := uint64(0)
			for at := 0; at < whole; { // in events of one to three blocks
				k := min(1+at/size%3, (whole-at)/size)
				hashes := make([]uint64, k)
				for i := range hashes {
					hashes[i] = hash + uint64(i) + 1
				}
				apply(x, 0, stored(GPU, hash, size, tokens[at:at+k*size], hashes...))
				hash += uint64(k)
				at += k * size
			}
			m.wantGPU(t, "all stored", blockhash.Chain(nil, ns, tokens[:whole], 64))
			for h := hash; h > hash/2; h-- { // evicted from the end
				apply(x, 0, removed(GPU, h))
			}
			m.wantGPU(t, "half removed", blockhash.Chain(nil, ns, tokens[:int(hash/2)*size], 64))
			for h := hash / 2; h > 0; h-- {
				apply(x, 0, removed(GPU, h))
			}
			m.wantGPU(t, "all removed", nil)
			if s := x.Stats(); s.Nodes != 0 || len(x.freed) != len(x.chunks)-1 || len(x.multi) != 0 {
				t.Errorf("left behind: %d nodes, %d of %d chunks, %d lists", s.Nodes, len(x.chunks)-1-len(x.freed), len(x.chunks)-1, len(x.multi))
			}
		})
	}
}

// scenario C7
func TestNamespacesShareNothing(t *testing.T) {
	tokens := seq(0, 64)
	for name, c := range map[string]struct {
		e    func(*Event)
		want []uint64
	}{
		"plain":        {func(*Event) {}, blockhash.Chain(nil, blockhash.Namespace("m", "", ""), tokens, 64)},
		"LoRA":         {func(e *Event) { e.LoRA = []byte("a") }, blockhash.Chain(nil, blockhash.Namespace("m", "a", ""), tokens, 64)},
		"salt":         {func(e *Event) { e.Salt = []byte("s") }, blockhash.Chain(nil, blockhash.Namespace("m", "", "s"), tokens, 64)},
		"both, extra":  {func(e *Event) { e.LoRA, e.Extra = []byte("a"), extra("a", "s") }, blockhash.Chain(nil, blockhash.Namespace("m", "a", "s"), tokens, 64)},
		"LoRA, number": {func(e *Event) { e.HasLoRAID, e.LoRAID = true, 3 }, nil},
		"an image":     {func(e *Event) { e.Extra = []ExtraKeys{{Other: true}} }, nil},
		"two unknown":  {func(e *Event) { e.Extra = extra("x", "y") }, nil},
	} {
		x, m := newIndex(t, IndexConfig{Model: "m"})
		e := stored(GPU, 0, 64, tokens, 1)
		c.e(&e)
		apply(x, 0, e)
		m.wantGPU(t, name, c.want)
		apply(x, 0, stored(GPU, 1, 64, seq(64, 64), 2)) // inherits the namespace
		if got := len(m.held[GPU]); got != 2*len(c.want) {
			t.Errorf("%s: the next block: %d held", name, got)
		}
		apply(x, 0, removed(GPU, 2), removed(GPU, 1))
		m.wantGPU(t, name+", removed", nil)
	}
}

func extra(texts ...string) []ExtraKeys {
	var k ExtraKeys
	for _, s := range texts {
		k.Texts = append(k.Texts, []byte(s))
	}
	return []ExtraKeys{k}
}

// scenario C4
func TestAStoreBehindAnUnknownParentIsNeverAPrefix(t *testing.T) {
	x, m := newIndex(t, IndexConfig{Model: "m", MaxParked: 1000})
	apply(x, 0, stored(GPU, 2, 64, seq(128, 64), 3), stored(GPU, 1, 64, seq(64, 64), 2))
	m.wantGPU(t, "parent unknown", nil)
	apply(x, 0, stored(GPU, 0, 64, seq(0, 64), 1))
	m.wantGPU(t, "parent known", blockhash.Chain(nil, blockhash.Namespace("m", "", ""), seq(0, 192), 64))
	if x.parked.len() != 0 {
		t.Errorf("%d stores still parked", x.parked.len())
	}
	for i := range uint64(100) {
		apply(x, 0, stored(GPU, 1000+i, 64, seq(0, 64), 2000+i))
	}
	if s := x.Stats(); s.Parked > 8 || s.Orphans < 90 {
		t.Errorf("parking is not bounded: %+v", s)
	}
	apply(x, 0, stored(GPU, 500, 64, seq(0, 64), 501), removed(GPU, 501), stored(GPU, 0, 64, seq(500, 64), 500))
	if len(m.held[GPU]) != 4 {
		t.Errorf("a block removed while parked came to life: %d held", len(m.held[GPU]))
	}
}

// TestAStoreNamesTheBlockBeforeIt: whoever follows the changes can tell that it
// has lost something (scenario C4). What is not in the view is not named.
func TestAStoreNamesTheBlockBeforeIt(t *testing.T) {
	var got []Change
	v := NewView("e", func(b []byte) {
		c, err := DecodeChange(b, nil)
		if err != nil {
			t.Error(err)
		}
		got = append(got, c)
	})
	x := NewIndex(IndexConfig{Model: "m", BlockTokens: 8}, v, nil)
	ns := blockhash.Namespace("m", "", "")
	chain := blockhash.Chain(nil, ns, seq(0, 32), 8)
	apply(x, 0, stored(GPU, 0, 8, seq(0, 8), 1))
	apply(x, 0, stored(GPU, 1, 8, seq(8, 16), 2, 3))
	apply(x, 0, removed(GPU, 3))
	apply(x, 0, stored(CPU, 2, 8, seq(16, 8), 3))
	apply(x, 0, stored(GPU, 3, 8, seq(24, 8), 4)) // its parent is in CPU memory only
	want := []Change{
		{Kind: Stored, Blocks: chain[:1], HasParent: true, Parent: ns},
		{Kind: Stored, Blocks: chain[1:3], HasParent: true, Parent: chain[0]},
		{Kind: Removed, Blocks: chain[2:3]},
		{Kind: Stored, Tier: CPU, Blocks: chain[2:3], HasParent: true, Parent: chain[1]},
		{Kind: Stored, Blocks: chain[3:]},
	}
	for i := range want {
		want[i].Epoch, want[i].Seq, want[i].Namespace = "e", uint64(i+1), ns
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("published (-want +got):\n%s", d)
	}
}

// EAGLE: an engine block is of pairs [t, next], so one prompt's start has a block
// for each token that came after it.
func TestBlocksOfPairsAreMappedByTheirFirstTokens(t *testing.T) {
	x, m := newIndex(t, IndexConfig{Model: "m", BlockTokens: 8})
	pairs := func(parent, hash uint64, from, next int) Event {
		e := stored(GPU, parent, 8, seq(from, 8), hash)
		e.Second = append(seq(from+1, 7), uint32(next))
		return e
	}
	chain := blockhash.Chain(nil, blockhash.Namespace("m", "", ""), seq(0, 16), 8)
	other := blockhash.Chain(nil, blockhash.Namespace("m", "", ""), append(seq(0, 8), seq(500, 8)...), 8)
	apply(x, 0, pairs(0, 1, 0, 8), pairs(1, 2, 8, 16))
	m.wantGPU(t, "a chain", chain)
	apply(x, 0, pairs(0, 3, 0, 500), pairs(3, 4, 500, 508))
	m.wantGPU(t, "another one that begins alike", append(slices.Clone(chain), other[1]))
	apply(x, 0, removed(GPU, 2, 1))
	m.wantGPU(t, "the start is still held by the other", other)
	apply(x, 0, removed(GPU, 4, 3))
	m.wantGPU(t, "nothing", nil)
}

func TestTiersAreASet(t *testing.T) {
	x, m := newIndex(t, IndexConfig{Model: "m", LowerTTL: time.Minute})
	apply(x, 0, stored(GPU, 0, 64, seq(0, 64), 1), Event{Kind: Stored, Tier: CPU, Hashes: []uint64{1}, Group: -1}, removed(GPU, 1))
	if len(m.held[GPU]) != 0 || len(m.held[CPU]) != 1 {
		t.Fatalf("after demotion: %v", m.held)
	}
	apply(x, 30*time.Second, Event{Kind: Stored, Tier: CPU, Hashes: []uint64{1}, Group: -1})
	x.Expire(61 * time.Second)
	if len(m.held[CPU]) != 1 {
		t.Error("a block that was stored again expired with its first store")
	}
	x.Expire(91 * time.Second) // scenario C11
	x.view.flush()
	if len(m.held[CPU]) != 0 || x.Stats().Nodes != 0 {
		t.Errorf("a lower tier does not expire: %v", m.held)
	}
	apply(x, 0, Event{Kind: Stored, Tier: CPU, Hashes: []uint64{9}, Group: -1}, stored(Shared, 0, 64, seq(0, 64), 7))
	if s := x.Stats(); s.UnknownMoved != 1 || len(m.held[CPU])+len(m.held[GPU]) != 0 {
		t.Errorf("an unknown or shared block is credited: %+v", s)
	}
}

func TestOtherCacheGroupsTouchNothing(t *testing.T) {
	x, m := newIndex(t, IndexConfig{Model: "m"})
	full := stored(GPU, 0, 64, seq(0, 64), 77)
	full.Group, full.Spec = 0, []byte("full_attention")
	sliding := full
	sliding.Group, sliding.Spec, sliding.Window = 1, []byte("sliding_window"), 1024
	gone := removed(GPU, 77)
	gone.Group = 1
	apply(x, 0, full, sliding, gone)
	if len(m.held[GPU]) != 1 {
		t.Error("the sliding window's removal took the attention block")
	}
	gone.Group = 0
	apply(x, 0, gone)
	if len(m.held[GPU]) != 0 {
		t.Error("the attention block stays")
	}
}

// scenario C13
func TestABlockSizeThatDoesNotFitIsAlarmedAndNotIndexed(t *testing.T) {
	var alarms []AlarmKind
	m := newMirror(t)
	x := NewIndex(IndexConfig{Model: "m", EngineBlock: 16}, NewView("e", m.take), func(k AlarmKind, _ string) { alarms = append(alarms, k) })
	apply(x, 0, stored(GPU, 0, 64, seq(0, 60), 1))
	apply(x, 0, stored(GPU, 0, 32, seq(0, 64), 2, 3))
	if want := []AlarmKind{AlarmTokens, AlarmBlockSize}; !slices.Equal(alarms, want) || len(m.held[GPU]) != 1 {
		t.Errorf("alarms %v, %d blocks held", alarms, len(m.held[GPU]))
	}
}

func TestAHashBehindTwoParentsIsCreditedNowhere(t *testing.T) {
	x, m := newIndex(t, IndexConfig{Model: "m"})
	apply(x, 0, stored(GPU, 0, 64, seq(0, 64), 1), stored(GPU, 0, 64, seq(500, 64), 2), stored(GPU, 1, 64, seq(64, 64), 9),
		stored(GPU, 9, 64, seq(128, 64), 10), stored(GPU, 2, 64, seq(64, 64), 9))
	if len(m.held[GPU]) != 2 || x.Stats().Ambiguous != 1 {
		t.Errorf("%d held, %+v", len(m.held[GPU]), x.Stats())
	}
}

// scenario C8
func TestTheIndexIsBoundedAndReturnsToItsBaseline(t *testing.T) {
	x, m := newIndex(t, IndexConfig{Model: "m", MaxNodes: 1000})
	for i := range uint64(3000) {
		apply(x, 0, stored(GPU, i, 16, seq(int(i)*16, 16), i+1))
	}
	if s := x.Stats(); s.Nodes != 1000 || s.Full == 0 && s.Parked == 0 {
		t.Errorf("%+v", s)
	}
	x.view.mu.Lock()
	x.clear(true)
	x.view.mu.Unlock()
	if s := x.Stats(); s.Nodes+s.Parked != 0 || len(m.held[GPU]) != 0 || cap(x.nodes) > 64 {
		t.Errorf("after clearing: %+v", s)
	}
}

// TestTheIndexAgreesWithAModel compares with the definition: a pool block is
// present in a tier when every engine block over it is.
func TestTheIndexAgreesWithAModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const poolBlock = 8
		type block struct {
			parent uint64
			tokens []uint32 // from the start
			size   int
			tiers  [3]bool
		}
		size := rapid.SampledFrom([]int{1, 2, 3, 4, 8, 12, 16, 20}).Draw(rt, "engine block")
		m := newMirror(t)
		m.parents = map[uint64]uint64{}
		v := NewView("e", m.take)
		x := NewIndex(IndexConfig{Model: "m", BlockTokens: poolBlock}, v, nil)
		model := map[uint64]*block{}
		var next uint64
		known := func(label string) uint64 {
			if len(model) == 0 {
				return 0
			}
			return rapid.SampledFrom(slices.Sorted(maps.Keys(model))).Draw(rt, label)
		}
		forget := func(h uint64) { // what the index may forget: nowhere, and no child
			for h != 0 {
				b := model[h]
				if b == nil || b.tiers != [3]bool{} {
					return
				}
				for _, c := range model {
					if c.parent == h {
						return
					}
				}
				delete(model, h)
				h = b.parent
			}
		}
		check := func() {
			var want [3]map[uint64]bool
			for i := range want {
				want[i] = map[uint64]bool{}
			}
			for _, b := range model {
				chain := blockhash.Chain(nil, blockhash.Namespace("m", "", ""), b.tokens, poolBlock)
				for k := (len(b.tokens) - b.size) / poolBlock; k < len(b.tokens)/poolBlock; k++ {
					for tier := range 3 {
						ok := true
						for c := b; ok; {
							ok = c.tiers[tier]
							if len(c.tokens)-c.size <= k*poolBlock {
								break
							}
							c = model[c.parent]
						}
						if ok {
							want[tier][chain[k]] = true
						}
					}
				}
			}
			if d := cmp.Diff(want, m.held); d != "" {
				rt.Fatalf("held (-want +got):\n%s", d)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"store": func(rt *rapid.T) {
				parent := uint64(0)
				if rapid.Bool().Draw(rt, "continue") {
					parent = known("parent")
				}
				n := rapid.IntRange(1, 4).Draw(rt, "blocks")
				var prefix []uint32
				if parent != 0 {
					prefix = model[parent].tokens
				}
				tier := Tier(rapid.IntRange(0, 2).Draw(rt, "tier"))
				var hashes []uint64
				tokens := slices.Clone(prefix)
				at := parent
				for range n {
					next++
					for range size { // unique tokens: two hashes never name one pool block
						tokens = append(tokens, uint32(next*1000)+uint32(len(tokens)))
					}
					b := &block{parent: at, tokens: slices.Clone(tokens), size: size}
					b.tiers[tier] = true
					model[next] = b
					hashes = append(hashes, next)
					at = next
				}
				before := blockhash.Namespace("m", "", "")
				for _, c := range blockhash.Chain(nil, before, tokens, poolBlock) {
					m.parents[c], before = before, c
				}
				apply(x, 0, stored(tier, parent, size, tokens[len(prefix):], hashes...))
				check()
			},
			"again": func(rt *rapid.T) {
				h := known("hash")
				if h == 0 {
					return
				}
				tier := Tier(rapid.IntRange(0, 2).Draw(rt, "tier"))
				b := model[h]
				b.tiers[tier] = true
				if rapid.Bool().Draw(rt, "with tokens") {
					apply(x, 0, stored(tier, b.parent, size, b.tokens[len(b.tokens)-size:], h))
				} else {
					apply(x, 0, Event{Kind: Stored, Tier: tier, Hashes: []uint64{h}, Group: -1})
				}
				check()
			},
			"remove": func(rt *rapid.T) {
				h := known("hash")
				if h == 0 {
					return
				}
				tier := Tier(rapid.IntRange(0, 2).Draw(rt, "tier"))
				model[h].tiers[tier] = false
				forget(h)
				apply(x, 0, removed(tier, h))
				check()
			},
			"hide and show": func(rt *rapid.T) {
				v.mu.Lock()
				x.show(false)
				v.flush()
				if n := v.blocks.len(); n != 0 {
					rt.Fatalf("%d blocks of a hidden rank", n)
				}
				x.show(true)
				v.flush()
				v.mu.Unlock()
				check()
				if err := m.same(v); err != nil {
					rt.Fatal(err)
				}
			},
		})
	})
}

func FuzzIndex(f *testing.F) {
	for _, c := range payloads(f) {
		f.Add(unhex(f, c.Hex), 4)
	}
	f.Fuzz(func(t *testing.T, p []byte, block int) {
		m := newMirror(t)
		v := NewView("e", m.take)
		x := NewIndex(IndexConfig{Model: "m", BlockTokens: block, MaxNodes: 1000, MaxParked: 1000}, v, nil)
		var b Batch
		for range 2 {
			_ = b.Decode(p)
			v.mu.Lock()
			x.Apply(0, &b, true)
			v.flush()
			v.mu.Unlock()
		}
		if err := m.same(v); err != nil {
			t.Fatal(err)
		}
		v.mu.Lock()
		x.show(false)
		v.flush()
		v.mu.Unlock()
		if v.Len() != 0 {
			t.Fatalf("%d blocks of a hidden rank", v.Len())
		}
	})
}
