package faults

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Kind of process.
type Kind int

// Kinds.
const (
	Dispatcher Kind = iota
	Agent
	Engine
	NATS
	kinds
)

func (k Kind) String() string { return [...]string{"dispatcher", "agent", "engine", "nats"}[k] }

// weights of the kinds among the faults, of 100.
var weights = [kinds]int{25, 30, 25, 20}

// Fault is one line of the script.
type Fault struct {
	After time.Duration // since the last one: 0.5 to 3 s
	Kind  Kind
	N     int           // which of its kind, from 0
	Pause bool          // SIGSTOP and SIGCONT instead of SIGKILL and a new start
	Down  time.Duration // until it runs again
}

// String is for the report: "kill agent 2 for 1.3s".
func (f Fault) String() string {
	verb := "kill"
	if f.Pause {
		verb = "stop"
	}
	return fmt.Sprintf("%s %s %d for %v", verb, f.Kind, f.N+1, f.Down)
}

// meanGap is what Schedule's gaps come to, about.
const meanGap = 1750 * time.Millisecond

// Schedule draws faults until there are that many kills. counts is how many
// processes of each kind there are; scale is that of the liveness timings, so
// that some absences are longer than an engine takes to be lost (30 s of
// production) and some pauses are those of a stopped dispatcher (60 s).
func Schedule(seed uint64, kills int, counts [4]int, scale float64) []Fault {
	rng := rand.New(rand.NewPCG(seed, 0x666175)) //nolint:gosec // it must be reproducible
	between := func(lo, hi time.Duration) time.Duration {
		return (lo + time.Duration(rng.Int64N(int64(hi-lo)))).Round(time.Millisecond)
	}
	long := func(d time.Duration) time.Duration { return time.Duration(float64(d) * scale).Round(time.Millisecond) }
	var s []Fault
	for kills > 0 {
		f := Fault{After: between(500*time.Millisecond, 3*time.Second), Pause: rng.IntN(8) == 0}
		for n := rng.IntN(100); n >= weights[f.Kind]; f.Kind++ {
			n -= weights[f.Kind]
		}
		f.N = rng.IntN(counts[f.Kind])
		f.Down = between(100*time.Millisecond, 2*time.Second)
		if rng.IntN(6) == 0 && f.Kind != NATS {
			f.Down = between(long(20*time.Second), long(60*time.Second))
		}
		if !f.Pause {
			kills--
		}
		s = append(s, f)
	}
	return s
}
