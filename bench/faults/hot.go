package faults

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// kind of the engines' adapters: owners need reports with KV figures.
func (c Config) kind() string {
	if c.hot > 0 {
		return "vllm"
	}
	return "openai"
}

// heat puts the pool under owner_pressure when it is to be hot. The engines'
// cache views are estimated, and have to count.
func (p *pool) heat(ctx context.Context, nc *nats.Conn, name subjects.Pool) error {
	if p.cfg.hot == 0 {
		return nil
	}
	s, err := kvstate.Open(nc, name)
	if err != nil {
		return err
	}
	set := subjects.Settings{Policy: "owner_pressure", Mode: subjects.ModeEnforce,
		Knobs: map[string]float64{"approximate_credit": 1, "seed_cooldown": 1, "owner_ceiling": 3}}
	for {
		_, err := s.PutSettings(ctx, set, 0)
		if err == nil || errors.Is(err, kvstate.ErrConflict) { // a repetition of one that was stored
			return nil
		}
		if pause(ctx, 10*poll) != nil {
			return fmt.Errorf("settings of the pool: %w", err)
		}
	}
}

// slots of an engine: in a hot pool so few that owners are pressured.
func (c Config) slots() int {
	if c.hot > 0 {
		return 4
	}
	return engineSlots
}
