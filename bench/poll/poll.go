package poll

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// Rate of an agent's looks at the load, per second.
const Rate = 5

// Bounds under which the cost passes.
const (
	MaxLossPercent = 1.0 // of tokens per second: the upper end of the interval
	MaxCPUPercent  = 0.5 // of a core
)

// Config of a measurement; zero = the default.
type Config struct {
	// Engine is the adapter for the engine under test. Required.
	Engine engine.Adapter
	// CPU gives the CPU time that the engine's process has used so far. Required.
	CPU func() (time.Duration, error)
	// Duration of the whole. Default 50 s; two thirds of it are busy.
	Duration time.Duration
	// Slice is the length of one turn: short ones meet the same noise on both
	// sides. Default 400 ms, two polls.
	Slice time.Duration
	// Streams at once while busy. Default 32.
	Streams int
	// Progress is told after each pair. It must not block.
	Progress func(done, all int)
}

func (c Config) withDefaults() Config {
	if c.Duration <= 0 {
		c.Duration = 50 * time.Second
	}
	if c.Slice <= 0 {
		c.Slice = 400 * time.Millisecond
	}
	if c.Streams <= 0 {
		c.Streams = 32
	}
	if c.Progress == nil {
		c.Progress = func(int, int) {}
	}
	return c
}

// Verdict of a measurement.
type Verdict string

// Verdicts.
const (
	Passed       Verdict = "passed"
	Inconclusive Verdict = "inconclusive"
)

// Result is what was measured.
type Result struct {
	Verdict Verdict `json:"verdict"`
	Because string  `json:"because"`

	TokensPerSecondOff float64 `json:"tokens_per_s_off"`
	TokensPerSecondOn  float64 `json:"tokens_per_s_on"`
	LossPercent        float64 `json:"loss_percent"` // mean over pairs; below 0: faster with polling
	LossLow            float64 `json:"loss_low_percent"`
	LossHigh           float64 `json:"loss_high_percent"` // ends of the 95 % interval
	Pairs              int     `json:"pairs"`

	CPUPercent float64 `json:"engine_cpu_percent"` // of a core, for five polls a second; mean over pairs
	CPULow     float64 `json:"engine_cpu_low_percent"`
	CPUHigh    float64 `json:"engine_cpu_high_percent"`
	IdlePairs  int     `json:"idle_pairs"`

	Polls   int     `json:"polls"`
	PollMS  float64 `json:"poll_ms_p50"` // while busy
	Seconds float64 `json:"seconds"`
}

// bench is one measurement.
type bench struct {
	cfg    Config
	tokens atomic.Int64
	on     atomic.Bool // polling
	failed atomic.Pointer[error]

	mu    sync.Mutex
	took  []time.Duration // of the polls
	idle  int             // polls before the engine was busy
	wrong error           // of a poll
}

// ErrTooShort is a duration in which nothing can be said.
var ErrTooShort = errors.New("too short: there must be time for three pairs of idle and of busy turns")

// Run measures. The engine should serve nobody else.
func Run(ctx context.Context, cfg Config) (Result, error) {
	b := &bench{cfg: cfg.withDefaults()}
	idle := int(b.cfg.Duration / 3 / (2 * b.cfg.Slice))
	busy := int(b.cfg.Duration * 2 / 3 / (2 * b.cfg.Slice))
	if idle < 3 || busy < 3 {
		return Result{}, fmt.Errorf("%v in turns of %v is %w", b.cfg.Duration, b.cfg.Slice, ErrTooShort)
	}
	if _, err := b.cfg.Engine.Capabilities(ctx); err != nil {
		return Result{}, err
	}
	switch l, err := b.cfg.Engine.Load(ctx); {
	case err != nil:
		return Result{}, fmt.Errorf("ask for the load: %w", err)
	case l == nil:
		return Result{}, errors.New("the engine tells no load: there is nothing to measure")
	}
	begun := time.Now()
	var r Result
	defer b.poll(ctx)()
	cpu, err := b.pairs(idle, b.cfg.Slice, func(n int) { b.cfg.Progress(n, idle+busy) }, func(d time.Duration) (float64, error) {
		return b.cpuOf(ctx, d)
	})
	if err != nil {
		return r, err
	}
	b.mu.Lock()
	b.idle = len(b.took)
	b.mu.Unlock()
	stop := b.load(ctx)
	tok, err := b.pairs(busy, b.cfg.Slice, func(n int) { b.cfg.Progress(idle+n, idle+busy) }, func(d time.Duration) (float64, error) {
		return b.tokensOf(ctx, d)
	})
	stop()
	if err == nil {
		err = b.trouble()
	}
	if err != nil {
		return r, err
	}
	r.IdlePairs, r.Pairs, r.Seconds = idle, busy, time.Since(begun).Seconds()
	spent := make([]float64, idle)
	for i, p := range cpu {
		spent[i] = 100 * (p.on - p.off)
	}
	r.CPUPercent, r.CPULow, r.CPUHigh = interval(spent)
	logs := make([]float64, busy)
	for i, p := range tok {
		logs[i] = math.Log(p.off / p.on) // a half and a double cancel, as their shares would not
		r.TokensPerSecondOff += p.off / float64(busy)
		r.TokensPerSecondOn += p.on / float64(busy)
	}
	loss := func(x float64) float64 { return 100 * (1 - math.Exp(-x)) }
	mean, low, high := interval(logs)
	r.LossPercent, r.LossLow, r.LossHigh = loss(mean), loss(low), loss(high)
	b.mu.Lock()
	defer b.mu.Unlock()
	r.Polls = len(b.took)
	busyTook := slices.Clone(b.took[b.idle:])
	slices.Sort(busyTook)
	if n := len(busyTook); n > 0 {
		r.PollMS = float64(busyTook[n/2]) / float64(time.Millisecond)
	}
	r.judge()
	return r, nil
}

// judge gives the verdict and says what it rests on.
func (r *Result) judge() {
	loss := fmt.Sprintf("%.2f %% of the output, 95 %% between %.2f and %.2f", r.LossPercent, r.LossLow, r.LossHigh)
	cpu := fmt.Sprintf("%.2f %% of a core, 95 %% between %.2f and %.2f", r.CPUPercent, r.CPULow, r.CPUHigh)
	switch {
	case r.LossHigh < MaxLossPercent:
		r.Verdict, r.Because = Passed, "polling costs "+loss
	case r.CPUHigh < MaxCPUPercent:
		r.Verdict, r.Because = Passed, "the engine spends "+cpu+" on polls"
	default:
		r.Verdict, r.Because = Inconclusive, "polling costs "+loss+"; the engine spends "+cpu+" on polls: measure for longer, or on a quieter machine"
	}
}

// pair is one turn with polling and one without.
type pair struct{ on, off float64 }

// pairs takes turns.
func (b *bench) pairs(n int, slice time.Duration, done func(int), measure func(time.Duration) (float64, error)) ([]pair, error) {
	out := make([]pair, n)
	for i := range out {
		for _, on := range [...]bool{i%2 == 0, i%2 != 0} {
			b.on.Store(on)
			v, err := measure(slice)
			if err == nil {
				err = b.trouble()
			}
			if err != nil {
				return nil, err
			}
			if on {
				out[i].on = v
			} else {
				out[i].off = v
			}
		}
		done(i + 1)
	}
	return out, nil
}

// poll asks for the load as an agent does, in the turns with polling, until
// stopped. Its beat goes on over all turns, so that a short one has its share.
func (b *bench) poll(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	p := telemetry.NewPoller(telemetry.Poller{Interval: time.Second / Rate, Slow: time.Second / Rate, Poll: func(ctx context.Context) error {
		if !b.on.Load() {
			return nil
		}
		begun := time.Now()
		_, err := b.cfg.Engine.Load(ctx)
		b.mu.Lock()
		defer b.mu.Unlock()
		if err == nil {
			b.took = append(b.took, time.Since(begun))
		} else if ctx.Err() == nil {
			b.wrong = fmt.Errorf("ask for the load: %w", err)
		}
		return err
	}})
	wg.Go(func() { p.Run(ctx) })
	return func() { cancel(); wg.Wait() }
}

func (b *bench) trouble() error {
	if err := b.failed.Load(); err != nil {
		return *err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.wrong
}

// cpuOf is the share of a core that the engine's process uses for a while.
func (b *bench) cpuOf(ctx context.Context, d time.Duration) (float64, error) {
	before, err := b.cfg.CPU()
	if err != nil {
		return 0, err
	}
	begun := time.Now()
	if err := wait(ctx, d); err != nil {
		return 0, err
	}
	after, err := b.cfg.CPU()
	return float64(after-before) / float64(time.Since(begun)), err
}

// tokensOf is how many tokens come per second for a while.
func (b *bench) tokensOf(ctx context.Context, d time.Duration) (float64, error) {
	settle := d / 10 // what was under way when polling began or ended
	if err := wait(ctx, settle); err != nil {
		return 0, err
	}
	before, begun := b.tokens.Load(), time.Now()
	if err := wait(ctx, d-settle); err != nil {
		return 0, err
	}
	v := float64(b.tokens.Load()-before) / time.Since(begun).Seconds()
	if v == 0 {
		return 0, errors.New("no token came for a whole turn: is the engine busy with something else?")
	}
	return v, nil
}

func wait(ctx context.Context, d time.Duration) error {
	over, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-over.Done()
	return context.Cause(ctx)
}

// load keeps the engine busy until stopped.
func (b *bench) load(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for i := range b.cfg.Streams {
		wg.Go(func() { b.stream(ctx, i) })
	}
	return func() { cancel(); wg.Wait() }
}

// stream runs one rollout after another.
func (b *bench) stream(ctx context.Context, number int) {
	const prompt, output = 64, 2048
	q := &subjects.Request{ID: "poll", Job: "poll", PromptTokenIDs: make([]uint32, prompt),
		Sampling: subjects.SamplingParams{MaxTokens: output, IgnoreEOS: true}}
	for i := range q.PromptTokenIDs {
		q.PromptTokenIDs[i] = uint32(1000 + number*prompt + i)
	}
	for n := 0; ctx.Err() == nil; n++ {
		o, err := b.cfg.Engine.Generate(ctx, q, engine.Run{ID: fmt.Sprintf("poll-%04d-%08d", number, n)}, func(d engine.Delta) {
			b.tokens.Add(int64(len(d.TokenIDs)))
		})
		if err == nil && o.Kind != engine.Completed {
			err = fmt.Errorf("a stream ended as %s (%s): %s", o.Kind, o.Code, o.Message)
			b.failed.CompareAndSwap(nil, &err)
			return
		}
	}
}
