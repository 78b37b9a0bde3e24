package prefix_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

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

// pick is the parent of p[i].
func pick(root uint64, p []uint64, i int) uint64 {
	if i == 0 {
		return root
	}
	return p[i-1]
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
