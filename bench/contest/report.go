package contest

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"strings"
)

// Target is something that must hold, and what was measured.
type Target struct {
	Name string  `json:"name"`
	Want string  `json:"want"`
	Got  float64 `json:"got"`
	CI95 float64 `json:"ci95"`
	Met  bool    `json:"met"`
	Why  string  `json:"why,omitempty"` // of a miss
}

// Picture is a chart with what it shows, in one sentence made from the data.
type Picture struct {
	SVG      string
	Sentence string
}

// Report of a bench. Its JSON has the figures of Extra beside its own keys.
type Report struct {
	Bench      string   `json:"bench"`
	Workload   string   `json:"workload"`
	Seeds      int      `json:"seeds"`
	Quick      bool     `json:"quick,omitempty"`
	Contenders []*Row   `json:"contenders"`
	Targets    []Target `json:"targets"`
	Conclusion string   `json:"conclusion"`

	Extra    map[string]any `json:"-"`
	Columns  []string       `json:"-"` // figures of the table
	Pictures []Picture      `json:"-"`
	Notes    []string       `json:"notes,omitempty"`
}

func newReport(name string, cfg Config, rows []*Row, columns ...string) *Report {
	return &Report{Bench: name, Seeds: cfg.seeds(), Quick: cfg.Quick, Contenders: rows, Columns: columns, Extra: map[string]any{}, Targets: []Target{}}
}

// MarshalJSON puts Extra beside the other keys.
func (r *Report) MarshalJSON() ([]byte, error) {
	type plain Report
	b, err := json.Marshal((*plain)(r))
	if err != nil || len(r.Extra) == 0 {
		return b, err
	}
	extra, err := json.Marshal(r.Extra)
	if err != nil {
		return nil, err
	}
	return append(append(b[:len(b)-1], ','), extra[1:]...), nil
}

// Missed are the targets that do not hold.
func (r *Report) Missed() []Target {
	var out []Target
	for _, t := range r.Targets {
		if !t.Met {
			out = append(out, t)
		}
	}
	return out
}

// row by name, nil when there is none.
func (r *Report) row(name string) *Row {
	for _, x := range r.Contenders {
		if x.Name == name {
			return x
		}
	}
	return nil
}

// best of a kind by the mean of a figure; sign -1 = the greatest is best.
func (r *Report) best(kind, figure string, sign float64) *Row {
	var best *Row
	for _, x := range r.Contenders {
		if x.Kind == kind && (best == nil || sign*x.Figures[figure].Mean < sign*best.Figures[figure].Mean) {
			best = x
		}
	}
	return best
}

func (r *Report) paired(a, b *Row, figure string) Stat {
	return paired(a.values[figure], b.values[figure])
}

// atMost adds a target: the mean must not be above the limit.
func (r *Report) atMost(name string, got Stat, limit float64, why string) {
	r.target(name, fmt.Sprintf("at most %s", short(limit)), got, got.Mean <= limit+1e-9, why)
}

// beyond adds a target: the mean may be above the limit by no more than the interval.
func (r *Report) beyond(name string, got Stat, limit float64, why string) {
	r.target(name, fmt.Sprintf("at most %s, within the interval", short(limit)), got, got.Mean-got.CI95 <= limit, why)
}

func (r *Report) atLeast(name string, got Stat, limit float64, why string) {
	r.target(name, fmt.Sprintf("at least %s", short(limit)), got, got.Mean >= limit, why)
}

func (r *Report) target(name, want string, got Stat, met bool, why string) {
	t := Target{Name: name, Want: want, Got: round(got.Mean), CI95: round(got.CI95), Met: met}
	if !met {
		t.Why = why
	}
	r.Targets = append(r.Targets, t)
}

// extra sets figures beside the report's keys.
func (r *Report) extra(values map[string]any) { maps.Copy(r.Extra, values) }

// verdict closes a conclusion: how many targets hold.
func (r *Report) verdict() string {
	missed := r.Missed()
	if len(r.Targets) == 0 {
		return ""
	}
	if len(missed) == 0 {
		return fmt.Sprintf("All %d targets hold.", len(r.Targets))
	}
	var names []string
	for _, t := range missed {
		names = append(names, t.Name)
	}
	return fmt.Sprintf("%d of %d targets hold; missed: %s.", len(r.Targets)-len(missed), len(r.Targets), strings.Join(names, "; "))
}

func round(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	p := math.Pow(10, 5-math.Ceil(math.Log10(math.Abs(v))))
	return math.Round(v*p) / p
}

func short(v float64) string { return fmt.Sprintf("%.4g", v) }

// FigureName is a figure's name with its unit, for people.
func FigureName(key string) string {
	if n, ok := figureNames[key]; ok {
		return n
	}
	return key
}

// FigureText is a mean with its interval, in the unit of FigureName.
func FigureText(key string, s Stat) string {
	f, unit := 1.0, ""
	if percents[key] {
		f, unit = 100, "%"
	}
	if s.CI95 == 0 {
		return short(s.Mean*f) + unit
	}
	return short(s.Mean*f) + unit + " ±" + fmt.Sprintf("%.2g", s.CI95*f)
}

var percents = map[string]bool{"hit_rate": true, "idle_share": true, "idle_while_backlog": true, "slots_idle": true, "cache_overclaimed": true}

var figureNames = map[string]string{
	"makespan_s": "makespan (s)", "hit_rate": "prompt tokens cached", "latency_p50_s": "latency p50 (s)",
	"latency_p90_s": "latency p90 (s)", "latency_p99_s": "latency p99 (s)", "first_token_p90_s": "first token p90 (s)",
	"first_token_p50_s": "first token p50 (s)", "trajectory_p50_s": "trajectory p50 (s)", "trajectory_p90_s": "trajectory p90 (s)",
	"served_p90_s": "trajectory without its tools p90 (s)", "ran_again": "rollouts run again", "idle_while_backlog": "engines idle, of the time when work waits", "unanswered": "not completed",
	"trajectory_mean_s": "trajectory mean (s)", "output_tok_s": "output (tokens/s)", "engines_used": "engines used", "share_max": "largest share / fair share",
	"idle_share": "engines idle while work waits", "slots_idle": "slots idle that waiting work could have",
	"waiting_max": "most waiting in one engine", "preemptions": "preemptions", "cache_overclaimed": "cache claimed and not found",
	"problems": "broken invariants", "over_fair_max": "most over the fair share", "static_ratio": "makespan / static split",
}
