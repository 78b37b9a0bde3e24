package workeragent

import (
	"testing"

	"github.com/rollbus/rollbus/subjects"
)

func TestOnlyABusyEngineShowsItsRates(t *testing.T) {
	rank := func(running, waiting int, decode, prefill float64) subjects.RankLoad {
		most := 8
		return subjects.RankLoad{Running: &running, Waiting: &waiting, MaxRunning: &most, DecodeTokS: &decode, PrefillTokS: &prefill}
	}
	silent := rank(8, 0, 0, 0)
	silent.DecodeTokS = nil
	blind := rank(8, 9, 1, 1)
	blind.Running = nil
	var s shownRates
	for _, c := range []struct {
		why             string
		ranks           []subjects.RankLoad
		decode, prefill float64
	}{
		{"an idle engine shows what it computed of prompts", []subjects.RankLoad{rank(1, 0, 60, 500)}, 0, 500},
		{"half full is busy", []subjects.RankLoad{rank(4, 0, 900, 9000)}, 900, 9000},
		{"ranks are summed", []subjects.RankLoad{rank(8, 0, 1000, 5000), rank(4, 1, 500, 5000)}, 1500, 10_000},
		{"a rank that does not tell hides the sum", []subjects.RankLoad{rank(8, 0, 1, 7), silent}, 1500, 10_000},
		{"an incomplete sample counts for nothing", []subjects.RankLoad{blind}, 1500, 10_000},
		{"idle again, it keeps what it showed", []subjects.RankLoad{rank(0, 0, 1, 8000)}, 1500, 8000},
	} {
		s.learn(&subjects.Load{Ranks: c.ranks})
		var e subjects.Engine
		s.tell(&e)
		got := func(p *float64) float64 {
			if p == nil {
				return 0
			}
			return *p
		}
		if got(e.DecodeTokS) != c.decode || got(e.PrefillTokS) != c.prefill {
			t.Errorf("%s: registered as %v and %v tokens/s, want %v and %v", c.why, got(e.DecodeTokS), got(e.PrefillTokS), c.decode, c.prefill)
		}
	}
}
