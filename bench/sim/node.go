package sim

import (
	"fmt"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Node is an agent with its engine: it runs what is bound to it, writes the
// answer, then releases.
type Node struct {
	w    *World
	Name string
	Reg  subjects.Engine

	// Time a run takes; by default 10 ms a token of MaxTokens, alike everywhere.
	Takes func(h subjects.Held) time.Duration
	// Hang makes runs never end.
	Hang bool
	// NoUsage leaves the usage out of answers and releases.
	NoUsage bool
	// Mute keeps load reports back.
	Mute bool
	// Status of an answer; Completed when nil.
	Outcome func(h subjects.Held) subjects.Status

	alive      bool
	away       bool // cut off from NATS: it goes on, and says so later
	life       int
	seq        uint64 // revision of its registration
	running    map[string]*run
	spool      []func()
	registered time.Duration // last
	told       time.Duration // its last report of load
	next       time.Duration // earliest delivery of the next entry of its own keys: they come in order
	tell       *reports      // nil without an engine model
	Most       int           // runs at once, ever
	Offered    int           // keys bound at once in one life, ever
}

type run struct {
	put    core.ReservationPut
	dead   bool
	tokens int  // generated, when an engine model ran it to its end
	cached *int // of its prompt
}

// AddNode starts an engine with that many slots and KV tokens (0 = unknown).
func (w *World) AddNode(name string, slots int, capacity int64) *Node {
	n := &Node{w: w, Name: name, running: map[string]*run{}}
	n.Reg = subjects.Engine{SchemaVersion: 1, Engine: name, Agent: "a", Kind: "sim", Model: "m",
		State: subjects.EngineReady, Slots: slots, Ranks: 1, BlockTokens: subjects.DefaultBlockTokens, Events: "none"}
	if capacity > 0 {
		n.Reg.CapacityTokens = &capacity
	}
	n.Takes = func(h subjects.Held) time.Duration { return time.Duration(h.MaxTokens) * 10 * time.Millisecond }
	w.Nodes[name] = n
	n.Start()
	return n
}

// Start begins a new life of agent and engine.
func (n *Node) Start() {
	n.life++
	n.alive, n.away = true, false
	n.Reg.Epoch = fmt.Sprintf("%s-%d", n.Name, n.life)
	n.running = map[string]*run{}
	if n.tell != nil {
		_ = n.boot() // the same configuration was good before
	}
	life := n.life
	n.renew(life)
	// It reads its own keys: those of an older life go back at once.
	n.w.after(n.w.delay(), func() {
		if n.life != life || !n.alive {
			return
		}
		for _, k := range sorted(n.w.Bus.keys) {
			if p := n.w.Bus.keys[k]; p.Engine == n.Name {
				n.see(*p)
			}
		}
	})
}

// Kill ends agent and engine without a word.
func (n *Node) Kill() {
	n.alive = false
	for _, r := range n.running {
		r.dead = true
	}
	if n.tell != nil {
		_ = n.boot() // an engine that runs nothing, until Start
	}
}

// Cut takes the agent's connection; Heal gives it back.
func (n *Node) Cut() { n.away = true }

// Heal ends a cut: what was finished meanwhile is written now.
func (n *Node) Heal() {
	n.away = false
	spool := n.spool
	n.spool = nil
	n.renew(n.life)
	for _, f := range spool {
		f()
	}
	for _, k := range sorted(n.running) {
		r := n.running[k]
		if p := n.w.Bus.keys[keyOf(n.Name, r.put.Job, r.put.ID)]; p == nil || p.Revision != r.put.Revision {
			r.dead = true
			delete(n.running, k)
			n.stopRun(r)
		}
	}
	for _, k := range sorted(n.w.Bus.keys) {
		if p := n.w.Bus.keys[k]; p.Engine == n.Name {
			n.see(*p)
		}
	}
}

func (n *Node) renew(life int) {
	if !n.alive || n.life != life {
		return
	}
	if !n.away {
		n.register()
	}
	n.w.after(n.w.opts.Timings.Suspect/3, func() { n.renew(life) })
}

func (n *Node) register() {
	b := n.w.Bus
	b.valueSeq++
	n.seq = b.valueSeq
	p := &core.EnginePut{Engine: n.Reg, Revision: b.valueSeq, Stored: n.w.stamp()}
	b.engines[n.Name] = p
	n.registered = n.w.Now
	n.w.tell(*p)
}

func (n *Node) see(p core.ReservationPut) {
	if !n.alive || n.away || p.State != subjects.StateBound {
		return
	}
	n.applied(p.Revision)
	cur := n.w.Bus.keys[keyOf(n.Name, p.Job, p.ID)]
	if cur == nil || cur.Revision != p.Revision {
		return // it has moved on: the later entry is on its way
	}
	if p.Epoch != n.Reg.Epoch {
		if _, done := n.w.Bus.register[p.Key()]; done {
			n.w.Bus.remove(released(p, subjects.OutcomeSuperseded, nil), p.Revision)
			return
		}
		n.giveBack(p, "epoch", p.Burnt+1)
		return
	}
	if old := n.running[p.Key()]; old != nil {
		if old.put.Revision == p.Revision {
			return
		}
		old.dead = true
		n.stopRun(old)
	}
	if len(n.running) >= n.Reg.Slots+n.w.prefetch() {
		n.giveBack(p, "over_capacity", p.Burnt)
		return
	}
	r := &run{put: p}
	n.running[p.Key()] = r
	n.Most = max(n.Most, len(n.running))
	n.w.Ran[p.Key()]++
	n.w.RanOn[p.Key()] = append(n.w.RanOn[p.Key()], n.Name)
	if !n.Hang {
		n.w.after(time.Duration(p.LeftMS)*time.Millisecond, func() { n.end(r, subjects.Expired) })
		if n.tell != nil {
			n.run(r)
		} else {
			n.w.after(n.Takes(p.Held), func() { n.finish(r) })
		}
	}
}

// follow brings an entry of the node's own keys: late, in order.
func (n *Node) follow(fn func()) {
	n.next = max(n.next, n.w.Now+n.w.delay())
	n.w.at(n.next, fn)
}

func (n *Node) applied(revision uint64) {
	if n.tell != nil {
		n.tell.applied = max(n.tell.applied, revision)
	}
}

func (w *World) prefetch() int { return w.opts.Settings.WithDefaults().PrefetchSlots() }

func (n *Node) lost(g core.ReservationGone) {
	if !n.away {
		n.applied(g.Revision)
	}
	if r := n.running[subjects.RolloutKey(g.Job, g.ID)]; r != nil && r.put.Revision < g.Revision && !n.away {
		r.dead = true
		delete(n.running, subjects.RolloutKey(g.Job, g.ID))
		n.stopRun(r)
	}
}

func (n *Node) cancelled(x subjects.Cancel) {
	for _, k := range sorted(n.running) {
		r := n.running[k]
		if x.Job == r.put.Job && (x.Kind == subjects.CancelJob || x.Kind == subjects.CancelID && x.Value == r.put.ID ||
			x.Kind == subjects.CancelGroup && x.Value == r.put.Group) {
			n.w.after(n.w.delay(), func() { n.end(r, subjects.Cancelled) })
		}
	}
}

func (n *Node) finish(r *run) {
	status := subjects.Completed
	if n.Outcome != nil {
		status = n.Outcome(r.put.Held)
	}
	n.end(r, status)
}

// end writes the answer, then releases; a node that is away spools both.
func (n *Node) end(r *run, status subjects.Status) {
	if r.dead || !n.alive {
		return
	}
	r.dead = true
	n.stopRun(r)
	write := func() {
		tokens := r.put.MaxTokens
		if n.tell != nil {
			tokens = r.tokens
		}
		used := &tokens
		if n.NoUsage {
			used = nil
		}
		prompt := r.put.PromptTokens
		outcome := subjects.OutcomeAnswered
		a, _ := n.w.Bus.commit(subjects.Answer{Job: r.put.Job, ID: r.put.ID, Status: status, Bind: r.put.Bind,
			Epoch: r.put.Epoch, Engine: n.Name, PromptTokens: &prompt, CompletionTokens: used, CachedTokens: r.cached, Group: r.put.Group})
		if a != core.OK {
			outcome = subjects.OutcomeSuperseded
		}
		n.w.after(n.w.opts.Latency, func() {
			if n.alive {
				rel := released(r.put, outcome, used)
				rel.Status, rel.CachedTokens = status, r.cached
				n.w.Bus.remove(rel, r.put.Revision)
			}
		})
		if n.running[r.put.Key()] == r {
			delete(n.running, r.put.Key())
		}
	}
	if n.away {
		n.spool = append(n.spool, write)
		return
	}
	n.w.after(n.w.opts.Latency, func() {
		if n.alive {
			write()
		}
	})
}

// Return gives a running rollout back, as an agent does after a failed attempt.
func (n *Node) Return(key, reason string, burn int) {
	r := n.running[key]
	if r == nil || r.dead {
		return
	}
	r.dead = true
	delete(n.running, key)
	n.stopRun(r)
	n.giveBack(r.put, reason, r.put.Burnt+burn)
}

// Running names what runs here.
func (n *Node) Running() []string { return sorted(n.running) }

func (n *Node) giveBack(p core.ReservationPut, reason string, burnt int) {
	n.w.Bus.giveBack(p.Held, p.Revision, reason, burnt, time.Duration(p.TTLMS)*time.Millisecond)
}

func released(p core.ReservationPut, o subjects.Outcome, completion *int) subjects.Released {
	return subjects.Released{Engine: p.Engine, Job: p.Job, ID: p.ID, Outcome: o, Bind: p.Bind, Epoch: p.Epoch,
		Tokens: p.Tokens, PromptTokens: p.PromptTokens, CompletionTokens: completion, Group: p.Group}
}
