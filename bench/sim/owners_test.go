package sim_test

import (
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/bench/sim"
	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

var ownerSeeds = flag.Int("owner-seeds", 1000, "runs of TestAThousandTroubledRunsKeepTheRulesOfOwners")

// hotPool is a pool under owner_pressure whose rollouts share the beginnings of
// their prompts: rollout i has that of key i % keys.
type hotPool struct {
	*sim.World
	t      testing.TB
	keys   int
	output func(i int) int // tokens
	moves  []core.Transition
}

const hotBlock = 64

func newHotPool(t testing.TB, o sim.Options, keys int, knobs map[string]float64) *hotPool {
	o.Settings = subjects.Settings{Policy: "owner_pressure", Mode: subjects.ModeEnforce, BlockTokens: hotBlock, AnchorTokens: 2 * hotBlock, Knobs: knobs}
	p := &hotPool{World: sim.New(o), t: t, keys: keys, output: func(int) int { return 100 }}
	p.Work = func(key string) sim.Work {
		i, err := strconv.Atoi(strings.TrimPrefix(key, "j."))
		if err != nil {
			t.Fatal(err)
		}
		return sim.Work{PromptTokens: 3*hotBlock + 1, OutputTokens: p.output(i), Blocks: p.blocks(i)}
	}
	p.OnTransition = func(x core.Transition) { p.moves = append(p.moves, x) }
	return p
}

// blocks of rollout i: two that are its key's, one of its own.
func (p *hotPool) blocks(i int) []uint64 {
	g := uint64(i%p.keys+1) << 32
	return []uint64{g + 1, g + 2, g + 1000 + uint64(i)}
}

// key is the owner key of rollout i.
func (p *hotPool) key(i int) string { return fmt.Sprintf("%016x", uint64(i%p.keys+1)<<32+2) }

func (p *hotPool) node(name string, slots int) *sim.Node {
	n := p.AddNode(name, slots, 0)
	if err := n.SetModel(model.Config{BlockTokens: hotBlock, KVTokens: 1 << 16, MaxRunning: slots}); err != nil {
		p.t.Fatal(err)
	}
	return n
}

func (p *hotPool) submit(i int) {
	p.Bus.Submit(subjects.Facts{Job: "j", ID: fmt.Sprintf("%04d", i), Reader: "main", Lane: subjects.LaneNormal, Model: "m",
		PromptTokens: 3*hotBlock + 1, MaxTokens: p.output(i), BlockTokens: hotBlock, Blocks: p.blocks(i), MaxAttempts: 50})
}

func (p *hotPool) count(what string) int {
	n := 0
	for _, m := range p.moves {
		if m.What == what {
			n++
		}
	}
	return n
}

func (p *hotPool) owners(i int) []string {
	var out []string
	owners, _ := p.Bus.Owners(p.key(i))
	for _, o := range owners {
		out = append(out, o.Engine)
	}
	slices.Sort(out)
	return out
}

// end runs until all is answered and what comes late has come.
func (p *hotPool) end(within time.Duration) {
	p.t.Helper()
	p.Run(within, p.AllAnswered)
	p.Run(time.Minute, nil)
	for _, x := range p.Problems() {
		p.t.Error(x)
	}
}

func TestAHotKeyGetsItsSecondOwnerByOneSeedAndItsProof(t *testing.T) {
	for _, dispatchers := range []int{1, 4} {
		p := newHotPool(t, sim.Options{Seed: 1}, 1, map[string]float64{"owner_ceiling": 2})
		for i := range dispatchers {
			p.AddDispatcher(fmt.Sprintf("d%d", i))
		}
		p.node("e0", 4)
		p.node("e1", 4)
		p.Run(time.Second, nil)
		p.submit(0)
		p.Run(5*time.Second, p.AllAnswered)
		p.Run(time.Second, nil)
		if got := p.owners(0); len(got) != 1 || p.count("first") != 1 {
			t.Fatalf("%d dispatchers: after the first completion the owners are %v, %d times the first", dispatchers, got, p.count("first"))
		}
		for i := range 24 {
			p.submit(1 + i)
		}
		p.end(2 * time.Minute)
		if got := p.owners(0); !slices.Equal(got, []string{"e0", "e1"}) {
			t.Errorf("%d dispatchers: the owners are %v, want both", dispatchers, got)
		}
		if p.Bus.Seeded != 1 || p.count("seeded") != 1 || p.count("proved") != 1 || p.count("cooldown") != 1 {
			t.Errorf("%d dispatchers: %d seeds, transitions %+v", dispatchers, p.Bus.Seeded, p.moves)
		}
		n := map[string]int{}
		for _, d := range p.Decisions {
			n[d.Reason]++
		}
		if n["owner_pressure_spill"] == 0 || n["cached_owner_hold"] == 0 {
			t.Errorf("%d dispatchers: decisions %v", dispatchers, n)
		}
	}
}

// A failed seed is given back before anything becomes of its rollout, and adds
// nobody; without usage nobody is an owner.
func TestASeedThatFailsIsGivenBackAndAddsNobody(t *testing.T) {
	for name, spoil := range map[string]func(n *sim.Node){
		"failed":   func(n *sim.Node) { n.Outcome = func(subjects.Held) subjects.Status { return subjects.Failed } },
		"no usage": func(n *sim.Node) { n.NoUsage = true },
	} {
		p := newHotPool(t, sim.Options{Seed: 2}, 1, nil)
		p.AddDispatcher("d0")
		p.AddDispatcher("d1")
		nodes := map[string]*sim.Node{"e0": p.node("e0", 4), "e1": p.node("e1", 4)}
		p.Run(time.Second, nil)
		p.submit(0)
		p.Run(5*time.Second, p.AllAnswered)
		p.Run(time.Second, nil)
		first := p.owners(0)
		for e, n := range nodes {
			if !slices.Contains(first, e) {
				spoil(n)
			}
		}
		for i := range 24 {
			p.submit(1 + i)
		}
		p.end(2 * time.Minute)
		if got := p.owners(0); !slices.Equal(got, first) || p.Bus.Seeded == 0 || p.Bus.Ended["given_back"] != p.Bus.Seeded {
			t.Errorf("%s: the owners are %v, %d seeds, ends %v", name, got, p.Bus.Seeded, p.Bus.Ended)
		}
	}
}

// Who starts later finds the end of a seed in its marker, and proves it; when
// the marker has expired it is given back, for nobody knows how it ended.
func TestASeedWhoseEndNobodySawIsEndedByWhoComesNext(t *testing.T) {
	for _, c := range []struct {
		away          time.Duration
		proved, given int
	}{{20 * time.Second, 1, 0}, {2 * time.Minute, 0, 1}} {
		p := newHotPool(t, sim.Options{Seed: 4}, 1, nil)
		d := p.AddDispatcher("d0")
		p.node("e0", 4)
		p.node("e1", 4)
		p.Run(time.Second, nil)
		p.submit(0)
		p.Run(5*time.Second, p.AllAnswered)
		p.Run(time.Second, nil)
		p.OnTransition = func(x core.Transition) {
			if p.moves = append(p.moves, x); x.What == "seeded" {
				d.Kill()
			}
		}
		for i := range 8 {
			p.submit(1 + i)
		}
		p.Run(c.away, nil)
		if p.Bus.Seeded != 1 {
			t.Fatalf("%d seeds", p.Bus.Seeded)
		}
		p.AddDispatcher("d1")
		p.end(time.Minute)
		if n := p.count("proved"); n != c.proved || p.Bus.Ended["given_back"] != c.given {
			t.Errorf("after %v: %d proved, ends %v, transitions %+v", c.away, n, p.Bus.Ended, p.moves)
		}
	}
}

func TestAnOwnerIsStruckOff(t *testing.T) {
	for name, strike := range map[string]func(n *sim.Node){
		"by a cleared cache":        func(n *sim.Node) { n.Engine().Flush() },
		"by a new epoch":            func(n *sim.Node) { n.Kill(); n.Start() },
		"by another weight version": func(n *sim.Node) { n.Reg.WeightVersion = new(int64) },
	} {
		p := newHotPool(t, sim.Options{Seed: 3}, 1, nil)
		p.AddDispatcher("d0")
		p.AddDispatcher("d1")
		n := p.node("e0", 4)
		p.Run(time.Second, nil)
		p.submit(0)
		p.Run(5*time.Second, p.AllAnswered)
		p.Run(15*time.Second, nil)
		if len(p.owners(0)) != 1 {
			t.Fatalf("%s: there is no owner to strike", name)
		}
		strike(n)
		p.Run(15*time.Second, nil)
		if got := p.owners(0); len(got) != 0 || p.count("struck") != 1 {
			t.Errorf("%s: the owners are still %v; transitions %+v", name, got, p.moves)
		}
		p.submit(1)
		p.end(time.Minute)
		if got := p.owners(0); len(got) != 1 {
			t.Errorf("%s: the next completion made no owner", name)
		}
	}
}

// troubledOwners is a run with everything in it: dispatchers that die at a step
// of a seed, stand still for a minute or lose answers, engines that die, are cut
// off or lose their cache, runs without usage, failures, new weights.
func troubledOwners(t testing.TB, seed uint64, plant sim.Plant, watch func(core.Event, time.Duration, []core.Effect)) *hotPool {
	rnd := seed*0x9e3779b97f4a7c15 + 1
	pick := func(n int) int {
		rnd ^= rnd << 13
		rnd ^= rnd >> 7
		rnd ^= rnd << 17
		return int(rnd>>33) % n
	}
	slow, lag, timings := 0.01, time.Duration(1+pick(20))*time.Millisecond, core.DefaultTimings()
	if plant != "" { // what is late, and whose turn it is, overlap
		slow, lag, timings.RequeueStagger = 0.1, 300*time.Millisecond, 200*time.Millisecond
	}
	late := time.Duration(0)
	if seed%3 == 0 {
		late = 4 * time.Second // longer than some cooldowns
	}
	p := newHotPool(t, sim.Options{Seed: seed, Plant: plant, WatchDelay: lag, SlowWrites: slow, Timings: timings, OwnerDelay: late,
		Telemetry: sim.Telemetry{LoadLoss: 0.05, CacheLoss: 0.02, CacheDelay: 50 * time.Millisecond}},
		1+pick(3), map[string]float64{"owner_ceiling": float64(1 + pick(3)), "seed_cooldown": float64(1 + pick(4))})
	p.output = func(i int) int { return 20 + (i*37)%60 }
	var ds []*sim.Dispatcher
	for i := range 2 + pick(3) {
		ds = append(ds, p.AddDispatcher(fmt.Sprintf("d%d", i)))
	}
	if watch != nil {
		ds[0].Log = watch
	}
	ds[1].Old = seed%5 == 4 // scenario F17: an old dispatcher beside new ones
	var ns []*sim.Node
	for i := range 2 + pick(3) {
		ns = append(ns, p.node(fmt.Sprintf("e%d", i), 2+pick(2)))
	}
	p.Run(300*time.Millisecond, nil)
	for i := range 40 {
		p.After(time.Duration(pick(8000))*time.Millisecond, func() { p.submit(i) })
	}
	still := 12 * time.Second // long enough for views to be made anew
	if seed%8 == 0 {
		still = time.Minute
	}
	p.spoilDispatchers(ds, still, pick)
	p.spoilNodes(ns, pick)
	p.Run(still+10*time.Second, nil)
	p.Run(10*time.Minute, p.AllAnswered)
	p.Run(45*time.Second, nil) // dead dispatchers leave the turns, what comes late has come
	return p
}

func (p *hotPool) spoilDispatchers(ds []*sim.Dispatcher, still time.Duration, pick func(int) int) {
	die := pick(4)
	nth := pick(3)
	ds[0].Die = func(e core.Effect) bool { // scenario F18: killed at each step of a seed
		at := -1
		switch e.(type) {
		case core.SeedBind:
			at = 0
		case core.WriteOwners:
			at = 1
		case core.WriteSeed:
			at = 2
		}
		if at == die {
			nth--
		}
		return at == die && nth < 0
	}
	d := ds[len(ds)-1] // scenario F2: stopped between choosing and binding, or whenever
	at := time.Duration(pick(9000)) * time.Millisecond
	p.After(at, d.Pause)
	p.After(at+still, d.Resume)
	p.After(time.Duration(pick(9000))*time.Millisecond, func() { p.Bus.Lost = 3 })
	p.After(15*time.Second, func() { p.AddDispatcher("late") })
}

func (p *hotPool) spoilNodes(ns []*sim.Node, pick func(int) int) {
	n := ns[pick(len(ns))]
	at := time.Duration(1000+pick(9000)) * time.Millisecond
	switch pick(7) {
	case 0:
		p.After(at, n.Kill)
		p.After(at+5*time.Second, n.Start)
	case 1:
		p.After(at, n.Cut)
		p.After(at+time.Duration(5+pick(40))*time.Second, n.Heal)
	case 2:
		p.After(at, func() { n.Engine().Flush() })
	case 3:
		n.NoUsage = true
	case 4:
		n.Outcome = func(h subjects.Held) subjects.Status {
			if h.ID[3]%2 == 0 {
				return subjects.Failed
			}
			return subjects.Completed
		}
	case 5:
		v := int64(7)
		p.After(at, func() { n.Reg.WeightVersion = &v })
	case 6:
		p.After(at, func() {
			for _, r := range n.Running() {
				n.Return(r, "failed", 1)
			}
		})
	}
}

// scenario F18
// scenario F2
// scenario F17
func TestAThousandTroubledRunsKeepTheRulesOfOwners(t *testing.T) {
	seeded, proved, given, most := 0, 0, 0, 0
	for seed := range uint64(*ownerSeeds) {
		p := troubledOwners(t, seed, "", nil)
		for _, x := range p.Problems() {
			t.Fatalf("seed %d: %s", seed, x)
		}
		seeded += p.Bus.Seeded
		proved += p.count("proved")
		given += p.Bus.Ended["given_back"]
		most = max(most, p.Bus.MaxOwners)
	}
	t.Logf("%d seeds, %d proved, %d given back, at most %d owners of a key", seeded, proved, given, most)
	if seeded < *ownerSeeds/2 || proved == 0 || given == 0 || most < 2 && *ownerSeeds > 10 {
		t.Errorf("too little happened: %d seeds, %d proved, %d given back, at most %d owners", seeded, proved, given, most)
	}
}

// A check that finds nothing must be known to bite.
func TestAStreamWithoutTheSeedsGuardIsFoundOut(t *testing.T) {
	for seed := range uint64(100) {
		if p := troubledOwners(t, seed, sim.PlantNoSeedGuard, nil).Problems(); len(p) > 0 {
			t.Logf("seed %d: %s", seed, p[0])
			return
		}
	}
	t.Error("in 100 runs no rule was broken")
}

// The same events give the same effects: from the start, and from a checkpoint
// taken in the midst of seeds.
func TestOwnersAndSeedsReplayExactlyAlsoFromACheckpoint(t *testing.T) {
	seeded := 0
	for seed := range uint64(12) {
		var events [][]byte
		var effects []string
		troubledOwners(t, seed, "", func(ev core.Event, now time.Duration, out []core.Effect) {
			events, effects = append(events, encoded(t, ev, now)), append(effects, listed(t, out))
		})
		again := core.New(core.Config{Dispatcher: "d0", Timings: core.DefaultTimings()})
		again.Step(core.ServerTime{UnixNano: 1_700_000_000_000_000_000}, 0) // before the log was there
		var restored *core.Core
		for i, b := range events {
			ev, now, err := core.DecodeEvent(b)
			if err != nil {
				t.Fatal(err)
			}
			if got := listed(t, again.Step(ev, now)); got != effects[i] {
				t.Fatalf("seed %d, event %d %s:\nrecorded %s\nreplayed %s", seed, i, b, effects[i], got)
			}
			if restored != nil {
				if got := listed(t, restored.Step(ev, now)); got != effects[i] {
					t.Fatalf("seed %d, event %d %s:\nrecorded %s\nrestored %s", seed, i, b, effects[i], got)
				}
			}
			if strings.Contains(effects[i], `"t":"SeedBind"`) || strings.Contains(effects[i], `"t":"WriteOwners"`) {
				seeded++
				if restored, err = core.Restore(core.Config{Dispatcher: "d0", Timings: core.DefaultTimings()}, again.Checkpoint()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if seeded == 0 {
		t.Error("nothing was seeded")
	}
}

func encoded(t *testing.T, ev core.Event, now time.Duration) []byte {
	b, err := core.EncodeEvent(ev, now)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func listed(t *testing.T, out []core.Effect) string {
	var b strings.Builder
	for _, e := range out {
		x, err := core.EncodeEffect(e)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(x)
		b.WriteByte('\n')
	}
	return b.String()
}
