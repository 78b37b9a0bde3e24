package picture

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

// well reads the picture as XML and gives back its text.
func well(t *testing.T, svg string) string {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	var text strings.Builder
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return text.String()
		}
		if err != nil {
			t.Fatalf("not well formed: %v\n%s", err, svg)
		}
		if c, ok := tok.(xml.CharData); ok {
			text.Write(c)
			text.WriteByte('\n')
		}
	}
}

func TestChartsSayWhatTheyShow(t *testing.T) {
	lines := Lines("a < b & c", Axis{Title: "time (s)"}, Axis{Title: "requests", Log: true}, []Line{
		{"one", []float64{0, 1, 2, math.NaN()}, []float64{1, 10, 500, 3}}, {"two", []float64{0, 4}, []float64{3, 0}},
	})
	bars := Bars("bars", "policy", Axis{Title: "hit rate (%)"}, []string{"hits"}, []Bar{{"x", []float64{40}, []float64{5}}, {"y", []float64{60}, nil}})
	heat := Heat("heat", Axis{Title: "time (s)"}, "engine", "running", 12, 8, [][]float64{{0, 1, 8}, {8, 8, 8}})
	for svg, want := range map[string][]string{
		lines: {"a < b & c", "time (s)", "requests", "one", "two", "100"},
		bars:  {"bars", "policy", "hit rate (%)", "hits", "x", "y", "60"},
		heat:  {"heat", "time (s)", "engine", "8 running", "10"},
	} {
		text := well(t, svg)
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%q is not in\n%s", w, text)
			}
		}
	}
}

func TestEmptyDataStillMakeAPicture(t *testing.T) {
	well(t, Lines("none", Axis{}, Axis{Log: true}, nil))
	well(t, Bars("none", "", Axis{}, nil, nil))
	well(t, Heat("none", Axis{}, "", "", 0, 0, nil))
}
