package local

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/subjects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func config(t *testing.T) Config {
	return Config{
		Pool: "p", NATS: NATSConfig{Dir: t.TempDir()}, Dispatchers: 1, Layout: subjects.Layout{Budget: 128 << 20},
		Settings: subjects.Settings{SchemaVersion: subjects.SchemaVersion, MaxAttempts: 7},
		Engines:  []Engine{{Name: "e1", Sim: &simengine.Config{}}, {Name: "e2", Sim: &simengine.Config{}}},
	}
}

func TestAPoolStartsStopsAndStartsAgainOnItsStreams(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cfg := config(t)
	for range 2 {
		p, err := Start(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if at := p.Addresses(); len(at) != 2 || !strings.HasPrefix(at["e2"], "http://127.0.0.1:") || at["e1"] == at["e2"] {
			t.Errorf("engines serve at %v", at)
		}
		if p.Settings.MaxAttempts != 7 {
			t.Errorf("settings that stand must be read, not written over: max_attempts is %d", p.Settings.MaxAttempts)
		}
		if err := p.Stop(ctx); err != nil {
			t.Error(err)
		}
		cfg.Settings.MaxAttempts = 2 // the pool has settings now: these are not written
	}
}

func TestAPoolThatCannotStartLeavesNothingRunning(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, breakIt := range map[string]func(*Config){
		"give at least one": func(c *Config) { c.Engines = nil },
		"bad name":          func(c *Config) { c.Pool = "No Pool" },
		"in use": func(c *Config) {
			c.Engines[1].Sim = &simengine.Config{Listen: l.Addr().String()}
		},
		"start NATS on 127.0.0.1": func(c *Config) { c.NATS.Listen = l.Addr().String() },
		"give host:port":          func(c *Config) { c.NATS.Listen = "nowhere" },
		"no adapter":              func(c *Config) { c.Engines[0].Sim = nil },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		cfg := config(t)
		breakIt(&cfg)
		if p, err := Start(ctx, cfg); err == nil || p != nil || !strings.Contains(err.Error(), name) {
			t.Errorf("want an error with %q, got %v", name, err)
		}
		cancel()
	}
}

func TestAnEmbeddedServerListensWhereItIsTold(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := StartNATS(ctx, NATSConfig{Dir: t.TempDir(), Listen: "127.0.0.1:0"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer n.Stop()
	conn, err := net.DialTimeout("tcp", strings.TrimPrefix(n.URL(), "nats://"), 5*time.Second)
	if err != nil {
		t.Fatalf("nobody listens at %s: %v", n.URL(), err)
	}
	_ = conn.Close()
}
