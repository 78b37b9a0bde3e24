package bus

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func TestWhatRecordingCostsIsMeasured(t *testing.T) {
	r, err := MeasureRecording(context.Background(), Config{Rounds: 2, Slice: 300 * time.Millisecond, Dir: t.TempDir()},
		Case{Storage: jetstream.MemoryStorage, Replicas: 1, Payload: 1024, Dispatchers: 2, Engines: 4})
	if err != nil {
		t.Fatal(err)
	}
	if r.CPU <= 0 || r.PlainCPU <= 0 || r.Rollouts == 0 || r.BytesPerRollout <= 0 || len(r.Rounds) != 2 {
		t.Errorf("a figure is missing: %+v", r)
	}
}
