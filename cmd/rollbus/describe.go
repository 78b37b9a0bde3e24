package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Describe tells everything about one thing.
type Describe struct {
	Engine  DescribeEngine  `cmd:"" help:"One engine: registration, load, what it runs."`
	Rollout DescribeRollout `cmd:"" help:"One rollout: where it stands, and its answer."`
}

// Help shows examples.
func (Describe) Help() string {
	return "Examples:\n  rollbus describe engine e1\n  rollbus describe rollout math.0001"
}

// DescribeEngine tells everything about an engine.
type DescribeEngine struct {
	Name string `arg:"" help:"Engine."`
}

type engineStory struct {
	*engineRow
	Load     *subjects.Load `json:"load"` // null: none came within a second
	Rollouts []rolloutRow   `json:"rollouts"`
}

// loadWait is how long describe listens for a load snapshot; agents send several a second.
const loadWait = time.Second

// Run tells it.
func (c DescribeEngine) Run(a *app) error {
	if err := subjects.CheckToken("engine", c.Name); err != nil {
		return err
	}
	return a.looking(func(l *look) error {
		sub, err := l.js.Conn().SubscribeSync(l.pool.Load(c.Name))
		if err != nil {
			return fmt.Errorf("listen for load: %w", err)
		}
		rows, err := l.engines()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(rows, func(e *engineRow) bool { return e.Engine.Engine == c.Name })
		if i < 0 {
			return coded(exitNotFound, "no engine %s in pool %s: `rollbus get engines` lists them", c.Name, l.pool)
		}
		story := engineStory{engineRow: rows[i]}
		held, err := l.reservations(c.Name)
		if err != nil {
			return err
		}
		for _, h := range held {
			story.Rollouts = append(story.Rollouts, rolloutRow{Job: h.Job, ID: h.ID, State: string(h.State), Lane: h.Lane, Engine: h.Engine,
				Bind: h.Bind, Tokens: h.Tokens, Reason: h.Reason, Seq: h.Revision, Stored: h.Stored, LeftMS: h.LeftMS, Tried: h.Tried})
		}
		if m, err := sub.NextMsg(loadWait); err == nil {
			var load subjects.Load
			if json.Unmarshal(m.Data, &load) == nil {
				story.Load = &load
			}
		}
		return a.printer().one(story, func() error { return story.print(a) })
	})
}

func (s *engineStory) print(a *app) error {
	p := a.printer()
	e := s.engineRow
	opt := func(v *int64) string {
		if v == nil {
			return "unknown"
		}
		return strconv.FormatInt(*v, 10)
	}
	if err := p.fields("engine", e.Engine.Engine, "state", stated(e), "kind", dash(e.Kind), "model", dash(e.Model),
		"loras", dash(strings.Join(e.LoRAs, ", ")), "agent", dash(e.Agent), "epoch", dash(e.Epoch),
		"slots", strconv.Itoa(e.Slots), "ranks", strconv.Itoa(e.Ranks),
		"capacity", opt(e.CapacityTokens)+" tokens ("+dash(e.CapacitySource)+")", "weights", opt(e.WeightVersion),
		"events", dash(e.Events), "bound", strconv.Itoa(e.Bound), "reserved", strconv.FormatInt(e.ReservedTokens, 10)+" tokens",
		"load", s.load()); err != nil {
		return err
	}
	if len(s.Rollouts) == 0 {
		return nil
	}
	fmt.Fprintln(a.stdout)
	return list(p, []string{"ROLLOUT", "STATE", ">BIND", ">TOKENS", "REASON"}, s.Rollouts, func(r rolloutRow) []string {
		return []string{subjects.RolloutKey(r.Job, r.ID), r.State, number(r.Bind), number(r.Tokens), dash(r.Reason)}
	})
}

// stated is an engine's state and its cause.
func stated(e *engineRow) string {
	if e.Cause == "" {
		return string(e.State)
	}
	return string(e.State) + ": " + e.Cause
}

func (s *engineStory) load() string {
	if s.Load == nil {
		return fmt.Sprintf("none came within %v", loadWait)
	}
	parts := make([]string, 0, len(s.Load.Ranks))
	for _, r := range s.Load.Ranks {
		n := func(v *int) string {
			if v == nil {
				return "?"
			}
			return strconv.Itoa(*v)
		}
		parts = append(parts, fmt.Sprintf("rank %d: %s running, %s waiting", r.Rank, n(r.Running), n(r.Waiting)))
	}
	text := strings.Join(parts, "; ") + " (" + s.Load.Source + ")"
	if s.Load.Problem != "" {
		text += ", does not count: " + s.Load.Problem
	}
	return text
}

// DescribeRollout tells everything about a rollout.
type DescribeRollout struct {
	Name  string `arg:"" help:"<job>.<id>"`
	Limit int    `default:"10000" help:"Look at so many queued ones of the job at most." placeholder:"N"`
}

type rolloutStory struct {
	Job    string           `json:"job"`
	ID     string           `json:"id"`
	Places []rolloutRow     `json:"places"` // every place where it stands, more than one during a hand-over
	Dead   []string         `json:"dead,omitempty"`
	Result *subjects.Result `json:"result,omitempty"`
}

// Run tells it.
func (c DescribeRollout) Run(a *app) error {
	job, id, ok := subjects.SplitRolloutKey(c.Name)
	if !ok {
		return coded(exitUsage, "%q is no rollout: give <job>.<id>", c.Name)
	}
	for _, f := range [][2]string{{"job", job}, {"id", id}} {
		if err := subjects.CheckToken(f[0], f[1]); err != nil {
			return err
		}
	}
	return a.looking(func(l *look) error {
		story := rolloutStory{Job: job, ID: id, Places: []rolloutRow{}}
		rows, cut, err := GetRollouts{Job: job, Limit: c.Limit}.find(l)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if r.ID != id {
				continue
			}
			story.Places = append(story.Places, r)
			if r.State != "answered" {
				continue
			}
			found, err := l.s.Result(l.ctx, job, r.reader, id)
			if err == nil && len(found.Body) > 0 {
				story.Result, _ = subjects.DecodeResult(found.Body) // shown when it can be read
			}
		}
		for m, err := range latest(l.ctx, l.js, l.pool.Dead(), l.pool.DeadSubject(job), true) {
			if err != nil {
				return err
			}
			if key, _, _ := strings.Cut(m.Headers().Get(subjects.HdrMsgID), "#"); key == c.Name {
				story.Dead = append(story.Dead, m.Headers().Get(subjects.HdrError))
			}
		}
		if len(story.Places) == 0 && len(story.Dead) == 0 {
			hint := "it was never accepted, or its answer was received"
			if cut {
				hint = fmt.Sprintf("or it stands behind the oldest %d queued ones, --limit looks at more", c.Limit)
			}
			return coded(exitNotFound, "no rollout %s in pool %s: %s", c.Name, l.pool, hint)
		}
		return a.printer().one(story, func() error { return story.print(a) })
	})
}

func (s *rolloutStory) print(a *app) error {
	p := a.printer()
	for _, r := range s.Places {
		pairs := []string{"rollout", subjects.RolloutKey(s.Job, s.ID), "state", r.State, "stored", r.Stored.UTC().Format(time.RFC3339Nano) + " at sequence " + strconv.FormatUint(r.Seq, 10)}
		for _, f := range [][2]string{{"lane", string(r.Lane)}, {"engine", r.Engine}, {"bind", number(r.Bind)}, {"reserved", number(r.Tokens)},
			{"status", string(r.Status)}, {"reason", r.Reason}, {"tried", strings.Join(r.Tried, ", ")}} {
			if f[1] != "" && f[1] != "-" {
				pairs = append(pairs, f[0], f[1])
			}
		}
		if r.LeftMS > 0 {
			pairs = append(pairs, "deadline", (time.Duration(r.LeftMS)*time.Millisecond).String()+" after it was stored here")
		}
		if err := p.fields(pairs...); err != nil {
			return err
		}
	}
	for _, d := range s.Dead {
		if err := p.fields("dead", d); err != nil {
			return err
		}
	}
	if s.Result != nil {
		fmt.Fprintln(a.stdout)
		return p.json(s.Result)
	}
	return nil
}
