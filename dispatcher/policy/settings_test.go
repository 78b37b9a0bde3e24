package policy_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

func TestAnEmptyConfigurationIsOff(t *testing.T) {
	s, err := policy.Resolve(subjects.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if s.Policy != policy.LeastRequests || s.Mode != subjects.ModeOff || s.StickyTrajectory || s.StickyGroup || s.WaitMax != 0 || s.ApproximateCredit {
		t.Fatalf("an empty configuration is %+v", s)
	}
	if s.KVBlock != 0.9 || s.KVUnblock != 0.75 || s.Alpha != 0.7 || s.EscapeRatio != 3 || s.EscapeFloor != 5 || s.Interference != 0.5 || s.Barrier != 0.15 || s.CreditCPU != 0.75 || s.CreditSSD != 0.25 {
		t.Fatalf("defaults are %+v", s)
	}
	if _, err := policy.Resolve(policy.Recommended()); err != nil {
		t.Fatalf("the recommended configuration is refused: %v", err)
	}
}

func TestEveryKnobReachesItsFieldAtBothBounds(t *testing.T) {
	for _, k := range policy.Knobs() {
		if k.Doc == "" || k.Unit == "" || k.Min > k.Default || k.Default > k.Max {
			t.Errorf("knob %s: %+v", k.Name, k)
		}
		base := subjects.Settings{Policy: policy.ProjectedTime, Mode: subjects.ModeEnforce}
		with := func(v float64) (policy.Settings, error) {
			s := base
			s.Knobs = map[string]float64{k.Name: v}
			if k.Name == "kv_block" { // it must stay above kv_unblock
				s.Knobs["kv_unblock"] = 0.05
			}
			return policy.Resolve(s)
		}
		low, errLow := with(k.Min)
		high, errHigh := with(k.Max)
		if k.Name == "kv_unblock" {
			if errHigh == nil {
				t.Errorf("kv_unblock above kv_block is accepted")
			}
			continue
		}
		if errLow != nil || errHigh != nil {
			t.Errorf("knob %s is refused at its bounds: %v, %v", k.Name, errLow, errHigh)
		}
		if low == high {
			t.Errorf("knob %s changes nothing", k.Name)
		}
	}
}

func TestOneBadValueRefusesTheWholeChangeAndTheErrorNamesThemAll(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(s *subjects.Settings)
		says  string
	}{
		{"an unknown policy", func(s *subjects.Settings) { s.Policy = "round_robin" }, `policy "round_robin" is unknown: want one of least_requests, `},
		{"an unknown mode", func(s *subjects.Settings) { s.Mode = "on" }, `mode: is "on": give off, shadow or enforce`},
		{"an unknown knob", func(s *subjects.Settings) { s.Knobs["alhpa"] = 1 }, `knob "alhpa" is unknown`},
		{"a knob below its bound", func(s *subjects.Settings) { s.Knobs["alpha"] = -0.1 }, "knob alpha is -0.1: want 0 to 1"},
		{"a knob above its bound", func(s *subjects.Settings) { s.Knobs["wait_max"] = 61 }, "knob wait_max is 61: want 0 to 60 (s)"},
		{"NaN", func(s *subjects.Settings) { s.Knobs["barrier"] = math.NaN() }, "knob barrier is NaN"},
		{"infinity", func(s *subjects.Settings) { s.Knobs["barrier"] = math.Inf(1) }, "knob barrier is +Inf"},
		{"half a request", func(s *subjects.Settings) { s.Knobs["sticky_margin"] = 2.5 }, "knob sticky_margin is 2.5: want a whole number"},
		{"half a switch", func(s *subjects.Settings) { s.Knobs["sticky_group"] = 0.5 }, "knob sticky_group is 0.5: want a whole number"},
		{"hysteresis turned round", func(s *subjects.Settings) { s.Knobs["kv_block"], s.Knobs["kv_unblock"] = 0.5, 0.6 }, "kv_unblock must be less"},
		{"no load strategy", func(s *subjects.Settings) { s.Knobs["weight_kv"], s.Knobs["weight_slots"] = 0, 0 }, "raise one of them"},
		{"a negative block size", func(s *subjects.Settings) { s.BlockTokens = -64 }, "block_tokens: is -64: give 1 to 4096"},
		{"a deadline beyond a day", func(s *subjects.Settings) { s.Deadline = subjects.Duration(25 * time.Hour) }, "deadline: is 25h"},
		{"a negative timeout", func(s *subjects.Settings) { s.AttemptTimeout = -1 }, "attempt_timeout: is -1ns"},
		{"too many attempts", func(s *subjects.Settings) { s.MaxAttempts = 1000 }, "max_attempts: is 1000"},
		{"a negative prefetch", func(s *subjects.Settings) { s.Prefetch = -2 }, "prefetch: is -2: give -1 to"},
		{"a weight of zero", func(s *subjects.Settings) { s.JobWeights = map[string]float64{"a": 1, "b": 0} }, "job_weights.b: is 0"},
		{"another schema", func(s *subjects.Settings) { s.SchemaVersion = 9 }, "schema_version: is 9"},
	} {
		good := subjects.Settings{Policy: policy.KVTokens, Mode: subjects.ModeShadow, Knobs: map[string]float64{"alpha": 0.5}, Prefetch: -1}
		if _, err := policy.Resolve(good); err != nil {
			t.Fatalf("the good part: %v", err)
		}
		c.spoil(&good)
		s, err := policy.Resolve(good)
		if err == nil || !errors.Is(err, policy.ErrSettings) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want it to say %q", c.name, err, c.says)
		}
		if s != (policy.Settings{}) {
			t.Errorf("%s: refused settings are %+v", c.name, s)
		}
	}
	_, err := policy.Resolve(subjects.Settings{Policy: "x", Mode: "y", Knobs: map[string]float64{"z": 1, "alpha": 9, "barrier": -1}, MaxAttempts: -1})
	for _, s := range []string{`"x"`, `"y"`, `"z"`, "alpha", "barrier", "max_attempts"} {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("the error does not name %s: %v", s, err)
		}
	}
}

func TestADeciderWantsResolvedSettings(t *testing.T) {
	for _, s := range []policy.Settings{{}, {Policy: policy.KVTokens}, {Policy: "x", Mode: subjects.ModeOff, KVBlock: 1}} {
		if _, err := policy.NewDecider(s); err == nil {
			t.Errorf("%+v was accepted", s)
		}
	}
}
