package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// flat is a profile in which a step takes 10 ms whatever it does, and a prompt
// token 1 us more.
func flat() Profile {
	return Profile{Name: "flat", Step: 10 * time.Millisecond, PromptToken: time.Microsecond}
}

func must(t *testing.T, c Config) *Model {
	t.Helper()
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func add(t *testing.T, m *Model, now time.Duration, r Request) {
	t.Helper()
	if err := m.Add(now, r); err != nil {
		t.Fatal(err)
	}
}

// drain runs to the end and returns every event, slices copied.
func drain(t *testing.T, m *Model) []Event {
	t.Helper()
	var out []Event
	for range 1_000_000 {
		at, ok := m.Next()
		if !ok {
			return out
		}
		out = append(out, copied(m.Advance(at))...)
		invariants(t, m)
	}
	t.Fatal("a million changes and no end")
	return nil
}

func copied(es []Event) []Event {
	out := slices.Clone(es)
	for i := range out {
		out[i].Blocks = slices.Clone(out[i].Blocks)
	}
	return out
}

// invariants checks the sums of the pool against what requests hold.
func invariants(t *testing.T, m *Model) {
	t.Helper()
	p := &m.pool
	refs, anon := map[int32]int{}, 0
	for _, r := range m.running {
		anon += r.anon
		for _, i := range r.held {
			refs[i]++
		}
		if want := blocksOf(max(r.computed, r.target), m.cfg.BlockTokens); len(r.held)+r.anon != want {
			t.Fatalf("%s holds %d blocks for %d tokens, want %d", r.req.ID, len(r.held)+r.anon, r.computed, want)
		}
	}
	idle := 0
	for i := p.oldest; i != none; i = p.slots[i].next {
		idle++
		if p.slots[i].refs != 0 {
			t.Fatalf("a referenced block is in the list of idle ones")
		}
	}
	if anon != p.anon || len(refs) != p.used || idle != p.idle || p.free() < 0 {
		t.Fatalf("pool says anon %d used %d idle %d free %d; requests hold anon %d used %d, the list has %d",
			p.anon, p.used, p.idle, p.free(), anon, len(refs), idle)
	}
	for i, n := range refs {
		if int(p.slots[i].refs) != n {
			t.Fatalf("block %d has %d references, requests hold %d", i, p.slots[i].refs, n)
		}
	}
}

func find(es []Event, k Kind, id string) *Event {
	for i := range es {
		if es[i].Kind == k && es[i].ID == id {
			return &es[i]
		}
	}
	return nil
}

func names(from, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = uint64(from + i)
	}
	return out
}

func TestARequestPrefillsThenDecodesOneTokenAStep(t *testing.T) {
	m := must(t, Config{Profile: flat()})
	add(t, m, time.Second, Request{ID: "a", PromptTokens: 100, OutputTokens: 5})
	es := drain(t, m)
	first, end := find(es, FirstToken, "a"), find(es, Finished, "a")
	if want := time.Second + 10*time.Millisecond + 100*time.Microsecond; first.At != want {
		t.Errorf("first token at %v, want %v", first.At, want)
	}
	if want := first.At + 40*time.Millisecond; end.At != want || end.Tokens != 5 {
		t.Errorf("finished at %v with %d tokens, want %v with 5", end.At, end.Tokens, want)
	}
	s := m.Stats()
	if s.KVUsed != 0 || s.PromptTokens != 100 || s.GenerationTokens != 5 || s.Finished != 1 || s.Steps != 5 {
		t.Errorf("stats after it: %+v", s)
	}
}

func TestRequestsOfOneInstantShareTheFirstStepAndLaterOnesJoinAtABoundary(t *testing.T) {
	m := must(t, Config{Profile: flat()})
	add(t, m, 0, Request{ID: "a", PromptTokens: 10, OutputTokens: 10})
	add(t, m, 0, Request{ID: "b", PromptTokens: 10, OutputTokens: 10})
	m.Advance(15 * time.Millisecond) // inside the second step, which began at 10.02 ms
	add(t, m, 15*time.Millisecond, Request{ID: "c", PromptTokens: 10, OutputTokens: 1})
	es := drain(t, m)
	if got := find(es, Started, "c").At; got != 20*time.Millisecond+20*time.Microsecond {
		t.Errorf("c joined at %v, want the end of the step in flight", got)
	}
	if a, b := find(es, Finished, "a").At, find(es, Finished, "b").At; a != b {
		t.Errorf("a and b were one batch and ended at %v and %v", a, b)
	}
}

func TestPromptsAreChunkedByTheTokenBudgetWhileOthersDecode(t *testing.T) {
	m := must(t, Config{Profile: flat(), StepTokens: 300, MaxRunning: 4})
	add(t, m, 0, Request{ID: "a", PromptTokens: 10, OutputTokens: 50})
	m.Advance(time.Millisecond)
	add(t, m, time.Millisecond, Request{ID: "long", PromptTokens: 1000, OutputTokens: 1})
	es := drain(t, m)
	start, first := find(es, Started, "long").At, find(es, FirstToken, "long").At
	// 299 tokens a step beside one decode: 299 + 299 + 299 + 103.
	if want := 40*time.Millisecond + time.Millisecond; first-start != want {
		t.Errorf("prefill of 1,000 tokens took %v, want four steps: %v", first-start, want)
	}
}

func TestTheQueueIsServedInOrderAndTheSlotsBoundTheBatch(t *testing.T) {
	m := must(t, Config{Profile: flat(), MaxRunning: 2})
	for i := range 6 {
		add(t, m, 0, Request{ID: fmt.Sprint(i), PromptTokens: 10, OutputTokens: 3 + i})
	}
	m.Advance(0)
	if s := m.Stats(); s.Running != 2 || s.Waiting != 4 || s.WaitingTokens != 40 {
		t.Fatalf("running %d, waiting %d of %d tokens, want 2, 4, 40", s.Running, s.Waiting, s.WaitingTokens)
	}
	var order []string
	for _, e := range drain(t, m) {
		if e.Kind == Started {
			order = append(order, e.ID)
		}
	}
	if want := []string{"2", "3", "4", "5"}; !slices.Equal(order, want) {
		t.Errorf("the rest started in order %v, want %v", order, want)
	}
}

func TestSiblingsOfOneStepShareTheirPromptAndAHitNeverCoversItsLastToken(t *testing.T) {
	m := must(t, Config{Profile: flat(), BlockTokens: 16})
	for i := range 4 {
		add(t, m, 0, Request{ID: fmt.Sprint(i), PromptTokens: 64, OutputTokens: 2, Blocks: names(1, 4)})
	}
	es := drain(t, m)
	for i, want := range []int{0, 48, 48, 48} {
		if got := find(es, Started, fmt.Sprint(i)).Tokens; got != want {
			t.Errorf("request %d found %d tokens, want %d", i, got, want)
		}
	}
	add(t, m, time.Minute, Request{ID: "longer", PromptTokens: 65, OutputTokens: 1, Blocks: names(1, 4)})
	if got := find(drain(t, m), Started, "longer").Tokens; got != 64 {
		t.Errorf("one token more found %d tokens, want all four blocks", got)
	}
	if s := m.Stats(); s.PrefixHits != 3*48+64 || s.PrefixQueries != 4*64+65 {
		t.Errorf("hits %d of %d", s.PrefixHits, s.PrefixQueries)
	}
}

func TestTheNextTurnFindsTheOutputOfTheLast(t *testing.T) {
	m := must(t, Config{Profile: flat(), BlockTokens: 16})
	add(t, m, 0, Request{ID: "1", PromptTokens: 40, OutputTokens: 60, Blocks: names(1, 2),
		Output: func(i int) uint64 { return uint64(1 + i) }})
	drain(t, m)
	add(t, m, time.Minute, Request{ID: "2", PromptTokens: 120, OutputTokens: 1, Blocks: names(1, 7)})
	// 99 tokens were computed: six whole blocks.
	if got := find(drain(t, m), Started, "2").Tokens; got != 96 {
		t.Errorf("the second turn found %d tokens, want 96", got)
	}
}

func TestEvictionTakesTheLeastRecentlyUsedAndTheEndOfAChainFirst(t *testing.T) {
	m := must(t, Config{Profile: flat(), BlockTokens: 16, KVTokens: 16 * 8, CacheEvents: true})
	one := func(id string, at time.Duration, first int) []Event {
		add(t, m, at, Request{ID: id, PromptTokens: 49, OutputTokens: 1, Blocks: names(first, 3)})
		return drain(t, m)
	}
	one("a", 0, 10)
	one("b", time.Second, 20)
	one("a2", 2*time.Second, 10) // touches a's
	var removed []uint64
	for _, e := range one("c", 3*time.Second, 30) { // takes 4, 2 are free
		if e.Kind == Removed {
			removed = append(removed, e.Blocks...)
		}
	}
	if want := []uint64{22, 21}; !slices.Equal(removed, want) {
		t.Errorf("evicted %v, want %v", removed, want)
	}
}

func TestAStoredEventNamesItsParentAndComesWhenItsStepEnds(t *testing.T) {
	m := must(t, Config{Profile: flat(), BlockTokens: 16, CacheEvents: true})
	add(t, m, 0, Request{ID: "a", PromptTokens: 33, OutputTokens: 1, Blocks: names(1, 2)})
	drain(t, m)
	add(t, m, time.Second, Request{ID: "b", PromptTokens: 70, OutputTokens: 1, Blocks: names(1, 4)})
	got := find(drain(t, m), Stored, "b")
	want := &Event{Kind: Stored, ID: "b", At: time.Second + 10*time.Millisecond + 38*time.Microsecond,
		First: 2, Parent: 2, Blocks: []uint64{3, 4}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestWhenTheKVRunsOutTheLastAdmittedIsPreemptedAndEveryoneFinishes(t *testing.T) {
	m := must(t, Config{Profile: flat(), BlockTokens: 16, KVTokens: 16 * 20, CacheEvents: true})
	for i := range 4 {
		add(t, m, 0, Request{ID: fmt.Sprint(i), PromptTokens: 64, OutputTokens: 100,
			Blocks: names(100*i+1, 4), Output: func(b int) uint64 { return uint64(100*i + 1 + b) }})
	}
	es := drain(t, m)
	if e := find(es, Preempted, "3"); e == nil {
		t.Fatal("nobody was preempted, or not the last")
	}
	for i := range 4 {
		if e := find(es, Finished, fmt.Sprint(i)); e == nil || e.Tokens != 100 {
			t.Errorf("request %d ended as %+v, want 100 tokens", i, e)
		}
		firsts := 0
		for _, e := range es {
			if e.Kind == FirstToken && e.ID == fmt.Sprint(i) {
				firsts++
			}
		}
		if firsts != 1 {
			t.Errorf("request %d had %d first tokens", i, firsts)
		}
	}
	s := m.Stats()
	if s.Preemptions == 0 || s.KVUsed != 0 || s.GenerationTokens != 400 {
		t.Errorf("stats: %+v", s)
	}
}

func TestARequestLargerThanThePoolIsRefused(t *testing.T) {
	m := must(t, Config{KVTokens: 1000, BlockTokens: 16})
	for _, r := range []Request{{ID: "a", PromptTokens: 900, OutputTokens: 93}, {ID: "b", PromptTokens: 1 << 40, OutputTokens: 1 << 62},
		{ID: "", PromptTokens: 1, OutputTokens: 1}, {ID: "c", PromptTokens: 0, OutputTokens: 1}, {ID: "d", PromptTokens: 1, OutputTokens: 0}} {
		if err := m.Add(0, r); err == nil {
			t.Errorf("%+v was accepted", r)
		}
	}
	add(t, m, 0, Request{ID: "a", PromptTokens: 900, OutputTokens: 92})
	if err := m.Add(0, Request{ID: "a", PromptTokens: 1, OutputTokens: 1}); err == nil {
		t.Error("an id in use was accepted")
	}
}

func TestAbortAtEveryStageGivesEverythingBack(t *testing.T) {
	for at := range 60 {
		m := must(t, Config{Profile: flat(), BlockTokens: 16, MaxRunning: 1, StepTokens: 40})
		add(t, m, 0, Request{ID: "a", PromptTokens: 100, OutputTokens: 10, Blocks: names(1, 6)})
		add(t, m, 0, Request{ID: "b", PromptTokens: 100, OutputTokens: 10, Blocks: names(1, 6)})
		now := time.Duration(at) * 5 * time.Millisecond
		es := copied(m.Advance(now))
		for _, id := range []string{"a", "b"} {
			if _, ok := m.Abort(now, id); ok == (find(es, Finished, id) != nil) {
				t.Fatalf("at %v: abort of %s answered %v", now, id, ok)
			}
			invariants(t, m)
		}
		drain(t, m)
		if s := m.Stats(); s.KVUsed != 0 || s.Running != 0 || s.Waiting != 0 || s.WaitingTokens != 0 {
			t.Fatalf("at %v something is left: %+v", now, s)
		}
	}
}

func TestFlushForgetsWhatIsCachedAndWhatIsHeld(t *testing.T) {
	m := must(t, Config{Profile: flat(), BlockTokens: 16, CacheEvents: true})
	add(t, m, 0, Request{ID: "old", PromptTokens: 65, OutputTokens: 1, Blocks: names(1, 4)})
	drain(t, m)
	add(t, m, time.Second, Request{ID: "holds", PromptTokens: 65, OutputTokens: 50, Blocks: names(1, 4),
		Output: func(i int) uint64 { return uint64(1 + i) }})
	m.Advance(time.Second + 100*time.Millisecond)
	m.Flush(time.Second + 100*time.Millisecond)
	invariants(t, m)
	add(t, m, time.Second+101*time.Millisecond, Request{ID: "new", PromptTokens: 65, OutputTokens: 1, Blocks: names(1, 4)})
	es := drain(t, m)
	if e := find(es, Cleared, ""); e == nil {
		t.Error("no cleared event")
	}
	if got := find(es, Started, "new").Tokens; got != 0 {
		t.Errorf("found %d tokens after the flush", got)
	}
	if find(es, Stored, "holds") != nil {
		t.Error("a request told blocks whose beginning nobody can find")
	}
	if s := m.Stats(); s.KVUsed != 0 || s.KVCached != 64 {
		t.Errorf("%d tokens in use and %d cached at the end, want 0 and the 64 of the new request", s.KVUsed, s.KVCached)
	}
}

func TestAFrozenEngineEndsItsStepAndGoesOnWhenThawed(t *testing.T) {
	m := must(t, Config{Profile: flat()})
	add(t, m, 0, Request{ID: "a", PromptTokens: 10, OutputTokens: 10})
	m.Advance(25 * time.Millisecond)
	m.Freeze(25*time.Millisecond, true)
	m.Advance(time.Hour)
	if n, _ := m.Generated("a"); n != 3 {
		t.Fatalf("%d tokens while frozen, want 3", n)
	}
	if at, ok := m.Next(); ok {
		t.Fatalf("a frozen engine has something due at %v", at)
	}
	m.Freeze(time.Hour, false)
	es := drain(t, m)
	if got, want := find(es, Finished, "a").At, time.Hour+70*time.Millisecond; got != want {
		t.Errorf("finished at %v, want %v", got, want)
	}
}

// load is a random workload; the same seed gives the same calls.
func load(t *testing.T, m *Model, seed uint64, tick time.Duration) []Event {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	b := m.cfg.BlockTokens
	var out []Event
	now := time.Duration(0)
	advance := func(to time.Duration) {
		for tick > 0 && now+tick < to {
			now += tick
			out = append(out, copied(m.Advance(now))...)
		}
		now = to
		out = append(out, copied(m.Advance(to))...)
	}
	for i := range 120 {
		base := 1000 * rng.IntN(6)
		prompt := 1 + rng.IntN(12*b)
		r := Request{ID: fmt.Sprint(i), PromptTokens: prompt, OutputTokens: 1 + rng.IntN(150), Blocks: names(base, prompt/b)}
		if rng.IntN(2) == 0 {
			r.Output = func(j int) uint64 { return uint64(base + j) }
		}
		add(t, m, now, r)
		invariants(t, m)
		if rng.IntN(3) > 0 {
			advance(now + time.Duration(rng.IntN(300))*time.Millisecond/2)
		}
		switch rng.IntN(25) {
		case 0:
			m.Abort(now, fmt.Sprint(rng.IntN(i+1)))
		case 1:
			m.Flush(now)
		case 2:
			m.Freeze(now, true)
			advance(now + 7*time.Millisecond)
			m.Freeze(now, false)
		}
		invariants(t, m)
	}
	return append(out, drain(t, m)...)
}

func TestAJumpEqualsItsStepsEventByEvent(t *testing.T) {
	for seed := range uint64(40) {
		c := Config{BlockTokens: 1 + int(seed%17), KVTokens: 600 + int(seed)*40, MaxRunning: 3 + int(seed%9), StepTokens: 64, CacheEvents: true}
		jump, step, ticked := must(t, c), must(t, c), must(t, c)
		step.most = 1
		want := load(t, step, seed, 0)
		if d := cmp.Diff(want, load(t, jump, seed, 0)); d != "" {
			t.Fatalf("seed %d, one step at a time (-) against jumps (+):\n%s", seed, d)
		}
		got := load(t, ticked, seed, 3*time.Millisecond)
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("seed %d, one step at a time (-) against jumps cut every 3 ms (+):\n%s", seed, d)
		}
		a, b := step.Stats(), jump.Stats()
		if d := cmp.Diff(a, b); d != "" {
			t.Fatalf("seed %d: stats differ:\n%s", seed, d)
		}
		if a.KVUsed != 0 || a.Waiting+a.Running != 0 {
			t.Fatalf("seed %d: something is left: %+v", seed, a)
		}
	}
}

func TestTheSameCallsGiveTheSameEvents(t *testing.T) {
	c := Config{BlockTokens: 16, KVTokens: 2000, MaxRunning: 8, StepTokens: 128, CacheEvents: true}
	if d := cmp.Diff(load(t, must(t, c), 7, 0), load(t, must(t, c), 7, 0)); d != "" {
		t.Error(d)
	}
}

func TestTheDefaultProfileHasThePublishedShape(t *testing.T) {
	p := H100x8B()
	near := func(what string, got, want float64) {
		if got < want*0.97 || got > want*1.03 {
			t.Errorf("%s is %.0f tokens/s, published or documented is %.0f", what, got, want)
		}
	}
	near("one stream", p.DecodeRate(1, 250), 1e3/6.48)
	near("four streams", p.DecodeRate(4, 1000), 4e3/6.59)
	near("256 streams of 1,000 tokens", p.DecodeRate(256, 256_000), 10_500)
	near("a prompt of 8,192", p.PrefillRate(8192), 23_900)
	if fast := p.Times(300); fast.DecodeRate(64, 64_000) < 2.99*p.DecodeRate(64, 64_000) {
		t.Error("three times the speed is not three times the rate")
	}
}

func TestAWrongConfigurationNamesEverythingThatIsWrong(t *testing.T) {
	_, err := New(Config{BlockTokens: -1, KVTokens: -5, MaxRunning: 1 << 20, StepTokens: 1, Profile: Profile{Name: "p", Step: -1}})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"block of -1", "KV capacity of -5", "1048576 running", "1 tokens a step", "step of -1ns"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
}

// BenchmarkRollouts is the engine's share of a simulation: one op is one
// rollout of 512 prompt and about 1,000 output tokens in a batch of 64.
func BenchmarkRollouts(b *testing.B) {
	m, err := New(Config{BlockTokens: 64, KVTokens: 400_000, MaxRunning: 64})
	if err != nil {
		b.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	left, id, done := b.N, 0, 0
	push := func(now time.Duration) {
		if left == 0 {
			return
		}
		left--
		id++
		_ = m.Add(now, Request{ID: fmt.Sprint(id), PromptTokens: 512, OutputTokens: 1 + rng.IntN(2000), Blocks: names(id/8*8, 8)})
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range 66 {
		push(0)
	}
	for done < b.N {
		at, ok := m.Next()
		if !ok {
			b.Fatal("stuck")
		}
		n := 0
		for _, e := range m.Advance(at) {
			if e.Kind == Finished {
				n++
			}
		}
		for range n {
			push(at)
		}
		done += n
	}
}

func TestTimeDoesNotRunOutInAYearOfWorkOrIdleness(t *testing.T) {
	m := must(t, Config{Profile: Profile{Name: "slow", Step: 10 * time.Second}, KVTokens: 4_000_000})
	const year = 365 * 24 * time.Hour
	add(t, m, 40*year, Request{ID: "a", PromptTokens: 1, OutputTokens: 3_200_000})
	end := find(drain(t, m), Finished, "a")
	if want := 40*year + 3_200_000*10*time.Second; end.At != want {
		t.Errorf("finished at %v, want %v", end.At, want)
	}
	if got := m.Stats().Busy; got != 3_200_000*10*time.Second {
		t.Errorf("busy for %v", got)
	}
}
