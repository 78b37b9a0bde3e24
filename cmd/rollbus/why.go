package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
)

// Why tells one rollout's story.
type Why struct {
	Rollout string `arg:"" help:"Rollout, <job>.<id>."`
	journalSource
}

// Help shows examples.
func (Why) Help() string {
	return `Examples:
  rollbus why train.0001
  rollbus why train.0001 --file math.bundle -o json
The journals are re-run up to each decision, so that its candidates can be shown as the core saw them.`
}

// Run tells it.
func (c Why) Run(a *app) error {
	job, id, ok := strings.Cut(c.Rollout, ".")
	if !ok || job == "" || id == "" {
		return coded(exitUsage, "why %q: name a rollout as <job>.<id>", c.Rollout)
	}
	journals, problems, err := c.read(a)
	if err != nil {
		return err
	}
	s, err := journal.Why(journals, job, id)
	if err != nil {
		return err
	}
	for _, p := range problems {
		s.Notes = append(s.Notes, p.Error())
	}
	if err := a.printer().one(s, func() error { return printStory(a.printer(), s) }); err != nil {
		return err
	}
	if !s.Found {
		return coded(exitNotFound, "no journal tells of rollout %s", c.Rollout)
	}
	return nil
}

func printStory(p printer, s *journal.Story) error {
	for i := range s.Lines {
		h := &s.Lines[i]
		at := fmt.Sprintf("+%.3fs", h.CoreS)
		if h.AtNS > 0 {
			at = time.Unix(0, h.AtNS).UTC().Format("15:04:05.000")
		}
		bind := ""
		if h.Bind > 0 {
			bind = fmt.Sprintf("bind %d  ", h.Bind)
		}
		if _, err := fmt.Fprintf(p.w, "%s  %-8s  %-16s %s%s  %s\n", at, h.Dispatcher, h.What, bind, dash(h.Engine), h.Detail); err != nil {
			return err
		}
		if h.Decision != nil {
			if err := printDecision(p, h.Decision); err != nil {
				return err
			}
		}
	}
	for _, n := range s.Notes {
		if _, err := fmt.Fprintf(p.w, "note: %s\n", n); err != nil {
			return err
		}
	}
	return nil
}

func printDecision(p printer, d *core.Decision) error {
	shadow := ""
	if d.Shadow != "" {
		shadow = fmt.Sprintf(", shadow %s (%s)", d.Shadow, d.ShadowWhy)
	}
	if _, err := fmt.Fprintf(p.w, "    policy %s, mode %s, basis %s, reason %s%s\n", d.Policy, d.Mode, d.Basis, d.Reason, shadow); err != nil {
		return err
	}
	rows := make([][]string, 0, len(d.Candidates))
	for _, c := range d.Candidates {
		chosen := ""
		if c.Engine == d.Engine {
			chosen = "*"
		}
		var parts []string
		for _, k := range slices.Sorted(maps.Keys(c.Parts)) {
			parts = append(parts, k+"="+strconv.FormatFloat(c.Parts[k], 'g', 4, 64))
		}
		rows = append(rows, []string{"   " + chosen, c.Engine, dash(c.Filter), strconv.FormatFloat(c.Score, 'g', 5, 64), dash(strings.Join(parts, " "))})
	}
	return p.table([]string{"    ", "CANDIDATE", "FILTER", ">SCORE", "PARTS"}, rows)
}
