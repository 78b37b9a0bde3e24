package policy

import (
	"fmt"
	"iter"
	"strings"
	"time"
)

// MaxScored is how many candidates a record keeps.
const MaxScored = 16

// Record explains one decision. Decide reuses it: it is valid until the next
// call with the same Record.
type Record struct {
	Policy  string // that decided
	Mode    string // of the settings
	Reason  Reason
	Basis   Basis
	Outcome Outcome
	Chosen  int    // index into Input.Candidates; -1 = none
	Detail  string // for people; set when nothing was placed

	// What the configured policy would have done, in mode shadow.
	ShadowPolicy  string
	ShadowChosen  int // -1 = none, or not in mode shadow
	ShadowReason  Reason
	ShadowOutcome Outcome
	ShadowBasis   Basis

	// Of OutcomeWait: the candidate worth waiting for (-1 = none), and how long
	// at most. WaitFor is set in mode shadow too; nobody waits then.
	WaitFor  int
	WaitSpan time.Duration

	Seed    bool    // of OutcomePlaced: bound there only together with a seed of its owner key
	NoSpill NoSpill // why pressured owners made no seed

	Eligible    int // candidates
	Admissible  int
	TriedLifted bool // every eligible engine had been tried: none is excluded
	Tied        int  // candidates that were as good as the chosen one, it included

	// Candidates are the best by score of the configured policy (the baseline's
	// in mode off), best first; behind them, as far as there is room, some that
	// were filtered. The chosen one is always among them.
	Candidates []Scored
	filtered   [numFilters]int
}

// Scored is one candidate of a record.
type Scored struct {
	Index  int
	Filter Filter  // FilterNone = admissible
	Score  float64 // least wins

	// Features, on the decision's basis.
	Requests float64 // running, waiting, reserved
	Tokens   int64
	Cached   float64 // tokens of the prompt credited as cached
	KVUsage  float64 // fullest rank; -1 = unknown
	// Of projected_time: tokens/s that it counted with, and where they are from.
	DecodeTokS, PrefillTokS float64
	DecodeFrom, PrefillFrom RateSource

	parts [numParts]float64
	has   uint16
}

// Parts are the addends of the score, in a fixed order.
func (s *Scored) Parts() iter.Seq2[Part, float64] {
	return func(yield func(Part, float64) bool) {
		for p := range numParts {
			if s.has&(1<<p) != 0 && !yield(p, s.parts[p]) {
				return
			}
		}
	}
}

func (s *Scored) part(p Part, v float64) {
	s.has |= 1 << p
	s.parts[p] = v
}

// Filtered is how many candidates that filter left out.
func (r *Record) Filtered(f Filter) int {
	if f < numFilters {
		return r.filtered[f]
	}
	return 0
}

// EachFilter yields the filters that left somebody out, in a fixed order.
func (r *Record) EachFilter() iter.Seq2[Filter, int] {
	return func(yield func(Filter, int) bool) {
		for f := FilterNone + 1; f < numFilters; f++ {
			if n := r.filtered[f]; n > 0 && !yield(f, n) {
				return
			}
		}
	}
}

// Agrees tells, in mode shadow, whether the policy would have done the same.
func (r *Record) Agrees() bool {
	return r.ShadowOutcome == r.Outcome && r.ShadowChosen == r.Chosen
}

func (r *Record) reset() {
	*r = Record{Chosen: -1, ShadowChosen: -1, WaitFor: -1, Basis: BasisNone, Candidates: r.Candidates[:0]}
}

func (r *Record) add(i int, f Filter) *Scored {
	r.Candidates = append(r.Candidates, Scored{Index: i, Filter: f})
	return &r.Candidates[len(r.Candidates)-1]
}

// filters is the counts as words: "3 paused, 1 window".
func (r *Record) filters() string {
	var b strings.Builder
	for f, n := range r.EachFilter() {
		if b.Len() > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%d %s", n, f)
	}
	return b.String()
}
