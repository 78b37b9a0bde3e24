package telemetry

import (
	"math"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// TrackerConfig are the times of a Tracker; zero = the default.
type TrackerConfig struct {
	// RateWindow is the time constant of the rates' moving average. Default 10 s.
	RateWindow time.Duration
	// FrozenAfter: gauges that show work while nothing is in flight and nothing
	// moved for so long are taken for frozen. Default 10 s.
	FrozenAfter time.Duration
	// WedgedAfter: a queue, nothing running and nothing moving for so long while
	// runs of this agent are at the engine is a wedged scheduler, whatever its
	// /health says. Default 30 s.
	WedgedAfter time.Duration
	// StalledAfter is the same while requests run: a long prefill or a load of
	// weights moves nothing for a while. Default 60 s.
	StalledAfter time.Duration
}

func (c TrackerConfig) withDefaults() TrackerConfig {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&c.RateWindow, 10*time.Second)
	set(&c.FrozenAfter, 10*time.Second)
	set(&c.WedgedAfter, 30*time.Second)
	set(&c.StalledAfter, 60*time.Second)
	return c
}

// Tracker puts the samples of one engine in a row. It is not safe for
// concurrent use; one goroutine polls one engine.
type Tracker struct {
	cfg     TrackerConfig
	ranks   map[int]*history
	totals  Counters
	started *float64
	seen    bool
	at      time.Duration // of the last sample
	moved   time.Duration // when anything last changed
}

type history struct {
	last    Rank
	decode  batchRate
	prefill quotient
}

// batchRate is what an engine would decode a second with all its slots busy, or
// as many of them as its KV holds. A batch is not slow because it is small: of n
// requests in s slots, and steps that take twice as long with all of them as with
// one, it makes 2n / (s + n) of that. Without it an engine that got less would
// look slower than its like, and get less still.
type batchRate struct {
	made    quotient // tokens over the time that each running request spent
	running quotient // requests over time
}

func (b *batchRate) add(tokens, running float64, dt, window time.Duration) {
	if running <= 0 {
		return
	}
	b.made.add(tokens, running*dt.Seconds(), dt, window)
	b.running.add(running*dt.Seconds(), dt.Seconds(), dt, window)
}

// value is nil until the engine has been seen busy for long enough. Without a
// number of slots it is what the engine made (FullBatch).
func (b *batchRate) value(r *Rank) *float64 {
	each, running := b.made.value(), b.running.value()
	if !b.running.known || each == nil || running == nil {
		return nil
	}
	v := *each * *running
	if r.MaxRunning != nil {
		v = FullBatch(v, *running, *r.MaxRunning, Used(&r.RankLoad))
	}
	return &v
}

// FullBatch is what n running requests that make so many tokens a second would
// make if they were as many as fit: in slots, and in the KV of which they use a
// share, 0 = not known.
func FullBatch(tokS, n float64, slots int, kv float64) float64 {
	most := float64(slots)
	if kv > 0 {
		most = min(most, n/kv)
	}
	if n <= 0 || most <= n {
		return tokS
	}
	return tokS * (most + n) / (2 * n)
}

// Used is a rank's share of KV in use; 0 = not known.
func Used(r *subjects.RankLoad) float64 {
	switch {
	case r.KVUsedTokens != nil && r.KVCapacityTokens != nil && *r.KVCapacityTokens > 0:
		return float64(*r.KVUsedTokens) / float64(*r.KVCapacityTokens)
	case r.KVUsage != nil:
		return *r.KVUsage
	}
	return 0
}

// quotient is tokens over the time that they took, both fading. Engines count a
// prompt when it is complete: single intervals say nothing, many of them do.
type quotient struct {
	tokens, seconds float64
	known           bool
}

// leastSeen is for how long an engine must have been seen at it, s, before a
// rate is told.
const leastSeen = 1

func (q *quotient) add(tokens, seconds float64, dt, window time.Duration) {
	keep := math.Exp(-dt.Seconds() / window.Seconds())
	q.tokens, q.seconds = q.tokens*keep+tokens, q.seconds*keep+seconds
	q.known = q.known || q.seconds >= leastSeen
}

func (q *quotient) value() *float64 {
	if !q.known || q.seconds <= 0 || q.tokens <= 0 {
		return nil
	}
	v := q.tokens / q.seconds
	return &v
}

// Reading is what a sample means after those before it.
type Reading struct {
	// Load has source, ranks and advertised ranks; whoever publishes it adds
	// engine, epoch, sequence, age and interval.
	Load      subjects.Load
	Complete  bool
	Restarted bool  // the engine's process is another one than before
	Preempted int64 // preemptions since the sample before; never negative
	Frozen    bool  // the gauges show work that is not there; one request refreshes them
	Wedged    bool  // there is work, runs of this agent among it, and nothing moves
	Moved     bool  // a gauge or a counter is another than in the sample before
	Asleep    bool  // the engine's cache is gone
	Problems  []Problem
}

// NewTracker starts with nothing known.
func NewTracker(cfg TrackerConfig) *Tracker {
	return &Tracker{cfg: cfg.withDefaults(), ranks: map[int]*history{}}
}

// Observe takes the next sample, received at time at (monotonic, since any
// fixed point), while inFlight runs of this agent were at the engine.
func (t *Tracker) Observe(s Sample, at time.Duration, inFlight int) Reading {
	r := Reading{Complete: s.Complete(), Problems: s.Problems, Asleep: s.Awake != nil && !*s.Awake}
	r.Restarted = t.restarted(s)
	if r.Restarted {
		clear(t.ranks)
		t.totals = Counters{}
	}
	dt := at - t.at
	moved := !t.seen || r.Restarted || !equalCounters(t.totals, s.Totals)
	for i := range s.Ranks {
		rank := &s.Ranks[i]
		h := t.ranks[rank.Rank]
		if h == nil {
			h, moved = &history{}, true
			t.ranks[rank.Rank] = h
			if r.Restarted && rank.Preemptions != nil {
				r.Preempted += *rank.Preemptions // all of them are new
			}
		} else {
			moved = moved || !equalCounters(h.last.Counters, rank.Counters) || !equalGauges(h.last, *rank)
			if d := increment(h.last.Preemptions, rank.Preemptions); d > 0 {
				r.Preempted += d
			}
			if dt > 0 {
				t.rates(h, rank, dt)
			}
		}
		h.last = *rank
	}
	if r.Moved = moved; moved {
		t.moved = at
	}
	t.totals, t.started, t.at, t.seen = s.Totals, s.StartedAt, at, true
	still := at - t.moved
	r.Frozen = inFlight == 0 && showsWork(s) && still >= t.cfg.FrozenAfter
	// Without a run of our own the same picture may be frozen gauges.
	r.Wedged = inFlight > 0 && (queueOnly(s) && still >= t.cfg.WedgedAfter || stallable(s) && still >= t.cfg.StalledAfter)
	r.Load = t.load(s, r.Frozen)
	r.Complete = r.Complete && !r.Frozen
	return r
}

// restarted: another process start, or a counter that fell.
func (t *Tracker) restarted(s Sample) bool {
	if !t.seen {
		return false
	}
	if t.started != nil && s.StartedAt != nil && *t.started != *s.StartedAt {
		return true
	}
	if fell(t.totals, s.Totals) {
		return true
	}
	for _, r := range s.Ranks {
		if h := t.ranks[r.Rank]; h != nil && fell(h.last.Counters, r.Counters) {
			return true
		}
	}
	return false
}

func (t *Tracker) rates(h *history, r *Rank, dt time.Duration) {
	switch {
	case r.DecodeTokS != nil:
		if busy(*r) && *r.DecodeTokS > 0 {
			h.decode.add(*r.DecodeTokS*dt.Seconds(), float64(*r.Running), dt, t.cfg.RateWindow)
		}
	case busy(h.last) && busy(*r): // an interval that idles in part says nothing
		if d := increment(h.last.GenerationTokens, r.GenerationTokens); d >= 0 {
			h.decode.add(float64(d), float64(*h.last.Running+*r.Running)/2, dt, t.cfg.RateWindow)
		}
	}
	// Prefill: by its own clock where the engine has one; else only while a
	// queue beside a large batch shows that it computes all it can. A few that
	// wait for the step in flight say nothing.
	computed := increment(h.last.PrefillUncachedTokens, r.PrefillUncachedTokens)
	if us := increment(h.last.PrefillBusyUS, r.PrefillBusyUS); us > 0 && computed > 0 {
		h.prefill.add(float64(computed), float64(us)/1e6, dt, t.cfg.RateWindow)
		h.prefill.known = true // its own clock needs no long look
		return
	}
	if computed < 0 {
		prompt, hit := increment(h.last.PromptTokens, r.PromptTokens), increment(h.last.PrefixHitTokens, r.PrefixHitTokens)
		if prompt < 0 {
			return
		}
		computed = prompt - max(hit, 0) // below 0 while a hit is counted and its prompt is not complete
	}
	if queued(h.last) && queued(*r) && halfFull(h.last) && halfFull(*r) {
		h.prefill.add(float64(computed), dt.Seconds(), dt, t.cfg.RateWindow)
	}
}

// load makes the wire's form. A rank with a problem, and every rank while the
// gauges are frozen, keeps its number and loses its gauges.
func (t *Tracker) load(s Sample, frozen bool) subjects.Load {
	bad := map[int]bool{}
	for _, p := range s.Problems {
		bad[p.Rank] = true
	}
	out := subjects.Load{SchemaVersion: subjects.SchemaVersion, Source: s.Source, RanksAdvertised: s.Advertised,
		Ranks: make([]subjects.RankLoad, len(s.Ranks))}
	for i, r := range s.Ranks {
		l := r.RankLoad
		h := t.ranks[r.Rank]
		l.DecodeTokS, l.PrefillTokS = h.decode.value(&r), h.prefill.value()
		l.PreemptionsTotal = r.Preemptions
		if frozen || bad[r.Rank] || bad[-1] {
			l.Running, l.Waiting, l.WaitingUncachedTokens, l.KVUsedTokens, l.KVUsage = nil, nil, nil, nil, nil
		}
		out.Ranks[i] = l
	}
	return out
}

// increment is -1 when one of the two is unknown.
func increment(before, after *int64) int64 {
	if before == nil || after == nil {
		return -1
	}
	return *after - *before
}

func (c *Counters) all() [8]*int64 {
	return [8]*int64{c.PromptTokens, c.GenerationTokens, c.PrefixQueryTokens, c.PrefixHitTokens, c.Preemptions, c.Steps,
		c.PrefillUncachedTokens, c.PrefillBusyUS}
}

func fell(before, after Counters) bool {
	a, b := before.all(), after.all()
	for i := range a {
		if a[i] != nil && b[i] != nil && *b[i] < *a[i] {
			return true
		}
	}
	return false
}

func equalCounters(a, b Counters) bool {
	x, y := a.all(), b.all()
	for i := range x {
		if !equal(x[i], y[i]) {
			return false
		}
	}
	return true
}

func equalGauges(a, b Rank) bool {
	return equal(a.Running, b.Running) && equal(a.Waiting, b.Waiting) && equal(a.KVUsage, b.KVUsage) && equal(a.KVUsedTokens, b.KVUsedTokens)
}

func equal[T comparable](a, b *T) bool {
	return (a == nil) == (b == nil) && (a == nil || *a == *b)
}

func busy(r Rank) bool   { return r.Running != nil && *r.Running > 0 }
func queued(r Rank) bool { return r.Waiting != nil && *r.Waiting > 0 }

// halfFull tells whether half of the slots or of the KV is in use; of an engine
// whose slots are not known nobody can tell that it is not.
func halfFull(r Rank) bool {
	if r.Running == nil || r.MaxRunning == nil || *r.MaxRunning <= 0 {
		return true
	}
	return 2**r.Running >= *r.MaxRunning || Used(&r.RankLoad) >= 0.5
}

// fullish is the KV usage above which an engine without a request is not
// believed: what it holds in use belongs to somebody.
const fullish = 0.5

func showsWork(s Sample) bool {
	for _, r := range s.Ranks {
		if busy(r) || queued(r) || r.KVUsage != nil && *r.KVUsage > fullish {
			return true
		}
	}
	return false
}

// stallable tells whether something runs and the sample has what would move
// with it: request counts alone stand still in health too.
func stallable(s Sample) bool {
	for _, r := range s.Ranks {
		if busy(r) && (r.GenerationTokens != nil || r.Steps != nil || r.KVUsedTokens != nil || r.KVUsage != nil) {
			return true
		}
	}
	return false
}

func queueOnly(s Sample) bool {
	waiting := false
	for _, r := range s.Ranks {
		if r.Running == nil || busy(r) {
			return false
		}
		waiting = waiting || queued(r)
	}
	return waiting
}
