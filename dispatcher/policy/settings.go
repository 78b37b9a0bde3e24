package policy

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Settings are a pool's resolved knobs. Resolve makes them; the zero value is
// not usable. Knobs documents each field, with unit and bounds.
type Settings struct {
	Policy string
	Mode   string

	KVBlock   float64
	KVUnblock float64

	StickyTrajectory bool
	StickyGroup      bool
	StickyMargin     float64 // requests
	StickyThreshold  float64
	StickyCap        int // requests; 0 = none

	MatchThreshold float64
	BalanceAbs     float64 // requests
	BalanceRel     float64

	Alpha, TierGPU, TierCPU, TierSSD float64
	WeightKV, WeightSlots            float64

	DecodeTokS, PrefillTokS, RateBound float64
	ActiveShare                        float64
	Barrier                            float64 // seconds
	CreditCPU, CreditSSD               float64
	ApproximateCredit                  bool
	EscapeRatio                        float64
	EscapeFloor                        float64 // seconds
	TieRatio                           float64
	WaitMax                            time.Duration // 0 = never

	Watermark, OwnerSlack  float64
	OwnerCeiling           int // owners
	SeedCooldown, OwnerTTL time.Duration
}

// ErrSettings is wrapped by every refusal of Resolve.
var ErrSettings = errors.New("settings refused, nothing was changed")

// Resolve checks a pool's settings and fills in every default. One bad value
// refuses them all; the error names each of them and what would be accepted.
func Resolve(s subjects.Settings) (Settings, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	checkPool(s, bad)
	s = s.WithDefaults()
	out := Settings{Policy: s.Policy, Mode: s.Mode}
	if !slices.Contains(Policies(), s.Policy) {
		bad("policy %q is unknown: want one of %s", s.Policy, strings.Join(Policies(), ", "))
	}
	switch s.Mode {
	case subjects.ModeOff, subjects.ModeShadow, subjects.ModeEnforce:
	default:
		bad("mode %q is unknown: want off, shadow or enforce", s.Mode)
	}
	known := make(map[string]bool, len(knobs))
	for i := range knobs {
		k := &knobs[i]
		known[k.Name] = true
		v, given := s.Knobs[k.Name]
		if !given {
			v = k.Default
		}
		if err := k.check(v); err != nil {
			errs = append(errs, err)
			continue
		}
		k.set(&out, v)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Knobs)) {
		if !known[name] {
			bad("knob %q is unknown: the table of knobs in docs/policies.md has them all", name)
		}
	}
	if len(errs) == 0 {
		if out.KVUnblock >= out.KVBlock {
			bad("kv_unblock is %v and kv_block is %v: kv_unblock must be less, or an engine would be blocked and free at once", out.KVUnblock, out.KVBlock)
		}
		if out.WeightKV == 0 && out.WeightSlots == 0 && out.Alpha < 1 {
			bad("weight_kv and weight_slots are both 0: the load half of the score would be empty, raise one of them or set alpha to 1")
		}
	}
	if len(errs) > 0 {
		return Settings{}, fmt.Errorf("%w: %w", ErrSettings, errors.Join(errs...))
	}
	return out, nil
}

func (k *Knob) check(v float64) error {
	switch {
	case math.IsNaN(v) || v < k.Min || v > k.Max:
		return fmt.Errorf("knob %s is %v: want %v to %v (%s)", k.Name, v, k.Min, k.Max, k.Unit)
	case k.Whole && v != math.Trunc(v):
		return fmt.Errorf("knob %s is %v: want a whole number of %v to %v (%s)", k.Name, v, k.Min, k.Max, k.Unit)
	}
	return nil
}

// Limits of the settings that are no knobs.
const (
	maxBlockTokens  = 4096
	maxAnchorTokens = 1 << 20
	maxDeadline     = 24 * time.Hour
	maxAttempts     = 100
	maxPrefetch     = 1000
	maxResultsKeep  = 90 * 24 * time.Hour
	maxJobWeight    = 1000
)

// checkPool checks what is not a knob, as given: zero means the default.
func checkPool(s subjects.Settings, bad func(string, ...any)) {
	if s.SchemaVersion != 0 && s.SchemaVersion != subjects.SchemaVersion {
		bad("schema_version is %d: this program knows %d", s.SchemaVersion, subjects.SchemaVersion)
	}
	number := func(name string, v, least, most int) {
		if v != 0 && (v < least || v > most) {
			bad("%s is %d: want %d to %d, or 0 for the default", name, v, least, most)
		}
	}
	number("block_tokens", s.BlockTokens, 1, maxBlockTokens)
	number("anchor_tokens", s.AnchorTokens, 1, maxAnchorTokens)
	number("max_attempts", s.MaxAttempts, 1, maxAttempts)
	number("prefetch", s.Prefetch, -1, maxPrefetch)
	number("partials_every", s.PartialsEvery, 1, maxAnchorTokens)
	span := func(name string, v subjects.Duration, most time.Duration) {
		if d := v.D(); d < 0 || d > most {
			bad("%s is %v: want more than 0 and at most %v, or 0 for the default", name, d, most)
		}
	}
	span("deadline", s.Deadline, maxDeadline)
	span("attempt_timeout", s.AttemptTimeout, maxDeadline)
	span("results_keep", s.ResultsKeep, maxResultsKeep)
	for _, job := range slices.Sorted(maps.Keys(s.JobWeights)) {
		if w := s.JobWeights[job]; math.IsNaN(w) || w <= 0 || w > maxJobWeight {
			bad("job_weights of %q is %v: want more than 0 and at most %d", job, w, maxJobWeight)
		}
	}
}

// KVGate is the KV hysteresis of one engine: whether it is blocked after a
// sample of its fullest rank's KV usage (0..1), given whether it was before. It
// blocks above kv_block and unblocks below kv_unblock. An unknown usage (< 0)
// blocks nobody: a mark lives no longer than the telemetry that set it.
func (s *Settings) KVGate(blocked bool, worst float64) bool {
	switch {
	case worst < 0:
		return false
	case worst > s.KVBlock:
		return true
	case worst < s.KVUnblock:
		return false
	}
	return blocked
}

// Recommended is what a new pool should start with.
func Recommended() subjects.Settings {
	return subjects.Settings{Policy: ProjectedTime, Mode: subjects.ModeEnforce}
}
