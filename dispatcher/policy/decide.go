package policy

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Decider decides by one set of settings. It keeps scratch memory between
// decisions and nothing else: equal inputs give equal decisions. One goroutine.
type Decider struct {
	s      Settings
	policy scorer // the configured one
	base   leastRequests
	round  round
}

// scorer is the last step of the pipeline. A scorer reads the round and fills
// in its scores and nothing else.
type scorer interface {
	// score fills r.score for every k in range r.adm; the least wins.
	score(r *round)
	// pick chooses a position in r.adm, given r.best, the least score.
	pick(r *round) (k int, why Reason)
	// explain writes the parts of the score of r.adm[k]. It is called for the
	// few candidates that a record keeps.
	explain(r *round, k int, out *Scored)
}

// escaper is a scorer that tells load from cache and may think twice.
type escaper interface {
	// escape may replace the winner k by another position.
	escape(r *round, k int) (int, bool)
	// wait may name a full candidate that is worth waiting for instead, and how long.
	wait(r *round, k int) (candidate int, span time.Duration, ok bool)
}

func newScorer(name string) scorer {
	switch name {
	case LeastRequests:
		return leastRequests{}
	case KVTokens:
		return &kvTokens{}
	case LoadSnapshot:
		return &loadSnapshot{}
	case WeightedCache:
		return &weightedCache{}
	case ProjectedTime:
		return &projectedTime{}
	case OwnerPressure:
		return &ownerPressure{}
	}
	return nil
}

var errUnresolved = errors.New("policy: these settings were not made by Resolve")

// NewDecider takes settings made by Resolve.
func NewDecider(s Settings) (*Decider, error) {
	d := &Decider{s: s, policy: newScorer(s.Policy)}
	if d.policy == nil || s.Mode == "" || s.KVBlock == 0 {
		return nil, errUnresolved
	}
	return d, nil
}

// verdict is what one policy would do.
type verdict struct {
	outcome  Outcome
	chosen   int
	reason   Reason
	basis    Basis
	tied     int
	waitFor  int
	waitSpan time.Duration
	seed     bool
	noSpill  NoSpill
}

// guarder is a scorer whose owner guard may decide instead of the score.
type guarder interface {
	guard(r *round) (verdict, bool)
}

// Decide runs the pipeline: eligible, load basis, admission, score, (owner
// guard), sticky, escape, pick. It returns the chosen candidate's index, -1 for
// none; rec says why, and is valid until the next call with it. Candidates are
// only read.
func (d *Decider) Decide(in *Input, rec *Record) int {
	rec.reset()
	rec.Mode, rec.Policy = d.s.Mode, LeastRequests
	if d.s.Mode == subjects.ModeEnforce {
		rec.Policy = d.s.Policy
	}
	r := &d.round
	r.begin(in, &d.s)
	r.filterAll()
	rec.Eligible, rec.Admissible, rec.TriedLifted, rec.filtered = r.eligible, len(r.adm), r.lifted, r.count
	if len(r.adm) == 0 {
		d.unplaced(rec)
		return -1
	}
	switch d.s.Mode {
	case subjects.ModeEnforce:
		d.enforce(rec)
	case subjects.ModeShadow:
		d.shadow(rec)
	default:
		v := d.baseline()
		rec.decided(v)
		d.keep(rec, d.base, v.chosen, -1)
	}
	return rec.Chosen
}

func (d *Decider) baseline() verdict {
	r := &d.round
	d.base.score(r)
	r.least()
	k, why := d.base.pick(r)
	return verdict{outcome: OutcomePlaced, chosen: int(r.adm[k]), reason: why, basis: BasisReserved, tied: r.tied, waitFor: -1}
}

func (d *Decider) enforce(rec *Record) {
	v, err := d.try()
	if err == nil {
		rec.decided(v)
		d.keep(rec, d.policy, v.chosen, v.waitFor)
		return
	}
	v = d.baseline()
	v.reason = ReasonPolicyError
	rec.decided(v)
	rec.Policy, rec.Detail = LeastRequests, err.Error()
	d.keep(rec, d.base, v.chosen, -1)
}

// shadow decides by the baseline and notes what the policy would have done. The
// record's candidates are the policy's: they are what one wants to look at.
func (d *Decider) shadow(rec *Record) {
	b := d.baseline()
	p, err := d.try()
	rec.decided(b)
	rec.ShadowPolicy = d.s.Policy
	if err == nil {
		rec.ShadowChosen, rec.ShadowReason, rec.ShadowOutcome, rec.ShadowBasis = p.chosen, p.reason, p.outcome, p.basis
		rec.WaitFor = p.waitFor
		d.keep(rec, d.policy, b.chosen, p.chosen)
		return
	}
	// In enforce the baseline would have stepped in.
	rec.ShadowChosen, rec.ShadowReason, rec.ShadowOutcome, rec.ShadowBasis = b.chosen, ReasonPolicyError, OutcomePlaced, b.basis
	rec.Detail = err.Error()
	d.baseline()
	d.keep(rec, d.base, b.chosen, -1)
}

// try lets the configured policy decide. An error means that it failed, and
// that nothing of it may be used.
func (d *Decider) try() (v verdict, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("policy %s panicked: %v", d.s.Policy, p)
		}
	}()
	r := &d.round
	if d.s.Policy == LeastRequests {
		r.reservedOnly() // stickiness too compares what the baseline compares
	}
	r.score = r.score[:0]
	d.policy.score(r)
	if !r.least() {
		return verdict{}, fmt.Errorf("policy %s gave a score that is not a number", d.s.Policy)
	}
	r.tied = 1
	if g, ok := d.policy.(guarder); ok {
		if v, ok := g.guard(r); ok {
			return v, nil
		}
	}
	k, why := d.policy.pick(r)
	v = verdict{outcome: OutcomePlaced, basis: r.basis, tied: r.tied, waitFor: -1}
	// Stickiness stands below eligibility, basis and admission and above the
	// score: whoever configures it bounds it by its margin.
	if s, as := r.sticky(); s >= 0 {
		v.chosen, v.reason = int(r.adm[s]), as
		return v, nil
	}
	if e, ok := d.policy.(escaper); ok {
		if other, escaped := e.escape(r, k); escaped {
			k, why, v.tied = other, ReasonHardEscape, r.tied
		}
		if i, span, ok := e.wait(r, k); ok {
			v.outcome, v.chosen, v.reason, v.waitFor, v.waitSpan = OutcomeWait, -1, ReasonWait, i, span
			return v, nil
		}
	}
	v.chosen, v.reason = int(r.adm[k]), why
	return v, nil
}

func (rec *Record) decided(v verdict) {
	rec.Outcome, rec.Chosen, rec.Reason, rec.Basis, rec.Tied = v.outcome, v.chosen, v.reason, v.basis, v.tied
	rec.WaitFor, rec.WaitSpan = v.waitFor, v.waitSpan
	rec.Seed, rec.NoSpill = v.seed, v.noSpill
}

// keep writes the best candidates into the record, best first, those named
// always among them, and fills what room is left with some that were filtered.
func (d *Decider) keep(rec *Record, sc scorer, must, also int) {
	r := &d.round
	var best [MaxScored]int32
	n := 0
	for k, s := range r.score {
		if n == MaxScored && s >= r.score[best[n-1]] {
			continue
		}
		if n < MaxScored {
			n++
		}
		j := n - 1
		for ; j > 0 && s < r.score[best[j-1]]; j-- {
			best[j] = best[j-1]
		}
		best[j] = int32(k)
	}
	for _, i := range [...]int{must, also} {
		k := int32(r.position(i))
		if k < 0 || slices.Contains(best[:n], k) {
			continue
		}
		at := n - 1 // n is MaxScored here, or everybody would be among them
		if i != must && best[at] == int32(r.position(must)) {
			at--
		}
		best[at] = k
	}
	for _, k := range best[:n] {
		out := rec.add(int(r.adm[k]), FilterNone)
		out.Score = r.score[k]
		r.features(out)
		sc.explain(r, int(k), out)
	}
	if len(rec.Candidates) == MaxScored {
		return
	}
	for i, f := range r.filter {
		if f != FilterNone {
			r.features(rec.add(i, f))
			if len(rec.Candidates) == MaxScored {
				return
			}
		}
	}
}

func (d *Decider) unplaced(rec *Record) {
	r := &d.round
	switch {
	case r.eligible > 0:
		rec.Outcome, rec.Reason = OutcomeNoneAdmissible, ReasonNoneAdmissible
		rec.Detail = fmt.Sprintf("%d of %d engines may serve it and none can take it now: %s", r.eligible, len(r.filter), rec.filters())
	case r.tooLarge(rec):
		rec.Outcome, rec.Reason = OutcomeTooLarge, ReasonTooLarge
	case len(r.filter) == 0:
		rec.Outcome, rec.Reason, rec.Detail = OutcomeNoneEligible, ReasonNoneEligible, "no engine is registered"
	default:
		rec.Outcome, rec.Reason = OutcomeNoneEligible, ReasonNoneEligible
		rec.Detail = fmt.Sprintf("none of %d engines may serve it: %s", len(r.filter), rec.filters())
	}
	for i, f := range r.filter {
		if len(rec.Candidates) == MaxScored {
			break
		}
		r.features(rec.add(i, f))
	}
}
