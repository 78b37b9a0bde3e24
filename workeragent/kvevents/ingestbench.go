package kvevents

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"syscall"
	"time"
)

// IngestConfig of the ingest benchmark; zero = the default.
type IngestConfig struct {
	// Duration of the measurement. Default 3 s.
	Duration time.Duration
	// BlocksPerEvent. Default 16.
	BlocksPerEvent int
	// BlockTokens of the engine. Default 16.
	BlockTokens int
	// EventsPerBatch: stores in one message, each with the removal of as many
	// old blocks. Default 8.
	EventsPerBatch int
	// Live is how many engine blocks the simulated cache holds. Default 100,000.
	Live int
	// Dialect of the events. Default VLLMMaps.
	Dialect Dialect
}

func (c IngestConfig) withDefaults() IngestConfig {
	set := func(p *int, v int) {
		if *p <= 0 {
			*p = v
		}
	}
	if c.Duration <= 0 {
		c.Duration = 3 * time.Second
	}
	set(&c.BlocksPerEvent, 16)
	set(&c.BlockTokens, 16)
	set(&c.EventsPerBatch, 8)
	set(&c.Live, 100_000)
	return c
}

// IngestResult is what the benchmark measured. Blocks are engine blocks stored;
// as many are removed meanwhile and not counted.
type IngestResult struct {
	BlocksPerCPUSecond float64 `json:"blocks_per_cpu_s"`
	AllocsPerEvent     float64 `json:"allocs_per_event"`
	EventsPerCPUSecond float64 `json:"events_per_cpu_s"`
	MBPerCPUSecond     float64 `json:"mb_per_cpu_s"`
	Blocks             int64   `json:"blocks"`
	Events             int64   `json:"events"`
	Messages           int64   `json:"messages_published"`
	CPUSeconds         float64 `json:"cpu_s"`
	WallSeconds        float64 `json:"wall_s"`
	BlocksPerEvent     int     `json:"blocks_per_event"`
	BlockTokens        int     `json:"block_tokens"`
	Live               int     `json:"live_blocks"`
	Encoding           string  `json:"encoding"`
	CPUs               int     `json:"cpus"`
}

// IngestBench measures frames taken apart, decoded, sequenced, mapped and
// encoded for publishing, in steady state at a full cache, on one goroutine.
// CPU time is the whole process's, the collector's work included.
func IngestBench(cfg IngestConfig) (IngestResult, error) {
	cfg = cfg.withDefaults()
	messages := ingestTraffic(cfg)
	var published int64
	v := NewView("bench", func([]byte) { published++ })
	x := NewIndex(IndexConfig{Model: "bench", MaxNodes: 4 * cfg.Live}, v, nil)
	s := NewSequencer[[]byte](SequenceConfig{}, func([]byte) bool { return false })
	var b Batch
	var seq uint64
	pass := func(i int) error {
		binary.BigEndian.PutUint64(messages[i][1], seq)
		seq++
		m, err := ParseLive(messages[i])
		if err != nil {
			return err
		}
		for _, st := range s.Live(0, m.Seq, m.Payload) {
			if st.Do != Apply {
				continue
			}
			if err := b.Decode(st.Batch); err != nil {
				return err
			}
			v.mu.Lock()
			x.Apply(0, &b, true)
			v.flush()
			v.mu.Unlock()
		}
		return nil
	}
	for i := range messages { // fill the cache and every buffer
		if err := pass(i); err != nil {
			return IngestResult{}, fmt.Errorf("ingest benchmark: %w", err)
		}
	}
	runtime.GC()
	published, x.stats = 0, Stats{} // the first half removed what was not there yet
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, wall := cpuTime(), time.Now()
	var batches int64
	for time.Since(wall) < cfg.Duration {
		for i := range messages {
			if err := pass(i); err != nil {
				return IngestResult{}, fmt.Errorf("ingest benchmark: %w", err)
			}
		}
		batches += int64(len(messages))
	}
	spent, elapsed := (cpuTime() - cpu).Seconds(), time.Since(wall).Seconds()
	runtime.ReadMemStats(&after)
	if st := x.Stats(); st.Parked+int(st.Orphans)+int(st.Full)+int(st.Mismatched)+int(st.UnknownRemoved) > 0 || v.Len() == 0 {
		return IngestResult{}, fmt.Errorf("ingest benchmark: the traffic did not map: %+v, %d pool blocks", st, v.Len())
	}
	bytes := 0
	for _, m := range messages {
		bytes += len(m[2])
	}
	events := batches * int64(cfg.EventsPerBatch)
	r := IngestResult{Blocks: events * int64(cfg.BlocksPerEvent), Events: 2 * events, Messages: published, CPUSeconds: spent, WallSeconds: elapsed,
		BlocksPerEvent: cfg.BlocksPerEvent, BlockTokens: cfg.BlockTokens, Live: x.Stats().Nodes, Encoding: cfg.Dialect.String(), CPUs: runtime.NumCPU()}
	r.BlocksPerCPUSecond, r.EventsPerCPUSecond = float64(r.Blocks)/spent, float64(r.Events)/spent
	r.MBPerCPUSecond = float64(bytes) * float64(batches) / float64(len(messages)) / spent / 1e6
	r.AllocsPerEvent = float64(after.Mallocs-before.Mallocs) / float64(r.Events)
	return r, nil
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ingestTraffic makes a ring of messages: each stores chains of new blocks and
// removes the oldest. Going round it again stores them anew.
func ingestTraffic(cfg IngestConfig) [][][]byte {
	rnd := rand.New(rand.NewPCG(1, 2))
	perBatch := cfg.BlocksPerEvent * cfg.EventsPerBatch
	n := 2 * max(1, cfg.Live/perBatch)
	events := n * cfg.EventsPerBatch
	hashes, tokens := make([][]uint64, events), make([][]uint32, events)
	for i := range events {
		hashes[i], tokens[i] = make([]uint64, cfg.BlocksPerEvent), make([]uint32, cfg.BlocksPerEvent*cfg.BlockTokens)
		for j := range hashes[i] {
			hashes[i][j] = rnd.Uint64()
		}
		for j := range tokens[i] {
			tokens[i][j] = uint32(rnd.IntN(152_000))
		}
	}
	messages := make([][][]byte, n)
	for i := range n {
		w := Encoder{Dialect: cfg.Dialect}
		w.Begin(1.7e9, 2*cfg.EventsPerBatch)
		for j := range cfg.EventsPerBatch {
			e := i*cfg.EventsPerBatch + j
			ev := Event{Kind: Stored, Hashes: hashes[e], Tokens: tokens[e], BlockSize: cfg.BlockTokens, Group: 0, Spec: []byte("full_attention")}
			if j > 0 { // one chain a batch
				ev.HasParent, ev.Parent = true, hashes[e-1][cfg.BlocksPerEvent-1]
			}
			w.Event(&ev)
		}
		for j := range cfg.EventsPerBatch { // from the chain's end, as engines evict
			old := ((i+n/2)%n)*cfg.EventsPerBatch + cfg.EventsPerBatch - 1 - j
			gone := make([]uint64, cfg.BlocksPerEvent)
			for k := range gone {
				gone[k] = hashes[old][cfg.BlocksPerEvent-1-k]
			}
			w.Event(&Event{Kind: Removed, Hashes: gone, Group: 0})
		}
		messages[i] = [][]byte{[]byte("kv-events"), make([]byte, 8), w.End(0)}
	}
	return messages
}
