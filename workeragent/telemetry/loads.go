package telemetry

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
)

// object is a JSON object read key by key, so that one key of an odd type does
// not cost the others.
type object map[string]json.RawMessage

// num reads a number; absent and null are nil, anything else is a problem.
func (s *Sample) num(o object, rank int, key string) *float64 {
	raw, ok := o[key]
	if !ok || string(raw) == "null" {
		return nil
	}
	v, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || math.IsInf(v, 0) {
		s.problem(rank, key, "%.40s is no number", raw)
		return nil
	}
	return &v
}

func (s *Sample) requests(o object, rank int, key string) *int {
	v := s.num(o, rank, key)
	if v == nil {
		return nil
	}
	return s.small(rank, key, *v)
}

func (s *Sample) tokens(o object, rank int, key string) *int64 {
	v := s.num(o, rank, key)
	if v == nil {
		return nil
	}
	return s.count(rank, key, *v)
}

// ParseLoads reads SGLang's GET /v1/loads. Ranks come in any order and without
// dp_rank when there is one. The timestamp is the reply's, not the sample's, so
// it is not read; neither is the aggregate, which need not fit.
func ParseLoads(b []byte) (Sample, error) {
	var in struct {
		Version string   `json:"version"`
		Ranks   *int     `json:"dp_rank_count"`
		Loads   []object `json:"loads"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return Sample{}, fmt.Errorf("/v1/loads: %w: %w", ErrShape, err)
	}
	if in.Loads == nil {
		return Sample{}, fmt.Errorf("/v1/loads: no list of loads: %w", ErrShape)
	}
	s := Sample{Source: SourceSGLangLoads, Version: in.Version, Advertised: positive(in.Ranks)}
	seen := map[int]bool{}
	for i, o := range in.Loads {
		n, ok := s.rankOf(o, len(in.Loads))
		if !ok {
			s.problem(-1, "loads", "entry %d has no usable dp_rank", i)
			continue
		}
		if seen[n] {
			s.problem(n, "dp_rank", "reported twice")
			*s.rank(n) = Rank{}
			s.rank(n).Rank = n
			continue
		}
		seen[n] = true
		s.readLoad(n, o)
	}
	s.check()
	return s, nil
}

func (s *Sample) rankOf(o object, of int) (int, bool) {
	v := s.num(o, -1, "dp_rank")
	if v == nil {
		return 0, of == 1
	}
	if *v < 0 || *v > maxRank || *v != math.Trunc(*v) {
		return 0, false
	}
	return int(*v), true
}

func (s *Sample) readLoad(n int, o object) {
	r := s.rank(n)
	r.Running = s.requests(o, n, "num_running_reqs")
	r.Waiting = s.requests(o, n, "num_waiting_reqs")
	r.KVUsedTokens = s.tokens(o, n, "num_used_tokens")
	r.KVCapacityTokens = s.tokens(o, n, "max_total_num_tokens")
	r.WaitingUncachedTokens = s.tokens(o, n, "num_waiting_uncached_tokens")
	r.UsedPlusQueued = s.tokens(o, n, "num_total_tokens")
	r.MaxRunning = s.requests(o, n, "max_running_requests")
	r.KVUsage = s.num(o, n, "token_usage")
	r.PrefillUncachedTokens = s.tokens(o, n, "total_prefill_uncached_tokens")
	r.PrefillBusyUS = s.tokens(o, n, "total_prefill_busy_us")
	if v := s.num(o, n, "gen_throughput"); v != nil {
		r.DecodeTokS = throughput(*v, true)
	}
	var dis struct {
		Mode string `json:"mode"`
	}
	if json.Unmarshal(o["disaggregation"], &dis) == nil && dis.Mode == "prefill" {
		s.problem(n, "disaggregation.mode", "a prefill engine generates nothing")
	}
	r.unpublish()
}

// unpublish makes a rank unknown whose numbers were never written: all zero,
// the capacity too. A capacity of 0 beside other numbers is unknown by itself.
func (r *Rank) unpublish() {
	if positive(r.KVCapacityTokens) != nil {
		return
	}
	r.KVCapacityTokens = nil
	if zero(r.Running) && zero(r.Waiting) && zero(r.KVUsedTokens) && zero(r.UsedPlusQueued) && zero(r.KVUsage) {
		n := r.Rank
		*r = Rank{}
		r.Rank = n
		return
	}
	r.MaxRunning = positive(r.MaxRunning)
}

func zero[T int | int64 | float64](v *T) bool { return v == nil || *v == 0 }

// ParseGetLoad reads SGLang's deprecated GET /get_load. It has no capacity.
func ParseGetLoad(b []byte) (Sample, error) {
	var in []object
	if err := json.Unmarshal(b, &in); err != nil {
		return Sample{}, fmt.Errorf("/get_load: %w: %w", ErrShape, err)
	}
	s := Sample{Source: SourceSGLangGetLoad}
	seen := map[int]bool{}
	for i, o := range in {
		n, ok := s.rankOf(o, len(in))
		if !ok || seen[n] {
			s.problem(-1, "get_load", "entry %d has no usable dp_rank of its own", i)
			continue
		}
		seen[n] = true
		r := s.rank(n)
		all, waiting := s.requests(o, n, "num_reqs"), s.requests(o, n, "num_waiting_reqs")
		tokens, pending := s.tokens(o, n, "num_tokens"), s.tokens(o, n, "num_pending_tokens")
		r.Waiting, r.UsedPlusQueued = waiting, tokens
		r.Running = minus(&s, n, "num_reqs", all, waiting)
		r.KVUsedTokens = minus(&s, n, "num_tokens", tokens, pending)
	}
	s.check()
	return s, nil
}

func minus[T int | int64](s *Sample, rank int, field string, a, b *T) *T {
	if a == nil || b == nil {
		return nil
	}
	if *a < *b {
		s.problem(rank, field, "%d is less than its waiting part, %d", *a, *b)
		return nil
	}
	d := *a - *b
	return &d
}
