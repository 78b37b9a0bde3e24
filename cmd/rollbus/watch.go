package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// watchFlags let a list go on.
type watchFlags struct {
	Watch    bool          `short:"W" help:"Go on, printing what changes, until interrupted."`
	Interval time.Duration `default:"2s" help:"How often --watch looks." placeholder:"DURATION"`
}

// leastInterval keeps a watch from being a load.
const leastInterval = 100 * time.Millisecond

// listing prints what load finds; with --watch it goes on and prints what is
// new, changed or gone since the last look.
func listing[T any](a *app, w watchFlags, head []string, load func(*look) ([]T, error), row func(T) []string) error {
	p := a.printer()
	if !w.Watch {
		return a.looking(func(l *look) error {
			rows, err := load(l)
			if err != nil {
				return err
			}
			return list(p, head, rows, row)
		})
	}
	if w.Interval < leastInterval {
		return coded(exitUsage, "--interval is %v: give at least %v", w.Interval, leastInterval)
	}
	seen := &watched[T]{p: p, head: head, row: row}
	return a.lookingOn(w.Interval, func(l *look) error {
		rows, err := load(l)
		if err != nil {
			return err
		}
		return seen.show(rows)
	})
}

// lookingOn is looking again and again, until the command is interrupted. The
// first look must work; later ones may fail, which is said once.
func (a *app) lookingOn(every time.Duration, f func(*look) error) error {
	s, done, err := a.store()
	if err != nil {
		return err
	}
	defer done()
	defer a.untilInterrupted()()
	tick := time.NewTicker(every)
	defer tick.Stop()
	pool, err := a.pool()
	if err != nil {
		return err
	}
	once := func() error {
		ctx, cancel := a.within()
		defer cancel()
		l := &look{ctx: ctx, a: a, pool: pool, s: s, js: s.JS()}
		if err := a.exists(ctx, l.js, pool); err != nil {
			return err
		}
		if err := f(l); err == nil || ctx.Err() == nil || a.ctx.Err() != nil {
			return a.noPool(err)
		}
		return context.Cause(ctx)
	}
	for first, failing := true, false; ; first = false {
		err := once()
		switch {
		case a.ctx.Err() != nil:
			return nil
		case err != nil && first:
			return err
		case err != nil && !failing:
			a.say("rollbus: %v (trying again)", err)
		}
		failing = err != nil
		select {
		case <-a.ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// untilInterrupted lets a signal end a command that only looks in an orderly
// way, with exit code 0: being interrupted is how it ends.
func (a *app) untilInterrupted() (done func()) {
	ctx, stop := signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
	a.ctx = ctx
	return stop
}

// watched remembers what was printed last.
type watched[T any] struct {
	p     printer
	head  []string
	row   func(T) []string
	print map[string]string // key -> what it looked like
	begun bool
}

// volatile are members that change without telling anything.
var volatile = []string{"renewed"}

func fingerprint(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(b, &m); err != nil {
		return "", err
	}
	for _, name := range volatile {
		delete(m, name)
	}
	b, err = json.Marshal(m)
	return string(b), err
}

// show prints what differs from the last call: whole rows, and "gone".
func (w *watched[T]) show(values []T) error {
	now := make(map[string]string, len(values))
	var changed []T
	for _, v := range values {
		key := w.row(v)[0]
		mark, err := fingerprint(v)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		now[key] += mark // a rollout may stand in two places during a hand-over
		if !strings.Contains(w.print[key], mark) {
			changed = append(changed, v)
		}
	}
	var gone []string
	for key := range w.print {
		if _, there := now[key]; !there {
			gone = append(gone, key)
		}
	}
	w.print = now
	if w.p.format == formatJSON || w.p.format == formatJSONL {
		for _, v := range changed {
			if err := w.p.line(v); err != nil {
				return err
			}
		}
		for _, key := range gone {
			if err := w.p.line(map[string]string{"gone": key}); err != nil {
				return err
			}
		}
		return nil
	}
	rows := make([][]string, 0, len(changed))
	for _, v := range changed {
		rows = append(rows, w.row(v))
	}
	for _, key := range gone {
		cells := make([]string, len(w.head))
		cells[0], cells[1] = key, "gone"
		rows = append(rows, cells)
	}
	if len(rows) == 0 && w.begun {
		return nil
	}
	w.begun = true
	return w.p.table(w.head, rows)
}
