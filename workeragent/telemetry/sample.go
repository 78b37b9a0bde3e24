package telemetry

import (
	"fmt"
	"math"
	"slices"

	"github.com/rollbus/rollbus/subjects"
)

// Sources, as they stand in subjects.Load.Source.
const (
	SourceVLLMMetrics   = "vllm:/metrics"
	SourceSGLangLoads   = "sglang:/v1/loads"
	SourceSGLangGetLoad = "sglang:/get_load"
	SourceSGLangMetrics = "sglang:/metrics"
	SourceLoadStat      = "sglang:LoadStat"
	SourceLoadSnapshot  = "sglang:LoadSnapshot"
	SourceLlamaMetrics  = "llamacpp:/metrics"
	SourceLlamaSlots    = "llamacpp:/slots"
)

// maxProblems bounds what a sample carries of complaints.
const maxProblems = 32

// Counters are cumulative since the engine started; nil = unknown.
type Counters struct {
	PromptTokens          *int64 // prompt tokens taken in, cached ones included
	GenerationTokens      *int64
	PrefixQueryTokens     *int64
	PrefixHitTokens       *int64
	Preemptions           *int64
	Steps                 *int64 // engine steps, where that is what moves
	PrefillUncachedTokens *int64 // computed in prefill
	PrefillBusyUS         *int64 // time spent computing them, microseconds
}

// Rank is one data-parallel rank of a sample.
type Rank struct {
	subjects.RankLoad
	Counters
	UsedPlusQueued *int64 // tokens: in use and waiting to be prefilled; no capacity
	Retracted      *int   // requests put back just now (a gauge)
}

// Problem is one thing that is wrong with a sample. Rank -1 = the whole of it.
type Problem struct {
	Rank  int
	Field string
	Text  string
}

func (p Problem) String() string {
	if p.Rank < 0 {
		return p.Field + ": " + p.Text
	}
	return fmt.Sprintf("rank %d %s: %s", p.Rank, p.Field, p.Text)
}

// Sample is one reading of one source.
type Sample struct {
	Source     string
	Ranks      []Rank // ordered by rank
	Advertised *int   // ranks that the source says exist
	Totals     Counters
	BlockSize  *int     // tokens a KV block
	Awake      *bool    // false: asleep, its cache is gone
	StartedAt  *float64 // process start, unix seconds of the engine's clock
	Version    string
	Problems   []Problem
	BadLines   int // of an exposition
}

// problem notes a complaint, up to the bound.
func (s *Sample) problem(rank int, field, format string, a ...any) {
	if len(s.Problems) < maxProblems {
		s.Problems = append(s.Problems, Problem{Rank: rank, Field: field, Text: fmt.Sprintf(format, a...)})
	}
}

// rank finds or makes a rank.
func (s *Sample) rank(n int) *Rank {
	i, found := slices.BinarySearchFunc(s.Ranks, n, func(r Rank, n int) int { return r.Rank - n })
	if !found {
		s.Ranks = slices.Insert(s.Ranks, i, Rank{RankLoad: subjects.RankLoad{Rank: n}})
	}
	return &s.Ranks[i]
}

// Hints are what is known of an engine from elsewhere: its server info, its
// registration, configuration. Nil = nothing.
type Hints struct {
	Ranks          *int
	MaxRunning     *int   // per rank
	CapacityTokens *int64 // per rank
}

// Fill completes what the source does not say. It never overrides a value and
// never touches what has to be measured.
func (s *Sample) Fill(h Hints) {
	if h.Ranks != nil && (s.Advertised == nil || *s.Advertised < *h.Ranks) {
		s.Advertised = h.Ranks
	}
	for i := range s.Ranks {
		r := &s.Ranks[i]
		if r.Running == nil { // not published: nothing to complete
			continue
		}
		if r.MaxRunning == nil {
			r.MaxRunning = h.MaxRunning
		}
		if r.KVCapacityTokens == nil {
			r.KVCapacityTokens = h.CapacityTokens
		}
	}
	s.check()
}

// Complete tells whether the whole engine is in the sample: every advertised
// rank, each with its running and waiting counts, and nothing wrong.
func (s *Sample) Complete() bool {
	if len(s.Problems) > 0 || len(s.Ranks) == 0 {
		return false
	}
	if s.Advertised != nil && len(s.Ranks) != *s.Advertised {
		return false
	}
	for i, r := range s.Ranks {
		if r.Rank != i || r.Running == nil || r.Waiting == nil {
			return false
		}
	}
	return true
}

// maxRank bounds rank numbers; beyond it a number is taken for garbage.
const maxRank = 4096

// slack is how far a used count may stand above its capacity: the two are not
// read at the same instant. A fraction.
const slack = 0.01

// check makes unknown what cannot be true and says so.
func (s *Sample) check() {
	for i := range s.Ranks {
		r := &s.Ranks[i]
		if u := r.KVUsage; u != nil && (math.IsNaN(*u) || *u < 0 || *u > 1+slack) {
			if !math.IsNaN(*u) {
				s.problem(r.Rank, "kv_usage", "%v is no fraction of 0..1", *u)
			}
			r.KVUsage = nil
		}
		if r.KVUsedTokens != nil && r.KVCapacityTokens != nil && float64(*r.KVUsedTokens) > float64(*r.KVCapacityTokens)*(1+slack) {
			s.problem(r.Rank, "kv_used_tokens", "%d of a capacity of %d", *r.KVUsedTokens, *r.KVCapacityTokens)
			r.KVUsedTokens, r.KVCapacityTokens, r.KVUsage = nil, nil, nil
		}
		if r.UsedPlusQueued != nil && r.KVUsedTokens != nil && *r.UsedPlusQueued < *r.KVUsedTokens {
			s.problem(r.Rank, "num_total_tokens", "%d is less than the %d in use", *r.UsedPlusQueued, *r.KVUsedTokens)
			r.UsedPlusQueued = nil
		}
		if r.Running != nil && r.MaxRunning != nil && *r.Running > *r.MaxRunning {
			s.problem(r.Rank, "running", "%d with %d slots", *r.Running, *r.MaxRunning)
			r.Running, r.MaxRunning = nil, nil
		}
		if r.PrefixHitTokens != nil && r.PrefixQueryTokens != nil && *r.PrefixHitTokens > *r.PrefixQueryTokens {
			r.PrefixHitTokens, r.PrefixQueryTokens = nil, nil
		}
	}
	if s.Advertised != nil && len(s.Ranks) > *s.Advertised {
		s.problem(-1, "ranks", "%d reported, %d advertised", len(s.Ranks), *s.Advertised)
	}
}

// count takes a number that must be a whole, non-negative count.
func (s *Sample) count(rank int, field string, v float64) *int64 {
	switch {
	case math.IsNaN(v):
		return nil
	case v < 0 || v != math.Trunc(v) || v > 1<<53:
		s.problem(rank, field, "%v is no count", v)
		return nil
	}
	n := int64(v)
	return &n
}

// small is count for numbers of requests.
func (s *Sample) small(rank int, field string, v float64) *int {
	n := s.count(rank, field, v)
	if n == nil {
		return nil
	}
	if *n > math.MaxInt32 {
		s.problem(rank, field, "%d is beyond belief", *n)
		return nil
	}
	i := int(*n)
	return &i
}

// positive is nil for zero: a capacity of 0 means that it is not known yet.
func positive[T int | int64](v *T) *T {
	if v == nil || *v <= 0 {
		return nil
	}
	return v
}
