package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Get lists things of a pool.
type Get struct {
	Engines     GetEngines     `cmd:"" aliases:"engine" help:"Engines: state, slots, what is reserved on them."`
	Rollouts    GetRollouts    `cmd:"" aliases:"rollout" help:"Rollouts: queued, bound or answered, where and since when."`
	Dispatchers GetDispatchers `cmd:"" aliases:"dispatcher" help:"Dispatchers that live."`
	Jobs        GetJobs        `cmd:"" aliases:"job" help:"Jobs: what waits, runs and is answered."`
	Decisions   GetDecisions   `cmd:"" aliases:"decision" help:"Decisions: which engine for which rollout, and why."`
	Owners      GetOwners      `cmd:"" aliases:"owner" help:"Owners: which engines hold which beginning of prompts, and what part of the pool it can use."`
	Seeds       GetSeeds       `cmd:"" aliases:"seed" help:"Seeds: which engines are being added to the owners of a key."`
}

// Help shows examples.
func (Get) Help() string {
	return `Examples:
  rollbus get engines
  rollbus get rollouts --job math --state bound -o json
  rollbus get jobs --watch
  rollbus get decisions --watch -o jsonl`
}

// look is one look at a pool.
type look struct {
	ctx  context.Context
	a    *app
	pool subjects.Pool
	s    *kvstate.Store
	js   jetstream.JetStream
}

// looking opens a pool that exists for one command and closes it after f.
func (a *app) looking(f func(*look) error) error {
	return a.lookingAnywhere(func(l *look) error {
		if err := l.a.exists(l.ctx, l.js, l.pool); err != nil {
			return err
		}
		return f(l)
	})
}

// exists tells a pool that was never made, or misspelt, from one that is empty.
func (a *app) exists(ctx context.Context, js jetstream.JetStream, pool subjects.Pool) error {
	if _, err := js.Stream(ctx, pool.Rollouts()); err != nil {
		return a.noPool(err)
	}
	heard(ctx)
	return nil
}

// lookingAnywhere is looking at a pool that need not exist.
func (a *app) lookingAnywhere(f func(*look) error) error {
	pool, err := a.pool()
	if err != nil {
		return err
	}
	s, done, err := a.store()
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := a.within()
	defer cancel()
	err = f(&look{ctx: ctx, a: a, pool: pool, s: s, js: s.JS()})
	if err != nil && ctx.Err() != nil && a.ctx.Err() == nil {
		return context.Cause(ctx)
	}
	return a.noPool(err)
}

func (l *look) bucket(kind string) string { return subjects.BucketStream(l.pool.Bucket(kind)) }

// values reads a small bucket.
func values[T any](l *look, kind string) ([]kvstate.Value[T], error) {
	var out []kvstate.Value[T]
	prefix := subjects.BucketSubject(l.pool.Bucket(kind), "")
	for m, err := range latest(l.ctx, l.js, l.bucket(kind), prefix+">", false) {
		if err != nil {
			return nil, err
		}
		meta, err := m.Metadata()
		if err != nil || len(m.Data()) == 0 || m.Headers().Get(subjects.HdrKVOperation) != "" {
			continue
		}
		v := kvstate.Value[T]{Key: strings.TrimPrefix(m.Subject(), prefix), Revision: meta.Sequence.Stream, Stored: meta.Timestamp}
		if json.Unmarshal(m.Data(), &v.V) == nil {
			out = append(out, v)
		}
	}
	slices.SortFunc(out, func(a, b kvstate.Value[T]) int { return cmp.Compare(a.Key, b.Key) })
	return out, nil
}

// reservations reads what is bound, on one engine or on all ("").
func (l *look) reservations(engine string) ([]kvstate.Reservation, error) {
	filter := l.pool.EngineGuard(cmp.Or(engine, "*"))
	var out []kvstate.Reservation
	for m, err := range latest(l.ctx, l.js, l.bucket(subjects.Reservations), filter, true) {
		if err != nil {
			return nil, err
		}
		e, job, id, ok := l.pool.ParseReservationSubject(m.Subject())
		meta, merr := m.Metadata()
		if !ok || merr != nil || strings.HasPrefix(e, "_") || m.Headers().Get(subjects.HdrKVOperation) != "" {
			continue
		}
		if held, err := subjects.HeldFromHeader(e, job, id, m.Headers()); err == nil {
			out = append(out, kvstate.Reservation{Held: held, Revision: meta.Sequence.Stream, Stored: meta.Timestamp})
		}
	}
	return out, nil
}

// GetEngines lists engines.
type GetEngines struct{ watchFlags }

// engineRow is an engine with what is reserved on it.
type engineRow struct {
	subjects.Engine
	Bound          int       `json:"bound"`
	ReservedTokens int64     `json:"reserved_tokens"`
	Renewed        time.Time `json:"renewed"` // NATS server's clock
	Registered     bool      `json:"registered"`
}

func (l *look) engines() ([]*engineRow, error) {
	regs, err := values[subjects.Engine](l, subjects.Engines)
	if err != nil {
		return nil, err
	}
	held, err := l.reservations("")
	if err != nil {
		return nil, err
	}
	rows := map[string]*engineRow{}
	for _, v := range regs {
		rows[v.V.Engine] = &engineRow{Engine: v.V, Renewed: v.Stored, Registered: true}
	}
	for _, h := range held {
		r := rows[h.Engine]
		if r == nil { // gone, and its keys not yet requeued
			r = &engineRow{Engine: subjects.Engine{Engine: h.Engine, State: "gone"}}
			rows[h.Engine] = r
		}
		r.Bound++
		r.ReservedTokens += int64(h.Tokens)
	}
	return slices.SortedFunc(maps.Values(rows), func(a, b *engineRow) int { return cmp.Compare(a.Engine.Engine, b.Engine.Engine) }), nil
}

// Run lists them.
func (c GetEngines) Run(a *app) error {
	head := []string{"ENGINE", "STATE", "KIND", "MODEL", ">SLOTS", ">BOUND", ">RESERVED", ">CAPACITY", "EPOCH", "AGENT", "+>RANKS", "+>CONTEXT", "+CAPACITY FROM", "+EVENTS", "+>WEIGHTS", "+RENEWED", "+CAUSE"}
	return listing(a, c.watchFlags, head, (*look).engines, func(e *engineRow) []string {
		return []string{e.Engine.Engine, string(e.State), dash(e.Kind), dash(e.Model), strconv.Itoa(e.Slots), strconv.Itoa(e.Bound),
			strconv.FormatInt(e.ReservedTokens, 10), known(e.CapacityTokens), dash(oneLine(e.Epoch, 14)), dash(e.Agent),
			number(e.Ranks), known(e.MaxModelLen), dash(e.CapacitySource), dash(e.Events), known(e.WeightVersion), stamp(e.Renewed), dash(oneLine(e.Cause, 60))}
	})
}

// known prints a number that may be unknown.
func known[N int | int64](v *N) string {
	if v == nil {
		return "-"
	}
	return strconv.FormatInt(int64(*v), 10)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// GetDispatchers lists dispatchers.
type GetDispatchers struct{ watchFlags }

// dispatcherRow is a dispatcher and when it last said so.
type dispatcherRow struct {
	subjects.Dispatcher
	Renewed time.Time `json:"renewed"` // NATS server's clock
}

func (l *look) dispatchers() ([]dispatcherRow, error) {
	regs, err := values[subjects.Dispatcher](l, subjects.Dispatchers)
	all := make([]dispatcherRow, 0, len(regs))
	for _, v := range regs {
		all = append(all, dispatcherRow{v.V, v.Stored})
	}
	return all, err
}

// Run lists them.
func (c GetDispatchers) Run(a *app) error {
	return listing(a, c.watchFlags, []string{"DISPATCHER", "VERSION", ">CORE", "STARTED", "+RENEWED"}, (*look).dispatchers, func(d dispatcherRow) []string {
		return []string{d.Dispatcher.Dispatcher, d.Version, strconv.Itoa(d.CoreVersion), stamp(time.UnixMilli(d.Started)), stamp(d.Renewed)}
	})
}

// GetJobs lists jobs.
type GetJobs struct{ watchFlags }

type jobRow struct {
	Job      string `json:"job"`
	Urgent   uint64 `json:"urgent"`
	Continue uint64 `json:"continue"`
	Normal   uint64 `json:"normal"`
	Batch    uint64 `json:"batch"`
	Retry    uint64 `json:"retry"`
	Bound    int    `json:"bound"`
	Unread   int    `json:"unread"` // answers not marked received
}

// Run lists them.
func (c GetJobs) Run(a *app) error {
	n := func(v uint64) string { return strconv.FormatUint(v, 10) }
	head := []string{"JOB", ">URGENT", ">CONTINUE", ">NORMAL", ">BATCH", ">RETRY", ">BOUND", ">UNREAD"}
	return listing(a, c.watchFlags, head, (*look).jobs, func(j *jobRow) []string {
		return []string{j.Job, n(j.Urgent), n(j.Continue), n(j.Normal), n(j.Batch), n(j.Retry), strconv.Itoa(j.Bound), strconv.Itoa(j.Unread)}
	})
}

func (l *look) jobs() ([]*jobRow, error) {
	rows := map[string]*jobRow{}
	row := func(job string) *jobRow {
		if rows[job] == nil {
			rows[job] = &jobRow{Job: job}
		}
		return rows[job]
	}
	queued, err := l.depths(l.pool.Rollouts(), l.pool.SubmitFilter())
	if err != nil {
		return nil, err
	}
	for subject, n := range queued {
		job, lane, ok := l.pool.ParseSubmitSubject(subject)
		if !ok {
			continue
		}
		j := row(job)
		switch lane {
		case subjects.LaneUrgent:
			j.Urgent = n
		case subjects.LaneContinue:
			j.Continue = n
		case subjects.LaneNormal:
			j.Normal = n
		case subjects.LaneBatch:
			j.Batch = n
		}
	}
	retries, err := l.depths(l.pool.Retry(), l.pool.RetryFilter())
	if err != nil {
		return nil, err
	}
	for subject, n := range retries {
		if job, ok := l.pool.ParseRetrySubject(subject); ok {
			row(job).Retry = n
		}
	}
	held, err := l.reservations("")
	if err != nil {
		return nil, err
	}
	for _, h := range held {
		row(h.Job).Bound++
	}
	for m, err := range latest(l.ctx, l.js, l.pool.Results(), l.pool.ResultFilter("", ""), true) {
		if err != nil {
			return nil, err
		}
		if job, _, _, ok := l.pool.ParseResultSubject(m.Subject()); ok && m.Headers().Get(subjects.HdrStatus) != "" {
			row(job).Unread++
		}
	}
	return slices.SortedFunc(maps.Values(rows), func(a, b *jobRow) int { return cmp.Compare(a.Job, b.Job) }), nil
}

// depths counts the messages of each subject, without a consumer.
func (l *look) depths(stream, filter string) (map[string]uint64, error) {
	s, err := l.js.Stream(l.ctx, stream)
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", stream, err)
	}
	info, err := s.Info(l.ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", stream, err)
	}
	heard(l.ctx)
	return info.State.Subjects, nil
}
