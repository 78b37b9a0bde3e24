package workload

import (
	"cmp"
	"fmt"
	"io"
	"slices"
)

func sortRows(rows []Row) {
	slices.SortStableFunc(rows, func(a, b Row) int { return cmp.Compare(a.Timestamp, b.Timestamp) })
}

// Episode is a line of the other trace format: one trajectory of an agent, as
// {"group", "stream", "prompt_len", "out_lens", "obs_lens"}. Turn i says
// out_lens[i] tokens, then sees obs_lens[i]; the last observation may be left
// out. Streams of one group share their first prompt.
type Episode struct {
	Group     string `json:"group"`
	Stream    int    `json:"stream"`
	PromptLen int    `json:"prompt_len"`
	OutLens   []int  `json:"out_lens"`
	ObsLens   []int  `json:"obs_lens"`
}

// ReadEpisodes reads such a trace as a workload of one step: all trajectories
// start at once, and turns follow their answers without a gap.
func ReadEpisodes(r io.Reader, name, job string) (Workload, error) {
	if job == "" {
		job = "trace"
	}
	w := Workload{Name: name, Closed: true}
	sizes, seen := map[string]int{}, map[string]bool{}
	for line, err := range lines(r) {
		var e Episode
		if err == nil {
			err = strict(line.text, &e)
		}
		if err == nil {
			err = e.check()
		}
		id := fmt.Sprintf("%s/%d", e.Group, e.Stream)
		if err == nil && seen[id] {
			err = fmt.Errorf("stream %d of group %q is there already", e.Stream, e.Group)
		}
		if err != nil {
			return Workload{}, fmt.Errorf("trace %s: %w", name, &LineError{line.n, err})
		}
		seen[id] = true
		sizes[e.Group] = max(sizes[e.Group], e.Stream+1)
		prompt := []Segment{{ID: contentID("prompt", e.Group), Tokens: e.PromptLen}}
		trajectory := fmt.Sprintf("t%06d", line.n)
		w.Rollouts = appendTurns(w.Rollouts, Rollout{Job: job, Group: e.Group, Index: e.Stream, Trajectory: trajectory, Prompt: prompt},
			e.turns())
		if len(w.Rollouts) > MaxRows {
			return Workload{}, fmt.Errorf("trace %s: %w: more than %d turns: cut it", name, ErrTrace, MaxRows)
		}
	}
	for i := range w.Rollouts {
		w.Rollouts[i].Size = sizes[w.Rollouts[i].Group]
	}
	limit(w.Rollouts)
	return w, nil
}

func (e *Episode) turns() []turn {
	out := make([]turn, len(e.OutLens))
	for i, n := range e.OutLens {
		out[i].out = n
		if i < len(e.ObsLens) {
			out[i].obs = e.ObsLens[i]
		}
	}
	return out
}

func (e *Episode) check() error {
	switch {
	case e.Group == "":
		return fmt.Errorf("group is missing")
	case e.Stream < 0 || e.PromptLen < 1 || e.PromptLen > MaxInput:
		return fmt.Errorf("stream %d, prompt_len %d: give a stream from 0 and 1 to %d tokens", e.Stream, e.PromptLen, MaxInput)
	case len(e.OutLens) == 0:
		return fmt.Errorf("out_lens is empty: give one length a turn")
	case len(e.ObsLens) != len(e.OutLens) && len(e.ObsLens) != len(e.OutLens)-1:
		return fmt.Errorf("%d obs_lens for %d out_lens: give one a turn, the last may be left out", len(e.ObsLens), len(e.OutLens))
	}
	for _, n := range e.OutLens {
		if n < 1 || n > MaxInput {
			return fmt.Errorf("out_lens has %d: give 1 to %d", n, MaxInput)
		}
	}
	for _, n := range e.ObsLens {
		if n < 0 || n > MaxInput {
			return fmt.Errorf("obs_lens has %d: give 0 to %d", n, MaxInput)
		}
	}
	return nil
}

// appendTurns adds the turns of one trajectory: each prompt is the one before,
// what was said, and what was seen.
func appendTurns(dst []Rollout, first Rollout, turns []turn) []Rollout {
	x := first
	for i, t := range turns {
		x.ID = fmt.Sprintf("%s-%03d", first.Trajectory, i+1)
		x.Turn, x.Output, x.Last = i+1, t.out, i == len(turns)-1
		dst = append(dst, x)
		prompt := append(x.Prompt[:len(x.Prompt):len(x.Prompt)], x.OutputSegment())
		if t.obs > 0 {
			prompt = append(prompt, Segment{ID: contentID("observation", x.Job, x.ID), Tokens: t.obs})
		}
		x.Prompt, x.After, x.Gap, x.At = prompt, x.ID, t.gap, 0
	}
	return dst
}
