package contest

import (
	"cmp"
	"math"
	"slices"
)

// Stat is a mean over seeds with the half width of its 95 % confidence interval.
type Stat struct {
	Mean float64 `json:"mean"`
	CI95 float64 `json:"ci95"` // half width; 0 with one seed
	N    int     `json:"n"`
}

// student is the 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom.
var student = [...]float64{
	12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
	2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
	2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
}

// stat of values that are independent: one a seed.
func stat(v []float64) Stat {
	s := Stat{Mean: mean(v), N: len(v)}
	if len(v) < 2 {
		return s
	}
	sum := 0.0
	for _, x := range v {
		sum += (x - s.Mean) * (x - s.Mean)
	}
	t := 1.96
	if df := len(v) - 1; df <= len(student) {
		t = student[df-1]
	}
	s.CI95 = t * math.Sqrt(sum/float64(len(v)-1)) / math.Sqrt(float64(len(v)))
	return s
}

// paired is the statistic of a over b, seed by seed: what the workload of a seed
// does to both cancels.
func paired(a, b []float64) Stat {
	v := make([]float64, len(a))
	for i := range a {
		v[i] = ratio(a[i], b[i])
	}
	return stat(v)
}

// sortBy sorts by a number, least first; equal ones keep their order.
func sortBy[T any](v []T, by func(*T) float64) {
	slices.SortStableFunc(v, func(a, b T) int { return cmp.Compare(by(&a), by(&b)) })
}
