package explore

import (
	"strings"
	"testing"
)

func explored(t *testing.T, sc Scene) Result {
	t.Helper()
	r, err := Run(t.Context(), sc, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s; %d states of cores, %d steps, %.1f s", r, r.CoreStates, r.CoreSteps, r.Seconds)
	return r
}

// scenario F2
// scenario F18
func TestTheProtocolOfOwnersHoldsInEveryOrder(t *testing.T) {
	for _, sc := range Scenes() {
		sc.MaxStates, sc.RestEvery = 2000, 4 // all of them: rollbus bench explore
		whole := sc.Name == "end"
		if whole {
			sc.MaxStates = 0
		}
		r := explored(t, sc)
		if r.Broken != "" {
			t.Errorf("%s: %s\n%s", sc.Name, r.Broken, strings.Join(r.Trace, "\n"))
		}
		if whole && !r.Whole {
			t.Errorf("%s: there is more than %d states", sc.Name, r.States)
		}
	}
}

// A check that finds nothing must be known to bite.
func TestEachGuardAndCheckThatIsTakenAwayIsMissed(t *testing.T) {
	for _, sc := range Mutants() {
		t.Run(string(sc.Mutation), func(t *testing.T) {
			r := explored(t, sc)
			if r.Broken == "" {
				t.Fatalf("%s: nothing is found", sc.Mutation)
			}
			t.Log(strings.Join(r.Trace, "\n"))
			sc.Mutation, sc.MaxStates = "", r.States
			if sound := explored(t, sc); sound.Broken != "" {
				t.Errorf("without the mutation: %s", sound.Broken)
			}
		})
	}
}

// What the explorer takes for one state must be one: a core goes on as any other
// with the same fingerprint, whatever way it came.
func TestCoresWithOneFingerprintGoOnAlike(t *testing.T) {
	for _, sc := range Scenes() {
		sc.MaxStates = 100
		x := newWorld(sc)
		x.cores.verify = true
		if _, err := run(t.Context(), x, nil); err != nil {
			t.Errorf("%s: %v", sc.Name, err)
		}
	}
}
