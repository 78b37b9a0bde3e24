package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// Tap follows a pool.
type Tap struct {
	Kinds []string `arg:"" optional:"" name:"kind" help:"submit, retry, result, load, cache, tokens, decision; all but load without one."`
	Count int      `short:"c" help:"End after this many lines; 0 = no limit." placeholder:"N"`
}

// Help shows examples.
func (Tap) Help() string {
	return `Examples:
  rollbus tap                       submits, retries, results and decisions as they happen
  rollbus tap decision -o jsonl
  rollbus tap load cache
It listens only: nothing is taken away, and what is missed is not repeated.`
}

// tapPending bounds what a slow terminal may leave waiting.
const tapPending = 64 << 10

// tapped is one line.
type tapped struct {
	At      time.Time       `json:"at"` // this machine's clock
	Kind    string          `json:"kind"`
	Subject string          `json:"subject"`
	Bytes   int             `json:"bytes"`
	Facts   map[string]any  `json:"facts,omitempty"` // Rollout- headers; what a cache event says
	Data    json.RawMessage `json:"data,omitempty"`  // of load and decision
}

// Run follows it until interrupted.
func (c Tap) Run(a *app) error {
	pool, err := a.pool()
	if err != nil {
		return err
	}
	kinds := c.Kinds
	if len(kinds) == 0 {
		kinds = []string{"submit", "retry", "result", "cache", "tokens", "decision"}
	}
	filters := map[string]string{
		"submit": pool.RecordPrefix() + ".submit.>", "retry": pool.RecordPrefix() + ".retry.>", "result": pool.RecordPrefix() + ".result.>",
		"load": pool.Load("*"), "cache": pool.Cache("*"), "tokens": pool.Tokens("*", "*"), "decision": pool.Decision(),
	}
	for _, k := range kinds {
		if filters[k] == "" {
			return coded(exitUsage, "tap: no kind %q: there are submit, retry, result, load, cache, tokens, decision", k)
		}
	}
	nc, err := a.connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	defer a.untilInterrupted()()
	lines := make(chan tapped, tapPending)
	for _, k := range kinds {
		if _, err := nc.Subscribe(filters[k], func(m *nats.Msg) {
			select {
			case lines <- line(k, m):
			default: // the terminal is slow: skip rather than grow
			}
		}); err != nil {
			return fmt.Errorf("listen to %s: %w", filters[k], err)
		}
	}
	p := a.printer()
	for n := 0; c.Count == 0 || n < c.Count; n++ {
		select {
		case <-a.ctx.Done():
			return nil
		case l := <-lines:
			if err := p.each(l, func() error { return l.print(p) }); err != nil {
				return err
			}
		}
	}
	return nil
}

func line(kind string, m *nats.Msg) tapped {
	l := tapped{At: time.Now(), Kind: kind, Subject: m.Subject, Bytes: len(m.Data)}
	if s := m.Header.Get("Nats-Subject"); s != "" {
		l.Subject = s
	}
	for k := range m.Header {
		if name, ok := strings.CutPrefix(k, "Rollout-"); ok && k != subjects.HdrBlocks {
			if l.Facts == nil {
				l.Facts = map[string]any{}
			}
			l.Facts[strings.ToLower(name)] = m.Header.Get(k)
		}
	}
	if (kind == "load" || kind == "decision") && json.Valid(m.Data) {
		l.Data = m.Data
	}
	if kind == "cache" {
		l.Facts = cacheFacts(m.Data)
	}
	return l
}

// cacheFacts reads a cache event. Hashes are hexadecimal: many readers of JSON
// round whole numbers beyond 2^53.
func cacheFacts(b []byte) map[string]any {
	c, err := kvevents.DecodeChange(b, nil)
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	hash := func(h uint64) string { return fmt.Sprintf("%016x", h) }
	blocks := make([]string, len(c.Blocks))
	for i, h := range c.Blocks {
		blocks[i] = hash(h)
	}
	f := map[string]any{"op": c.Kind.String(), "epoch": c.Epoch, "seq": c.Seq}
	if c.Kind != kvevents.Cleared {
		f["tier"], f["namespace"], f["blocks"] = c.Tier.String(), hash(c.Namespace), blocks
	}
	if c.HasParent {
		f["parent"] = hash(c.Parent)
	}
	return f
}

func (l tapped) print(p printer) error {
	what := string(l.Data)
	if len(l.Facts) > 0 {
		var parts []string
		for _, k := range []string{"status", "engine", "bind", "prompt-tokens", "completion-tokens", "cached-tokens", "max-tokens", "tried",
			"op", "tier", "epoch", "seq", "blocks", "parent", "error"} {
			v, ok := l.Facts[k]
			if hashes, list := v.([]string); list {
				v = len(hashes)
			}
			if ok {
				parts = append(parts, fmt.Sprintf("%s=%v", k, v))
			}
		}
		what = strings.Join(parts, " ")
	}
	if what == "" {
		what = fmt.Sprintf("%d bytes", l.Bytes)
	}
	_, err := fmt.Fprintf(p.w, "%s  %-8s  %s  %s\n", l.At.Format("15:04:05.000"), l.Kind, l.Subject, what)
	return err
}
