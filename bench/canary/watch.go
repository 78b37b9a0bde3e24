package canary

import (
	"encoding/json"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/bench/contest"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// watch hears what dispatchers decide and what engines report.
type watch struct {
	mu       sync.Mutex
	arm      *contest.CanaryArm
	running  map[string]int
	preempts map[string]int64
	seeds    map[string]time.Time // decided, by rollout
	live     int
	decided  int
	complete int
	on       bool
	subs     []*nats.Subscription
}

// told is a line on the subject of decisions.
type told struct {
	core.Decision
	Transition *core.Transition `json:"transition"`
}

func listen(nc *nats.Conn, pool subjects.Pool, arm *contest.CanaryArm) (*watch, error) {
	w := &watch{arm: arm, running: map[string]int{}, preempts: map[string]int64{}, seeds: map[string]time.Time{}}
	for subject, take := range map[string]nats.MsgHandler{pool.Decision(): w.decision, pool.Load("*"): w.load} {
		s, err := nc.Subscribe(subject, take)
		if err != nil {
			w.close()
			return nil, err
		}
		w.subs = append(w.subs, s)
	}
	return w, nil
}

func (w *watch) close() {
	for _, s := range w.subs {
		_ = s.Unsubscribe() // the connection is closed next
	}
}

func (w *watch) decision(m *nats.Msg) {
	var t told
	if json.Unmarshal(m.Data, &t) != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.arm
	switch {
	case t.Transition != nil:
		switch t.Transition.What {
		case "seeded":
			w.live++
			a.Spills++
			a.MostSeeds = max(a.MostSeeds, w.live)
		case "cooldown", "given_back":
			w.live--
		}
		a.MostOwners = max(a.MostOwners, t.Transition.Owners)
	case w.on:
		a.Decisions[t.Reason]++
		w.decided++
		if t.Basis == string(policy.BasisEngine) {
			w.complete++
		}
		if t.Seed {
			w.seeds[t.Rollout] = time.Now()
		}
	}
}

func (w *watch) load(m *nats.Msg) {
	var l subjects.Load
	if json.Unmarshal(m.Data, &l) != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	n, preempts := 0, int64(0)
	for _, r := range l.Ranks {
		if r.Running != nil {
			n += *r.Running
		}
		if r.PreemptionsTotal != nil {
			preempts += *r.PreemptionsTotal
		}
	}
	w.running[l.Engine], w.preempts[l.Engine] = n, preempts
	w.arm.RunningMax = max(w.arm.RunningMax, w.sum())
}

func (w *watch) sum() (n int) {
	for _, v := range w.running {
		n += v
	}
	return n
}

// total is how many run now.
func (w *watch) total() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sum()
}

// begin starts counting decisions.
func (w *watch) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.on = true
}

// start notes what runs when the rest is released.
func (w *watch) start(engines []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range engines {
		w.arm.Start = append(w.arm.Start, w.running[e])
	}
}

// finish writes what was counted into the arm.
func (w *watch) finish() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.preempts {
		w.arm.Preemptions += n
	}
	if w.decided > 0 {
		w.arm.Coverage = float64(w.complete) / float64(w.decided)
	}
}

// seededAt is when a rollout was decided to be a seed; zero when it was none.
func (w *watch) seededAt(rollout string) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seeds[rollout]
}
