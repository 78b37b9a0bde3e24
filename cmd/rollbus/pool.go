package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// PoolCmd makes and configures pools.
type PoolCmd struct {
	Init PoolInit `cmd:"" help:"Make what is missing of a pool's streams and buckets, with the recommended settings."`
	Get  PoolGet  `cmd:"" help:"Print the settings."`
	Set  PoolSet  `cmd:"" help:"Change settings; one bad value refuses all."`
}

// Help shows examples.
func (PoolCmd) Help() string {
	return `Examples:
  rollbus pool init --pool math --replicas 3
  rollbus pool get --pool math -o wide       with every knob, its unit, default and bounds
  rollbus pool set --pool math max_attempts=5 deadline=2h job_weights.eval=2 knobs.escape_ratio=4`
}

// layoutFlags are how streams are made, for whoever comes first.
type layoutFlags struct {
	Replicas int    `default:"1" help:"Copies of everything; 3 in production. Counts only for what does not exist yet." placeholder:"N"`
	Storage  string `default:"file" enum:"file,memory" help:"Where NATS keeps it: file or memory. Counts only for what does not exist yet."`
}

func (f layoutFlags) layout(record bool) subjects.Layout {
	l := subjects.Layout{Replicas: f.Replicas, Record: record}
	if f.Storage == "memory" {
		l.Storage = jetstream.MemoryStorage
	}
	return l
}

// recommended are the settings that up, demo and pool init write.
func recommended() subjects.Settings {
	s := policy.Recommended()
	s.SchemaVersion, s.Record = subjects.SchemaVersion, true
	return s
}

// PoolInit makes a pool.
type PoolInit struct {
	layoutFlags
}

// Run makes it, and prints the settings.
func (c PoolInit) Run(a *app) error {
	return a.lookingAnywhere(func(l *look) error {
		settings := recommended()
		if err := subjects.Ensure(l.ctx, l.js, l.pool, c.layout(settings.Record)); err != nil {
			return err
		}
		if _, err := l.s.PutSettings(l.ctx, settings, 0); err != nil && !errors.Is(err, kvstate.ErrConflict) {
			return fmt.Errorf("write the settings of pool %s: %w", l.pool, err)
		}
		a.say("pool %s is there", l.pool)
		return printSettings(l)
	})
}

// PoolGet prints settings.
type PoolGet struct{}

// Run prints them.
func (PoolGet) Run(a *app) error { return a.looking(printSettings) }

func printSettings(l *look) error {
	s, rev, err := l.s.Settings(l.ctx)
	if errors.Is(err, kvstate.ErrGone) {
		return coded(exitNotFound, "pool %s has no settings: `rollbus pool init --pool %s` writes the recommended ones", l.pool, l.pool)
	}
	if err != nil {
		return err
	}
	full := s.WithDefaults()
	return l.a.printer().one(full, func() error {
		rows, err := flatten(full)
		if err != nil {
			return err
		}
		pairs := []string{"pool", l.pool.String(), "revision", strconv.FormatUint(rev, 10)}
		for _, r := range rows {
			pairs = append(pairs, r[0], r[1])
		}
		if err := l.a.printer().fields(pairs...); err != nil || l.a.opts.Output != formatWide {
			return err
		}
		return printKnobs(l.a, full)
	})
}

// printKnobs prints the table of knobs beside what the pool says.
func printKnobs(a *app, s subjects.Settings) error {
	fmt.Fprintln(a.stdout)
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	return list(a.printer(), []string{"KNOB", ">VALUE", ">DEFAULT", ">MIN", ">MAX", "UNIT", "POLICY", "MEANING"}, policy.Knobs(), func(k policy.Knob) []string {
		v, given := s.Knobs[k.Name]
		if !given {
			v = k.Default
		}
		reads := k.Policy
		if reads == "" {
			reads = "all"
		}
		return []string{"knobs." + k.Name, number(v), number(k.Default), number(k.Min), number(k.Max), k.Unit, reads, k.Doc}
	})
}

// flatten lists settings as the keys that set takes.
func flatten(s subjects.Settings) ([][2]string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	var m map[string]any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	var rows [][2]string
	for k, v := range m {
		if inner, ok := v.(map[string]any); ok {
			for k2, v2 := range inner {
				rows = append(rows, [2]string{k + "." + k2, fmt.Sprint(v2)})
			}
			continue
		}
		rows = append(rows, [2]string{k, fmt.Sprint(v)})
	}
	slices.SortFunc(rows, func(a, b [2]string) int { return strings.Compare(a[0], b[0]) })
	return rows, nil
}

// PoolSet changes settings.
type PoolSet struct {
	Change []string `arg:"" name:"key=value" help:"Setting and value; an empty value is the default again."`
}

// Run changes them.
func (c PoolSet) Run(a *app) error {
	return a.looking(func(l *look) error {
		for {
			s, rev, err := l.s.Settings(l.ctx)
			if err != nil && !errors.Is(err, kvstate.ErrGone) {
				return err
			}
			next, err := change(s, c.Change)
			if err != nil {
				return coded(exitUsage, "pool set: %w (nothing was changed)", err)
			}
			_, err = l.s.PutSettings(l.ctx, next, rev)
			if errors.Is(err, kvstate.ErrConflict) && l.ctx.Err() == nil {
				continue // somebody else changed them: change theirs
			}
			if err != nil {
				return fmt.Errorf("write the settings of pool %s: %w", l.pool, err)
			}
			return printSettings(l)
		}
	})
}

// change applies key=value pairs; all that is wrong comes in one error.
func change(s subjects.Settings, pairs []string) (subjects.Settings, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return s, err
	}
	doc := map[string]any{}
	if err := json.Unmarshal(b, &doc); err != nil {
		return s, err
	}
	known := settingKeys()
	var errs []error
	for _, p := range pairs {
		key, value, ok := strings.Cut(p, "=")
		if !ok {
			errs = append(errs, fmt.Errorf("%q: give key=value", p))
			continue
		}
		at, full := doc, key
		outer, inner, nested := strings.Cut(key, ".")
		if !slices.Contains(known, outer) {
			errs = append(errs, fmt.Errorf("%s: no such setting; there are %s", outer, strings.Join(known, ", ")))
			continue
		}
		if nested {
			m, ok := doc[outer].(map[string]any)
			if !ok && settingType(outer).Kind() != reflect.Map {
				errs = append(errs, fmt.Errorf("%s: %s has no parts: give %s=value", key, outer, outer))
				continue
			}
			if !ok {
				m = map[string]any{}
				doc[outer] = m
			}
			at, key = m, inner
		}
		if value == "" {
			delete(at, key)
			continue
		}
		v, err := settingValue(outer, inner, value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s is %.80q: %w", full, value, err))
			continue
		}
		at[key] = v
	}
	if len(errs) > 0 {
		return s, errors.Join(errs...)
	}
	if b, err = json.Marshal(doc); err != nil {
		return s, err
	}
	var next subjects.Settings
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&next); err != nil {
		if t, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			err = fmt.Errorf("%s: got a %s, want a %s", t.Field, t.Value, t.Type)
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		if _, err := policy.Resolve(next); err != nil {
			// What dispatchers would refuse is not written.
			errs = append(errs, errors.New(strings.TrimPrefix(err.Error(), policy.ErrSettings.Error()+": ")))
		}
	}
	return next, errors.Join(errs...)
}

// settingValue reads a value as the type of its setting; an error tells what is
// accepted. Bounds are for Validate and the policies to tell.
func settingValue(outer, inner, value string) (any, error) {
	t := settingType(outer)
	if inner != "" {
		t = t.Elem() // both maps are of numbers
	}
	v := reflect.New(t)
	switch {
	case t == reflect.TypeFor[subjects.Duration]():
		if json.Unmarshal([]byte(value), v.Interface()) != nil {
			d, err := time.ParseDuration(value)
			if err != nil {
				return nil, errors.New("give a duration such as 90s or 6h, or a number of seconds")
			}
			v.Elem().SetInt(int64(d))
		}
	case t.Kind() == reflect.String:
		if json.Unmarshal([]byte(value), v.Interface()) != nil {
			return value, nil // a bare word
		}
	case json.Unmarshal([]byte(value), v.Interface()) == nil:
	case t.Kind() == reflect.Int:
		return nil, errors.New("give a whole number")
	case t.Kind() == reflect.Bool:
		return nil, errors.New("give true or false")
	case t.Kind() == reflect.Float64:
		for _, k := range policy.Knobs() {
			if outer == "knobs" && k.Name == inner {
				return nil, fmt.Errorf("give a number from %v to %v (%s)", k.Min, k.Max, k.Unit)
			}
		}
		return nil, errors.New("give a number")
	case t.Kind() == reflect.Map:
		return nil, fmt.Errorf("give a JSON object of numbers, or one of them as %s.name=number", outer)
	default:
		return nil, errors.New("give it as JSON")
	}
	return v.Interface(), nil
}

// settingType is the type behind a key of settingKeys.
func settingType(key string) reflect.Type {
	t := reflect.TypeFor[subjects.Settings]()
	for i := range t.NumField() {
		if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name == key {
			return t.Field(i).Type
		}
	}
	return reflect.TypeFor[any]()
}

func settingKeys() []string {
	t := reflect.TypeFor[subjects.Settings]()
	keys := make([]string, 0, t.NumField())
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		keys = append(keys, name)
	}
	return keys
}
