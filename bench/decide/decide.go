// Package decide measures the decision core: one placement as the dispatcher
// takes it (hash the prompt, match it against every engine's cache, score,
// pick, record), and the block index by itself.
//
// Figures are CPU time of the one thread that does the work, best of five
// rounds, beside a fixed calibration loop of the same run: on a shared machine
// the ratio to the calibration means more than the nanoseconds.
package decide

import (
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/dispatcher/prefix"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

// Config of a measurement. Zero fields take the default.
type Config struct {
	Engines []int  // 50, 1,000, 10,000
	Tokens  int    // of the prompt; 2,048
	Policy  string // projected_time
	Rounds  int    // 5; the best counts
}

// Result of one fleet size.
type Result struct {
	Engines           int     `json:"engines"`
	Policy            string  `json:"policy"`
	PromptTokens      int     `json:"prompt_tokens"`
	NSPerDecision     float64 `json:"ns_per_decision"`
	AllocsPerDecision float64 `json:"allocs_per_decision"`
	Calibrations      float64 `json:"calibrations_per_decision"` // the time of so many calibration loops
}

// Report is what `rollbus bench decide` prints.
type Report struct {
	CalibrationNS float64  `json:"calibration_ns"` // of one fixed loop: 1,000 dependent multiplications
	Results       []Result `json:"results"`
}

const rounds = 5

// Run measures.
func Run(cfg Config) (Report, error) {
	if len(cfg.Engines) == 0 {
		cfg.Engines = []int{50, 1000, 10000}
	}
	if cfg.Tokens == 0 {
		cfg.Tokens = 2048
	}
	if cfg.Policy == "" {
		cfg.Policy = policy.ProjectedTime
	}
	if cfg.Rounds == 0 {
		cfg.Rounds = rounds
	}
	settings, err := policy.Resolve(subjects.Settings{Policy: cfg.Policy, Mode: subjects.ModeEnforce})
	if err != nil {
		return Report{}, fmt.Errorf("bench decide: %w", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	report := Report{CalibrationNS: best(cfg.Rounds, 20_000, calibrate)}
	for _, n := range cfg.Engines {
		if n < 1 {
			return Report{}, fmt.Errorf("bench decide: %d engines: give at least one", n)
		}
		f, err := newFleet(n, cfg.Tokens, settings)
		if err != nil {
			return Report{}, err
		}
		times := max(20, 400_000/(n+50))
		r := Result{Engines: n, Policy: cfg.Policy, PromptTokens: cfg.Tokens}
		f.decide() // warm: buffers grow once
		r.NSPerDecision = best(cfg.Rounds, times, f.decide)
		r.AllocsPerDecision = allocs(times, f.decide)
		r.Calibrations = r.NSPerDecision / report.CalibrationNS
		report.Results = append(report.Results, r)
	}
	return report, nil
}

const (
	prompts = 16 // that come in turn
	shared  = 4  // blocks that all prompts begin with, and all engines hold: a system prompt
)

// fleet is a decision with everything that a dispatcher has in hand for it.
type fleet struct {
	prompts [prompts][]uint32
	space   uint64
	index   *prefix.Index
	decider *policy.Decider
	in      policy.Input
	rec     policy.Record
	chain   []uint64
	hits    []prefix.Hit
	turn    int
}

func newFleet(n, tokens int, s policy.Settings) (*fleet, error) {
	d, err := policy.NewDecider(s)
	if err != nil {
		return nil, fmt.Errorf("bench decide: %w", err)
	}
	f := &fleet{space: blockhash.Namespace("m", "", ""), index: prefix.New(prefix.Options{}), decider: d}
	for k := range f.prompts {
		f.prompts[k] = make([]uint32, tokens)
		for i := range f.prompts[k] {
			f.prompts[k][i] = uint32(i*2654435761) % 50_000
			if i >= shared*subjects.DefaultBlockTokens {
				f.prompts[k][i] += uint32(k)
			}
		}
	}
	f.in = policy.Input{Dispatcher: "d", Request: policy.Request{
		Rollout: "j.1", Model: "m", PromptTokens: tokens, MaxTokens: 1024, ExpectedTokens: 512, BlockTokens: subjects.DefaultBlockTokens,
	}}
	for i := range n {
		name := fmt.Sprintf("e%05d", i)
		f.index.Put(prefix.Registration{Engine: name, Epoch: "1", Events: true, Tag: i})
		f.index.Begin(name, "1", 0)
		f.chain = blockhash.Chain(f.chain[:0], f.space, f.prompts[i%prompts], subjects.DefaultBlockTokens)
		held := min(shared, len(f.chain))
		if i%10 == 0 { // every tenth engine holds more of one of the prompts
			held = len(f.chain) * (1 + i%7) / 7
		}
		f.index.Part(0, name, "1", prefix.GPU, f.chain[:held])
		f.index.End(0, name, "1")
		f.in.Candidates = append(f.in.Candidates, policy.Candidate{
			Engine: name, NameHash: policy.HashName(name), Epoch: "1", Model: "m", Slots: 64, Window: 66, Ranks: 1,
			CapacityTokens: 400_000, MaxModelLen: 32_768, MatchKnown: true,
			ReservedRequests: 20 + i%17, ReservedTokens: int64(20+i%17) * 2000, ReservedPromptTokens: int64(20+i%17) * 1500,
			Observed: &policy.Observed{
				Running: 18 + i%13, Waiting: i % 3, WaitingUncachedTokens: int64(i%3) * 700, UsedTokens: int64(20+i%17) * 1900,
				KVUsageWorst: 0.1 + float64(i%60)/100, MaxRunning: 64, DecodeTokS: 3000, PrefillTokS: 20_000,
				ComingTokens: int64(i%3) * 700,
				PendingTold:  true, PendingPrefillTokens: int64(i%5) * 900, PendingOutputTokens: int64(18+i%13) * 300,
			},
		})
	}
	return f, nil
}

// decide is one placement: hash, match, score, pick, record.
func (f *fleet) decide() {
	f.turn++
	f.chain = blockhash.Chain(f.chain[:0], f.space, f.prompts[f.turn%prompts], subjects.DefaultBlockTokens)
	f.hits = f.index.Match(f.chain, f.hits)
	for i := range f.hits {
		h := &f.hits[i]
		c := &f.in.Candidates[h.Tag]
		c.MatchGPU, c.MatchCPU, c.MatchSSD = h.GPU*subjects.DefaultBlockTokens, h.CPU*subjects.DefaultBlockTokens, h.SSD*subjects.DefaultBlockTokens
	}
	f.in.Now = time.Duration(f.turn) * time.Millisecond
	f.in.Request.Affinity = ""
	if f.turn%2 == 0 {
		f.in.Request.Affinity = "a group"
	}
	if at := f.decider.Decide(&f.in, &f.rec); at >= 0 {
		f.in.Candidates[at].LastPicked = uint64(f.turn)
	}
	for i := range f.hits { // candidates live longer than a request
		c := &f.in.Candidates[f.hits[i].Tag]
		c.MatchGPU, c.MatchCPU, c.MatchSSD = 0, 0, 0
	}
}

var sink uint64

func calibrate() {
	x := sink | 1
	for range 1000 {
		x = x*0x9e3779b97f4a7c15 + 1
	}
	sink = x
}

// best is the least CPU time of one call over some rounds, in nanoseconds.
func best(rounds, times int, f func()) float64 {
	least := 0.0
	for i := range rounds {
		began := threadCPU()
		for range times {
			f()
		}
		ns := float64(threadCPU()-began) / float64(times)
		if i == 0 || ns < least {
			least = ns
		}
	}
	return least
}

func allocs(times int, f func()) float64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range times {
		f()
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(times)
}

// threadCPU is what this thread has used; the caller is locked to it.
func threadCPU() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
