package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// republish publishes a span of RECORD again, elsewhere.
type republish struct {
	Subjects bool    `help:"Publish what RECORD holds of submit, retry, result, load, cache and decision again, under --to."`
	To       string  `help:"Prefix of the subjects, with --subjects; no live one." placeholder:"PREFIX"`
	Speed    float64 `default:"1" help:"Pace, with --subjects: 1 as recorded, 10 ten times as fast, 0 at once." placeholder:"N"`
}

// Headers of what is published again.
const (
	headerReplayedSubject = "Rollout-Replayed-Subject"
	headerReplayedAt      = "Rollout-Replayed-At" // RFC 3339, when RECORD stored it
)

// republished tells what was done.
type republished struct {
	Messages int            `json:"messages"`
	Bytes    int64          `json:"bytes"`
	Kinds    map[string]int `json:"kinds"`
	First    time.Time      `json:"first,omitzero"` // as recorded
	Last     time.Time      `json:"last,omitzero"`
	Prefix   string         `json:"prefix"`
	Seconds  float64        `json:"seconds"`
}

// checkPrefix refuses what somebody may live on: our own subjects, NATS KV's and
// the server's.
func checkPrefix(p string) error {
	tokens := strings.Split(p, ".")
	for _, t := range tokens {
		if t == "" || strings.ContainsAny(t, "*> \t\r\n") {
			return coded(exitUsage, "--to %q: give a subject without wildcards, as test.math", p)
		}
	}
	if t := tokens[0]; t == "rollout" || t[0] == '$' || t[0] == '_' {
		return coded(exitUsage, "--to %q is live: pools live under rollout, servers under $ and _; give a prefix of your own, as test.math", p)
	}
	return nil
}

// replaySubject is where a recorded message goes; ok is false for what is none.
func replaySubject(pool subjects.Pool, subject, prefix string) (to, kind string, ok bool) {
	rest, ok := strings.CutPrefix(subject, pool.RecordPrefix()+".")
	if !ok {
		if rest, ok = strings.CutPrefix(subject, "rollout."+pool.String()+"."); !ok {
			return "", "", false
		}
	}
	kind, _, _ = strings.Cut(rest, ".")
	return prefix + "." + rest, kind, true
}

func (c *republish) run(a *app, s span) error {
	from, until, err := s.bounds()
	if err != nil {
		return err
	}
	if err := checkPrefix(c.To); err != nil {
		return err
	}
	if c.Speed < 0 || math.IsNaN(c.Speed) || math.IsInf(c.Speed, 0) {
		return coded(exitUsage, "--speed %v: give 0 or more", c.Speed)
	}
	pool, err := a.pool()
	if err != nil {
		return err
	}
	nc, err := a.connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	r, err := c.publish(a, nc, pool, from, until)
	if err != nil {
		return err
	}
	p := a.printer()
	return p.one(r, func() error {
		return p.fields("messages", number(r.Messages), "bytes", strconv.FormatInt(r.Bytes, 10), "recorded from", r.First.UTC().Format(time.RFC3339Nano),
			"until", r.Last.UTC().Format(time.RFC3339Nano), "published under", r.Prefix+".>", "in", fmt.Sprintf("%.1f s", r.Seconds))
	})
}

func (c *republish) publish(a *app, nc *nats.Conn, pool subjects.Pool, from, until int64) (*republished, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	cfg := jetstream.OrderedConsumerConfig{}
	if from > 0 {
		t := time.Unix(0, from)
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &t
	}
	ctx, cancel := a.within()
	cons, err := js.OrderedConsumer(ctx, pool.Record(), cfg)
	cancel()
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, coded(exitNotFound, "pool %s records nothing: switch its setting record on", pool)
	}
	if err != nil {
		return nil, a.noPool(fmt.Errorf("read stream %s: %w", pool.Record(), err))
	}
	out := &republished{Prefix: c.To, Kinds: map[string]int{}}
	began := time.Now()
	for pending := cons.CachedInfo().NumPending; pending > 0; {
		ctx, cancel := a.within()
		m, err := cons.Next(jetstream.FetchContext(ctx))
		cancel()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", pool.Record(), err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", pool.Record(), err)
		}
		pending = meta.NumPending
		if until > 0 && meta.Timestamp.UnixNano() > until {
			break
		}
		subject, kind, ok := replaySubject(pool, m.Subject(), c.To)
		if !ok {
			continue
		}
		if out.Messages == 0 {
			out.First = meta.Timestamp
		}
		if err := c.wait(a.ctx, began, meta.Timestamp.Sub(out.First)); err != nil {
			return nil, err
		}
		again := &nats.Msg{Subject: subject, Data: m.Data(), Header: nats.Header{}}
		for k, v := range m.Headers() {
			if !strings.HasPrefix(k, "Nats-") { // guards, ids and TTLs would be obeyed where a stream takes it
				again.Header[k] = v
			}
		}
		again.Header.Set(headerReplayedSubject, m.Subject())
		again.Header.Set(headerReplayedAt, meta.Timestamp.UTC().Format(time.RFC3339Nano))
		if err := nc.PublishMsg(again); err != nil {
			return nil, fmt.Errorf("publish on %s: %w", subject, err)
		}
		out.Messages++
		out.Kinds[kind]++
		out.Bytes += int64(len(again.Data))
		out.Last = meta.Timestamp
	}
	ctx, cancel = a.within()
	defer cancel()
	if err := nc.FlushWithContext(ctx); err != nil {
		return nil, fmt.Errorf("publish under %s: %w", c.To, err)
	}
	if err := nc.LastError(); err != nil {
		return nil, fmt.Errorf("publish under %s: %w", c.To, err)
	}
	if out.Messages == 0 {
		return nil, coded(exitNotFound, "stream %s holds nothing of that span", pool.Record())
	}
	out.Seconds = time.Since(began).Seconds()
	return out, nil
}

// wait until a message is due at the pace asked for.
func (c *republish) wait(ctx context.Context, began time.Time, recorded time.Duration) error {
	if c.Speed == 0 {
		return context.Cause(ctx)
	}
	left := time.Duration(float64(recorded)/c.Speed) - time.Since(began)
	if left <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(left)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return errInterrupted
	case <-t.C:
		return nil
	}
}
