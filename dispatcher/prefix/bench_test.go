package prefix

import (
	"strconv"
	"testing"
)

func fill(x *Index, name string) {
	x.Put(Registration{Engine: name, Epoch: "a", Events: true})
	x.Begin(name, "a", 0)
	x.End(0, name, "a")
}

func chain(seed uint64, n int) []uint64 {
	out := make([]uint64, n)
	h := mix(seed)
	for i := range out {
		h = mix(h)
		out[i] = h
	}
	return out
}

// One engine stores blocks that nobody shares, in events of 32.
func BenchmarkInsertUnique(b *testing.B) {
	x := New(Options{MaxBytes: 4 << 30})
	fill(x, "e0")
	seq := uint64(0)
	blocks := chain(1, 32)
	b.ReportAllocs()
	for i := 0; i < b.N; i += 32 {
		seq++
		for j := range blocks {
			blocks[j] = mix(uint64(i + j))
		}
		x.Apply(0, Event{Engine: "e0", Epoch: "a", Seq: seq, Op: Stored, Blocks: blocks})
	}
	b.ReportMetric(float64(x.bytes())/float64(max(1, b.N)), "B/holder")
}

// 100 engines store the same blocks.
func BenchmarkInsertShared(b *testing.B) {
	x := New(Options{MaxBytes: 4 << 30})
	var names [100]string
	for i := range names {
		names[i] = "e" + strconv.Itoa(i)
		fill(x, names[i])
	}
	per := b.N/100/32 + 1
	blocks := make([]uint64, 32)
	b.ReportAllocs()
	b.ResetTimer()
	for _, name := range names {
		for i := range per {
			for j := range blocks {
				blocks[j] = mix(uint64(i*32 + j))
			}
			x.Apply(0, Event{Engine: name, Epoch: "a", Seq: uint64(i + 1), Op: Stored, Blocks: blocks})
		}
	}
	b.ReportMetric(float64(x.bytes())/float64(per*32*100), "B/holder")
}

// 100 engines store random halves of the blocks: sets do not repeat.
func BenchmarkInsertRandomSubsets(b *testing.B) {
	x := New(Options{MaxBytes: 4 << 30})
	var names [100]string
	for i := range names {
		names[i] = "e" + strconv.Itoa(i)
		fill(x, names[i])
	}
	per := b.N/50/32 + 1
	blocks := make([]uint64, 0, 32)
	n := 0
	b.ReportAllocs()
	b.ResetTimer()
	for at, name := range names {
		for i := range per {
			blocks = blocks[:0]
			for j := range 32 {
				k := uint64(i*32 + j)
				if mix(k<<8+uint64(at))&1 == 0 {
					blocks = append(blocks, mix(k))
				}
			}
			n += len(blocks)
			x.Apply(0, Event{Engine: name, Epoch: "a", Seq: uint64(i + 1), Op: Stored, Blocks: blocks})
		}
	}
	b.ReportMetric(float64(x.bytes())/float64(n), "B/holder")
}

func BenchmarkMatch(b *testing.B) {
	x := New(Options{MaxBytes: 4 << 30})
	prompts := make([][]uint64, 20000)
	for i := range prompts {
		prompts[i] = chain(uint64(i), 32)
	}
	for e := range 8 {
		name := "e" + strconv.Itoa(e)
		fill(x, name)
		for i, p := range prompts {
			x.Apply(0, Event{Engine: name, Epoch: "a", Seq: uint64(i + 1), Op: Stored, Blocks: p[:32-e*3]})
		}
	}
	var hits []Hit
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		hits = x.Match(prompts[i], hits)
		i = (i + 7919) % len(prompts)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/32, "ns/block")
}
