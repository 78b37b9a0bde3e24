package kvevents

import (
	"testing"
	"time"
)

func TestTheIngestBenchmarkMapsItsOwnTraffic(t *testing.T) {
	for _, d := range []Dialect{VLLMMaps, VLLMArrays, SGLangArrays} {
		r, err := IngestBench(IngestConfig{Duration: time.Millisecond, Live: 2000, Dialect: d})
		if err != nil {
			t.Fatal(err)
		}
		if r.Blocks == 0 || r.Messages == 0 || r.BlocksPerCPUSecond <= 0 || r.Live < 1000 {
			t.Errorf("%+v", r)
		}
	}
}

func BenchmarkIngest(b *testing.B) {
	for b.Loop() {
		r, err := IngestBench(IngestConfig{Duration: time.Second})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(r.BlocksPerCPUSecond, "blocks/cpu-s")
		b.ReportMetric(r.AllocsPerEvent, "allocs/event")
	}
}
