package model

import (
	"errors"
	"fmt"
)

// Config of one engine (one data-parallel rank). Zero values take the default.
type Config struct {
	Profile     Profile // default H100x8B
	BlockTokens int     // tokens in a KV block; default 16, as in vLLM
	KVTokens    int     // KV capacity, tokens, rounded down to blocks; default 400,000 (8B on 80 GB)
	MaxRunning  int     // requests in the batch (max_num_seqs); default 256
	StepTokens  int     // tokens of all requests in one step (max_num_batched_tokens); default 8,192, at least MaxRunning
	NoCache     bool    // no prefix cache
	CacheEvents bool    // emit Stored, Removed and Cleared
}

// Bounds of a Config.
const (
	MaxBlockTokens = 1 << 14
	MaxKVTokens    = 1 << 26
	MaxBatch       = 1 << 16
	MaxStepTokens  = 1 << 20
)

// WithDefaults fills what is zero.
func (c Config) WithDefaults() Config {
	if c.Profile == (Profile{}) {
		c.Profile = H100x8B()
	}
	c.BlockTokens = or(c.BlockTokens, 16)
	c.KVTokens = or(c.KVTokens, 400_000)
	c.MaxRunning = or(c.MaxRunning, 256)
	c.StepTokens = or(c.StepTokens, max(8192, c.MaxRunning))
	return c
}

func or(v, def int) int {
	if v == 0 {
		return def
	}
	return v
}

// Validate reports everything that is wrong at once.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.BlockTokens >= 1 && c.BlockTokens <= MaxBlockTokens, "block of %d tokens: give 1 to %d", c.BlockTokens, MaxBlockTokens)
	check(c.KVTokens >= c.BlockTokens && c.KVTokens <= MaxKVTokens, "KV capacity of %d tokens: give one block (%d) to %d", c.KVTokens, c.BlockTokens, MaxKVTokens)
	check(c.MaxRunning >= 1 && c.MaxRunning <= MaxBatch, "%d running requests: give 1 to %d", c.MaxRunning, MaxBatch)
	check(c.StepTokens <= MaxStepTokens, "%d tokens a step: give at most %d", c.StepTokens, MaxStepTokens)
	check(c.StepTokens >= c.MaxRunning, "%d tokens a step for %d running requests: give at least one token each", c.StepTokens, c.MaxRunning)
	errs = append(errs, c.Profile.validate())
	return errors.Join(errs...)
}

// Capacity is the KV capacity in tokens: whole blocks.
func (c Config) Capacity() int { return c.KVTokens / c.BlockTokens * c.BlockTokens }
