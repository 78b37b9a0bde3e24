package decide

import "testing"

// Allocations do not depend on the machine: the hot path makes none.
func TestADecisionAllocatesNextToNothing(t *testing.T) {
	r, err := Run(Config{Engines: []int{50}, Rounds: 1})
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Results[0].AllocsPerDecision; got > 4 {
		t.Errorf("%g allocations a decision: want at most 4", got)
	}
	if r.Results[0].NSPerDecision <= 0 || r.CalibrationNS <= 0 {
		t.Errorf("nothing was measured: %+v", r)
	}
}

func TestUnusableConfigurationsAreRefused(t *testing.T) {
	for _, cfg := range []Config{{Engines: []int{0}}, {Policy: "no such policy"}} {
		if _, err := Run(cfg); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
}

func BenchmarkDecide50(b *testing.B)   { bench(b, 50) }
func BenchmarkDecide1000(b *testing.B) { bench(b, 1000) }

func bench(b *testing.B, n int) {
	r, err := Run(Config{Engines: []int{n}, Rounds: 1})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(r.Results[0].NSPerDecision, "cpu-ns/decision")
}

// Bytes do not depend on the machine either.
func TestABlockAtAnEngineTakesAtMostFortyBytes(t *testing.T) {
	r, err := Index()
	if err != nil {
		t.Fatal(err)
	}
	if r.BytesPerHolding > 40 || r.UniqueBytesPerHolding > 40 {
		t.Errorf("%.1f bytes when 100 engines share, %.1f when nobody does: want at most 40", r.BytesPerHolding, r.UniqueBytesPerHolding)
	}
	if r.InsertsPerCPUS <= 0 || r.LookupsPerCPUS <= 0 || r.UniqueInsertsPerCPUS <= 0 {
		t.Errorf("nothing was measured: %+v", r)
	}
}
