package workload

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

var update = flag.Bool("update", false, "write sample.jsonl")

func line(ts, in, out int, ids ...int) string {
	b, _ := json.Marshal(ids)
	return fmt.Sprintf(`{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}`+"\n", ts, in, out, b)
}

func trace(t *testing.T, s string, o TraceOptions) Workload {
	t.Helper()
	w, err := ReadTrace(strings.NewReader(s), o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestEqualHashIdsBecomeEqualTokensAndDifferentOnesDoNot(t *testing.T) {
	w := trace(t, line(0, 1100, 5, 0, 1, 2)+line(3000, 1500, 7, 0, 1, 3)+"\n"+line(3000, 513, 1, 9, 2), TraceOptions{Job: "j"})
	a, b := Tokens(nil, w.Rollouts[0].Prompt, nil), Tokens(nil, w.Rollouts[1].Prompt, nil)
	if len(a) != 1100 || len(b) != 1500 {
		t.Fatalf("prompts of %d and %d tokens", len(a), len(b))
	}
	if !slices.Equal(a[:1024], b[:1024]) || a[1024] == b[1024] && a[1025] == b[1025] {
		t.Error("they must share exactly their first two blocks")
	}
	if r := w.Rollouts[1]; r.At != 3*time.Second || r.Job != "j" || r.ID != "000002" || r.Output != 7 {
		t.Errorf("got %+v", r)
	}
	if c := Tokens(nil, w.Rollouts[2].Prompt, nil); len(c) != 513 || slices.Equal(c[:512], a[:512]) {
		t.Error("another first block gave the same tokens")
	}
}

func TestScalingDividesLengthsAndKeepsWhatIsShared(t *testing.T) {
	w := trace(t, line(0, 1100, 50, 0, 1, 2)+line(0, 1100, 1, 0, 1, 3), TraceOptions{Scale: 16})
	a, b := Tokens(nil, w.Rollouts[0].Prompt, nil), Tokens(nil, w.Rollouts[1].Prompt, nil)
	if len(a) != 32+32+5 || !slices.Equal(a[:64], b[:64]) || slices.Equal(a[64:], b[64:]) || w.Rollouts[0].Output != 4 || w.Rollouts[1].Output != 1 {
		t.Errorf("scaled: %d tokens, outputs %d and %d", len(a), w.Rollouts[0].Output, w.Rollouts[1].Output)
	}
	if _, err := ReadTrace(strings.NewReader(line(0, 1, 1, 0)), TraceOptions{Scale: 1000}); err == nil {
		t.Error("a scale of 1,000 was accepted")
	}
}

func TestAWrongTraceIsRefusedByItsLine(t *testing.T) {
	good := line(10, 600, 5, 0, 1)
	for name, x := range map[string]struct{ line, has string }{
		"no JSON":        {"{oops", "invalid character"},
		"missing":        {`{"timestamp": 1, "input_length": 5}`, "output_length is missing"},
		"unknown key":    {`{"timestamp": 20, "input_length": 5, "output_length": 1, "hash_ids": [1], "tokens": 3}`, `unknown field "tokens"`},
		"backwards":      {line(9, 5, 1, 1), "timestamp 9 comes after 10"},
		"too few ids":    {line(10, 513, 1, 1), "1 hash_ids for 513 tokens: one for each 512 is 2"},
		"no input":       {`{"timestamp": 10, "input_length": 0, "output_length": 1, "hash_ids": []}`, "input_length 0"},
		"no output":      {line(10, 5, 0, 1), "output_length 0"},
		"negative id":    {line(10, 5, 1, -1), "cannot unmarshal"},
		"fraction":       {`{"timestamp": 20.5, "input_length": 5, "output_length": 1, "hash_ids": [1]}`, "cannot unmarshal"},
		"two objects":    {strings.TrimSpace(good) + " {}", "something follows"},
		"turn alone":     {`{"timestamp": 20, "input_length": 5, "output_length": 1, "hash_ids": [1], "turn": 2}`, "turn 2 without a trajectory"},
		"huge line":      {`{"hash_ids": [` + strings.Repeat("1,", MaxLine/2) + `1]}`, "longer than"},
		"huge timestamp": {line(1<<62, 5, 1, 1), "no time in milliseconds"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ReadTrace(strings.NewReader(good+"\n"+x.line+"\n"), TraceOptions{Name: "t"})
			l, ok := errors.AsType[*LineError](err)
			if !ok || l.Line != 3 || !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), x.has) {
				t.Errorf("got %v, want line 3 and %q", err, x.has)
			}
		})
	}
}

func TestTurnsFollowEachOtherInATrace(t *testing.T) {
	row := func(ts, turn int, trajectory string) string {
		return fmt.Sprintf(`{"timestamp":%d,"input_length":5,"output_length":1,"hash_ids":[%d],"trajectory":%q,"turn":%d,"gap_ms":250,"job":"a","group":"g","sample":1}`+"\n", ts, turn, trajectory, turn)
	}
	w := trace(t, row(0, 1, "x")+row(5, 1, "y")+row(9, 2, "x"), TraceOptions{Chained: true})
	got := w.Rollouts[2]
	if got.After != "000001" || got.Gap != 250*time.Millisecond || !got.Last || w.Rollouts[0].Last || got.Size != 2 || got.Index != 1 {
		t.Errorf("the second turn is %+v", got)
	}
	if w := trace(t, row(0, 1, "x")+row(9, 2, "x"), TraceOptions{}); w.Rollouts[1].After != "" || w.Rollouts[1].At != 9*time.Millisecond {
		t.Errorf("unchained: %+v", w.Rollouts[1])
	}
	for _, bad := range []string{row(0, 2, "x"), row(0, 1, "x") + row(0, 3, "x"), row(0, 1, "x") + row(0, 1, "x")} {
		if _, err := ReadTrace(strings.NewReader(bad), TraceOptions{}); !errors.Is(err, ErrTrace) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestWrittenRowsReadBackAndKeepTheSharing(t *testing.T) {
	w, err := Agentic{Seed: 3, Tasks: 2, N: 3, Turns: Fixed(4), Arrivals: Arrivals{Rate: 1}}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	rows := w.ToRows(10 * time.Millisecond)
	var b bytes.Buffer
	if err := Write(&b, rows); err != nil {
		t.Fatal(err)
	}
	back := trace(t, b.String(), TraceOptions{Chained: true})
	if len(back.Rollouts) != 24 {
		t.Fatalf("%d rollouts came back", len(back.Rollouts))
	}
	byTurn := map[string]Rollout{}
	for _, r := range back.Rollouts {
		byTurn[fmt.Sprint(r.Trajectory, r.Turn)] = r
	}
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		got := byTurn[fmt.Sprint(r.Trajectory, r.Turn)]
		if got.PromptTokens() != r.PromptTokens() || got.Output != r.Output || got.Group != r.Group || got.Index != r.Index ||
			got.Last != r.Last || (got.After == "") != (r.After == "") {
			t.Fatalf("%s came back as %+v", r.ID, got)
		}
		for j := range i {
			o := &w.Rollouts[j]
			want := common(Names(nil, 0, r.Prompt, 512), Names(nil, 0, o.Prompt, 512))
			have := common(whole(got), whole(byTurn[fmt.Sprint(o.Trajectory, o.Turn)]))
			if want != have {
				t.Fatalf("%s and %s share %d blocks of 512, as rows %d", r.ID, o.ID, want, have)
			}
		}
	}
}

// whole is the ids of a row's whole blocks.
func whole(r Rollout) []uint64 {
	var out []uint64
	for _, s := range r.Prompt {
		if s.Tokens == BlockTokens {
			out = append(out, s.ID)
		}
	}
	return out
}

func common(a, b []uint64) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

func TestNamesAreEqualExactlyWhereTheHashesOfTheTokensAre(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for range 200 {
		shared := []Segment{{1, 1 + rng.IntN(100)}, {2, rng.IntN(80)}, {3, rng.IntN(200)}}
		cut := rng.IntN(4)
		a := slices.Concat(shared[:cut], []Segment{{uint64(10 + rng.IntN(2)), 100}})
		b := slices.Concat(shared[:cut], []Segment{{uint64(10 + rng.IntN(2)), 150}})
		block := 1 + rng.IntN(70)
		names := common(Names(nil, 7, a, block), Names(nil, 7, b, block))
		hashes := common(blockhash.Chain(nil, 7, Tokens(nil, a, nil), block), blockhash.Chain(nil, 7, Tokens(nil, b, nil), block))
		if names != hashes {
			t.Fatalf("%v and %v in blocks of %d: %d names, %d hashes are common", a, b, block, names, hashes)
		}
	}
	if a, b := Names(nil, 1, []Segment{{1, 32}, {1, 32}}, 16), Names(nil, 1, []Segment{{1, 64}}, 16); common(a, b) != 2 {
		t.Errorf("a content that begins again shares %d blocks with one that goes on, want its first 2", common(a, b))
	}
	if a, b := Names(nil, 1, []Segment{{1, 64}}, 16), Names(nil, 2, []Segment{{1, 64}}, 16); a[0] == b[0] {
		t.Error("two namespaces share a name (scenario C7)")
	}
}

func TestTheOutputOfATurnIsNamedAsTheNextPromptNamesIt(t *testing.T) {
	w, err := Agentic{Seed: 1, Tasks: 1, N: 1, Turns: Fixed(2), Output: Fixed(100)}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	first, second := &w.Rollouts[0], &w.Rollouts[1]
	const block = 16
	names := Names(nil, 0, second.Prompt, block)
	name := first.OutputNames(0, block)
	for i := first.PromptTokens() / block; i < (first.PromptTokens()+100)/block; i++ {
		if name(i) != names[i] {
			t.Fatalf("block %d has another name", i)
		}
	}
	said := []uint32{1, 2, 3}
	tokens := Tokens(nil, second.Prompt, func(id uint64) []uint32 {
		if id == first.OutputSegment().ID {
			return said
		}
		return nil
	})
	if n := first.PromptTokens(); !slices.Equal(tokens[n:n+3], said) || len(tokens) != second.PromptTokens()-97 {
		t.Error("what was said does not stand in the next prompt")
	}
}

func TestARolloutBecomesARequestThatIsValid(t *testing.T) {
	w, err := Agentic{Seed: 1, Tasks: 1, N: 2, Turns: Fixed(2)}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		for _, o := range []RequestOptions{{Model: "sim"}, {Model: "sim", Forced: true}, {Model: "sim", MaxTokens: 4096}} {
			q := r.Request(o)
			if err := q.Validate(); err != nil {
				t.Fatalf("%s: %v", r.ID, err)
			}
			if q.Group.Index != r.Index || q.Group.Size != 2 || q.Trajectory.Turn != r.Turn || len(q.PromptTokenIDs) != r.PromptTokens() {
				t.Errorf("%s became %+v", r.ID, q)
			}
			if o.Forced != q.Sampling.IgnoreEOS || q.Sampling.MaxTokens < r.Output {
				t.Errorf("%s: sampling %+v", r.ID, q.Sampling)
			}
		}
	}
}

func TestMaxTokensTellNothingAboutTheOutput(t *testing.T) {
	w := trace(t, line(0, 5, 5, 0)+line(0, 5, 512, 1), TraceOptions{})
	for i := range w.Rollouts {
		if got := w.Rollouts[i].Request(RequestOptions{}).Sampling.MaxTokens; got != 1024 {
			t.Errorf("an output of %d got max_tokens %d, want its job's 1024", w.Rollouts[i].Output, got)
		}
	}
}

func TestEpisodesBecomeChainsOfGrowingPrompts(t *testing.T) {
	in := `{"group":"a","stream":0,"prompt_len":100,"out_lens":[10,20],"obs_lens":[5]}
{"group":"a","stream":1,"prompt_len":100,"out_lens":[7],"obs_lens":[0]}
`
	w, err := ReadEpisodes(strings.NewReader(in), "e", "j")
	if err != nil {
		t.Fatal(err)
	}
	if len(w.Rollouts) != 3 || !w.Closed || w.Rollouts[1].PromptTokens() != 115 || w.Rollouts[1].After != w.Rollouts[0].ID ||
		w.Rollouts[0].Size != 2 || !w.Rollouts[1].Last {
		t.Errorf("got %+v", w.Rollouts)
	}
	if n := common(Names(nil, 0, w.Rollouts[0].Prompt, 10), Names(nil, 0, w.Rollouts[2].Prompt, 10)); n != 10 {
		t.Errorf("streams of a group share %d blocks of 10, want their prompt", n)
	}
	for _, bad := range []string{`{"group":"","stream":0,"prompt_len":1,"out_lens":[1],"obs_lens":[]}`,
		`{"group":"a","stream":0,"prompt_len":1,"out_lens":[],"obs_lens":[]}`, `{"group":"a","stream":0,"prompt_len":1,"out_lens":[1,1,1],"obs_lens":[1]}`,
		`{"group":"a","stream":0,"prompt_len":1,"out_lens":[0],"obs_lens":[]}`, strings.Split(in, "\n")[0] + "\n" + strings.Split(in, "\n")[0]} {
		if _, err := ReadEpisodes(strings.NewReader(bad), "e", "j"); !errors.Is(err, ErrTrace) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestTheSameSeedGivesTheSameWorkloadAndAnotherAnother(t *testing.T) {
	for name, draw := range map[string]func(seed uint64) (Workload, error){
		"reasoning": func(s uint64) (Workload, error) { return Reasoning{Seed: s}.Workload() },
		"agentic":   func(s uint64) (Workload, error) { return Agentic{Seed: s, Tasks: 2}.Workload() },
		"hot":       func(s uint64) (Workload, error) { return HotPrefix{Seed: s, Cold: 0.2, Prefixes: 3}.Workload() },
	} {
		a, err := draw(1)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := draw(1)
		c, _ := draw(2)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: one seed gave two workloads", name)
		}
		if reflect.DeepEqual(a, c) {
			t.Errorf("%s: two seeds gave the same", name)
		}
		ids := map[string]bool{}
		for _, r := range a.Rollouts {
			if ids[r.ID] {
				t.Fatalf("%s: id %s twice", name, r.ID)
			}
			ids[r.ID] = true
		}
	}
}

// near fails unless got is within tol of want, relatively.
func near(t *testing.T, what string, got, want, tol float64) {
	t.Helper()
	if got < want*(1-tol) || got > want*(1+tol) {
		t.Errorf("%s is %.4g, published %.4g", what, got, want)
	}
}

func quantiles(n int, draw func() float64) func(q float64) float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = draw()
	}
	slices.Sort(v)
	return func(q float64) float64 { return v[int(q*float64(n))] }
}

func TestDrawnLengthsHaveThePublishedQuantiles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const n = 100_000
	sum := 0.0
	out := quantiles(n, func() float64 { v := float64(ReasoningOutput.Draw(rng)); sum += v; return v })
	near(t, "p50 of outputs", out(0.5), 600, 0.08)
	near(t, "p90 of outputs", out(0.9), 1_824, 0.05)
	near(t, "p99 of outputs", out(0.99), 16_448, 0.10)
	near(t, "mean of outputs", sum/n, 1_206, 0.05)
	turns := quantiles(n, func() float64 { return float64(AgentTurns.Draw(rng)) })
	near(t, "p50 of turns", turns(0.5), 29, 0.04)
	near(t, "p90 of turns", turns(0.9), 56, 0.04)
	obs := quantiles(n, func() float64 { return 4 * float64(AgentObservation.Draw(rng)) })
	near(t, "p50 of observations", obs(0.5), 388, 0.1)
	gaps := quantiles(n, func() float64 { return ToolGap(rng).Seconds() })
	if gaps(0.855) > 1 || gaps(0.865) < 1 || gaps(0.945) > 10 || gaps(0.955) < 10 {
		t.Errorf("tool gaps: p86 %v, p95 %v", gaps(0.86), gaps(0.95))
	}
}

func TestLengthsInAGroupGoTogether(t *testing.T) {
	spread := func(rho float64) float64 {
		w, err := Reasoning{Seed: 1, Groups: 300, Rho: rho}.Workload()
		if err != nil {
			t.Fatal(err)
		}
		// Mean over groups of (longest / shortest), in ranks of the whole.
		all := map[int]int{}
		var v []int
		for _, r := range w.Rollouts {
			v = append(v, r.Output)
		}
		slices.Sort(v)
		for i, n := range v {
			all[n] = i
		}
		lo, hi := map[string]int{}, map[string]int{}
		for _, r := range w.Rollouts {
			rank := all[r.Output]
			if n, ok := lo[r.Group]; !ok || rank < n {
				lo[r.Group] = rank
			}
			hi[r.Group] = max(hi[r.Group], rank)
		}
		sum := 0
		for g := range lo {
			sum += hi[g] - lo[g]
		}
		return float64(sum) / float64(len(lo)) / float64(len(v))
	}
	if alone, half, tight := spread(-1), spread(0.5), spread(0.95); !(alone > half && half > tight) || alone < 0.8 {
		t.Errorf("spread in a group: %v alone, %v at 0.5, %v at 0.95", alone, half, tight)
	}
}

func TestGeneratorsRefuseWhatMakesNoWorkload(t *testing.T) {
	for name, f := range map[string]func() (Workload, error){
		"negative groups": Reasoning{Groups: -1}.Workload,
		"n upside down":   Reasoning{NMin: 9, NMax: 8}.Workload,
		"distribution":    Agentic{Turns: Dist{Median: -1, Min: 1, Max: 2}}.Workload,
		"too many":        HotPrefix{Requests: MaxRows + 1}.Workload,
	} {
		if _, err := f(); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestAClosedLoopBeginsAStepWhenTheLastIsAnswered(t *testing.T) {
	w, err := Agentic{Seed: 1, Steps: 2, Tasks: 1, N: 2, Turns: Fixed(2)}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	p := w.Pace(time.Second)
	now := time.Second
	for step := range int64(2) {
		first := p.Due(now)
		if len(first) != 2 || first[0].Step != step+1 || first[0].Turn != 1 {
			t.Fatalf("step %d begins with %d rollouts", step+1, len(first))
		}
		now += time.Second
		var turns []*Rollout
		for _, r := range first {
			p.Answered(now, r.Job, r.ID)
			p.Answered(now, r.Job, r.ID) // twice changes nothing
		}
		if got := p.Due(now); len(got) != 0 {
			t.Fatalf("the next turns came before their gap")
		}
		for len(turns) < 2 {
			at, ok := p.Next()
			if !ok {
				t.Fatal("nothing is due")
			}
			now = at
			turns = append(turns, p.Due(now)...)
		}
		now += time.Second
		p.Answered(now, turns[0].Job, turns[0].ID)
		if at, ok := p.Next(); ok {
			t.Fatalf("with one unanswered something is due at %v", at)
		}
		p.Answered(now, turns[1].Job, turns[1].ID)
	}
	if _, ok := p.Next(); ok || p.Left() != 0 {
		t.Errorf("%d left at the end", p.Left())
	}
}

func TestAnOpenLoopKeepsItsTimesWhateverIsAnswered(t *testing.T) {
	w, err := HotPrefix{Seed: 1, Requests: 1000, Arrivals: Arrivals{Rate: 50, Burst: 10}}.Workload()
	if err != nil {
		t.Fatal(err)
	}
	p := w.Pace(0)
	n, bursts := 0, 0
	var last time.Duration
	for {
		at, ok := p.Next()
		if !ok {
			break
		}
		got := p.Due(at)
		n, bursts, last = n+len(got), bursts+1, at
	}
	if n != 1000 || bursts != 100 {
		t.Errorf("%d requests in %d bursts", n, bursts)
	}
	near(t, "span of 1,000 arrivals at 50 a second", last.Seconds(), 20, 0.3)
}

func TestTheSampleIsWhatItsGeneratorMakes(t *testing.T) {
	rows, err := generateSample()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := Write(&b, rows); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile("sample.jsonl", b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(string(sample), b.String()); d != "" {
		t.Fatalf("sample.jsonl is another (-update writes it):\n%.500s", d)
	}
	w := trace(t, string(sample), TraceOptions{})
	jobs, groups, turns := map[string]int{}, map[string]bool{}, 0
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		jobs[r.Job]++
		groups[r.Job+r.Group] = true
		turns = max(turns, r.Turn)
		if err := r.Request(RequestOptions{Model: "sim"}).Validate(); err != nil {
			t.Fatalf("row %d: %v", i+1, err)
		}
	}
	if len(w.Rollouts) != 240 || jobs["math"] != 80 || jobs["agent"] != 160 || len(groups) != 15 || turns != 8 {
		t.Errorf("%d rollouts, jobs %v, %d groups, %d turns", len(w.Rollouts), jobs, len(groups), turns)
	}
}

func FuzzRows(f *testing.F) {
	f.Add([]byte(line(0, 600, 5, 0, 1)))
	f.Add([]byte("{}\n\n{"))
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := ReadTrace(bytes.NewReader(b), TraceOptions{Scale: 7})
		if err == nil {
			for i := range w.Rollouts {
				Names(nil, 0, w.Rollouts[i].Prompt, 64)
			}
		} else if !errors.Is(err, ErrTrace) {
			t.Errorf("an error that is not about the trace: %v", err)
		}
	})
}
