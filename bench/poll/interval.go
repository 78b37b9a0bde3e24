package poll

import "math"

// interval is the mean of values that are independent, and the ends of its 95 %
// confidence interval by Student's t.
func interval(v []float64) (mean, low, high float64) {
	n := float64(len(v))
	for _, x := range v {
		mean += x / n
	}
	squares := 0.0
	for _, x := range v {
		squares += (x - mean) * (x - mean)
	}
	half := quantile(n-1) * math.Sqrt(squares/(n-1)/n)
	return mean, mean - half, mean + half
}

// quantile is the 97.5 % quantile of Student's t, by its expansion around the
// normal one: within 1 % from three degrees of freedom on.
func quantile(df float64) float64 {
	const z = 1.959964
	z3, z5, z7 := z*z*z, z*z*z*z*z, z*z*z*z*z*z*z
	return z + (z3+z)/(4*df) + (5*z5+16*z3+3*z)/(96*df*df) + (3*z7+19*z5+17*z3-15*z)/(384*df*df*df)
}
