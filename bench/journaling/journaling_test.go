package journaling_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/journaling"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEveryFigureIsMeasuredAndNothingDiffers(t *testing.T) {
	r, err := journaling.Run(t.Context(), journaling.Config{Engines: 4, Rollouts: 300, Rounds: 1, Slice: 300 * time.Millisecond, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if r.Differences != 0 {
		t.Errorf("%d differences", r.Differences)
	}
	if r.Decisions == 0 || r.PerCPU <= 0 || r.ToLive <= 0 || r.CPUMicros <= 0 || r.PlainCPUMicros <= 0 || r.LoadBytesPerS <= r.IdleBytesPerS || r.CheckpointMS <= 0 || r.RestoreMS <= 0 {
		t.Errorf("a figure is missing: %+v", r)
	}
	// These do not depend on the machine.
	if most := 512 + 10*float64(r.BlocksPer); r.BytesPerRollout <= 0 || r.BytesPerRollout > most {
		t.Errorf("%.0f bytes a rollout, at most %.0f", r.BytesPerRollout, most)
	}
}
