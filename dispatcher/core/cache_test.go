package core_test

import (
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// warm is a core under projected_time with engines a and b that report load
// and cache events; a holds the blocks.
type warm struct {
	t    *testing.T
	c    *core.Core
	now  time.Duration
	load uint64
	next core.Handle
	log  []logged // of every step, as encoded
}

type logged struct {
	event   []byte
	effects []string
}

func (w *warm) step(ev core.Event) []core.Effect {
	w.t.Helper()
	out := w.c.Step(ev, w.now)
	b, err := core.EncodeEvent(ev, w.now)
	if err != nil {
		w.t.Fatal(err)
	}
	w.log = append(w.log, logged{b, written(w.t, out)})
	return out
}

func (w *warm) report() {
	w.load++
	for _, e := range []string{"a", "b"} {
		r, rate := rank(0, 0, 0, 0), 5000.0
		r.DecodeTokS, r.PrefillTokS = &rate, &rate
		w.step(loadOf(e, "x", w.load, r))
	}
}

func newWarm(t *testing.T) (*warm, []core.Effect) {
	w := &warm{t: t, c: ready(t, 0), now: time.Second}
	w.step(core.PoolPut{Revision: 1, Settings: subjects.Settings{Policy: "projected_time", Mode: subjects.ModeEnforce}})
	var out []core.Effect
	for i, e := range []string{"a", "b"} {
		p := engineAt(e, "x", uint64(10+i), subjects.EngineReady)
		p.Events, p.Stored = "exact", stamp+int64(time.Second)
		out = append(out, append([]core.Effect(nil), w.step(p)...)...)
	}
	w.step(core.Contact{Proven: true})
	w.report()
	return w, out
}

var chain = []uint64{11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30}

// place is where the next request for the chain is bound; the bind is answered
// and released at once, so that load plays no part.
func (w *warm) place() (engine string, predicted *int) {
	w.t.Helper()
	w.next++
	id := string(rune('a' + w.next))
	b := bindIn(w.step(core.Fetched{Handle: w.next, Queue: core.Queue{Job: "j", Lane: subjects.LaneNormal}, Seq: uint64(w.next),
		Stored: stamp, Facts: subjects.Facts{Job: "j", ID: id, Lane: subjects.LaneNormal, PromptTokens: 64*len(chain) + 10, MaxTokens: 10, Blocks: chain}}))
	if b == nil {
		w.t.Fatal("not bound")
	}
	seq := b.Expected + 1000*uint64(w.next)
	w.step(core.BindAnswer{Handle: w.next, Engine: b.Held.Engine, Job: "j", ID: id, Bind: b.Held.Bind, Answer: core.OK, Seq: seq, Stored: stamp})
	w.step(goneAt(b.Held.Engine, id, 1, seq+1))
	return b.Held.Engine, b.Held.PredictedCached
}

// always is whether n requests in a row all go to one engine.
func (w *warm) always(engine string, n int) bool {
	for range n {
		w.report()
		if at, _ := w.place(); at != engine {
			return false
		}
	}
	return true
}

func (w *warm) snapshot(engine string, asOf uint64, blocks []uint64) {
	for _, phase := range []string{"begin", "part", "end"} {
		s := core.Snapshot{Engine: engine, Epoch: "x", AsOf: asOf, Phase: phase}
		if phase == "part" {
			s.Tier, s.Blocks = "gpu", blocks
		}
		w.step(s)
	}
}

func asks(out []core.Effect) int {
	n := 0
	for _, e := range out {
		if _, ok := e.(core.AskSnapshot); ok {
			n++
		}
	}
	return n
}

// scenarios C1, C3, C4, C5, C9 through the core: credit follows the snapshot
// barrier, and ends with whatever makes the view untrue.
func TestPrefixCreditFollowsWhatTheCacheIsKnownToHold(t *testing.T) {
	w, out := newWarm(t)
	if asks(out) != 2 {
		t.Fatalf("%d snapshots were asked for: want one of each engine", asks(out))
	}
	if w.always("a", 4) {
		t.Error("engine a is preferred before its cache is known")
	}
	w.snapshot("a", 5, chain)
	w.snapshot("b", 0, nil)
	w.report()
	at, predicted := w.place()
	if at != "a" || predicted == nil || *predicted != 64*len(chain) {
		t.Errorf("bound to %s, predicting %v cached tokens: want a, %d", at, predicted, 64*len(chain))
	}
	if !w.always("a", 4) {
		t.Error("the holder of the prefix does not get the work")
	}
	// C5: cleared.
	w.step(core.Cache{Engine: "a", Epoch: "x", Seq: 6, Op: "cleared"})
	if w.always("a", 4) {
		t.Error("engine a is preferred although its cache was cleared")
	}
	w.step(core.Cache{Engine: "a", Epoch: "x", Seq: 7, Op: "stored", Tier: "gpu", Blocks: chain})
	if !w.always("a", 4) {
		t.Error("what was stored after the clearing gives no credit")
	}
	// C4: a block under one that nobody told of: something is missing here.
	under := core.Cache{Engine: "a", Epoch: "x", Seq: 8, Namespace: 5, Op: "stored", Tier: "gpu", Blocks: []uint64{41}, HasParent: true}
	under.Parent = chain[0]
	if n := asks(w.step(under)); n != 0 || !w.always("a", 4) {
		t.Errorf("a block under one that a holds led to %d requests for a snapshot: want none, and a keeps its credit", n)
	}
	under.Seq, under.Parent = 9, 40
	if n := asks(w.step(under)); n != 1 {
		t.Errorf("a block under an unknown one led to %d requests for a snapshot: want 1", n)
	}
	if w.always("a", 4) {
		t.Error("engine a is preferred although its view misses a block")
	}
	w.snapshot("a", 9, chain)
	if !w.always("a", 4) {
		t.Error("after the snapshot that mends it the holder does not get the work")
	}
	// A gap: no credit until a new snapshot.
	if n := asks(w.step(core.Cache{Engine: "a", Epoch: "x", Seq: 11, Op: "stored", Tier: "gpu", Blocks: []uint64{99}})); n != 1 {
		t.Errorf("a gap led to %d requests for a snapshot: want 1", n)
	}
	if w.always("a", 4) {
		t.Error("engine a is preferred although events are missing")
	}
	// C9: the agent does not answer: asked again later, not at once.
	if n := asks(w.step(core.Snapshot{Engine: "a", Epoch: "x", Phase: "failed"})); n != 0 {
		t.Error("a failed snapshot is asked for again at once")
	}
	again := 0
	for range 60 {
		w.now += 50 * time.Millisecond
		w.step(core.Contact{Proven: true})
		again += asks(w.step(core.Tick{}))
	}
	if again != 1 {
		t.Errorf("a failed snapshot was asked for %d times in 3 s: want once", again)
	}
	w.snapshot("a", 11, chain)
	if !w.always("a", 4) {
		t.Error("after the new snapshot the holder does not get the work")
	}
	// C3: gone, and late events do not bring it back.
	w.step(core.EngineGone{Engine: "a", Revision: 99})
	w.step(core.Cache{Engine: "a", Epoch: "x", Seq: 12, Op: "stored", Tier: "gpu", Blocks: chain})
	if !w.always("b", 4) {
		t.Error("work goes to an engine that is gone")
	}
}
