package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
)

// span is a part of a recording.
type span struct {
	From  string `help:"Start there: RFC 3339, or how long ago, as 10m." placeholder:"TIME"`
	Until string `help:"End there: RFC 3339, or how long ago." placeholder:"TIME"`
}

// bounds are the span in unix ns, 0 = open.
func (s span) bounds() (from, until int64, err error) {
	if from, err = timeFlag("--from", s.From); err != nil {
		return 0, 0, err
	}
	if until, err = timeFlag("--until", s.Until); err != nil {
		return 0, 0, err
	}
	if from > 0 && until > 0 && from >= until {
		return 0, 0, coded(exitUsage, "--from %s is not before --until %s", s.From, s.Until)
	}
	return from, until, nil
}

func timeFlag(name, v string) (int64, error) {
	if v == "" {
		return 0, nil
	}
	if d, err := time.ParseDuration(strings.TrimPrefix(v, "-")); err == nil {
		return time.Now().Add(-d).UnixNano(), nil
	}
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		return 0, coded(exitUsage, "%s %q: give RFC 3339, as 2026-11-29T12:00:00Z, or how long ago, as 10m", name, v)
	}
	return t.UnixNano(), nil
}

func (s span) options() (o journal.ReplayOptions, err error) {
	o.From, o.Until, err = s.bounds()
	return o, err
}

// stopped is the step at which --break held.
type stopped struct {
	Dispatcher string            `json:"dispatcher"`
	Event      uint64            `json:"event"`
	AtS        float64           `json:"at_s"`
	At         string            `json:"at,omitempty"` // on the NATS server's clock
	Type       string            `json:"type"`
	Body       core.Event        `json:"body"`
	Recorded   []core.Decision   `json:"recorded_decisions"`
	Replayed   []core.Decision   `json:"replayed_decisions"`
	Effects    []journal.Effect  `json:"effects"`
	State      *core.StateAround `json:"state"`
}

// showBreak prints the first step of each journal at which the expression holds.
func showBreak(a *app, journals []*journal.Journal, o journal.ReplayOptions, brk journal.Break) error {
	var found []stopped
	o.Explain = true
	for _, j := range journals {
		o.Step = func(s *journal.Step, effects []core.Effect) error {
			if err := a.ctx.Err(); err != nil {
				return err
			}
			if !brk.Hit(s, effects) {
				return nil
			}
			x := stopped{j.Dispatcher, s.N, s.Now.Seconds(), "", journal.Name(s.Event), s.Event, s.Decisions,
				journal.Decisions(effects), journal.Effects(effects), s.Around()}
			if s.Server > 0 {
				x.At = time.Unix(0, s.Server).UTC().Format(time.RFC3339Nano)
			}
			found = append(found, x)
			return journal.ErrStop
		}
		o.GoOn = true
		if rep, err := journal.Replay(j, o); err != nil {
			return err
		} else if rep.Incomplete != "" {
			a.say("rollbus: %s", rep.Incomplete)
		}
	}
	if len(found) == 0 {
		return coded(exitNotFound, "no event holds --break")
	}
	p := a.printer()
	if p.format == formatJSON {
		return p.json(found)
	}
	for i := range found {
		x := &found[i]
		if err := p.one(x, func() error { return printStopped(p, x) }); err != nil {
			return err
		}
	}
	return nil
}

func printStopped(p printer, x *stopped) error {
	fmt.Fprintf(p.w, "%s stands before event %d's effects\n", x.Dispatcher, x.Event)
	if err := printEvent(p, x.Event, x.AtS, x.Type, x.Body); err != nil {
		return err
	}
	for i := range x.Replayed {
		if err := printMade(p, "decided", &x.Replayed[i]); err != nil {
			return err
		}
	}
	for _, e := range x.Effects {
		if e.Type != "Decision" {
			b, _ := json.Marshal(e.Body) // an effect that cannot be shown is shown by its type
			fmt.Fprintf(p.w, "effect %s %s\n", e.Type, b)
		}
	}
	return printState(p, x.State)
}

func printEvent(p printer, n uint64, atS float64, typ string, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(p.w, "event %d at %.3f s: %s %s\n", n, atS, typ, b)
	return err
}

func printMade(p printer, how string, d *core.Decision) error {
	to := d.Engine
	if to == "" {
		to = "nowhere"
	}
	fmt.Fprintf(p.w, "%s: %s bind %d to %s, %d tokens\n", how, d.Rollout, d.Bind, to, d.Tokens)
	return printDecision(p, d)
}

// printDifference shows the event, both decisions and the state around.
func printDifference(p printer, d *journal.Difference) error {
	if err := printEvent(p, d.Event, d.AtS, d.Type, d.Body); err != nil {
		return err
	}
	for i := range d.Recorded {
		if err := printMade(p, "recorded", &d.Recorded[i]); err != nil {
			return err
		}
	}
	for i := range d.Replayed {
		if err := printMade(p, "replayed", &d.Replayed[i]); err != nil {
			return err
		}
	}
	return printState(p, d.State)
}

func printState(p printer, s *core.StateAround) error {
	if s == nil {
		return nil
	}
	fmt.Fprintf(p.w, "state: %d in hand, %d of them without a place, room for %d more; policy %s, mode %s, settings %d; live dispatchers %s\n",
		s.InHand, s.Waiting, s.Headroom, s.Policy, s.Mode, s.Settings, strings.Join(s.Live, " "))
	rows := make([][]string, 0, len(s.Engines))
	for _, e := range s.Engines {
		rows = append(rows, []string{e.Engine, e.State, e.Epoch, number(e.Slots), number(e.Requests), strconv.FormatInt(e.Tokens, 10), strconv.FormatUint(e.Seq, 10), e.Load, yesNo(e.Trusted)})
	}
	return p.table([]string{"ENGINE", "STATE", "EPOCH", ">SLOTS", ">RESERVED", ">TOKENS", ">SEQUENCE", "LOAD", "CACHE KNOWN"}, rows)
}

func yesNo(v bool) string {
	if v {
		return "yes"
	}
	return "no"
}
