package decide

import "testing"

func TestProf(t *testing.T) {
	r, err := Run(Config{Engines: []int{10000}, Rounds: 60})
	t.Log(r.Results[0].NSPerDecision, err)
}
