package dispatcher

import (
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
)

// keeper is a recorder that wants a checkpoint behind every step.
type keeper struct {
	steps
	order string // r for a record, c for a checkpoint; by the owner's goroutine
	taken int
}

func (k *keeper) Record(now time.Duration, ev core.Event, effects []core.Effect) {
	k.steps.Record(now, ev, effects)
	k.order += "r"
}

func (k *keeper) Due(time.Duration) bool { return true }

func (k *keeper) Checkpoint(now time.Duration, of core.Source) {
	k.order += "c"
	if p := of.Checkpoint(); p.Now == now && of.CheckpointBytes() > 0 {
		k.taken++
	}
}

func TestARecorderThatWantsCheckpointsGetsTheStateBehindEachStep(t *testing.T) {
	b := newBench(t)
	rec := &keeper{}
	cfg := b.config()
	cfg.Recorder = rec
	d, _ := b.running(cfg, nil)
	natstest.Eventually(t, within, "a core that has seen every view", func() bool {
		missing := 1
		if err := d.Inspect(b.ctx(), func(c *core.Core) { missing = len(c.Missing()) }); err != nil {
			t.Fatal(err)
		}
		return missing == 0
	})
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if rec.taken == 0 || 2*rec.taken != len(rec.order) {
		t.Fatalf("%d checkpoints behind %d steps", rec.taken, len(rec.order)-rec.taken)
	}
	for i := range rec.order {
		if rec.order[i] != "rc"[i%2] {
			t.Fatalf("call %d is out of order: %s", i, rec.order[:i+1])
		}
	}
}
