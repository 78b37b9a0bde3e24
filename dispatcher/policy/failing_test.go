package policy

import (
	"math"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/subjects"
)

// broken is a policy that fails in one way.
type broken struct {
	score_  func(r *round)
	pickBad bool
}

func (b broken) score(r *round) { b.score_(r) }
func (b broken) pick(r *round) (int, Reason) {
	if b.pickBad {
		return len(r.adm) + 7, ReasonLeastLoad
	}
	return 0, ReasonLeastLoad
}
func (broken) explain(*round, int, *Scored) {}

func TestAPolicyThatFailsLeavesTheDecisionToTheBaseline(t *testing.T) {
	fill := func(v float64) func(r *round) {
		return func(r *round) {
			for k := range r.grow() {
				r.score[k] = float64(k)
			}
			r.score[len(r.score)-1] = v
		}
	}
	for name, b := range map[string]broken{
		"panics":                  {score_: func(*round) { panic("boom") }},
		"divides by zero":         {score_: func(r *round) { r.need /= int64(len(r.score[:0])) }},
		"gives NaN":               {score_: fill(math.NaN())},
		"gives infinity":          {score_: fill(math.Inf(1))},
		"gives minus infinity":    {score_: fill(math.Inf(-1))},
		"scores too few":          {score_: func(r *round) { r.score = r.grow()[:1] }},
		"scores nothing":          {score_: func(*round) {}},
		"picks what is not there": {score_: fill(1), pickBad: true},
	} {
		for _, mode := range []string{subjects.ModeEnforce, subjects.ModeShadow} {
			s, err := Resolve(subjects.Settings{Policy: LoadSnapshot, Mode: mode})
			if err != nil {
				t.Fatal(err)
			}
			d, err := NewDecider(s)
			if err != nil {
				t.Fatal(err)
			}
			in := &Input{Candidates: []Candidate{{Engine: "a", Window: 9, ReservedRequests: 2}, {Engine: "b", Window: 9, ReservedRequests: 1}, {Engine: "c", Window: 9, ReservedRequests: 3}}}
			var rec Record
			d.Decide(in, &rec) // leaves scores of an earlier decision behind
			d.policy = b
			at := d.Decide(in, &rec)
			if at != 1 || rec.Outcome != OutcomePlaced || rec.Basis != BasisReserved || rec.Policy != LeastRequests {
				t.Errorf("%s, %s: chosen %d by %s on %s", name, mode, at, rec.Policy, rec.Basis)
			}
			why, want := rec.Reason, ReasonPolicyError
			if mode == subjects.ModeShadow {
				why = rec.ShadowReason
				if rec.Reason != ReasonLeastRequests || rec.ShadowChosen != 1 {
					t.Errorf("%s, shadow: decided for %s, shadow choice %d", name, rec.Reason, rec.ShadowChosen)
				}
			}
			if why != want || !strings.HasPrefix(rec.Detail, "policy load_snapshot ") {
				t.Errorf("%s, %s: reason %s, detail %q", name, mode, why, rec.Detail)
			}
			if len(rec.Candidates) != 3 || rec.Candidates[0].Index != 1 {
				t.Errorf("%s, %s: the record does not show the baseline's candidates: %+v", name, mode, rec.Candidates)
			}
		}
	}
}
