package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
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

// Profile is what an engine reported once, kept for the times when it does not.
type Profile struct {
	CapacityTokens *int64 `json:"capacity_tokens,omitempty"`
	Slots          *int   `json:"slots,omitempty"`
	EngineBlock    *int   `json:"engine_block,omitempty"`
}

// Profiles is a small file of them, by any key that names an engine and its
// model. Safe for concurrent use.
type Profiles struct {
	path string
	mu   sync.Mutex
	all  map[string]Profile
}

// maxProfiles bounds the file.
const maxProfiles = 1024

// OpenProfiles reads the file; one that is not there is empty. path "" keeps
// everything in memory.
func OpenProfiles(path string) (*Profiles, error) {
	p := &Profiles{path: path, all: map[string]Profile{}}
	if path == "" {
		return p, nil
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return nil, fmt.Errorf("engine profiles: %w", err)
	}
	if err := json.Unmarshal(b, &p.all); err != nil {
		return nil, fmt.Errorf("engine profiles %s: %w; delete the file to start anew", path, err)
	}
	return p, nil
}

// Get is what is known under a key.
func (p *Profiles) Get(key string) Profile {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all[key]
}

// Put remembers what is not nil in v and writes the file when that is news.
func (p *Profiles) Put(key string, v Profile) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	old, known := p.all[key]
	merged := old
	if v.CapacityTokens != nil {
		merged.CapacityTokens = v.CapacityTokens
	}
	if v.Slots != nil {
		merged.Slots = v.Slots
	}
	if v.EngineBlock != nil {
		merged.EngineBlock = v.EngineBlock
	}
	if equal(merged.CapacityTokens, old.CapacityTokens) && equal(merged.Slots, old.Slots) && equal(merged.EngineBlock, old.EngineBlock) {
		return nil
	}
	if !known && len(p.all) >= maxProfiles {
		clear(p.all)
	}
	p.all[key] = merged
	if p.path == "" {
		return nil
	}
	b, err := json.MarshalIndent(p.all, "", " ")
	if err != nil {
		return fmt.Errorf("engine profiles: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(p.path), ".profiles-*")
	if err != nil {
		return fmt.Errorf("engine profiles: %w", err)
	}
	_, err = tmp.Write(b)
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), p.path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
		return fmt.Errorf("engine profiles: %w", err)
	}
	return nil
}
