package whatif

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// Besides is what another policy would have decided, decision for decision, on
// the state that each recorded decision was taken on. No model plays a part;
// what would have followed is not followed.
type Besides struct {
	Decisions int         `json:"decisions"`
	Changed   int         `json:"changed"` // another engine, or placed where the other was not
	Label     string      `json:"label"`   // recorded
	By        []BesideRow `json:"by_reason"`
	Differ    int         `json:"replay_differences"` // the replay itself: not 0 = another core recorded it
}

// BesideRow groups decisions by the reasons of both.
type BesideRow struct {
	Recorded  string   `json:"recorded_reason"`
	Other     string   `json:"other_reason"`
	Decisions int      `json:"decisions"`
	Changed   int      `json:"changed"`
	Examples  []string `json:"examples"` // rollouts, three at most
}

// Beside replays journals and asks another policy at every decision.
func Beside(journals []*journal.Journal, s subjects.Settings, from, until int64) (*Besides, error) {
	set, err := policy.Resolve(s)
	if err != nil {
		return nil, err
	}
	out := &Besides{Label: Recorded, By: []BesideRow{}}
	by := map[[2]string]*BesideRow{}
	for _, j := range journals {
		d, err := policy.NewDecider(set)
		if err != nil {
			return nil, err
		}
		var rec policy.Record
		ask := func(in *policy.Input, was *policy.Record) {
			at := d.Decide(in, &rec)
			out.Decisions++
			k := [2]string{string(was.Reason), string(rec.Reason)}
			row := by[k]
			if row == nil {
				row = &BesideRow{Recorded: k[0], Other: k[1], Examples: []string{}}
				by[k] = row
			}
			row.Decisions++
			if at == was.Chosen {
				return
			}
			out.Changed++
			row.Changed++
			if len(row.Examples) < 3 && !slices.Contains(row.Examples, in.Request.Rollout) {
				row.Examples = append(row.Examples, in.Request.Rollout)
			}
		}
		rep, err := journal.Replay(j, journal.ReplayOptions{From: from, Until: until, Config: func(c *core.Config) { c.Beside = ask }})
		if err != nil {
			return nil, fmt.Errorf("what the other policy would have decided: %w", err)
		}
		out.Differ += rep.Differences
	}
	for _, r := range by {
		out.By = append(out.By, *r)
	}
	slices.SortFunc(out.By, func(a, b BesideRow) int {
		return cmp.Or(cmp.Compare(b.Changed, a.Changed), cmp.Compare(b.Decisions, a.Decisions), cmp.Compare(a.Recorded+a.Other, b.Recorded+b.Other))
	})
	return out, nil
}
