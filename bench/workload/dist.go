package workload

import (
	"math"
	"math/rand/v2"

	"github.com/cespare/xxhash/v2"
)

// Dist is a distribution of lengths: lognormal, with a second lognormal as its
// tail if TailShare is above 0, cut to Min..Max. Fixed makes a constant.
type Dist struct {
	Median    float64 `json:"median"`
	Sigma     float64 `json:"sigma"` // of the logarithm; 0 = always the median
	TailShare float64 `json:"tail_share,omitempty"`
	TailMed   float64 `json:"tail_median,omitempty"`
	TailSigma float64 `json:"tail_sigma,omitempty"`
	Min       int     `json:"min"`
	Max       int     `json:"max"`
}

// Fixed is a length that is always n.
func Fixed(n int) Dist { return Dist{Median: float64(n), Min: n, Max: n} }

// Published shapes. The first two are mixtures fitted to the histograms of
// ServeGen's deepseek-r1 clients (share of a window each): the fit meets every
// decile within 3 points and has the mean 1,226 (1,206 there).
var (
	// ReasoningOutput: p50 620, p90 1,800, p99 15,700 tokens.
	ReasoningOutput = Dist{Median: 592, Sigma: 0.746, TailShare: 0.038, TailMed: 11_120, TailSigma: 0.489, Min: 16, Max: 32_768}
	// ReasoningPrompt is the body of the same clients' prompts: p50 325.
	ReasoningPrompt = Dist{Median: 325, Sigma: 1.2, Min: 32, Max: 8_192}
	// AgentTurns: p50 29, p90 56 turns.
	AgentTurns = Dist{Median: 29, Sigma: 0.513, Min: 2, Max: 150}
	// AgentOutput and AgentObservation follow SWE-agent's demonstrations: 245 /
	// 569 / 1,178 and 388 / 4,117 / 8,978 characters (p50 / p90 / p99), four to
	// a token.
	AgentOutput      = Dist{Median: 61, Sigma: 0.66, Min: 4, Max: 1_024}
	AgentObservation = Dist{Median: 97, Sigma: 1.6, Min: 1, Max: 6_125}
)

// Draw a length.
func (d Dist) Draw(rng *rand.Rand) int { return d.At(rng.NormFloat64()) }

// At is the length at z standard deviations of a normal variable: equal z, equal
// rank. Correlated lengths come from correlated z.
func (d Dist) At(z float64) int {
	var v float64
	switch {
	case d.Sigma == 0:
		v = d.Median
	case d.TailShare <= 0:
		v = d.Median * math.Exp(d.Sigma*z)
	default:
		v = d.quantile(normalCDF(z))
	}
	if !(v < float64(d.Max)) {
		return d.Max
	}
	return max(d.Min, int(math.Round(v)))
}

// quantile of the mixture, by halving on its logarithm.
func (d Dist) quantile(u float64) float64 {
	cdf := func(logv float64) float64 {
		body := normalCDF((logv - math.Log(d.Median)) / d.Sigma)
		tail := normalCDF((logv - math.Log(d.TailMed)) / d.TailSigma)
		return body*(1-d.TailShare) + tail*d.TailShare
	}
	lo, hi := 0.0, math.Log(float64(d.Max)+1)
	for range 40 {
		if mid := (lo + hi) / 2; cdf(mid) < u {
			lo = mid
		} else {
			hi = mid
		}
	}
	return math.Exp(hi)
}

func normalCDF(z float64) float64 { return math.Erfc(-z/math.Sqrt2) / 2 }

// correlated is a z that shares rho of its variance with the group's.
func correlated(rng *rand.Rand, group, rho float64) float64 {
	return math.Sqrt(rho)*group + math.Sqrt(1-rho)*rng.NormFloat64()
}

// contentID names a content by what it is.
func contentID(parts ...string) uint64 {
	var d xxhash.Digest
	d.Reset()
	for _, p := range parts {
		_, _ = d.WriteString(p)
		_, _ = d.Write([]byte{0})
	}
	return d.Sum64() &^ (3 << 62) // the top bits mark outputs and padding
}
