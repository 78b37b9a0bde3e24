package recorded_test

import (
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/recorded"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// scenario I10
func TestFourDispatchersWithFaultsAndWeightSyncsReplayWithoutADifference(t *testing.T) {
	for _, policy := range []string{"projected_time", "owner_pressure"} {
		t.Run(policy, func(t *testing.T) { four(t, policy) })
	}
}

func four(t *testing.T, policy string) {
	t.Helper()
	r, err := recorded.Make(recorded.Options{
		Seed: 7, Settings: subjects.Settings{Policy: policy, Mode: subjects.ModeEnforce}, Dispatchers: 4, Engines: 6, Rollouts: 400,
		Over: 20 * time.Second, Cache: true, Faults: true, Syncs: true, Cancels: true, Journal: journal.Options{CheckpointAge: 4 * time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	journals, problems := journal.Split(journal.Slice(r.Frames()))
	if len(journals) != 4 || len(problems) > 0 {
		t.Fatalf("%d journals, %v", len(journals), problems)
	}
	if r.World.Requeues == 0 {
		t.Error("no attempt came back: the faults did nothing")
	}
	for _, procs := range []int{1, 8} {
		before := runtime.GOMAXPROCS(procs)
		for _, j := range journals {
			rep, err := journal.Replay(j, journal.ReplayOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if !rep.OK() || rep.Decisions < 50 || rep.Checkpoints == 0 || rep.TailMissing {
				t.Errorf("%d procs: %+v, %+v", procs, rep, rep.First)
			}
		}
		runtime.GOMAXPROCS(before)
	}
}
