package core_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// life makes a core's history: events of every type over a few names, and the
// answers to what the core asks for, each when it pleases.
type life struct {
	*rand.Rand
	now      time.Duration
	revision uint64
	handle   core.Handle
	bound    []core.ReservationPut
	open     []core.Event // answers on their way
	cacheSeq map[string]uint64
	loadSeq  uint64
	epoch    map[string]int
}

func newLife(seed uint64) *life {
	return &life{Rand: rand.New(rand.NewPCG(seed, 11)), cacheSeq: map[string]uint64{}, epoch: map[string]int{}}
}

func (l *life) engine() string { return string(rune('a' + l.IntN(4))) }
func (l *life) of(s ...string) string {
	return s[l.IntN(len(s))]
}
func (l *life) stored() int64 { return stamp + int64(l.now) - int64(l.IntN(3))*int64(time.Second) }
func (l *life) next() uint64  { l.revision++; return l.revision }

func (l *life) blocks() []uint64 {
	p := uint64(1 + l.IntN(3))
	var out []uint64
	for i := range 1 + l.IntN(6) {
		out = append(out, p<<32+uint64(i)*0x9e3779b97f4a7c15)
	}
	return out
}

func (l *life) facts() subjects.Facts {
	f := subjects.Facts{
		Job: l.of("j", "k"), ID: fmt.Sprint(l.IntN(400)), Reader: "main", Lane: l.lane(), Group: l.of("", "g1", "g2"),
		Trajectory: l.of("", "t1", "t2"), Model: "m", PromptTokens: 100 + l.IntN(900), MaxTokens: 50 + l.IntN(500),
		DeadlineMS: int64(2000 + l.IntN(60_000)), MaxAttempts: 1 + l.IntN(3), Blocks: l.blocks(), BlockTokens: 64,
	}
	if l.IntN(4) == 0 {
		f.Bind, f.Burnt, f.Tried, f.Accepted = 2, 1, []string{l.engine()}, l.stored()
	}
	return f
}

func (l *life) lane() subjects.Lane {
	return []subjects.Lane{subjects.LaneUrgent, subjects.LaneContinue, subjects.LaneNormal, subjects.LaneBatch}[l.IntN(4)]
}

// begin is what a dispatcher hears first.
func (l *life) begin() []core.Event {
	out := []core.Event{core.ServerTime{UnixNano: stamp}, core.Contact{Proven: true}}
	for _, v := range []core.ViewKind{core.ViewReservations, core.ViewResults, core.ViewDispatchers, core.ViewCancels, core.ViewEngines} {
		out = append(out, core.ViewSwap{Kind: v})
	}
	out = append(out, core.ViewSwap{Kind: core.ViewPools, Pool: &core.PoolPut{Revision: 1, Settings: subjects.Settings{
		Policy: "projected_time", Mode: l.of("off", "shadow", "enforce"), Knobs: map[string]float64{"wait_max": 2}}}})
	for _, e := range []string{"a", "b", "c", "d"} {
		out = append(out, l.register(e))
	}
	return out
}

func (l *life) register(e string) core.Event {
	tokens := int64(40_000)
	return core.EnginePut{Revision: l.next(), Stored: l.stored(), Engine: subjects.Engine{
		Engine: e, Epoch: fmt.Sprint(e, l.epoch[e]), State: subjects.EngineReady, Slots: 2 + l.IntN(2), Model: "m", Ranks: 1,
		Events: l.of("exact", "exact", "approximate", "none"), CapacityTokens: &tokens,
	}}
}

func (l *life) load(e string) core.Event {
	l.loadSeq++
	n, used, capacity, most, pre := 1+l.IntN(4), int64(l.IntN(39_000)), int64(40_000), 4, int64(l.IntN(3))
	rate := 100 + 10*l.Float64()
	return core.Load{Load: subjects.Load{
		SchemaVersion: 1, Engine: e, Epoch: fmt.Sprint(e, l.epoch[e]), Seq: l.loadSeq, AppliedRevision: l.revision - min(l.revision, uint64(l.IntN(4))),
		IntervalMS: 200, Ranks: []subjects.RankLoad{{Running: &n, Waiting: &n, KVUsedTokens: &used, KVCapacityTokens: &capacity,
			MaxRunning: &most, DecodeTokS: &rate, PrefillTokS: &rate, PreemptionsTotal: &pre}},
	}}
}

// event is the next one.
func (l *life) event() core.Event {
	l.now += time.Duration(l.IntN(80)) * time.Millisecond
	if len(l.open) > 0 && l.IntN(2) == 0 {
		i := l.IntN(len(l.open))
		ev := l.open[i]
		l.open = slices.Delete(l.open, i, i+1)
		return ev
	}
	e := l.engine()
	switch n := l.IntN(100); {
	case n < 18:
		return core.Tick{}
	case n < 24:
		return core.Contact{Proven: l.IntN(12) > 0, View: []core.ViewKind{"", "", core.ViewEngines, core.ViewReservations}[l.IntN(4)]}
	case n < 27:
		return core.ServerTime{UnixNano: stamp + int64(l.now) + int64(l.IntN(50))*int64(time.Millisecond)}
	case n < 50:
		l.handle++
		q := core.Queue{Job: "j", Lane: l.lane()}
		f := l.facts()
		q.Job = f.Job
		if f.Bind > 0 {
			q = core.Queue{Job: f.Job, Retry: true}
		}
		return core.Fetched{Handle: l.handle, Queue: q, Facts: f, Seq: uint64(l.IntN(500)), Stored: l.stored(), Pending: uint64(l.IntN(5))}
	case n < 55:
		return l.load(e)
	case n < 60:
		l.cacheSeq[e]++
		return core.Cache{Engine: e, Epoch: fmt.Sprint(e, l.epoch[e]), Seq: l.cacheSeq[e], Op: l.of("stored", "stored", "stored", "removed", "cleared"), Tier: l.of("gpu", "cpu"), Blocks: l.blocks()}
	case n < 65:
		if len(l.bound) > 0 {
			return l.end(l.bound[l.IntN(len(l.bound))])
		}
		return core.Tick{}
	case n < 70:
		return l.register(e)
	case n < 71:
		l.epoch[e]++
		l.cacheSeq[e] = 0
		return l.register(e)
	case n < 72:
		return core.EngineGone{Engine: e, Revision: l.next()}
	case n < 75:
		return core.DispatcherPut{Dispatcher: l.of("d1", "d2"), Revision: l.next(), Stored: l.stored()}
	case n < 77:
		return core.Answered{Answer: subjects.Answer{Job: "j", ID: fmt.Sprint(l.IntN(400)), Status: subjects.Completed, CompletionTokens: &n}, Revision: l.next(), Stored: l.stored()}
	case n < 78:
		return core.CancelPut{Cancel: subjects.Cancel{Kind: subjects.CancelGroup, Job: "j", Value: "g1"}, Revision: l.next(), Stored: l.stored()}
	case n < 79:
		return core.PoolPut{Revision: l.next(), Settings: subjects.Settings{Policy: l.of("projected_time", "kv_tokens", "weighted_cache"), Mode: l.of("enforce", "shadow"), Knobs: map[string]float64{"wait_max": 1},
			Servers: []subjects.Server{{Name: "s1", Slots: 3, Model: "m"}}}}
	case n < 81:
		l.handle++
		return core.Acquire{Handle: l.handle, Facts: l.facts(), TTLMS: 3000}
	case n < 83:
		return core.Jobs{Queues: []core.QueueDepth{{Queue: core.Queue{Job: "j", Lane: l.lane()}, Messages: uint64(l.IntN(9))}}}
	case n < 84:
		return l.swap()
	case n < 85 && l.IntN(30) == 0:
		l.now += 11 * time.Second // the process was stopped
		return core.Tick{}
	}
	p := core.ReservationPut{Revision: l.next(), Stored: l.stored(), TTLMS: 90_000_000, Held: subjects.Held{
		Engine: e, Job: "j", ID: fmt.Sprint(l.IntN(400)), State: []subjects.State{subjects.StateBound, subjects.StateBound, subjects.StateReturned}[l.IntN(3)],
		Bind: 1 + l.IntN(3), Epoch: fmt.Sprint(e, l.epoch[e]), Tokens: 300, PromptTokens: 200, LeftMS: int64(l.IntN(60_000)), Group: l.of("", "g1"), MaxAttempts: 2, Dispatcher: l.of("d", "d1")}}
	if p.State == subjects.StateBound {
		l.bound = append(l.bound, p)
	}
	return p
}

func (l *life) end(p core.ReservationPut) core.Event {
	n := 10 + l.IntN(300)
	return core.ReservationGone{Revision: l.next(), Stored: l.stored(), Released: subjects.Released{Engine: p.Engine, Job: p.Job, ID: p.ID, Bind: p.Bind,
		Epoch: p.Epoch, Outcome: subjects.OutcomeAnswered, Tokens: p.Tokens, PromptTokens: p.PromptTokens, CompletionTokens: &n, Group: p.Group}}
}

func (l *life) swap() core.Event {
	s := core.ViewSwap{Kind: core.ViewReservations}
	for i, p := range l.bound {
		if i%2 == 0 && !slices.ContainsFunc(s.Reservations, func(o core.ReservationPut) bool { return o.Engine == p.Engine && o.Key() == p.Key() }) {
			s.Reservations = append(s.Reservations, p)
		}
	}
	return s
}

// hear takes the effects of a step and has them answered some time.
func (l *life) hear(out []core.Effect) {
	refusals := []core.Answer{core.OK, core.OK, core.OK, core.OK, core.Conflict, core.Busy, core.Duplicate, core.Unavailable, core.Full, core.Gone}
	a := refusals[l.IntN(len(refusals))]
	for _, e := range out {
		switch e := e.(type) {
		case core.Bind:
			ans := core.BindAnswer{Handle: e.Handle, Engine: e.Held.Engine, Job: e.Held.Job, ID: e.Held.ID, Bind: e.Held.Bind, Answer: a, Stored: l.stored()}
			switch a {
			case core.OK, core.Duplicate:
				ans.Seq = l.next()
				p := core.ReservationPut{Held: e.Held, Revision: ans.Seq, Stored: ans.Stored, TTLMS: e.TTL.Milliseconds()}
				l.bound = append(l.bound, p)
				l.open = append(l.open, p)
			case core.Conflict:
				ans.Actual = e.Expected + uint64(l.IntN(4))
			}
			l.open = append(l.open, ans)
		case core.Fetch:
			l.open = append(l.open, core.FetchDone{Queue: e.Queue, Asked: e.N, Delivered: l.IntN(e.N + 1)})
		case core.GetFromLeader:
			ans := core.LeaderAnswer{Handle: e.Handle, Engine: e.Engine, Job: e.Job, ID: e.ID, Err: l.of("", "", "no leader")}
			if l.IntN(2) == 0 {
				ans.Answered = &core.Answered{Answer: subjects.Answer{Job: e.Job, ID: e.ID}, Revision: 1, Stored: l.stored()}
			}
			l.open = append(l.open, ans)
		case core.Retry:
			l.open = append(l.open, core.RetryAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision, Answer: a})
		case core.DeleteKey:
			l.open = append(l.open, core.DeleteAnswer{Engine: e.Engine, Job: e.Job, ID: e.ID, Revision: e.Revision, Answer: a, Seq: l.next()})
		case core.PublishResult:
			l.open = append(l.open, core.ResultAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID, Answer: a, Seq: 1})
		case core.PublishDead:
			l.open = append(l.open, core.DeadAnswer{Handle: e.Handle, Job: e.Job, ID: e.ID, Answer: a})
		case core.AskSnapshot:
			at := l.cacheSeq[e.Engine]
			for _, phase := range []string{"begin", "part", "end"} {
				l.open = append(l.open, core.Snapshot{Engine: e.Engine, Epoch: e.Epoch, AsOf: at, Phase: phase, Blocks: []uint64{1<<32 + 0, 2 << 32}})
			}
		}
	}
}

// readBack is a checkpoint as it comes back from a file.
func readBack(t *rapid.T, c *core.Core) *core.Checkpoint {
	b, err := json.Marshal(c.Checkpoint())
	if err != nil {
		t.Fatal(err)
	}
	p := new(core.Checkpoint)
	if err := json.Unmarshal(b, p); err != nil {
		t.Fatal(err)
	}
	return p
}

var alike = cmp.Options{cmpopts.EquateEmpty()}

// Whatever a core has lived through, one restored from its checkpoint goes on
// with the same effects.
func TestACoreRestoredFromACheckpointGoesOnAsIfItHadNeverStopped(t *testing.T) {
	decisions, waiting, held := 0, 0, 0
	rapid.Check(t, func(t *rapid.T) {
		l := newLife(rapid.Uint64().Draw(t, "seed"))
		cfg := core.Config{Dispatcher: "d", MaxAnswered: rapid.SampledFrom([]int{3, 1000}).Draw(t, "answered")}
		c := core.New(cfg)
		for _, ev := range l.begin() {
			l.hear(c.Step(ev, l.now))
		}
		for range rapid.IntRange(0, 400).Draw(t, "before") {
			l.hear(c.Step(l.event(), l.now))
		}
		r, err := core.Restore(cfg, readBack(t, c))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(c.Checkpoint(), r.Checkpoint(), alike); d != "" {
			t.Fatalf("another checkpoint comes of the restored core:\n%s", d)
		}
		if d := cmp.Diff(c.Candidates(), r.Candidates(), alike); d != "" {
			t.Fatalf("its candidates are others:\n%s", d)
		}
		waiting, held = waiting+c.InHand(), held+len(c.Checkpoint().Held)
		for i := range rapid.IntRange(1, 150).Draw(t, "after") {
			ev := l.event()
			got := slices.Clone(r.Step(ev, l.now))
			want := c.Step(ev, l.now)
			if d := cmp.Diff(want, got, alike); d != "" {
				t.Fatalf("event %d after it, %T, has other effects (-never stopped +restored):\n%s", i, ev, d)
			}
			for _, e := range want {
				if _, ok := e.(core.Decision); ok {
					decisions++
				}
			}
			l.hear(want)
		}
		if d := cmp.Diff(c.Checkpoint(), r.Checkpoint(), alike); d != "" {
			t.Fatalf("in the end they know different things:\n%s", d)
		}
	})
	if decisions < 100 || waiting < 20 || held < 20 {
		t.Errorf("this proves little: %d decisions after checkpoints, %d messages in hand and %d reservations in them", decisions, waiting, held)
	}
}

// A field that no checkpoint holds would be lost in it, and a replay from there
// would decide otherwise.
func TestEveryFieldOfTheCoreIsHeldInItsCheckpoint(t *testing.T) {
	for _, k := range core.KeptTypes {
		typ := reflect.TypeOf(k.Of)
		named := " " + k.Held + " " + k.Derived + " "
		for i := range typ.NumField() {
			if f := typ.Field(i).Name; !strings.Contains(named, " "+f+" ") {
				t.Errorf("%s.%s is new: hold it in core.Checkpoint (checkpoint.go), take and restore it there, then name it in export_test.go; "+
					"where it follows from the rest name it as derived and make Restore derive it", typ, f)
			}
		}
		for _, f := range strings.Fields(named) {
			if _, ok := typ.FieldByName(f); !ok {
				t.Errorf("%s.%s is named in export_test.go and not there any more", typ, f)
			}
		}
	}
	for i, n := range core.NamesOfStages() {
		if n == "" {
			t.Errorf("stage %d of an item has no name in checkpoint.go", i)
		}
	}
}

func TestACheckpointWithoutSenseIsRefused(t *testing.T) {
	l := newLife(5)
	c := core.New(core.Config{Dispatcher: "d"})
	for _, ev := range l.begin() {
		l.hear(c.Step(ev, l.now))
	}
	for range 300 {
		l.hear(c.Step(l.event(), l.now))
	}
	for name, spoil := range map[string]func(*core.Checkpoint){
		"later":          func(p *core.Checkpoint) { p.Version = core.CheckpointVersion + 1 },
		"no version":     func(p *core.Checkpoint) { p.Version = 0 },
		"index":          func(p *core.Checkpoint) { p.Index = p.Index[:len(p.Index)/2] },
		"stage":          func(p *core.Checkpoint) { p.Hand = append(p.Hand, core.ItemState{Handle: 1 << 60, Stage: "dancing"}) },
		"engine":         func(p *core.Checkpoint) { p.Held = append(p.Held, core.HeldState{}) },
		"twice":          func(p *core.Checkpoint) { p.Engines = append(slices.Clone(p.Engines), p.Engines[0]) },
		"not in hand":    func(p *core.Checkpoint) { p.Jobs = append(p.Jobs, core.JobState{Waiting: [][]uint64{{1 << 61}}}) },
		"answered":       func(p *core.Checkpoint) { p.Answered.Ring = make([]byte, 7) },
		"settings":       func(p *core.Checkpoint) { p.Settings.Policy = "no such policy" },
		"too many lanes": func(p *core.Checkpoint) { p.Jobs = append(p.Jobs, core.JobState{Waiting: make([][]uint64, 99)}) },
	} {
		p := *c.Checkpoint()
		spoil(&p)
		if _, err := core.Restore(core.Config{Dispatcher: "d"}, &p); !errors.Is(err, core.ErrCheckpoint) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
