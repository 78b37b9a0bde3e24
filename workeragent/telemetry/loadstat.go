package telemetry

import (
	"fmt"
	"math"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/kvevents/msgpack"
)

// LoadStat is one load message of SGLang over ZeroMQ: the array LoadStat of 6,
// 11 or more elements, or the map LoadSnapshot in which a field at its default
// (0) is left out. The rank of a message is its socket's; InPayload is only
// compared with it.
type LoadStat struct {
	Source          string
	Running         int64
	Waiting         int64
	Used            int64
	Capacity        *int64
	InPayload       *int64
	WaitingUncached *int64
	UsedPlusQueued  *int64
	MaxRunning      *int64
	PrefillUncached *int64 // cumulative
	PrefillBusyUS   *int64 // cumulative
}

// minLoadStat is the length of the first form.
const minLoadStat = 6

// ParseLoadStat reads the payload frame. An error wraps ErrMalformed: drop the
// message, keep the subscription.
func ParseLoadStat(b []byte) (LoadStat, error) {
	r := msgpack.Reader{B: b}
	switch r.Kind() {
	case msgpack.Array:
		return parseLoadArray(&r)
	case msgpack.Map:
		return parseLoadMap(&r)
	}
	return LoadStat{}, fmt.Errorf("%w: neither an array nor a map", ErrMalformed)
}

func parseLoadArray(r *msgpack.Reader) (LoadStat, error) {
	n, err := r.Array()
	if err != nil {
		return LoadStat{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if n < minLoadStat {
		return LoadStat{}, fmt.Errorf("%w: LoadStat of %d elements, want at least %d", ErrMalformed, n, minLoadStat)
	}
	if tag, err := r.Str(); err != nil || string(tag) != "LoadStat" {
		return LoadStat{}, fmt.Errorf("%w: tag %.20q is not LoadStat", ErrMalformed, tag)
	}
	var v [11]*int64
	for i := 1; i < n && i < len(v); i++ {
		if v[i], err = optional(r); err != nil {
			return LoadStat{}, fmt.Errorf("%w: element %d: %w", ErrMalformed, i, err)
		}
	}
	if v[1] == nil || v[2] == nil || v[3] == nil {
		return LoadStat{}, fmt.Errorf("%w: a count is nil", ErrMalformed)
	}
	return LoadStat{Source: SourceLoadStat, Running: *v[1], Waiting: *v[2], Used: *v[3], Capacity: positive(v[4]), InPayload: v[5],
		WaitingUncached: v[6], UsedPlusQueued: v[7], MaxRunning: positive(v[8]), PrefillUncached: v[9], PrefillBusyUS: v[10]}, nil
}

// optional reads nil or a count.
func optional(r *msgpack.Reader) (*int64, error) {
	if r.Nil() {
		return nil, nil
	}
	n, err := r.Int64()
	if err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, fmt.Errorf("%d is negative", n)
	}
	return &n, nil
}

func parseLoadMap(r *msgpack.Reader) (LoadStat, error) {
	n, err := r.Map()
	if err != nil {
		return LoadStat{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	var rank, capacity, slots, waitingUncached, total int64
	out := LoadStat{Source: SourceLoadSnapshot, InPayload: &rank, WaitingUncached: &waitingUncached, UsedPlusQueued: &total}
	var prefill, busy int64
	into := map[string]*int64{
		"dp_rank": &rank, "num_running_reqs": &out.Running, "num_waiting_reqs": &out.Waiting, "num_used_tokens": &out.Used,
		"num_total_tokens": &total, "max_total_num_tokens": &capacity, "max_running_requests": &slots,
		"num_waiting_uncached_tokens": &waitingUncached, "total_prefill_uncached_tokens": &prefill, "total_prefill_busy_us": &busy,
	}
	for range n {
		key, err := r.Str()
		if err != nil {
			return LoadStat{}, fmt.Errorf("%w: key: %w", ErrMalformed, err)
		}
		p, known := into[string(key)]
		if !known {
			if err := r.Skip(); err != nil {
				return LoadStat{}, fmt.Errorf("%w: %.40q: %w", ErrMalformed, key, err)
			}
			continue
		}
		v, err := optional(r)
		if err != nil {
			return LoadStat{}, fmt.Errorf("%w: %s: %w", ErrMalformed, key, err)
		}
		if v != nil {
			*p = *v
		}
		switch p { // newer keys: left out is unknown, since older builds have none
		case &prefill:
			out.PrefillUncached = v
		case &busy:
			out.PrefillBusyUS = v
		}
	}
	out.Capacity, out.MaxRunning = positive(&capacity), positive(&slots)
	return out, nil
}

// Rank is the message as the load of a rank. A message without a capacity
// whose counts are all zero proves nothing: the rank is unknown.
func (l LoadStat) Rank(rank int) (Rank, []Problem) {
	var s Sample
	r := s.rank(rank)
	if l.Capacity == nil && l.Running == 0 && l.Waiting == 0 && l.Used == 0 {
		return *r, nil
	}
	r.RankLoad = subjects.RankLoad{Rank: rank, Running: s.narrow(rank, "running", l.Running), Waiting: s.narrow(rank, "waiting", l.Waiting),
		KVUsedTokens: &l.Used, KVCapacityTokens: l.Capacity, WaitingUncachedTokens: l.WaitingUncached}
	if l.MaxRunning != nil {
		r.MaxRunning = s.narrow(rank, "max_running", *l.MaxRunning)
	}
	r.UsedPlusQueued = l.UsedPlusQueued
	r.PrefillUncachedTokens, r.PrefillBusyUS = l.PrefillUncached, l.PrefillBusyUS
	s.check()
	return s.Ranks[0], s.Problems
}

func (s *Sample) narrow(rank int, field string, v int64) *int {
	if v > math.MaxInt32 {
		s.problem(rank, field, "%d is beyond belief", v)
		return nil
	}
	n := int(v)
	return &n
}
