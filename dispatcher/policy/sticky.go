package policy

import "github.com/hashicorp/golang-lru/v2/simplelru"

// maxSticky is how many trajectories, and how many groups, are remembered (S5's
// sticky_max_size).
const maxSticky = 10_000

// Scope says by what a last engine was found.
type Scope uint8

// Scopes.
const (
	ScopeNone Scope = iota
	ScopeTrajectory
	ScopeGroup
)

// Sticky remembers the last engine of trajectories and groups. It learns from
// reservation events alone, and asking changes nothing: dispatchers that saw
// the same events know the same. Bounded: the one bound longest ago goes first.
// Whether its answer is followed is the policy's matter: eligibility and
// admission stand above it.
type Sticky struct {
	trajectories *simplelru.LRU[stickyKey, string]
	groups       *simplelru.LRU[stickyKey, string]
}

type stickyKey struct{ job, id string }

// NewSticky remembers nothing yet.
func NewSticky() *Sticky {
	return &Sticky{trajectories: newLRU[stickyKey, string](maxSticky), groups: newLRU[stickyKey, string](maxSticky)}
}

// Learn notes that a request of this trajectory and group was bound to the
// engine. Either may be empty.
func (s *Sticky) Learn(job, trajectory, group, engine string) {
	if trajectory != "" {
		s.trajectories.Add(stickyKey{job, trajectory}, engine)
	}
	if group != "" {
		s.groups.Add(stickyKey{job, group}, engine)
	}
}

// Find is the last engine of the trajectory, else of the group.
func (s *Sticky) Find(job, trajectory, group string) (engine string, scope Scope) {
	if trajectory != "" {
		if e, ok := s.trajectories.Peek(stickyKey{job, trajectory}); ok {
			return e, ScopeTrajectory
		}
	}
	if group != "" {
		if e, ok := s.groups.Peek(stickyKey{job, group}); ok {
			return e, ScopeGroup
		}
	}
	return "", ScopeNone
}
