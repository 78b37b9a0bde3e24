package poll

import (
	"context"
	"errors"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func simulated(t *testing.T) engine.Adapter {
	t.Helper()
	s, err := simengine.New(simengine.Config{TimeScale: 200})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	a, err := engine.NewVLLM(engine.VLLMConfig{OpenAIConfig: engine.OpenAIConfig{URL: s.URL()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

func TestTurnsWithAndWithoutPollingAreMeasuredInPairs(t *testing.T) {
	var told [][2]int
	cfg := Config{Engine: simulated(t), CPU: ProcessCPU(os.Getpid()), Duration: 5400 * time.Millisecond, Slice: 300 * time.Millisecond, Streams: 4,
		Progress: func(done, all int) { told = append(told, [2]int{done, all}) }}
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.IdlePairs != 3 || r.Pairs != 6 || len(told) != 9 || told[8] != [2]int{9, 9} {
		t.Errorf("%d idle and %d busy pairs, told %v", r.IdlePairs, r.Pairs, told)
	}
	if r.TokensPerSecondOff <= 0 || r.TokensPerSecondOn <= 0 || r.LossLow > r.LossPercent || r.LossPercent > r.LossHigh || r.CPULow > r.CPUHigh {
		t.Errorf("figures that cannot be: %+v", r)
	}
	if r.Polls < 9 || r.PollMS <= 0 {
		t.Errorf("%d polls, %v ms: the turns with polling polled less than once each", r.Polls, r.PollMS)
	}
	if r.Verdict == "" || r.Because == "" {
		t.Errorf("no verdict: %+v", r)
	}
}

func TestAVerdictRestsOnTheUpperEndOfAnInterval(t *testing.T) {
	for name, c := range map[string]struct {
		r       Result
		want    Verdict
		because string
	}{
		"the loss is small":              {Result{LossPercent: 0.2, LossHigh: 0.9, CPUHigh: 9}, Passed, "polling costs 0.20 %"},
		"the CPU is little":              {Result{LossHigh: 7, CPUPercent: 0.3, CPUHigh: 0.49}, Passed, "0.30 % of a core"},
		"a small mean is no proof":       {Result{LossPercent: 0.1, LossHigh: 1.1, CPUPercent: 0.1, CPUHigh: 0.6}, Inconclusive, "longer"},
		"a cost that is sure is no pass": {Result{LossPercent: 5, LossLow: 4, LossHigh: 6, CPUPercent: 3, CPULow: 2, CPUHigh: 4}, Inconclusive, "polling costs 5.00 %"},
	} {
		c.r.judge()
		if c.r.Verdict != c.want || !strings.Contains(c.r.Because, c.because) {
			t.Errorf("%s: %s because %q", name, c.r.Verdict, c.r.Because)
		}
	}
}

func TestTheIntervalIsStudents(t *testing.T) {
	mean, low, high := interval([]float64{1, 2, 3, 4, 5})
	if want := 2.776 * math.Sqrt(2.5/5); mean != 3 || math.Abs(high-3-want) > 0.02 || math.Abs(3-low-want) > 0.02 {
		t.Errorf("%v, %v to %v, want 3 +- %v", mean, low, high, want)
	}
	for df, want := range map[float64]float64{3: 3.182, 9: 2.262, 30: 2.042, 1000: 1.962} {
		if got := quantile(df); math.Abs(got-want) > 0.01*want {
			t.Errorf("%v degrees of freedom: %v, want %v", df, got, want)
		}
	}
}

// silent is an engine that tells no load.
type silent struct{ engine.Adapter }

func (silent) Capabilities(context.Context) (engine.Capabilities, error) {
	return engine.Capabilities{}, nil
}
func (silent) Load(context.Context) (*subjects.Load, error) { return nil, nil }

func TestWhatCannotBeMeasuredIsAnError(t *testing.T) {
	cfg := Config{Engine: silent{}, CPU: ProcessCPU(os.Getpid()), Duration: time.Second, Slice: time.Second}
	if _, err := Run(t.Context(), cfg); !errors.Is(err, ErrTooShort) {
		t.Errorf("a second: %v", err)
	}
	cfg.Slice = 20 * time.Millisecond
	if _, err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "no load") {
		t.Errorf("an engine without load: %v", err)
	}
	if _, err := ProcessCPU(1 << 30)(); err == nil {
		t.Error("a process that is not there has CPU time")
	}
}
