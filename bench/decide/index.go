package decide

import (
	"fmt"
	"runtime"

	"github.com/rollbus/rollbus/dispatcher/prefix"
)

// IndexReport is what `rollbus bench index` prints. A holding is one block at
// one engine.
type IndexReport struct {
	Engines         int     `json:"engines"` // that share every block
	Blocks          int     `json:"blocks"`  // distinct
	InsertsPerCPUS  float64 `json:"inserts_per_cpu_s"`
	LookupsPerCPUS  float64 `json:"lookups_per_cpu_s"` // blocks looked at, walked one by one
	BytesPerHolding float64 `json:"bytes_per_holding"` // of heap
	CalibrationNS   float64 `json:"calibration_ns"`

	// The other end: blocks that nobody shares.
	UniqueInsertsPerCPUS  float64 `json:"unique_inserts_per_cpu_s"`
	UniqueBytesPerHolding float64 `json:"unique_bytes_per_holding"`
}

// Index measures the block index: engines that share prompts of 32 blocks.
func Index() (IndexReport, error) {
	const engines, prompts, length = 100, 2000, 32
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := IndexReport{Engines: engines, Blocks: prompts * length, CalibrationNS: best(rounds, 20_000, calibrate)}
	chains := make([][]uint64, prompts)
	x := uint64(88172645463325252)
	for i := range chains {
		chains[i] = make([]uint64, length)
		for k := range chains[i] {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			chains[i][k] = x
		}
	}
	least := 0.0
	var index *prefix.Index
	for round := range rounds {
		before := heap()
		index = prefix.New(prefix.Options{JumpFrom: -1})
		for e := range engines {
			name := fmt.Sprintf("e%03d", e)
			index.Put(prefix.Registration{Engine: name, Epoch: "1", Events: true, Tag: e})
			index.Begin(name, "1", 0)
			index.End(0, name, "1")
		}
		seq := make([]uint64, engines)
		began := threadCPU()
		for _, c := range chains {
			for e := range engines {
				seq[e]++
				v := index.Apply(0, prefix.Event{Engine: names[e], Epoch: "1", Seq: seq[e], Op: prefix.Stored, Tier: prefix.GPU, Blocks: c})
				if v.Did != prefix.Applied {
					return r, fmt.Errorf("bench index: an event was not applied but %d", v.Did)
				}
			}
		}
		s := (threadCPU() - began).Seconds()
		if round == 0 || s < least {
			least = s
		}
		if round == 0 { // later rounds begin with an index on the heap
			r.BytesPerHolding = float64(heap()-before) / float64(engines*prompts*length)
		}
	}
	r.InsertsPerCPUS = float64(engines*prompts*length) / least
	var hits []prefix.Hit
	at := 0
	ns := best(rounds, 2*prompts, func() {
		hits = index.Match(chains[at], hits)
		at = (at + 1) % prompts
	})
	if len(hits) != engines {
		return r, fmt.Errorf("bench index: %d engines hold the prompt, want %d", len(hits), engines)
	}
	r.LookupsPerCPUS = length / ns * 1e9
	return r, r.unique()
}

// unique measures a million blocks spread over the engines, each at one alone.
func (r *IndexReport) unique() error {
	const blocks, length = 1_000_000, 32
	least := 0.0
	batch := make([]uint64, length)
	for round := range rounds {
		before := heap()
		index := prefix.New(prefix.Options{})
		for _, name := range names {
			index.Put(prefix.Registration{Engine: name, Epoch: "1", Events: true})
			index.Begin(name, "1", 0)
			index.End(0, name, "1")
		}
		x := uint64(88172645463325252)
		began := threadCPU()
		for n := range blocks / length {
			for k := range batch {
				x ^= x << 13
				x ^= x >> 7
				x ^= x << 17
				batch[k] = x
			}
			ev := prefix.Event{Engine: names[n%len(names)], Epoch: "1", Seq: uint64(n/len(names) + 1), Op: prefix.Stored, Blocks: batch}
			if v := index.Apply(0, ev); v.Did != prefix.Applied {
				return fmt.Errorf("bench index: an event was not applied but %d", v.Did)
			}
		}
		s := (threadCPU() - began).Seconds()
		if round == 0 || s < least {
			least = s
		}
		r.UniqueBytesPerHolding = float64(heap()-before) / blocks
		runtime.KeepAlive(index)
	}
	r.UniqueInsertsPerCPUS = blocks / least
	return nil
}

var names = func() (n [100]string) {
	for i := range n {
		n[i] = fmt.Sprintf("e%03d", i)
	}
	return n
}()

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
