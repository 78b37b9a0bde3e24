package prefix_test

import (
	"fmt"
	"maps"
	"testing"

	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/prefix"
)

// agent is the truth of one engine in the model, and what of it was delivered.
type agent struct {
	name    string
	epoch   string
	seq     uint64
	holds   map[uint64]uint8            // block -> tiers
	history map[uint64]map[uint64]uint8 // holds by sequence
	pipe    []prefix.Event              // published, not yet delivered
	asked   bool
	reply   *reply

	heard uint64 // last event delivered of this life, in order
	base  uint64 // sequence the view stands on
	holed bool   // an event after base is missing
}

type reply struct {
	asOf  uint64
	holds map[uint64]uint8
	begun bool
}

func (a *agent) publish(ev prefix.Event) {
	a.seq++
	ev.Engine, ev.Epoch, ev.Seq, ev.Namespace = a.name, a.epoch, a.seq, ns
	a.history[a.seq] = maps.Clone(a.holds)
	a.pipe = append(a.pipe, ev)
}

func (a *agent) answer() {
	if a.asked && a.reply == nil {
		a.reply = &reply{asOf: a.seq, holds: maps.Clone(a.holds)}
	}
}

// held is what the engine held of a prompt at the last event known of it: blocks
// in GPU memory, and behind them in CPU memory alone.
func (a *agent) held(p []uint64) (h prefix.Hit) {
	for _, b := range p {
		switch tiers := a.history[max(a.heard, a.base)][b]; {
		case tiers&1 != 0:
			h.GPU++
		case tiers != 0:
			h.CPU++
		default:
			return h
		}
	}
	return h
}

// model is an index beside the agents that it follows.
type model struct {
	x       *prefix.Index
	names   []string
	agents  map[string]*agent
	lives   int
	prompts [][]uint64
	all     []uint64          // every block of them once
	parent  map[uint64]uint64 // of each
}

func newModel() *model {
	m := &model{
		x:     prefix.New(prefix.Options{JumpFrom: -1, MaxBuffered: 40}),
		names: []string{"e1", "e2", "e3"}, agents: map[string]*agent{}, parent: map[uint64]uint64{},
		prompts: [][]uint64{prompt("a", 6, 6, "a"), prompt("a", 2, 6, "b"), prompt("c", 6, 6, "c")},
	}
	for _, p := range m.prompts {
		for i, b := range p {
			if _, dup := m.parent[b]; !dup {
				m.all = append(m.all, b)
			}
			m.parent[b] = pick(ns, p, i)
		}
	}
	for _, n := range m.names {
		m.begin(n)
	}
	return m
}

func (m *model) note(a *agent, v prefix.Verdict) {
	if v.Resync {
		a.asked, a.reply = true, nil
	}
}

// begin starts an engine's next life.
func (m *model) begin(name string) {
	m.lives++
	a := &agent{name: name, epoch: fmt.Sprint("x", m.lives), holds: map[uint64]uint8{}, history: map[uint64]map[uint64]uint8{0: {}}}
	m.agents[name] = a
	m.note(a, m.x.Put(prefix.Registration{Engine: name, Tag: tagOf(name), Epoch: a.epoch, Events: true}))
}

func (m *model) deliver(a *agent) {
	ev := a.pipe[0]
	a.pipe = a.pipe[1:]
	if ev.Seq > max(a.heard, a.base)+1 {
		a.holed = true
	}
	a.heard = max(a.heard, ev.Seq)
	m.note(a, m.x.Apply(0, ev))
}

// takeIn takes an answered snapshot in: its beginning first, the rest at the next call.
func (m *model) takeIn(a *agent) {
	r := a.reply
	switch {
	case r == nil:
		return
	case !r.begun:
		r.begun = true
		m.x.Begin(a.name, a.epoch, r.asOf)
		return
	}
	a.reply, a.asked = nil, false
	for tier := range prefix.Tier(2) {
		var part []uint64
		for _, b := range m.all {
			if r.holds[b]&(1<<tier) != 0 {
				part = append(part, b)
			}
		}
		m.x.Part(0, a.name, a.epoch, tier, part)
	}
	v := m.x.End(0, a.name, a.epoch)
	a.base, a.holed = r.asOf, false
	m.note(a, v)
}

// settle delivers everything and answers every question.
func (m *model) settle() {
	for range 4 {
		for _, n := range m.names {
			a := m.agents[n]
			for len(a.pipe) > 0 {
				m.deliver(a)
			}
			a.answer()
			m.takeIn(a)
			m.takeIn(a)
		}
	}
}

func (m *model) check(t *rapid.T) {
	for _, n := range m.names {
		a := m.agents[n]
		for i, p := range m.prompts {
			var got prefix.Hit
			for _, h := range m.x.Match(p, nil) {
				if nameOfTag(h.Tag) == n {
					got = h
				}
			}
			if !m.x.Trusted(n) {
				if got.Blocks() != 0 {
					t.Fatalf("engine %s is not trusted and is credited %+v", n, got)
				}
				continue
			}
			if a.holed {
				t.Fatalf("engine %s is trusted over a missing event", n)
			}
			if w := a.held(p); got.GPU != w.GPU || got.CPU != w.CPU {
				t.Fatalf("engine %s at event %d holds %d+%d blocks of prompt %d, the index says %d+%d", n, max(a.heard, a.base), w.GPU, w.CPU, i, got.GPU, got.CPU)
			}
		}
	}
}

// actions are what may happen, in any order.
func (m *model) actions() map[string]func(*rapid.T) {
	some := func(t *rapid.T) *agent { return m.agents[rapid.SampledFrom(m.names).Draw(t, "engine")] }
	tier := func(t *rapid.T) prefix.Tier { return prefix.Tier(rapid.IntRange(0, 1).Draw(t, "tier")) }
	return map[string]func(*rapid.T){
		"store": func(t *rapid.T) {
			a, at := some(t), tier(t)
			p := rapid.SampledFrom(m.prompts).Draw(t, "prompt")
			i := rapid.IntRange(0, 5).Draw(t, "from")
			if i > 0 && a.holds[p[i-1]] == 0 {
				i = 0
			}
			n := rapid.IntRange(1, 6-i).Draw(t, "n")
			for _, b := range p[i : i+n] {
				a.holds[b] |= 1 << at
			}
			a.publish(prefix.Event{Op: prefix.Stored, Tier: at, Parent: m.parent[p[i]], HasParent: true, Blocks: p[i : i+n]})
		},
		"remove a block": func(t *rapid.T) {
			a, at, b := some(t), tier(t), rapid.SampledFrom(m.all).Draw(t, "block")
			a.holds[b] &^= 1 << at
			a.publish(prefix.Event{Op: prefix.Removed, Tier: at, Blocks: []uint64{b}})
		},
		"clear": func(t *rapid.T) {
			a := some(t)
			clear(a.holds)
			a.publish(prefix.Event{Op: prefix.Cleared})
		},
		"deliver": func(t *rapid.T) {
			a := some(t)
			for range min(len(a.pipe), rapid.IntRange(1, 4).Draw(t, "n")) {
				m.deliver(a)
			}
		},
		"deliver twice": func(t *rapid.T) {
			if a := some(t); len(a.pipe) > 0 {
				ev := a.pipe[0]
				m.deliver(a)
				m.note(a, m.x.Apply(0, ev))
			}
		},
		"lose": func(t *rapid.T) {
			if a := some(t); len(a.pipe) > 0 {
				a.pipe = a.pipe[1:]
			}
		},
		"answer a snapshot":    func(t *rapid.T) { some(t).answer() },
		"take the snapshot in": func(t *rapid.T) { m.takeIn(some(t)) },
		"restart":              func(t *rapid.T) { m.begin(some(t).name) },
		"remove the engine": func(t *rapid.T) {
			n := some(t).name
			m.x.Remove(n)
			m.begin(n)
		},
		"tick": func(*rapid.T) { m.x.Tick(0) },
		"":     m.check,
	}
}

// Whatever is lost, doubled, late or restarted: an engine that counts is known
// exactly as it was at its last event, and one that is not known does not count.
func TestAnEngineCountsOnlyWhileItsViewIsWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel()
		t.Repeat(m.actions())
		// Once nothing is lost any more, every engine is known again.
		m.settle()
		m.check(t)
		for _, n := range m.names {
			if a := m.agents[n]; (a.heard == a.seq || a.base == a.seq) && !m.x.Trusted(n) {
				t.Fatalf("engine %s is not trusted although all has been delivered", n)
			}
		}
		for range 100 {
			m.x.Tick(0)
		}
		m.check(t)
	})
}
