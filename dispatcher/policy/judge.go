package policy

import (
	"math"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Why says why an engine's load report is not used. The empty one means it is.
type Why string

// Reasons for leaving a report out. An engine without a usable report is
// unknown, not idle and not full: its reservations decide.
const (
	WhyUsable       Why = ""
	WhyMissing      Why = "missing"       // none has come
	WhyStale        Why = "stale"         // older than max(3 intervals, 1 s)
	WhyEpoch        Why = "other_epoch"   // of another life of the engine
	WhyRanksMissing Why = "ranks_missing" // fewer ranks reported than there are
	WhyRanksWrong   Why = "ranks_wrong"   // a rank twice, out of range, or too many
	WhyIncomplete   Why = "incomplete"    // a rank does not say what runs or waits
	WhyNegative     Why = "negative"      // a number below zero
	WhyNotANumber   Why = "not_a_number"  // NaN or infinite
	WhyInconsistent Why = "inconsistent"  // numbers that contradict each other, or fields that only some ranks have
	WhyUnpublished  Why = "unpublished"   // zeros of a rank that has not measured yet
)

// Whys is the whole list, WhyUsable left out.
func Whys() []Why {
	return []Why{WhyMissing, WhyStale, WhyEpoch, WhyRanksMissing, WhyRanksWrong, WhyIncomplete,
		WhyNegative, WhyNotANumber, WhyInconsistent, WhyUnpublished}
}

// Want is what a report is held against.
type Want struct {
	Epoch string // of the engine's registration
	Ranks int    // configured data-parallel ranks; 0 = not known
}

const (
	minFresh    = time.Second
	maxInterval = 20 * time.Second // a source that claims a longer interval is judged by this one
	maxRanks    = 1024
	maxCount    = 1 << 24 // requests of one rank
	maxTokens   = 1 << 42 // tokens of one rank
	overfull    = 1.01    // reported usage may exceed 1 by rounding
)

// Fresh is the age at which a source with this interval is stale.
func Fresh(interval time.Duration) time.Duration {
	return max(3*min(interval, maxInterval), minFresh)
}

// Judge makes an Observed of a load report, or says why not. age is the time
// since it was received, on the reader's clock; negative = never received. All
// ranks must be there, each with its own numbers: counts are summed, the
// fullest rank's KV usage is kept (scenario P14). UsedTokens is what was
// observed: Fuser.Fuse makes it what it means in a decision.
func Judge(l *subjects.Load, age time.Duration, want Want) (Observed, Why) {
	if l == nil || age < 0 {
		return Observed{}, WhyMissing
	}
	if l.Epoch != want.Epoch {
		return Observed{}, WhyEpoch
	}
	if why := judgeAge(l, age); why != WhyUsable {
		return Observed{}, why
	}
	assumed, why := judgeRanks(l, want.Ranks)
	if why != WhyUsable {
		return Observed{}, why
	}
	var t tally
	for i := range l.Ranks {
		if why := t.add(&l.Ranks[i]); why != WhyUsable {
			return Observed{}, why
		}
	}
	o, why := t.observed(len(l.Ranks), assumed)
	if why == WhyUsable {
		why = o.own(l)
	}
	if why != WhyUsable {
		return Observed{}, why
	}
	o.CountsScraped = l.Source == scrapedSource
	return o, WhyUsable
}

// own takes what the agent tells of its own runs, the pair whole or not at all.
func (o *Observed) own(l *subjects.Load) Why {
	for _, p := range [...]*int64{l.PendingPrefillTokens, l.PendingOutputTokens} {
		if why := count(p, maxTokens); why != WhyUsable {
			return why
		}
	}
	if why := count(l.OwnRequests, maxCount); why != WhyUsable {
		return why
	}
	if o.PendingTold = l.PendingPrefillTokens != nil && l.PendingOutputTokens != nil; o.PendingTold {
		// What waits may be somebody else's: the engine's own figure has it.
		o.PendingPrefillTokens, o.PendingOutputTokens = max(*l.PendingPrefillTokens, o.WaitingUncachedTokens), *l.PendingOutputTokens
	}
	return WhyUsable
}

// count checks a number that may be missing.
func count[T int | int64](p *T, most T) Why {
	switch {
	case p != nil && *p < 0:
		return WhyNegative
	case p != nil && *p > most:
		return WhyInconsistent
	}
	return WhyUsable
}

// scrapedSource exports one set of counts for each tensor-parallel rank, told
// apart by a label that not every release has (S2).
const scrapedSource = "sglang:/metrics"

func judgeAge(l *subjects.Load, age time.Duration) Why {
	switch {
	case math.IsNaN(l.AgeMS) || math.IsInf(l.AgeMS, 0):
		return WhyNotANumber
	case l.AgeMS < 0 || l.IntervalMS < 0:
		return WhyNegative
	}
	interval := time.Duration(min(l.IntervalMS, int(maxInterval.Milliseconds()))) * time.Millisecond
	limit := Fresh(interval)
	if l.AgeMS >= float64(limit.Milliseconds()) || age+time.Duration(l.AgeMS*1e6) >= limit {
		return WhyStale
	}
	return WhyUsable
}

// judgeRanks wants each of the advertised ranks once; else of the configured
// ones; else those seen are taken for all, and that is shown as assumed.
func judgeRanks(l *subjects.Load, configured int) (assumed bool, why Why) {
	n := configured
	if l.RanksAdvertised != nil {
		n = *l.RanksAdvertised
		if n <= 0 {
			return false, WhyRanksWrong
		}
	}
	if n <= 0 {
		n, assumed = len(l.Ranks), true
	}
	switch {
	case len(l.Ranks) > maxRanks || n > maxRanks || len(l.Ranks) > n:
		return assumed, WhyRanksWrong
	case len(l.Ranks) < n || n == 0:
		return assumed, WhyRanksMissing
	}
	var seen [maxRanks / 64]uint64
	for i := range l.Ranks {
		r := l.Ranks[i].Rank
		if r < 0 || r >= n || seen[r/64]&(1<<(r%64)) != 0 {
			return assumed, WhyRanksWrong
		}
		seen[r/64] |= 1 << (r % 64)
	}
	return assumed, WhyUsable
}

// tally sums ranks and counts how many of them told each optional field.
type tally struct {
	running, waiting                   int
	uncached, used                     int64
	worst                              float64
	slots                              int
	decode, prefill                    float64
	toldUncached, toldUsed, toldKV     int
	toldSlots, toldDecode, toldPrefill int
}

func (t *tally) add(r *subjects.RankLoad) Why {
	if r.Running == nil || r.Waiting == nil {
		return WhyIncomplete
	}
	for _, p := range [...]*int{r.Running, r.Waiting, r.MaxRunning} {
		if why := count(p, maxCount); why != WhyUsable {
			return why
		}
	}
	for _, p := range [...]*int64{r.WaitingUncachedTokens, r.KVUsedTokens, r.KVCapacityTokens, r.PreemptionsTotal} {
		if why := count(p, maxTokens); why != WhyUsable {
			return why
		}
	}
	for _, p := range [...]*float64{r.KVUsage, r.DecodeTokS, r.PrefillTokS} {
		switch {
		case p == nil:
		case math.IsNaN(*p) || math.IsInf(*p, 0):
			return WhyNotANumber
		case *p < 0:
			return WhyNegative
		}
	}
	if unpublished(r) {
		return WhyUnpublished
	}
	t.running += *r.Running
	t.waiting += *r.Waiting
	if r.WaitingUncachedTokens != nil {
		t.uncached += *r.WaitingUncachedTokens
		t.toldUncached++
	}
	if r.MaxRunning != nil && *r.MaxRunning > 0 {
		t.slots += *r.MaxRunning
		t.toldSlots++
	}
	if r.DecodeTokS != nil && *r.DecodeTokS > 0 {
		t.decode += *r.DecodeTokS
		t.toldDecode++
	}
	if r.PrefillTokS != nil && *r.PrefillTokS > 0 {
		t.prefill += *r.PrefillTokS
		t.toldPrefill++
	}
	return t.addKV(r)
}

// unpublished tells the zeros of a rank that has not measured anything from an
// idle one: an idle one has a capacity.
func unpublished(r *subjects.RankLoad) bool {
	zero := func(p *int64) bool { return p == nil || *p == 0 }
	noSize := r.KVCapacityTokens != nil && *r.KVCapacityTokens == 0 || r.MaxRunning != nil && *r.MaxRunning == 0
	return noSize && *r.Running == 0 && *r.Waiting == 0 && zero(r.KVUsedTokens) && zero(r.WaitingUncachedTokens) &&
		(r.KVUsage == nil || *r.KVUsage == 0)
}

func (t *tally) addKV(r *subjects.RankLoad) Why {
	capacity := int64(0)
	if r.KVCapacityTokens != nil {
		capacity = *r.KVCapacityTokens
	}
	usage := -1.0
	if r.KVUsage != nil {
		usage = *r.KVUsage
	}
	if r.KVUsedTokens != nil {
		t.used += *r.KVUsedTokens
		t.toldUsed++
		if capacity > 0 {
			usage = max(usage, float64(*r.KVUsedTokens)/float64(capacity))
		}
	} else if r.KVUsage != nil && capacity > 0 {
		t.used += int64(min(*r.KVUsage, 1) * float64(capacity))
		t.toldUsed++
	}
	if usage > overfull {
		return WhyInconsistent
	}
	if usage >= 0 {
		t.worst = max(t.worst, min(usage, 1))
		t.toldKV++
	}
	return WhyUsable
}

func (t *tally) observed(ranks int, assumed bool) (Observed, Why) {
	o := Observed{Running: t.running, Waiting: t.waiting, WaitingUncachedTokens: -1, UsedTokens: -1, KVUsageWorst: -1, RanksAssumed: assumed}
	// A KV figure of some ranks only would hide the others' (the worst may be
	// among them): that report says too little to be used at all.
	if t.toldKV != 0 && t.toldKV != ranks || t.toldUsed != 0 && t.toldUsed != ranks {
		return Observed{}, WhyInconsistent
	}
	if t.toldKV == ranks {
		o.KVUsageWorst = t.worst
	}
	if t.toldUsed == ranks {
		o.UsedTokens = t.used
	}
	if t.toldUncached == ranks {
		o.WaitingUncachedTokens = t.uncached
	}
	if t.toldSlots == ranks {
		o.MaxRunning = t.slots
	}
	if t.toldDecode == ranks {
		o.DecodeTokS = t.decode
	}
	if t.toldPrefill == ranks {
		o.PrefillTokS = t.prefill
	}
	return o, WhyUsable
}
