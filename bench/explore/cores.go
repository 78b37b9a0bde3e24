package explore

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// digest tells states apart.
type digest [16]byte

func sum(b []byte) digest {
	full := sha256.Sum256(b)
	return digest(full[:16])
}

// pool keeps each different value once, under a number from 1 on.
type pool[T any] struct {
	all []T
	at  map[string]uint32
}

func newPool[T any]() *pool[T] { return &pool[T]{all: make([]T, 1), at: map[string]uint32{}} }

func (p *pool[T]) put(key string, v T) uint32 {
	if id, ok := p.at[key]; ok {
		return id
	}
	id := uint32(len(p.all))
	p.all = append(p.all, v)
	p.at[key] = id
	return id
}

func (p *pool[T]) key(id uint32) string {
	for k, v := range p.at {
		if v == id {
			return k
		}
	}
	return ""
}

// cores are the states that dispatchers' cores were seen in. A state is reached
// by steps from its first event on; which steps is remembered, not the core.
type cores struct {
	events  *pool[[]core.Event] // what is stepped together
	effects *pool[core.Effect]
	states  []coreState
	known   map[coreKey]int32
	edges   map[edgeKey]edge
	live    map[int32]*core.Core // those stepped last, where they stand
	order   [maxLive]kept
	turn    int
	steps   int
	verify  bool // step every edge twice, not one of verifyEvery
	jump    time.Duration
	err     error
}

type kept struct {
	at   int32
	core *core.Core
}

type coreState struct {
	dispatcher int8
	from       int32 // -1 = a new core
	ev         uint32
	now        uint8
}

type coreKey struct {
	dispatcher int8
	digest     digest
}

type edgeKey struct {
	from       int32
	ev         uint32
	now        uint8
	dispatcher int8
}

type edge struct {
	to      int32
	effects []uint32
}

func newCores(jump time.Duration) *cores {
	return &cores{jump: jump, events: newPool[[]core.Event](), effects: newPool[core.Effect](), known: map[coreKey]int32{},
		edges: map[edgeKey]edge{}, live: map[int32]*core.Core{}}
}

// event gives a number to what is stepped together.
func (c *cores) event(evs ...core.Event) uint32 {
	var key []byte
	for _, ev := range evs {
		b, err := core.EncodeEvent(ev, 0)
		if err != nil {
			c.err = err
		}
		key = append(key, b...)
	}
	return c.events.put(string(key), evs)
}

// fresh is a new core of a dispatcher that has taken its first events.
func (c *cores) fresh(d int8, ev uint32, now uint8) edge { return c.step(d, -1, ev, now) }

// step takes events in a state.
func (c *cores) step(d int8, from int32, ev uint32, now uint8) edge {
	k := edgeKey{from, ev, now, d}
	if e, ok := c.edges[k]; ok {
		return e
	}
	x := c.live[from]
	if x == nil || from < 0 {
		x = c.replay(d, from)
	} else {
		delete(c.live, from)
	}
	e := edge{effects: c.take(x, ev, now)}
	key := coreKey{d, c.fingerprint(x)}
	if c.verify || len(c.edges)%verifyEvery == 0 {
		c.compare(k, e.effects, key.digest)
	}
	to, seen := c.known[key]
	if !seen {
		to = int32(len(c.states))
		c.states = append(c.states, coreState{d, from, ev, now})
		c.known[key] = to
	}
	c.keep(to, x)
	e.to = to
	c.edges[k] = e
	return e
}

// compare steps a core that came by the remembered path, and must find the same:
// else the fingerprint has left something out that matters.
func (c *cores) compare(k edgeKey, effects []uint32, want digest) {
	x := c.replay(k.dispatcher, k.from)
	same := slices.Equal(c.take(x, k.ev, k.now), effects)
	if got := c.fingerprint(x); !same || got != want {
		c.err = fmt.Errorf("two cores of dispatcher %d with one fingerprint go apart at %s", k.dispatcher, c.events.key(k.ev))
	}
}

// verifyEvery is of how many steps one is taken twice: see compare.
const verifyEvery = 32

// maxLive bounds the cores that are kept.
const maxLive = 256

func (c *cores) keep(at int32, x *core.Core) {
	if old := c.order[c.turn]; c.live[old.at] == old.core {
		delete(c.live, old.at)
	}
	c.order[c.turn] = kept{at, x}
	c.turn = (c.turn + 1) % maxLive
	c.live[at] = x
}

// replay makes the core of a state by the steps that led to it.
func (c *cores) replay(d int8, to int32) *core.Core {
	var path []int32
	for s := to; s >= 0; s = c.states[s].from {
		path = append(path, s)
	}
	x := core.New(core.Config{Dispatcher: dispatcherName(int(d)), Timings: timings, MaxAnswered: 64, MaxIndexBytes: 1 << 20})
	for i := len(path) - 1; i >= 0; i-- {
		s := c.states[path[i]]
		c.take(x, s.ev, s.now)
	}
	return x
}

func (c *cores) take(x *core.Core, ev uint32, now uint8) []uint32 {
	var out []uint32
	for _, e := range c.events.all[ev] {
		c.steps++
		for _, eff := range x.Step(e, c.at(now)) {
			if matters(eff) {
				out = append(out, c.effect(eff))
			}
		}
	}
	return out
}

// matters leaves out what only asks for work that comes by itself here, and what
// is told to people.
func matters(e core.Effect) bool {
	switch e.(type) {
	case core.Bind, core.SeedBind, core.WriteSeed, core.WriteOwners, core.GetFromLeader, core.Retry, core.DeleteKey,
		core.PublishResult, core.PublishDead, core.Ack, core.NakDelay:
		return true
	}
	return false
}

func (c *cores) effect(e core.Effect) uint32 {
	b, err := core.EncodeEffect(e)
	if err != nil {
		c.err = err
	}
	return c.effects.put(string(b), e)
}

// fingerprint is a digest of a core's checkpoint, without what only counts: how
// often something was picked or learned, here always the same.
func (c *cores) fingerprint(x *core.Core) digest {
	p := x.Checkpoint()
	p.Picks, p.Lengths, p.Settings = 0, policy.LengthsState{}, subjects.Settings{} // those of the scene
	p.Index = withoutCounts(p.Index)
	slices.SortStableFunc(p.Retired.Order, func(a, b core.RetiredBind) int { return strings.Compare(a.Key, b.Key) }) // a copy; its order is for what never expires here
	for i := range p.Engines {
		p.Engines[i].Picked = 0
	}
	for i := range p.Jobs {
		p.Jobs[i].Used = 0
	}
	b, err := json.Marshal(p)
	if err != nil {
		c.err = fmt.Errorf("a core's checkpoint: %w", err)
	}
	return sum(b)
}

// indexCounts is how many counters end the encoding of a block index, each a varint.
const indexCounts = 6

func withoutCounts(b []byte) []byte {
	for range indexCounts {
		if len(b) == 0 {
			break
		}
		b = b[:len(b)-1]
		for len(b) > 0 && b[len(b)-1] >= 0x80 {
			b = b[:len(b)-1]
		}
	}
	return b
}

// timings have time stand still: nothing ages, and what only saves work or
// spares a race is not waited for.
var timings = func() core.Timings {
	t := core.DefaultTimings()
	long := 10_000 * time.Hour
	t.Suspect, t.Lost, t.ContactFresh, t.HoldInHand, t.PauseRebuild, t.RetiredKeep, t.QueueIdle = long, 2*long, long, long, long, long, long
	t.RequeueStagger, t.ReleaseGrace, t.Backoff, t.Sweep, t.AgingStep = 0, 0, 0, 0, time.Second
	return t
}()

// at is the time after so many jumps, on every clock.
func (c *cores) at(now uint8) time.Duration { return time.Second + time.Duration(now)*c.jump }

// stamp is the NATS server's clock then.
func (c *cores) stamp(now uint8) int64 { return 1_700_000_000_000_000_000 + int64(c.at(now)) }

func dispatcherName(i int) string { return fmt.Sprintf("d%d", i) }
func engineName(i int) string     { return fmt.Sprintf("e%d", i) }
