package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// GetDecisions lists decisions.
type GetDecisions struct {
	Watch bool          `short:"W" help:"Print decisions as they are made, until interrupted."`
	Count int           `short:"c" help:"End after this many; 0 = no limit." placeholder:"N"`
	Since time.Duration `default:"10m" help:"How far back to look, without --watch." placeholder:"DURATION"`
	Job   string        `short:"j" help:"Only this job's." placeholder:"NAME"`
}

// Help shows examples.
func (GetDecisions) Help() string {
	return `Examples:
  rollbus get decisions --since 1m
  rollbus get decisions --watch -o jsonl
Those of the past are kept while the pool's setting record is on; --watch needs nothing kept.`
}

// decisionLine is a decision as dispatchers publish it.
type decisionLine struct {
	core.Decision
	Dispatcher string `json:"dispatcher"`
	AtNS       int64  `json:"at_ns,omitempty"` // NATS server's clock

	Transition *core.Transition `json:"transition,omitempty"` // of owners or seeds: no decision
}

var decisionHead = []string{"AT", "ROLLOUT", "ENGINE", "REASON", "POLICY", "MODE", ">CANDIDATES", "DISPATCHER", "+BASIS", "+SHADOW"}

func (d *decisionLine) row() []string {
	at := "-"
	if d.AtNS > 0 {
		at = time.Unix(0, d.AtNS).UTC().Format("15:04:05.000")
	}
	return []string{at, d.Rollout, dash(d.Engine), dash(d.Reason), dash(d.Policy), dash(d.Mode), number(len(d.Candidates)), dash(d.Dispatcher), dash(d.Basis), dash(d.Shadow)}
}

// read tells whether a message is a decision that was asked for.
func (c GetDecisions) read(b []byte) (*decisionLine, bool) {
	var d decisionLine
	if json.Unmarshal(b, &d) != nil || d.Transition != nil || c.Job != "" && !strings.HasPrefix(d.Rollout, c.Job+".") {
		return nil, false
	}
	return &d, true
}

// Run lists or follows them.
func (c GetDecisions) Run(a *app) error {
	if c.Watch {
		return c.follow(a)
	}
	return a.looking(func(l *look) error {
		rows, err := c.recorded(l)
		if err != nil {
			return err
		}
		return list(a.printer(), decisionHead, rows, (*decisionLine).row)
	})
}

// recorded reads RECORD, the latest last.
func (c GetDecisions) recorded(l *look) ([]*decisionLine, error) {
	// The stream's clock is the server's; a minute more forgives a clock here that is ahead.
	from := time.Now().Add(-c.Since)
	cons, err := l.js.OrderedConsumer(l.ctx, l.pool.Record(), jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{l.pool.Decision()}, DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &from,
	})
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, coded(exitNotFound, "pool %s keeps no decisions: `rollbus pool set record=true` keeps those to come, --watch shows them as they are made", l.pool)
	}
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", l.pool.Record(), err)
	}
	var out []*decisionLine
	for pending := cons.CachedInfo().NumPending; pending > 0; {
		m, err := cons.Next(jetstream.FetchContext(l.ctx))
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", l.pool.Record(), err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", l.pool.Record(), err)
		}
		pending = meta.NumPending
		if d, ok := c.read(m.Data()); ok {
			if out = append(out, d); c.Count > 0 && len(out) > c.Count {
				out = out[1:]
			}
		}
	}
	return out, nil
}

func (c GetDecisions) follow(a *app) error {
	pool, err := a.pool()
	if err != nil {
		return err
	}
	nc, err := a.connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	defer a.untilInterrupted()()
	lines := make(chan *decisionLine, tapPending)
	if _, err := nc.Subscribe(pool.Decision(), func(m *nats.Msg) {
		if d, ok := c.read(m.Data); ok {
			select {
			case lines <- d:
			default: // the terminal is slow: skip rather than grow
			}
		}
	}); err != nil {
		return fmt.Errorf("listen to %s: %w", pool.Decision(), err)
	}
	a.say("listening to decisions of pool %s", pool)
	p := a.printer()
	for n := 0; c.Count == 0 || n < c.Count; n++ {
		select {
		case <-a.ctx.Done():
			return nil
		case d := <-lines:
			if err := p.each(d, func() error {
				_, rows := p.shown(decisionHead, [][]string{d.row()})
				_, err := fmt.Fprintln(p.w, strings.Join(rows[0], "  "))
				return err
			}); err != nil {
				return err
			}
		}
	}
	return nil
}
