package faults

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) {
	Reexec()
	flag.Parse()
	// The tests wait for processes most of the time, so that more of them go
	// along than there are cores.
	_ = flag.Set("test.parallel", "4") // a flag that is always there
	dir, err := os.MkdirTemp("", "rollbus-faults-")
	if err == nil {
		err = build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir) // temporary anyhow
		os.Exit(code)
	}))
}

// rollbus is the program, built once.
var rollbus string

func build(dir string) error {
	rollbus = filepath.Join(dir, "rollbus")
	out, err := exec.CommandContext(context.Background(), "go", "build", "-o", rollbus, "github.com/rollbus/rollbus/cmd/rollbus").CombinedOutput()
	if err != nil {
		return fmt.Errorf("build rollbus: %w\n%s", err, out)
	}
	return nil
}

// strike runs a pool through a script and judges it.
func strike(t *testing.T, cfg Config) Report {
	t.Helper()
	t.Parallel() // they mostly wait
	cfg.Bin, cfg.Dir, cfg.Log = rollbus, filepath.Join(t.TempDir(), "run"), t.Output()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r, err := Run(ctx, cfg)
	var text strings.Builder
	r.Text(&text)
	t.Logf("seed %d\n%s", r.Seed, &text)
	if err != nil || !r.OK() {
		t.Errorf("promises were broken: %v", err)
		logs, _ := filepath.Glob(filepath.Join(cfg.Dir, "[ade]*.log"))
		for _, name := range logs {
			if b, err := os.ReadFile(name); err == nil {
				t.Logf("%s:\n%s", name, b[max(0, len(b)-4000):])
			}
		}
	}
	return r
}

// scenario F1
// scenario F3
// scenario F6
// scenario F8
// scenario B11
func TestKillsOfRealProcessesLoseNothingAndAnswerNothingTwice(t *testing.T) {
	r := strike(t, Config{Seed: 4, Kills: 6, Rollouts: 220})
	if r.Rollouts != 220 || r.Kills != 6 {
		t.Errorf("want 220 rollouts and 6 kills, got %d and %d", r.Rollouts, r.Kills)
	}
	if r.Figures.Requeued == 0 {
		t.Error("nothing was bound again: the kills struck nothing and the test shows nothing")
	}
}

func TestAScheduleFollowsFromItsSeed(t *testing.T) {
	counts := [4]int{3, 4, 4, 3}
	a := Schedule(7, 100, counts, 0.2)
	if !slices.Equal(a, Schedule(7, 100, counts, 0.2)) {
		t.Error("two schedules of one seed differ")
	}
	if slices.Equal(a, Schedule(8, 100, counts, 0.2)) {
		t.Error("two seeds give one schedule")
	}
	kills, met := 0, map[Kind]bool{}
	for _, f := range a {
		if f.After < 500*time.Millisecond || f.After > 3*time.Second || f.N < 0 || f.N >= counts[f.Kind] || f.Down <= 0 {
			t.Errorf("%+v is out of bounds", f)
		}
		if !f.Pause {
			kills++
		}
		met[f.Kind] = true
	}
	if kills != 100 || len(met) != int(kinds) {
		t.Errorf("want 100 kills over every kind, got %d over %v", kills, met)
	}
}

func TestRecoveryLastsUntilWhatWasHeldIsAnswered(t *testing.T) {
	at := time.Unix(100, 0)
	ns := func(d time.Duration) int64 { return at.Add(d).UnixNano() }
	held := func(engine, id string, d time.Duration) checker.Reservation {
		return checker.Reservation{Stored: ns(d), Held: &subjects.Held{Engine: engine, Job: "j", ID: id, State: subjects.StateBound}}
	}
	answer := func(id string, d time.Duration) checker.Result {
		return checker.Result{Stored: ns(d), Answer: subjects.Answer{Job: "j", ID: id, Status: "completed"}}
	}
	h := checker.History{
		Reservations: []checker.Reservation{
			held("e1", "a", -3*time.Second), held("e1", "b", -2*time.Second),
			{Stored: ns(-time.Second), Released: &subjects.Released{Engine: "e1", Job: "j", ID: "b"}},
			held("e2", "c", 2*time.Second),
		},
		Results: []checker.Result{answer("b", -time.Second), answer("c", 3*time.Second), answer("a", 5*time.Second)},
	}
	got := recoveries(h, []Struck{
		{Fault{Kind: Agent, N: 0}, at},      // a was there
		{Fault{Kind: Engine, N: 1}, at},     // nothing was there
		{Fault{Kind: Dispatcher, N: 0}, at}, // bound after 2 s, answered after 3
	})
	if want := []time.Duration{5 * time.Second, 3 * time.Second}; !slices.Equal(got, want) {
		t.Errorf("recoveries are %v, want %v", got, want)
	}
}
