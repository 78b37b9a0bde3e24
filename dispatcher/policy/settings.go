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
	ActiveShare, Interference          float64
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

// Resolve checks a pool's settings, the knobs here and the rest by
// subjects.Settings.Validate, and fills in every default. One bad value refuses
// them all; the error names each of them and what would be accepted.
func Resolve(s subjects.Settings) (Settings, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := s.Validate(); err != nil {
		errs = append(errs, err)
	}
	s = s.WithDefaults()
	out := Settings{Policy: s.Policy, Mode: s.Mode}
	if !slices.Contains(Policies(), s.Policy) {
		bad("policy %q is unknown: want one of %s", s.Policy, strings.Join(Policies(), ", "))
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
