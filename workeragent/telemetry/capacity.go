package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Where a capacity came from, in order of trust.
const (
	CapacityReported   = "reported"
	CapacityProfiled   = "profiled"
	CapacityConfigured = "configured"
)

// ResolveCapacity chooses the engine's KV capacity in tokens: what it reports,
// else what it reported before, else what was configured, else unknown (nil, "").
func ResolveCapacity(reported, profiled, configured *int64) (*int64, string) {
	switch {
	case positive(reported) != nil:
		return reported, CapacityReported
	case positive(profiled) != nil:
		return profiled, CapacityProfiled
	case positive(configured) != nil:
		return configured, CapacityConfigured
	}
	return nil, ""
}

// Profile is what an engine reported once, kept in a file of its own for the
// times when it does not.
type Profile struct {
	Model          string `json:"model"` // another model is another profile
	CapacityTokens *int64 `json:"capacity_tokens,omitempty"`
	Slots          *int   `json:"slots,omitempty"`
}

// ReadProfile reads a profile's file; one that is not there is empty.
func ReadProfile(path string) (Profile, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Profile{}, nil
	}
	if err != nil {
		return Profile{}, fmt.Errorf("engine profile: %w", err)
	}
	var p Profile
	if err := json.Unmarshal(b, &p); err != nil {
		return Profile{}, fmt.Errorf("engine profile %s: %w; delete the file to begin anew", path, err)
	}
	return p, nil
}

// Merge is the profile with what was reported now: what is nil is kept, unless
// it was of another model.
func (p Profile) Merge(now Profile) Profile {
	if p.Model != now.Model {
		p = Profile{Model: now.Model}
	}
	if n := positive(now.CapacityTokens); n != nil {
		p.CapacityTokens = n
	}
	if n := positive(now.Slots); n != nil {
		p.Slots = n
	}
	return p
}

// Equal compares what two profiles say.
func (p Profile) Equal(o Profile) bool {
	return p.Model == o.Model && equal(p.CapacityTokens, o.CapacityTokens) && equal(p.Slots, o.Slots)
}

// Write replaces the file whole; its folder is made if it is missing.
func (p Profile) Write(path string) error {
	fail := func(err error) error { return fmt.Errorf("engine profile: %w", err) }
	b, err := json.Marshal(p)
	if err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fail(err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".profile-*")
	if err != nil {
		return fail(err)
	}
	_, err = tmp.Write(append(b, '\n'))
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
		return fail(err)
	}
	return nil
}
