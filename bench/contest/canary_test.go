package contest

import (
	"encoding/json"
	"testing"
)

// The fields that issue 8 names, and the figures of one seed.
func TestTheCanaryOfOwnerPressureReachesItsBound(t *testing.T) {
	r, err := Canary(t.Context(), Config{Seeds: 1, Quick: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range r.Missed() {
		t.Errorf("%s: want %s, measured %g: %s", m.Name, m.Want, m.Got, m.Why)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Arms []map[string]any `json:"arms"`

		Ratio, Bound float64
		Projected    float64 `json:"projected_ratio"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Arms) != 3 || got.Ratio < 1.6 || got.Bound < got.Ratio || got.Bound > 2 || got.Projected < 1.85 {
		t.Errorf("%d arms, ratio %g, bound %g, projected_time %g", len(got.Arms), got.Ratio, got.Bound, got.Projected)
	}
	for _, a := range got.Arms {
		for _, key := range []string{"name", "tok_s", "wall_s", "p50_s", "p95_s", "running_max", "shares", "cached_fraction", "decisions", "binary_sha256", "core_version", "settings_digest"} {
			if v, ok := a[key]; !ok || v == "" {
				t.Errorf("arm %v has no %s", a["name"], key)
			}
		}
	}
}
