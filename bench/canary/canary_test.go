package canary

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

func TestARunOutsideItsBoundsIsRefused(t *testing.T) {
	for _, cfg := range []Config{{Scale: 0.5, Dispatchers: 1}, {Scale: 1000, Dispatchers: 1}, {Scale: 10}, {Scale: 10, Dispatchers: 9}} {
		if _, err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "give 1 to") {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func said(t *testing.T, v any) *nats.Msg {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return &nats.Msg{Data: b}
}

func TestWhatDispatchersAndEnginesSayIsCounted(t *testing.T) {
	a := &contest.CanaryArm{Decisions: map[string]int{}}
	w := &watch{arm: a, running: map[string]int{}, preempts: map[string]int64{}, seeds: map[string]time.Time{}}
	decide := func(d core.Decision) { w.decision(said(t, d)) }
	decide(core.Decision{Rollout: "canary.owner", Reason: "first_owner", Basis: "engine"}) // before it counts
	w.begin()
	decide(core.Decision{Rollout: "canary.a", Reason: "cached_owner_hold", Basis: "engine"})
	decide(core.Decision{Rollout: "canary.b", Reason: "owner_pressure_spill", Basis: "engine", Seed: true})
	decide(core.Decision{Rollout: "canary.c", Reason: "no_safe_spill_hold", Basis: "reservations"})
	for _, what := range []string{"seeded", "proved", "cooldown"} {
		w.decision(said(t, told{Transition: &core.Transition{Key: "k", What: what, Owners: 2}}))
	}
	for engine, n := range map[string]int{"e1": 38, "e2": 35} {
		preemptions := int64(1)
		w.load(said(t, subjects.Load{Engine: engine, Ranks: []subjects.RankLoad{{Running: &n, PreemptionsTotal: &preemptions}}}))
	}
	w.start(engineNames())
	w.finish()
	if a.Decisions["first_owner"] != 0 || a.Decisions["cached_owner_hold"] != 1 || a.Decisions["owner_pressure_spill"] != 1 {
		t.Errorf("decisions %v", a.Decisions)
	}
	if a.Spills != 1 || a.MostSeeds != 1 || a.MostOwners != 2 || w.live != 0 {
		t.Errorf("%d seeds, %d at once, %d owners, %d left", a.Spills, a.MostSeeds, a.MostOwners, w.live)
	}
	if a.RunningMax != 73 || a.Preemptions != 2 || a.Start[0] != 38 || a.Start[1] != 35 {
		t.Errorf("at most %d running, %d preemptions, at the start %v", a.RunningMax, a.Preemptions, a.Start)
	}
	if got := a.Coverage; got < 0.66 || got > 0.67 {
		t.Errorf("%g of decisions on complete reports, want two of three", got)
	}
	if w.seededAt("canary.b").IsZero() || !w.seededAt("canary.a").IsZero() {
		t.Error("the seed is not told from what is none")
	}
}
