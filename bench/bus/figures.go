package bus

import "slices"

// turns are the slices of one side.
type turns []turn

func (t *turns) add(x turn) { *t = append(*t, x) }

// figures are rollouts a second, and CPU microseconds and refused binds a
// rollout over all turns, and the rate of each.
func (t turns) figures() (rate, cpu, refused float64, each []float64) {
	var n, seconds, busy float64
	for _, x := range t {
		n += float64(x.n)
		seconds += x.in.Seconds()
		refused += float64(x.refused)
		busy += float64(x.cpu.Microseconds())
		each = append(each, float64(x.n)/x.in.Seconds())
	}
	if n == 0 || seconds == 0 {
		return 0, 0, 0, each
	}
	return n / seconds, busy / n, refused / n, each
}

// percentile is the nearest rank; 0 of nothing.
func percentile(v []float64, p float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return v[min(len(v)-1, int(p*float64(len(v))))]
}
