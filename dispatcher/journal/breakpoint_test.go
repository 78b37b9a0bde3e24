package journal_test

import (
	"errors"
	"testing"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

func TestABreakHoldsWhereItsTermsHold(t *testing.T) {
	s := &journal.Step{N: 7, Now: 2e9, Event: core.Fetched{Handle: 1, Facts: subjects.Facts{Job: "train", ID: "0001"}}}
	effects := []core.Effect{
		core.Decision{Rollout: "train.0001", Bind: 2, Engine: "e1", Reason: "projected_time", Policy: "projected_time", Mode: "enforce", Basis: "engine"},
		core.Bind{Held: subjects.Held{Engine: "e1", Job: "train", ID: "0001"}},
	}
	for expr, want := range map[string]bool{
		"n==7": true, "n=7": true, "n!=7": false, "n>=7 && n<8": true, "at>2": false, "at<=2": true, "bind==2": true, "bind>2": false, "bind != 3": true,
		"event==Fetched": true, "event!=Fetched": false, "event~etch": true, "effect==Bind": true, "effect==Ack": false,
		"id==0001": true, "id==train.0001": true, "id==other.0001": false, "job==train and engine==e1": true, "engine==e2": false, "engine!=e2": true,
		`reason==projected_time`: true, `reason=="projected_time" and mode==off`: false, "policy~projected && basis==engine": true, "shadow==e9": false,
	} {
		b, err := journal.ParseBreak(expr)
		if err != nil {
			t.Errorf("%s: %v", expr, err)
		} else if b.Hit(s, effects) != want {
			t.Errorf("%s: %t", expr, !want)
		}
	}
	for _, expr := range []string{"", "engine", "n==x", "colour==red", "engine<e1", "n~3", "n==1 &&"} {
		if _, err := journal.ParseBreak(expr); !errors.Is(err, journal.ErrBreak) {
			t.Errorf("%q: %v", expr, err)
		}
	}
}
