package blockhash_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

// The vectors were made by another implementation of xxhash64 in another
// language: they are the contract with it.
func TestTheGoldenVectorsHold(t *testing.T) {
	b, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Model       string
		LoRA        string
		CacheSalt   string `json:"cache_salt"`
		BlockTokens int    `json:"block_tokens"`
		Tokens      []uint32
		Namespace   string
		Blocks      []string
	}
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 5 {
		t.Fatalf("only %d vectors", len(cases))
	}
	for i, c := range cases {
		ns := blockhash.Namespace(c.Model, c.LoRA, c.CacheSalt)
		if got := fmt.Sprintf("%016x", ns); got != c.Namespace {
			t.Errorf("vector %d: namespace %s, want %s", i, got, c.Namespace)
		}
		var got []string
		for _, h := range blockhash.Chain(nil, ns, c.Tokens, c.BlockTokens) {
			got = append(got, fmt.Sprintf("%016x", h))
		}
		if !slices.Equal(got, c.Blocks) {
			t.Errorf("vector %d: blocks %v, want %v", i, got, c.Blocks)
		}
	}
}

// scenario C7
func TestTheSameTokensUnderAnotherModelAdapterOrSaltShareNothing(t *testing.T) {
	seen := map[uint64]string{}
	for _, n := range [][3]string{{"m", "", ""}, {"m", "l", ""}, {"m", "", "l"}, {"ml", "", ""}, {"", "m", "l"}, {"m", "l", "s"}} {
		for _, h := range blockhash.Chain(nil, blockhash.Namespace(n[0], n[1], n[2]), make([]uint32, 256), 64) {
			if other, ok := seen[h]; ok {
				t.Errorf("%q and %s share block %016x", n, other, h)
			}
			seen[h] = fmt.Sprintf("%q", n)
		}
	}
}

func TestTokensGivenInPiecesHashAsTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		block := rapid.IntRange(1, 300).Draw(t, "block")
		tokens := rapid.SliceOfN(rapid.Uint32(), 0, 900).Draw(t, "tokens")
		ns := rapid.Uint64().Draw(t, "ns")
		want := blockhash.Chain(nil, ns, tokens, block)
		if len(want) != len(tokens)/block {
			t.Fatalf("%d blocks of %d tokens by %d", len(want), len(tokens), block)
		}
		h := blockhash.New(ns, block)
		var got []uint64
		for rest := tokens; ; {
			n := rapid.IntRange(0, len(rest)).Draw(t, "piece")
			got = h.Append(got, rest[:n])
			rest = rest[n:]
			if len(rest) == 0 {
				break
			}
		}
		if !slices.Equal(got, want) || h.Tokens() != len(tokens) {
			t.Fatalf("in pieces %v, as a whole %v", got, want)
		}
	})
}

func TestAPromptThatGoesOnKeepsItsBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		block := rapid.IntRange(1, 64).Draw(t, "block")
		a := rapid.SliceOfN(rapid.Uint32(), block, 400).Draw(t, "a")
		b := rapid.SliceOfN(rapid.Uint32(), 0, 100).Draw(t, "b")
		whole := blockhash.Chain(nil, 1, slices.Concat(a, b), block)
		first := blockhash.Chain(nil, 1, a, block)
		if !slices.Equal(first, whole[:len(first)]) {
			t.Fatal("more tokens changed earlier blocks")
		}
		at := rapid.IntRange(0, len(first)*block-1).Draw(t, "at")
		a[at]++
		changed := blockhash.Chain(nil, 1, a, block)
		if !slices.Equal(changed[:at/block], first[:at/block]) || slices.Equal(changed[at/block:], first[at/block:]) {
			t.Fatal("a changed token does not change exactly the blocks from its own on")
		}
	})
}

func TestChainDoesNotAllocateWithRoom(t *testing.T) {
	tokens := make([]uint32, 64*100)
	dst := make([]uint64, 0, 100)
	if n := testing.AllocsPerRun(100, func() { dst = blockhash.Chain(dst[:0], 7, tokens, 64) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestAnAnchorIsTheWholeBlocksOfTheBeginning(t *testing.T) {
	blocks := blockhash.Chain(nil, 1, make([]uint32, 64*40), 64)
	hex := func(i int) string { return fmt.Sprintf("%016x", blocks[i]) }
	for _, c := range []struct {
		name   string
		blocks []uint64
		want   string
	}{
		{"under one block", nil, ""},
		{"one block", blocks[:1], hex(0)},
		{"shorter than the anchor", blocks[:9], hex(8)},
		{"exactly the anchor", blocks[:16], hex(15)},
		{"longer", blocks, hex(15)},
	} {
		if got := blockhash.AnchorKey(c.blocks, 1024, 64); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if got := blockhash.AnchorKey([]uint64{5}, 10, 64); got != "0000000000000005" {
		t.Errorf("a small hash: %q", got)
	}
	if got := blockhash.AnchorKey(blocks, 10, 0); got != "" {
		t.Errorf("no block size: %q", got)
	}
}

func TestNonsenseBlockSizesGiveNoBlocks(t *testing.T) {
	if got := blockhash.Chain(nil, 1, []uint32{1, 2}, 0); got != nil {
		t.Errorf("%v", got)
	}
	if got := blockhash.Chain(nil, 1, []uint32{1, 2}, -5); got != nil {
		t.Errorf("%v", got)
	}
}

func BenchmarkChain64(b *testing.B) {
	tokens := make([]uint32, 64*512)
	dst := make([]uint64, 0, 512)
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		dst = blockhash.Chain(dst[:0], 7, tokens, 64)
	}
}
