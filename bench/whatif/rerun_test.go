package whatif

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/bench/demo"
	"github.com/rollbus/rollbus/bench/demo/local"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

const poolName = "rerun"

// conversations are chains of turns with prompts that grow: who knows the caches
// sends a turn where the turn before was.
func conversations() workload.Workload {
	w := workload.Workload{Name: "conversations"}
	const chains, turns = 24, 5
	for turn := range turns {
		for c := range chains {
			r := workload.Rollout{Job: "j", ID: fmt.Sprintf("%02d-%d", c, turn), At: time.Duration(c) * 120 * time.Millisecond, Output: 24 + c%7,
				Trajectory: fmt.Sprint("t", c), Turn: turn + 1, Last: turn == turns-1, Prompt: []workload.Segment{{ID: uint64(c + 1), Tokens: 1024}}}
			if turn > 0 {
				before := &w.Rollouts[(turn-1)*chains+c]
				r.After, r.Gap = before.ID, 150*time.Millisecond
				r.Prompt = append(before.Prompt[:len(before.Prompt):len(before.Prompt)], before.OutputSegment(),
					workload.Segment{ID: uint64(1000 + turn*chains + c), Tokens: 256})
			}
			w.Rollouts = append(w.Rollouts, r)
		}
	}
	return w
}

// real runs the conversations on simulated HTTP engines behind a real pool, and
// returns what it measured and recorded.
func real(t *testing.T, policy string) (demo.Report, []*journal.Journal) {
	t.Helper()
	dir := t.TempDir()
	s := enforce(policy)
	s.SchemaVersion, s.Model = subjects.SchemaVersion, "sim"
	cfg := demo.Config{Workload: conversations(), Speed: 1, Local: local.Config{
		Pool: poolName, Dispatchers: 1, Layout: subjects.Layout{Budget: 256 << 20}, Settings: s, Journal: true, NATS: local.NATSConfig{Dir: dir},
	}}
	for i := range 4 {
		cfg.Local.Engines = append(cfg.Local.Engines, local.Engine{Name: fmt.Sprintf("e%d", i+1),
			Sim: &simengine.Config{Engine: model.Config{MaxRunning: 8, KVTokens: 60_000}}})
	}
	report, err := demo.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	server, err := local.StartNATS(t.Context(), local.NATSConfig{Dir: dir}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	nc, err := server.Conn("test")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "JOURNAL_"+poolName)
	if err != nil {
		t.Fatal(err)
	}
	info := stream.CachedInfo().State
	var frames [][]byte
	for seq := info.FirstSeq; seq <= info.LastSeq; seq++ {
		m, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		frames = append(frames, m.Data)
	}
	return report, journals(t, frames)
}

// What the model says of another policy has the sign of what happens when it is
// really tried: the same workload, the same HTTP engines, that policy.
func TestTheModelsSignIsThatOfARealRerun(t *testing.T) {
	was, js := real(t, "least_requests")
	x := traffic(t, js)
	if len(x.Rollouts) < 100 {
		t.Fatalf("%d of 120 rollouts are whole in the journal, %d not", len(x.Rollouts), x.Unfinished)
	}
	s := enforce("projected_time")
	a, err := Run(t.Context(), x, Question{Settings: &s, Closed: true, Seeds: 6}) // three may be alike by chance, and state too small an error
	if err != nil {
		t.Fatal(err)
	}
	within(t, x, a)
	now, _ := real(t, "projected_time")
	f := of(t, a, "hit_rate")
	modelled, really := f.Change, now.CachedPromptFraction-was.CachedPromptFraction
	t.Logf("hit rate: recorded %.3f, modelled the same %.3f +- %.3f, the other %.3f; the re-run %.3f", *f.Recorded, f.Same, f.Error, f.Other, now.CachedPromptFraction)
	if modelled < 0.03 || really < 0.03 {
		t.Errorf("the model says the hit rate changes by %.3f, a re-run by %.3f", modelled, really)
	}
	if d := abs(*f.Recorded - was.CachedPromptFraction); d > 0.05 {
		t.Errorf("the journal has a hit rate of %.3f, the run one of %.3f", *f.Recorded, was.CachedPromptFraction)
	}
}
