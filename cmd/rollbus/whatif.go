package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/rollbus/rollbus/bench/whatif"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// WhatIf asks what recorded traffic would have met.
type WhatIf struct {
	journalSource
	span
	Policy   string   `help:"Another policy, in enforce." placeholder:"NAME"`
	Set      []string `help:"Other settings, as pool set takes them." placeholder:"KEY=VALUE"`
	Engines  string   `help:"Engines more or less, as +2 or -1, or how many." placeholder:"N"`
	Arrivals string   `enum:"open,closed" default:"open" help:"open: everything comes when it came. closed: turns wait for the answers before them, training steps for the steps."`
	Seeds    int      `default:"3" help:"Runs of the model for each arm." placeholder:"N"`
	Picture  string   `type:"path" help:"Write the figures as one SVG." placeholder:"FILE"`
}

// Help shows examples.
func (WhatIf) Help() string {
	return `Examples:
  rollbus what-if --policy projected_time
  rollbus what-if --file math.bundle --set knobs.escape_ratio=5 --engines +2 --arrivals closed --picture what-if.svg
  rollbus what-if --from 2h --until 1h --policy kv_tokens -o json
The recorded rollouts are released again into a pool in virtual time: the production core, and an engine model that is fitted to the
recorded run. Each figure is recorded or modelled, and says how far off the model is. What another policy would have decided on the
very state of each recorded decision is shown too; that needs no model.`
}

// Run asks.
func (c *WhatIf) Run(a *app) error {
	from, until, err := c.bounds()
	if err != nil {
		return err
	}
	if c.Seeds < 1 || c.Seeds > 50 {
		return coded(exitUsage, "--seeds %d: give 1 to 50", c.Seeds)
	}
	journals, _, err := c.readTold(a, from, until)
	if err != nil {
		return err
	}
	t, err := whatif.Extract(journals, from, until)
	if errors.Is(err, whatif.ErrEmpty) {
		return coded(exitNotFound, "%w", err)
	}
	if err != nil {
		return coded(exitNo, "%w", err)
	}
	q := whatif.Question{Closed: c.Arrivals == "closed", Seeds: c.Seeds, Progress: func(done, total int, what string) {
		a.say("%d of %d: %s", done+1, total, what)
	}}
	s, err := c.settings(t.Settings)
	if err != nil {
		return err
	}
	q.Settings = &s
	if q.Engines, err = moreEngines(c.Engines, len(t.Engines)); err != nil {
		return err
	}
	answer, err := whatif.Run(a.ctx, t, q)
	if err != nil {
		return coded(exitNo, "what-if: %w", err)
	}
	if answer.Beside, err = whatif.Beside(journals, s, from, until); err != nil {
		return coded(exitNo, "what-if: %w", err)
	}
	if c.Picture != "" {
		if err := os.WriteFile(c.Picture, []byte(answer.Picture()), 0o600); err != nil {
			return coded(exitUsage, "--picture: %w", err)
		}
	}
	p := a.printer()
	return p.one(answer, func() error { return printWhatIf(p, answer) })
}

// settings are the recorded ones with what was asked for.
func (c *WhatIf) settings(s subjects.Settings) (subjects.Settings, error) {
	pairs := c.Set
	if c.Policy != "" {
		pairs = append([]string{"policy=" + c.Policy, "mode=" + subjects.ModeEnforce}, pairs...)
	}
	s, err := change(s, pairs)
	if err != nil {
		return s, coded(exitUsage, "what-if: %w", err)
	}
	if _, err := policy.Resolve(s); err != nil {
		return s, coded(exitUsage, "what-if: %w", err)
	}
	return s, nil
}

func moreEngines(v string, recorded int) (int, error) {
	if v == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		return 0, coded(exitUsage, "--engines %q: give +N, -N or a number", v)
	}
	if v[0] != '+' && v[0] != '-' {
		n -= recorded
	}
	if recorded+n < 1 || n > 10_000 {
		return 0, coded(exitUsage, "--engines %s: %d were recorded, that leaves %d", v, recorded, recorded+n)
	}
	return n, nil
}

// figure prints a number with four digits.
func figure(v float64) string {
	if v != 0 && math.Abs(v) < 1e-4 {
		return "0.0000"
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

func printWhatIf(p printer, a *whatif.Answer) error {
	fmt.Fprintf(p.w, "%d rollouts in %.1f s, %s loop; %s on %d engines against %s on %d (%s)\n", a.Rollouts, a.Span, a.Loop,
		a.Policy, a.Engines, a.OtherPolicy, a.OtherEngines, dash(strings.Join(a.Changed, ", ")))
	fmt.Fprintf(p.w, "the engine model was fitted to the recorded run; +- is how far off it is, over %d runs\n\n", a.Seeds)
	rows := make([][]string, 0, len(a.Figures))
	for _, f := range a.Figures {
		was := "not known"
		if f.Recorded != nil {
			was = figure(*f.Recorded)
		}
		rows = append(rows, []string{f.Key, was, figure(f.Same), "+- " + figure(f.Error), figure(f.Other), fmt.Sprintf("%+.1f %%", 100*f.Relative), f.Verdict, f.Unit, f.What})
	}
	if err := p.table([]string{"FIGURE", ">RECORDED", ">MODELLED SAME", ">ERROR", ">MODELLED OTHER", ">CHANGE", "VERDICT", "+UNIT", "+WHAT"}, rows); err != nil {
		return err
	}
	if b := a.Beside; b != nil {
		fmt.Fprintf(p.w, "\n%d of %d decisions would have been another on the recorded state:\n", b.Changed, b.Decisions)
		rows = rows[:0]
		for _, r := range b.By {
			rows = append(rows, []string{r.Recorded, r.Other, number(r.Changed), number(r.Decisions), dash(strings.Join(r.Examples, " "))})
		}
		if err := p.table([]string{"RECORDED REASON", "OTHER REASON", ">CHANGED", ">OF", "AS"}, rows); err != nil {
			return err
		}
	}
	fmt.Fprintf(p.w, "\nrollouts that another engine serves in the model, by the other policy's reason (under the same policy %d of %d move):\n", a.MovedSame, a.Rollouts)
	rows = rows[:0]
	for _, m := range a.Moved {
		rows = append(rows, []string{m.Reason, number(m.Rollouts), number(m.Of)})
	}
	if err := p.table([]string{"REASON", ">MOVED", ">OF"}, rows); err != nil {
		return err
	}
	for _, n := range a.Notes {
		fmt.Fprintf(p.w, "note: %s\n", n)
	}
	return nil
}
