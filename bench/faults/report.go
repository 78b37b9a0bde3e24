package faults

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/subjects"
)

// Report is what a run came to. Its JSON is the last line that `make
// test-faults` prints.
type Report struct {
	Seed          uint64  `json:"seed"`
	Kills         int     `json:"kills"`          // SIGKILLs
	Rollouts      int     `json:"rollouts"`       // accepted
	Lost          int     `json:"lost"`           // accepted and never answered
	SecondAnswers int     `json:"second_answers"` // stored or handed out beside another one
	WastedTokens  int     `json:"wasted_tokens"`  // of runs whose answer did not count, where told
	RecoveryP95   float64 `json:"recovery_p95_s"` // see Recoveries

	Seeds      int                 `json:"-"` // messages at seeds' keys
	Owned      int                 `json:"-"` // versions of entries of the owner map
	Pauses     int                 `json:"-"` // SIGSTOPs
	Figures    checker.Figures     `json:"-"`
	Violations []checker.Violation `json:"-"`
	Problems   []error             `json:"-"` // ends that nobody asked for, errors of the client
	Struck     []Struck            `json:"-"`
	Recoveries []time.Duration     `json:"-"` // one a fault, of those that met something
	Silence    time.Duration       `json:"-"` // the longest time between two answers, while there was work
	Unseen     int                 `json:"-"` // messages overwritten before the recorder saw them: checks that need them say nothing
}

func (r *Report) judge(h checker.History, struck []Struck, trainers []*trainer, crashes error) {
	r.Struck = struck
	for _, s := range struck {
		if s.Pause {
			r.Pauses++
		} else {
			r.Kills++
		}
	}
	r.Figures, r.Violations = checker.Figure(h), checker.Check(h)
	r.Rollouts, r.Lost = r.Figures.Submitted, r.Figures.Lost+r.Figures.Open
	r.SecondAnswers, r.WastedTokens = r.Figures.Duplicated, r.Figures.WastedTokens
	r.Unseen = h.UnseenReservations + h.UnseenResults
	r.Seeds, r.Owned = len(h.Seeds), len(h.Owned)
	for _, t := range trainers {
		r.SecondAnswers += t.second
		r.Problems = append(r.Problems, t.errs...)
	}
	if crashes != nil {
		r.Problems = append(r.Problems, crashes)
	}
	r.Recoveries, r.Silence = recoveries(h, struck), silence(h)
	if n := len(r.Recoveries); n > 0 {
		slices.Sort(r.Recoveries)
		r.RecoveryP95 = r.Recoveries[(n*95+99)/100-1].Round(time.Millisecond).Seconds()
	}
}

// OK tells whether the pool kept its promises.
func (r *Report) OK() bool {
	return r.Lost == 0 && r.SecondAnswers == 0 && len(r.Violations) == 0 && len(r.Problems) == 0
}

// recoveries tells how long each fault was felt. An engine or an agent: until
// the last rollout that was bound there is answered, by whomever. A dispatcher
// or a NATS server: until something is bound and something answered again. The
// servers' clock is this machine's.
func recoveries(h checker.History, struck []Struck) []time.Duration {
	answered := map[string]int64{} // when first
	var answers, binds []int64
	for i := range h.Results {
		if r := &h.Results[i]; r.Status != "" && answered[r.Key()] == 0 {
			answered[r.Key()] = r.Stored
			answers = append(answers, r.Stored)
		}
	}
	slices.Sort(answers)
	for i := range h.Reservations {
		if r := &h.Reservations[i]; r.Held != nil && r.Stored != 0 && r.Held.State == subjects.StateBound {
			binds = append(binds, r.Stored)
		}
	}
	slices.Sort(binds)
	var out []time.Duration
	for _, s := range struck {
		at := s.At.UnixNano()
		var end int64
		if s.Kind == Agent || s.Kind == Engine {
			for key := range boundAt(h, engineName(s.N), at) {
				end = max(end, answered[key])
			}
		} else {
			bind, answer := nextAfter(binds, at), nextAfter(answers, at)
			if bind == 0 || answer == 0 {
				continue // nothing was left to do
			}
			end = max(bind, answer)
		}
		if end > at {
			out = append(out, time.Duration(end-at))
		}
	}
	return out
}

// silence is the longest time between two answers, server time.
func silence(h checker.History) (longest time.Duration) {
	var before int64
	for i := range h.Results {
		r := &h.Results[i]
		if r.Status == "" {
			continue
		}
		if before != 0 {
			longest = max(longest, time.Duration(r.Stored-before))
		}
		before = r.Stored
	}
	return longest
}

// boundAt are the rollouts that an engine held at a time.
func boundAt(h checker.History, engine string, at int64) map[string]bool {
	held := map[string]bool{}
	for i := range h.Reservations {
		switch r := &h.Reservations[i]; {
		case r.Inferred: // its time is that of what overwrote it
		case r.Stored > at:
			return held
		case r.Held != nil && r.Held.Engine == engine:
			held[r.Held.Key()] = r.Held.State == subjects.StateBound
		case r.Released != nil && r.Released.Engine == engine:
			delete(held, subjects.RolloutKey(r.Released.Job, r.Released.ID))
		}
	}
	return held
}

func nextAfter(times []int64, at int64) int64 {
	i, _ := slices.BinarySearch(times, at+1)
	if i == len(times) {
		return 0
	}
	return times[i]
}

// Text writes the report for people.
func (r *Report) Text(w io.Writer) {
	f := r.Figures
	byKind := map[string]int{}
	for _, s := range r.Struck {
		verb := "killed"
		if s.Pause {
			verb = "stopped"
		}
		byKind[s.Kind.String()+" "+verb]++
	}
	fmt.Fprintf(w, "faults      %d kills, %d stops: %v\n", r.Kills, r.Pauses, byKind)
	fmt.Fprintf(w, "rollouts    %d accepted, answers %v, lost %d, second answers %d\n", r.Rollouts, f.Statuses, r.Lost, r.SecondAnswers)
	fmt.Fprintf(w, "work        %d binds, %d beyond the first, %d ran twice at once, %d late answers refused, %d tokens wasted\n",
		f.Binds, f.Requeued, f.DoubleRuns, f.Superseded, f.WastedTokens)
	if f.BroughtBack > 0 {
		fmt.Fprintf(w, "came back   %d retired reservations, shown again by a NATS server that had crashed and retired again (decisions/0009)\n", f.BroughtBack)
	}
	if n := len(r.Recoveries); n > 0 {
		fmt.Fprintf(w, "recovery    p50 %v, p95 %gs, most %v, of %d faults that met something\n",
			r.Recoveries[(n-1)/2].Round(time.Millisecond), r.RecoveryP95, r.Recoveries[n-1].Round(time.Millisecond), n)
	}
	fmt.Fprintf(w, "silence     %v at most between two answers\n", r.Silence.Round(time.Millisecond))
	fmt.Fprintf(w, "seen        all but %d messages, which were overwritten before the recorder came\n", r.Unseen)
	for i, v := range r.Violations {
		if i == 30 {
			fmt.Fprintf(w, "... and %d more\n", len(r.Violations)-i)
			break
		}
		fmt.Fprintf(w, "BROKEN      %v\n", v)
	}
	for _, err := range r.Problems {
		fmt.Fprintf(w, "PROBLEM     %v\n", err)
	}
}
