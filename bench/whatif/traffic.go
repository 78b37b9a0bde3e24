package whatif

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/bench/workload"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/journal"
	"github.com/rollbus/rollbus/subjects"
)

// ErrEmpty says that journals hold no rollout from its submission to its answer.
var ErrEmpty = errors.New("no rollout is recorded from its submission to its answer")

// Seen is one rollout as it was recorded. Times are unix ns of the NATS server.
type Seen struct {
	Facts     subjects.Facts
	Submitted int64
	Bound     int64 // the first time
	Answered  int64
	Engine    string // that answered
	Tokens    int    // of the output
	Cached    int    // prompt tokens found; < 0 = the engine did not say
	Status    subjects.Status
	Reason    string // of the last decision that placed it
}

// Fleet is an engine as it registered.
type Fleet struct {
	Engine   string
	Slots    int
	Capacity int // KV tokens, 0 = unknown
	Ranks    int
}

// Traffic is what journals tell of a span.
type Traffic struct {
	Rollouts    []Seen // by submission
	Engines     []Fleet
	Settings    subjects.Settings
	Dispatchers int
	Unfinished  int // submitted and not answered within the span, or the other way round
	Unplaced    int // answered without having been bound: rejected, expired or cancelled in the queue
}

type collector struct {
	seen    map[string]*Seen
	engines map[string]Fleet
	t       *Traffic
	from    int64
	until   int64
}

// Extract reads what all dispatchers of a pool recorded between two times of the
// NATS server, unix ns, 0 = open. A gap loses what stood in it.
func Extract(journals []*journal.Journal, from, until int64) (*Traffic, error) {
	c := &collector{seen: map[string]*Seen{}, engines: map[string]Fleet{}, t: &Traffic{}, from: from, until: until}
	names := map[string]bool{}
	for _, j := range journals {
		if err := c.read(j); err != nil {
			return nil, err
		}
		names[j.Dispatcher] = true
	}
	c.t.Dispatchers = max(1, len(names))
	for _, s := range c.seen {
		switch {
		case s.Submitted == 0 || s.Answered == 0:
			c.t.Unfinished++
		case s.Bound == 0 || s.Engine == "":
			c.t.Unplaced++
		default:
			c.t.Rollouts = append(c.t.Rollouts, *s)
		}
	}
	if len(c.t.Rollouts) == 0 {
		return nil, ErrEmpty
	}
	slices.SortFunc(c.t.Rollouts, func(a, b Seen) int {
		return cmp.Or(cmp.Compare(a.Submitted, b.Submitted), cmp.Compare(a.Facts.Key(), b.Facts.Key()))
	})
	for _, e := range c.engines {
		c.t.Engines = append(c.t.Engines, e)
	}
	slices.SortFunc(c.t.Engines, func(a, b Fleet) int { return cmp.Compare(a.Engine, b.Engine) })
	return c.t, nil
}

func (c *collector) read(j *journal.Journal) error {
	r, err := journal.NewReader(j)
	if err != nil {
		return err
	}
	defer r.Close()
	for {
		s, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if _, gap := errors.AsType[*journal.ReadError](err); gap {
			continue
		}
		if err != nil {
			return err
		}
		if m := r.Mark(); m != nil {
			if p, err := m.State(); err == nil {
				c.state(p)
			}
		}
		c.event(s.Event)
		for i := range s.Decisions {
			if d := &s.Decisions[i]; d.Engine != "" {
				if x := c.seen[d.Rollout]; x != nil {
					x.Reason = d.Reason
				}
			}
		}
	}
}

// state takes what a checkpoint knows: a journal may begin with one.
func (c *collector) state(p *core.Checkpoint) {
	for i := range p.Engines {
		if e := &p.Engines[i]; e.Known && !e.External {
			c.engine(&e.Reg)
		}
	}
	if c.t.Settings.SchemaVersion == 0 {
		c.t.Settings = p.Settings
	}
}

func (c *collector) engine(e *subjects.Engine) {
	f := Fleet{Engine: e.Engine, Slots: e.Slots, Ranks: max(1, e.Ranks)}
	if e.CapacityTokens != nil {
		f.Capacity = int(*e.CapacityTokens)
	}
	c.engines[e.Engine] = f
}

func (c *collector) within(stored int64) bool {
	return stored > 0 && stored >= c.from && (c.until == 0 || stored <= c.until)
}

func (c *collector) of(job, id string) *Seen {
	k := subjects.RolloutKey(job, id)
	s := c.seen[k]
	if s == nil {
		s = &Seen{Cached: -1}
		c.seen[k] = s
	}
	return s
}

func (c *collector) event(ev core.Event) {
	switch e := ev.(type) {
	case core.Fetched:
		if !e.Queue.Retry && e.Bad == nil && c.within(e.Stored) {
			s := c.of(e.Facts.Job, e.Facts.ID)
			s.Facts, s.Submitted = e.Facts, e.Stored
		}
	case core.ReservationPut:
		c.put(&e)
	case core.BindAnswer:
		if e.Answer == core.OK || e.Answer == core.Duplicate {
			c.bound(e.Job, e.ID, e.Stored)
		}
	case core.ReservationGone:
		c.gone(&e)
	case core.Answered:
		c.answered(&e)
	case core.EnginePut:
		c.engine(&e.Engine)
	case core.PoolPut:
		c.t.Settings = e.Settings.WithDefaults()
	case core.ViewSwap:
		for i := range e.Reservations {
			c.put(&e.Reservations[i])
		}
		for i := range e.Gone {
			c.gone(&e.Gone[i])
		}
		for i := range e.Answered {
			c.answered(&e.Answered[i])
		}
		for i := range e.Engines {
			c.engine(&e.Engines[i].Engine)
		}
		if e.Pool != nil {
			c.t.Settings = e.Pool.Settings.WithDefaults()
		}
	}
}

func (c *collector) put(p *core.ReservationPut) {
	if p.State == subjects.StateBound {
		c.bound(p.Job, p.ID, p.Stored)
	}
}

func (c *collector) bound(job, id string, stored int64) {
	if !c.within(stored) {
		return
	}
	if s := c.of(job, id); s.Bound == 0 || stored < s.Bound {
		s.Bound = stored
	}
}

// gone takes a release: where a reader was quick, its answer has been overwritten
// before any follower saw it, and the release is what is left of it.
func (c *collector) gone(g *core.ReservationGone) {
	if g.Outcome != subjects.OutcomeAnswered || !c.within(g.Stored) {
		return
	}
	if s := c.of(g.Job, g.ID); s.Answered == 0 {
		s.usage(g.Stored, g.Engine, cmp.Or(g.Status, subjects.Completed), g.CompletionTokens, g.CachedTokens)
	}
}

func (c *collector) answered(a *core.Answered) {
	if a.Status != "" && c.within(a.Stored) { // "" = its reader has received it
		c.of(a.Job, a.ID).usage(a.Stored, a.Engine, a.Status, a.CompletionTokens, a.CachedTokens)
	}
}

func (s *Seen) usage(stored int64, engine string, status subjects.Status, tokens, cached *int) {
	s.Answered, s.Engine, s.Status = stored, engine, status
	if tokens != nil {
		s.Tokens = *tokens
	}
	if cached != nil {
		s.Cached = *cached
	}
}

// Workload releases the recorded rollouts again. In an open loop each comes when
// it came; in a closed one a turn comes its recorded gap after the answer to the
// turn before, and a training step that began when everything of the step before
// was answered does so again.
func (t *Traffic) Workload(closed bool) workload.Workload {
	w := workload.Workload{Name: "recorded"}
	first := t.Rollouts[0].Submitted
	last := map[[2]string]int{} // of a trajectory
	begins, barrier := t.steps()
	w.Closed = closed && barrier
	for i := range t.Rollouts {
		s := &t.Rollouts[i]
		f := &s.Facts
		r := workload.Rollout{
			Job: f.Job, ID: f.ID, Output: max(1, s.Tokens), Limit: max(f.MaxTokens, s.Tokens, 1), At: time.Duration(s.Submitted - first),
			Step: f.Step, Group: f.Group, Trajectory: f.Trajectory, Turn: f.Turn, Last: true, Prompt: prompt(f),
		}
		if w.Closed {
			r.At = time.Duration(s.Submitted - begins[f.Step])
		}
		if k := [2]string{f.Job, f.Trajectory}; f.Trajectory != "" {
			if before, ok := last[k]; ok {
				b := &w.Rollouts[before]
				b.Last = false
				if closed && s.Submitted >= t.Rollouts[before].Answered {
					r.After, r.Gap = b.ID, time.Duration(max(0, s.Submitted-t.Rollouts[before].Answered))
				}
				r.Prompt = follow(b, &t.Rollouts[before].Facts, f, r.Prompt)
			}
			last[k] = i
		}
		w.Rollouts = append(w.Rollouts, r)
	}
	return w
}

// steps are the times from which a step's rollouts count; barrier tells whether
// each began after the last answer of the step before.
func (t *Traffic) steps() (begins map[int64]int64, barrier bool) {
	begins = map[int64]int64{}
	ends, starts := map[int64]int64{}, map[int64]int64{}
	var order []int64
	for i := range t.Rollouts {
		s := &t.Rollouts[i]
		if _, ok := starts[s.Facts.Step]; !ok {
			order = append(order, s.Facts.Step)
			starts[s.Facts.Step] = s.Submitted
		}
		ends[s.Facts.Step] = max(ends[s.Facts.Step], s.Answered)
	}
	slices.Sort(order)
	begins[order[0]] = starts[order[0]]
	for i := 1; i < len(order); i++ {
		if starts[order[i]] < ends[order[i-1]] {
			return begins, false
		}
		begins[order[i]] = ends[order[i-1]]
	}
	return begins, len(order) > 1
}

// prompt is a recorded prompt: equal blocks are equal segments.
func prompt(f *subjects.Facts) []workload.Segment {
	size := cmp.Or(f.BlockTokens, subjects.DefaultBlockTokens)
	var out []workload.Segment
	left := max(1, f.PromptTokens)
	tail := uint64(0)
	for _, b := range f.Blocks {
		if left < size {
			break
		}
		out = append(out, workload.Segment{ID: b, Tokens: size})
		left -= size
		tail = b
	}
	if left > 0 {
		out = append(out, workload.Segment{ID: rest(tail, f), Tokens: left})
	}
	return out
}

// rest names what no block hash covers: prompts that are alike as far as is
// known, and of one length, are of one group or else not alike.
func rest(tail uint64, f *subjects.Facts) uint64 {
	who := f.Group
	if who == "" {
		who = f.ID
	}
	return xxhash.Sum64String(fmt.Sprintf("%x %d %s.%s", tail, f.PromptTokens, f.Job, who))
}

// follow is the prompt of a turn that goes on from the one before: what that one
// said is in it, and was cached where it was said.
func follow(before *workload.Rollout, old, now *subjects.Facts, plain []workload.Segment) []workload.Segment {
	n := len(old.Blocks)
	added := now.PromptTokens - old.PromptTokens - before.Output
	if added < 0 || len(now.Blocks) < n || !slices.Equal(now.Blocks[:n], old.Blocks) {
		return plain
	}
	out := append(before.Prompt[:len(before.Prompt):len(before.Prompt)], before.OutputSegment())
	if added > 0 {
		out = append(out, workload.Segment{ID: plain[len(plain)-1].ID, Tokens: added})
	}
	return out
}
