package demo

import (
	"time"

	"github.com/rollbus/rollbus/bench/checker"
)

// Report is what a run came to. Durations are milliseconds, rates are per
// second of the wall clock.
type Report struct {
	Trace       string  `json:"trace"`
	Policy      string  `json:"policy"`
	Dispatchers int     `json:"dispatchers"`
	TimeScale   float64 `json:"time_scale"` // modelled seconds of an engine per second

	Submitted  int `json:"submitted"`
	Refused    int `json:"refused"`
	Completed  int `json:"completed"` // answered with a sample
	Failed     int `json:"failed"`    // answered without one
	Lost       int `json:"lost"`
	Duplicated int `json:"duplicated"`

	Interrupted bool `json:"interrupted"` // told to stop before the end
	Open        int  `json:"open"`        // unanswered then

	Requeued     int `json:"requeued"`      // binds beyond the first of a rollout
	DoubleRuns   int `json:"double_runs"`   // rollouts that ran twice at once
	WastedTokens int `json:"wasted_tokens"` // of answers that came second

	PromptTokens         int64   `json:"prompt_tokens"`
	CompletionTokens     int64   `json:"completion_tokens"`
	CachedPromptFraction float64 `json:"cached_prompt_fraction"`
	OutputTokPerS        float64 `json:"output_tok_per_s"`
	DispatchP50MS        float64 `json:"dispatch_p50_ms"` // stored in ROLLOUTS to bind stored, server time
	DispatchP99MS        float64 `json:"dispatch_p99_ms"`
	Seconds              float64 `json:"seconds"` // first submit stored to last answer stored

	Engines    []EngineReport `json:"engines"`
	Violations []string       `json:"violations"`
}

// EngineReport is one engine's part.
type EngineReport struct {
	Name             string  `json:"name"`
	Rollouts         int     `json:"rollouts"`
	PromptTokens     int64   `json:"prompt_tokens"`
	CompletionTokens int64   `json:"completion_tokens"`
	CachedTokens     int64   `json:"cached_tokens"`
	CachedFraction   float64 `json:"cached_fraction"`
	PeakRequests     int     `json:"peak_requests"` // reservations at once
	RunP50MS         float64 `json:"run_p50_ms"`    // bound to answered, server time
	RunP99MS         float64 `json:"run_p99_ms"`
}

// OK tells whether every promise was kept. An answer without a sample keeps it
// (a prompt may be larger than any engine); none with one does not.
func (r *Report) OK() bool {
	return r.Completed > 0 && r.Lost == 0 && r.Duplicated == 0 && len(r.Violations) == 0
}

func newReport(h checker.History) Report {
	f := checker.Figure(h)
	r := Report{
		Submitted: f.Submitted, Refused: f.Refused, Completed: f.Completed, Failed: f.Failed, Lost: f.Lost, Duplicated: f.Duplicated,
		Interrupted: !h.Ended, Open: f.Open,
		Requeued: f.Requeued, DoubleRuns: f.DoubleRuns, WastedTokens: f.WastedTokens,
		PromptTokens: f.PromptTokens, CompletionTokens: f.CompletionTokens, CachedPromptFraction: fraction(f.CachedTokens, f.PromptTokens),
		DispatchP50MS: ms(f.DispatchP50), DispatchP99MS: ms(f.DispatchP99), Seconds: round(f.Span.Seconds()),
		Engines: []EngineReport{}, Violations: []string{},
	}
	if f.Span > 0 {
		r.OutputTokPerS = round(float64(f.CompletionTokens) / f.Span.Seconds())
	}
	for _, e := range f.Engines {
		r.Engines = append(r.Engines, EngineReport{
			Name: e.Engine, Rollouts: e.Rollouts, PromptTokens: e.PromptTokens, CompletionTokens: e.CompletionTokens,
			CachedTokens: e.CachedTokens, CachedFraction: fraction(e.CachedTokens, e.PromptTokens), PeakRequests: e.PeakRequests,
			RunP50MS: ms(e.HeldP50), RunP99MS: ms(e.HeldP99),
		})
	}
	for _, v := range checker.Check(h) {
		r.Violations = append(r.Violations, v.String())
	}
	return r
}

func fraction(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return round(float64(part) / float64(whole))
}

func ms(d time.Duration) float64 { return round(float64(d) / float64(time.Millisecond)) }

// round keeps three decimals: more would look like precision.
func round(v float64) float64 { return float64(int64(v*1000+0.5)) / 1000 }
