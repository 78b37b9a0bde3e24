package recorded_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/recorded"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// corpus are the kept runs: small, and each of another kind.
var corpus = []struct {
	name string
	of   recorded.Options
}{
	{"baseline", recorded.Options{Seed: 1, Rollouts: 60, Over: 5 * time.Second}},
	{"projected-faults", recorded.Options{Seed: 2, Settings: enforce("projected_time"), Dispatchers: 4, Engines: 6, Rollouts: 120, Over: 15 * time.Second,
		Cache: true, Faults: true, Syncs: true, Cancels: true, Journal: journal.Options{CheckpointAge: 16 * time.Second}}},
	{"recommended", recorded.Options{Seed: 3, Settings: policy.Recommended(), Dispatchers: 2, Rollouts: 120, Over: 8 * time.Second,
		Prompt: 1024, Cache: true, KVTokens: 20_000, Journal: journal.Options{CheckpointAge: 3 * time.Second}}},
	{"waiting", recorded.Options{Seed: 4, Settings: with(enforce("projected_time"), "wait_max", 2), Rollouts: 90, Over: 4 * time.Second, Engines: 3, Slots: 4, Cache: true}},
	{"weighted-shadow", recorded.Options{Seed: 5, Settings: subjects.Settings{Policy: "weighted_cache", Mode: subjects.ModeShadow}, Rollouts: 80, Over: 5 * time.Second, Cache: true, Cancels: true}},
	{"owner-pressure", recorded.Options{Seed: 8, Settings: enforce("owner_pressure"), Dispatchers: 2, Rollouts: 160, Over: 6 * time.Second, Slots: 4, Prompt: 2048,
		Output: 60, Cache: true, Faults: true, Journal: journal.Options{CheckpointAge: 20 * time.Second}}},
	{"kv-tokens", recorded.Options{Seed: 6, Settings: enforce("kv_tokens"), Rollouts: 80, Over: 5 * time.Second, Cache: true, Faults: true}},
	{"load-snapshot", recorded.Options{Seed: 7, Settings: enforce("load_snapshot"), Dispatchers: 2, Rollouts: 80, Over: 5 * time.Second, Cache: true}},
}

func enforce(policy string) subjects.Settings {
	return subjects.Settings{Policy: policy, Mode: subjects.ModeEnforce}
}

func with(s subjects.Settings, knob string, v float64) subjects.Settings {
	s.Knobs = map[string]float64{knob: v}
	return s
}

func corpusFile(name string) string { return filepath.Join("testdata", "corpus", name+".bundle") }

func kept(t *testing.T, name string) []*journal.Journal {
	t.Helper()
	b, err := os.ReadFile(corpusFile(name))
	if err != nil {
		t.Fatalf("%v: run make corpus", err)
	}
	_, frames, err := journal.ReadBundle(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	js, problems := journal.Split(frames)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return js
}

// scenario I10
//
// The kept journals are replayed by the core of this tree. A core that decides
// otherwise on purpose raises core.Version, and has them made anew by
//
//	make corpus
func TestTheKeptCorpusReplaysWithoutADifference(t *testing.T) {
	update := os.Getenv("UPDATE_CORPUS") != ""
	for _, c := range corpus {
		t.Run(c.name, func(t *testing.T) {
			if update {
				writeCorpus(t, c.name, c.of)
			}
			decisions := uint64(0)
			for _, j := range kept(t, c.name) {
				rep, err := journal.Replay(j, journal.ReplayOptions{Explain: true})
				if err != nil {
					t.Fatal(err)
				}
				decisions += rep.Decisions
				if !rep.OK() {
					t.Errorf("%s decides otherwise than it did%s. If you meant that: raise core.Version when it is %d still, then make corpus", j.Dispatcher, told(rep), rep.Core)
				}
			}
			if decisions < 40 {
				t.Errorf("%d decisions in it", decisions)
			}
		})
	}
}

func told(r *journal.Report) string {
	if r.First == nil {
		return ": " + r.Incomplete
	}
	return fmt.Sprintf(" at event %d (%s, %.3f s): %s", r.First.Event, r.First.Type, r.First.AtS, r.First.What)
}

// writeCorpus makes a kept run anew, and says what was different.
func writeCorpus(t *testing.T, name string, o recorded.Options) {
	t.Helper()
	if b, err := os.ReadFile(corpusFile(name)); err == nil {
		if _, frames, err := journal.ReadBundle(bytes.NewReader(b)); err == nil {
			js, _ := journal.Split(frames)
			for _, j := range js {
				if rep, err := journal.Replay(j, journal.ReplayOptions{}); err == nil && !rep.OK() {
					t.Logf("%s/%s was of core %d and differs%s", name, j.Dispatcher, rep.Core, told(rep))
				}
			}
		}
	}
	r, err := recorded.Make(o)
	if err != nil {
		t.Fatal(err)
	}
	b, err := r.Bundle(journal.Manifest{Pool: "recorded", Program: fmt.Sprintf("core %d", core.Version)})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(corpusFile(name)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(corpusFile(name), b, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d bytes", name, len(b))
}

// A constant of the core that is another is found at the first step whose
// effects it alters, and not before.
func TestAPlantedConstantIsFoundAtTheFirstStepItAlters(t *testing.T) {
	for name, plant := range map[string]func(*core.Config){
		"lost":    func(c *core.Config) { c.Timings.Lost /= 2 },
		"sweep":   func(c *core.Config) { c.Timings.Sweep += 20 * time.Millisecond },
		"in hand": func(c *core.Config) { c.MaxInHand = 7 },
		"expiry":  func(c *core.Config) { c.Timings.FetchExpiry += time.Nanosecond },
	} {
		found := false
		for _, j := range kept(t, "projected-faults") {
			rep, err := journal.Replay(j, journal.ReplayOptions{Config: plant})
			if err != nil {
				t.Fatal(err)
			}
			want, differs := firstAltered(t, j, plant)
			if differs != (rep.First != nil) || differs && rep.First.Event != want {
				t.Errorf("%s in %s: first altered at event %d (%t), found %+v", name, j.Dispatcher, want, differs, rep.First)
			}
			found = found || differs
		}
		if !found {
			t.Errorf("%s alters nothing in this run: the test proves nothing", name)
		}
	}
}

// firstAltered steps two cores side by side and compares their effects in full.
func firstAltered(t *testing.T, j *journal.Journal, plant func(*core.Config)) (event uint64, differs bool) {
	t.Helper()
	r, err := journal.NewReader(j)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cfg := core.Config{Dispatcher: j.Dispatcher, Timings: j.Begin.Timings, MaxInHand: j.Begin.MaxInHand, MaxAnswered: j.Begin.MaxAnswered}
	a := core.New(cfg)
	plant(&cfg)
	b := core.New(cfg)
	for {
		s, err := r.Next()
		if err != nil {
			return 0, false
		}
		if !reflect.DeepEqual(slices.Clone(a.Step(s.Event, s.Now)), slices.Clone(b.Step(s.Event, s.Now))) {
			return s.N, true
		}
	}
}

func TestOneSeedGivesOneBundleByteForByte(t *testing.T) {
	var bundles [2][]byte
	for i := range bundles {
		r, err := recorded.Make(corpus[1].of)
		if err != nil {
			t.Fatal(err)
		}
		if bundles[i], err = r.Bundle(journal.Manifest{}); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(bundles[0], bundles[1]) {
		t.Error("two runs of one seed gave two bundles")
	}
}
