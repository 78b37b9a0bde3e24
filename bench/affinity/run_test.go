package affinity

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/bench/demo/local"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pool runs two simulated engines and a dispatcher whose settings are not those
// of either arm.
func pool(t *testing.T) (*local.Pool, Config) {
	t.Helper()
	p := start(t, subjects.Settings{SchemaVersion: subjects.SchemaVersion, Policy: "kv_tokens", Mode: subjects.ModeShadow, MaxAttempts: 7, Knobs: map[string]float64{"alpha": 0.3}},
		local.Engine{Name: "e1", Sim: &simengine.Config{TimeScale: 10}}, local.Engine{Name: "e2", Sim: &simengine.Config{TimeScale: 10}})
	return p, Config{Engines: p.Addresses(), Policy: "projected_time", Job: "v", Requests: 6, PromptTokens: MinPromptTokens, Seed: 1}
}

func start(t *testing.T, s subjects.Settings, engines ...local.Engine) *local.Pool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	p, err := local.Start(ctx, local.Config{Pool: "p", NATS: local.NATSConfig{Dir: t.TempDir()}, Dispatchers: 1, Layout: subjects.Layout{Budget: 128 << 20},
		Settings: s, Engines: engines})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := p.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	return p
}

func drive(t *testing.T, ctx context.Context, p *local.Pool, cfg Config) (Report, error) {
	t.Helper()
	nc, err := p.NATS.Conn("validate")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	return Run(ctx, nc, p.Name, cfg)
}

func TestAnInterruptedRunPutsTheSettingsBack(t *testing.T) {
	p, cfg := pool(t)
	ctx, interrupt := context.WithCancelCause(t.Context())
	told := errors.New("told to stop")
	during := ""
	cfg.Progress = func(_, _ string, done, _ int) {
		if done == 2 && during == "" {
			s, _, err := p.Store.Settings(t.Context())
			if err != nil {
				t.Error(err)
			}
			during = s.Mode
			interrupt(told)
		}
	}
	r, err := drive(t, ctx, p, cfg)
	if !errors.Is(err, told) || r.OK || !r.Restored || r.Problem == "" {
		t.Errorf("the run ended with %v, report ok %v, restored %v", err, r.OK, r.Restored)
	}
	if during != subjects.ModeOff {
		t.Errorf("meanwhile the mode was %q: the run did not switch it", during)
	}
	s, _, err := p.Store.Settings(t.Context())
	if err != nil || s.Policy != "kv_tokens" || s.Mode != subjects.ModeShadow || s.MaxAttempts != 7 || s.Knobs["alpha"] != 0.3 {
		t.Errorf("the settings are %+v (%v): want them as they were", s, err)
	}
	if len(r.Arms) != 1 || len(r.Arms[0].Phases) != 1 || len(r.Arms[0].Phases[0].Requests) < 2 {
		t.Errorf("the report does not hold what was seen until then: %+v", r.Arms)
	}
}

func TestSettingsThatSomebodyElseChangedAreLeftAlone(t *testing.T) {
	p, cfg := pool(t)
	ctx, interrupt := context.WithCancel(t.Context())
	cfg.Progress = func(string, string, int, int) {
		s, rev, err := p.Store.Settings(t.Context())
		if err == nil && s.MaxAttempts != 9 {
			s.MaxAttempts = 9
			_, err = p.Store.PutSettings(t.Context(), s, rev)
		}
		if err != nil {
			t.Error(err)
		}
		interrupt()
	}
	r, err := drive(t, ctx, p, cfg)
	if r.Restored || err == nil || !strings.Contains(err.Error(), `somebody else has changed the settings of pool p meanwhile`) || !strings.Contains(err.Error(), `"kv_tokens"`) {
		t.Errorf("restored %v, %v: want it to say that they were left, and what they were", r.Restored, err)
	}
	if s, _, err := p.Store.Settings(t.Context()); err != nil || s.MaxAttempts != 9 {
		t.Errorf("the other's change is gone: %+v (%v)", s, err)
	}
}

func TestARunThatCannotTellAnythingIsRefused(t *testing.T) {
	p, good := pool(t)
	for says, spoil := range map[string]func(*Config){
		"give at least two":           func(c *Config) { c.Engines = map[string]string{"e1": c.Engines["e1"]} },
		"three for each engine":       func(c *Config) { c.Requests = 5 },
		"prompts of 5 tokens":         func(c *Config) { c.PromptTokens = 5 },
		"e3 is not registered":        func(c *Config) { c.Engines["e3"], c.Requests = c.Engines["e1"], 9 },
		"engine e2 takes work":        func(c *Config) { delete(c.Engines, "e2"); c.Engines["e3"] = c.Engines["e1"] },
		"engine e1: ":                 func(c *Config) { c.Engines["e1"] = "http://127.0.0.1:1" },
		`policy "nobody" is unknown`:  func(c *Config) { c.Policy = "nobody" },
		"no prefix cache counter":     func(c *Config) { c.Engines["e1"] += "/nowhere" },
		"-1s to settle: give 0 to 1m": func(c *Config) { c.Settle = -time.Second },
	} {
		cfg := good
		cfg.Engines = p.Addresses()
		spoil(&cfg)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		r, err := drive(t, ctx, p, cfg)
		if err == nil || !strings.Contains(err.Error(), says) || r.OK || !r.Restored {
			t.Errorf("want a refusal with %q and the settings untouched, got %v, restored %v", says, err, r.Restored)
		}
		cancel()
	}
}
