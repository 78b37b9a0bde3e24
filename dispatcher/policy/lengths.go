package policy

import "github.com/hashicorp/golang-lru/v2/simplelru"

// DefaultExpectedTokens is the expected output of a pool that has seen none.
const DefaultExpectedTokens = 512

const (
	maxGroupLengths = 20_000 // (job, group) pairs remembered
	maxJobLengths   = 2_000
	// lengthWeight is a new length's share in its average. The group's samples
	// are few, the pool's many: one weight serves both well enough, and a plain
	// running average would never forget an old phase of training.
	lengthWeight = 0.2
	// maxLength bounds what is learned, tokens: one absurd report must not
	// poison an average for long.
	maxLength = 1 << 22
)

// Lengths learns how many tokens answers have: an average that forgets, by (job,
// group), by job and by pool (S1.1). It learns from reports alone and asking
// changes nothing, so that every dispatcher that saw the same reports in the same order
// expects the same. Memory is bounded; the group heard of longest ago goes first.
type Lengths struct {
	groups *simplelru.LRU[lengthKey, float64]
	jobs   *simplelru.LRU[string, float64]
	pool   float64
	seen   bool
}

type lengthKey struct{ job, group string }

// NewLengths has learned nothing.
func NewLengths() *Lengths {
	return &Lengths{groups: newLRU[lengthKey, float64](maxGroupLengths), jobs: newLRU[string, float64](maxJobLengths)}
}

// Learn takes one answer's length, in tokens. A negative one is no length.
func (l *Lengths) Learn(job, group string, tokens int) {
	if tokens < 0 {
		return
	}
	v := float64(min(tokens, maxLength))
	if group != "" {
		learn(l.groups, lengthKey{job, group}, v)
	}
	learn(l.jobs, job, v)
	if l.seen {
		l.pool = average(l.pool, v, lengthWeight)
	} else {
		l.pool, l.seen = v, true
	}
}

// Expect is the output to reserve for a request, at least 1 token: the caller's
// own guess when it gave one (> 0), else what was learned of its group, its
// job, the pool, else DefaultExpectedTokens; never more than maxTokens (when > 0).
func (l *Lengths) Expect(job, group string, guess, maxTokens int) int {
	n := guess
	if n <= 0 {
		n = int(l.learned(job, group) + 0.5)
	}
	if maxTokens > 0 {
		n = min(n, maxTokens)
	}
	return max(1, n)
}

func (l *Lengths) learned(job, group string) float64 {
	if group != "" {
		if v, ok := l.groups.Peek(lengthKey{job, group}); ok {
			return v
		}
	}
	if v, ok := l.jobs.Peek(job); ok {
		return v
	}
	if l.seen {
		return l.pool
	}
	return DefaultExpectedTokens
}

func learn[K comparable](m *simplelru.LRU[K, float64], k K, v float64) {
	if old, ok := m.Peek(k); ok {
		v = average(old, v, lengthWeight)
	}
	m.Add(k, v)
}

// average moves an average towards v. Written so that no compiler may fuse it.
func average(old, v, weight float64) float64 {
	return old + float64((v-old)*weight)
}

// newLRU makes an LRU; size is a positive constant, the only error there is.
func newLRU[K comparable, V any](size int) *simplelru.LRU[K, V] {
	m, err := simplelru.NewLRU[K, V](size, nil)
	if err != nil {
		panic("policy: " + err.Error())
	}
	return m
}
