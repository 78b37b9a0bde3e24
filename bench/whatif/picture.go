package whatif

import (
	"fmt"

	"github.com/rollbus/rollbus/bench/picture"
)

// Picture is the answer as one SVG: each figure as a share of what was recorded,
// or of the model under the recorded policy where nothing was.
func (a *Answer) Picture() string {
	var bars []picture.Bar
	for _, f := range a.Figures {
		of := f.Same
		if f.Recorded != nil && *f.Recorded != 0 {
			of = *f.Recorded
		}
		if of == 0 {
			continue
		}
		was := 0.0
		if f.Recorded != nil {
			was = *f.Recorded / of
		}
		e := f.Error / abs(of)
		bars = append(bars, picture.Bar{Label: f.Key, Values: []float64{was, f.Same / of, f.Other / of}, Err: []float64{0, e, e}})
	}
	names := []string{
		fmt.Sprintf("recorded: %s, %d engines", a.Policy, a.Engines),
		fmt.Sprintf("modelled: %s, %d engines", a.Policy, a.Engines),
		fmt.Sprintf("modelled: %s, %d engines", a.OtherPolicy, a.OtherEngines),
	}
	title := fmt.Sprintf("What if: %d recorded rollouts, %s loop", a.Rollouts, a.Loop)
	return picture.Bars(title, "figure", picture.Axis{Title: "share of the recorded run (bars show the model's error)"}, names, bars)
}
