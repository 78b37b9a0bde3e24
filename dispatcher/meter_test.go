package dispatcher

import "testing"

// counterValue sums what of a counter or gauge has that label value ("" = everything).
func counterValue(t *testing.T, d *Dispatcher, name, label string) float64 {
	t.Helper()
	all, err := d.metrics.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range all {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			hit := label == ""
			for _, l := range m.GetLabel() {
				hit = hit || l.GetValue() == label
			}
			if hit {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

func histogramCount(t *testing.T, d *Dispatcher, name string) uint64 {
	t.Helper()
	all, err := d.metrics.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	n := uint64(0)
	for _, f := range all {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				n += m.GetHistogram().GetSampleCount()
			}
		}
	}
	return n
}
