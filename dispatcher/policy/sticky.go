package policy

import (
	"iter"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

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

// maxGroupEngines is how many engines of a group are remembered: siblings that
// come at once fill one after the other, and their events cross.
const maxGroupEngines = 4

// Sticky remembers the last engine of trajectories and the last engines of
// groups. It learns from reservation events, and from a dispatcher's own binds
// whose events are on their way; asking changes nothing: dispatchers that saw the
// same events know the same. Bounded: the one bound longest ago goes first.
// Whether its answer is followed is the policy's matter: eligibility and
// admission stand above it.
type Sticky struct {
	trajectories *simplelru.LRU[stickyKey, string]
	groups       *simplelru.LRU[stickyKey, []string] // latest first; never changed in place
}

type stickyKey struct{ job, id string }

// NewSticky remembers nothing yet.
func NewSticky() *Sticky {
	return &Sticky{trajectories: newLRU[stickyKey, string](maxSticky), groups: newLRU[stickyKey, []string](maxSticky)}
}

// Learn notes that a request of this trajectory and group was bound to the
// engine. Either may be empty.
func (s *Sticky) Learn(job, trajectory, group, engine string) {
	if trajectory != "" {
		s.trajectories.Add(stickyKey{job, trajectory}, engine)
	}
	if group != "" {
		k := stickyKey{job, group}
		old, _ := s.groups.Peek(k)
		if len(old) == 0 || old[0] != engine {
			all := append(make([]string, 0, maxGroupEngines), engine)
			for _, e := range old {
				if e != engine && len(all) < maxGroupEngines {
					all = append(all, e)
				}
			}
			old = all
		}
		s.groups.Add(k, old)
	}
}

// Find is the last engine of the trajectory, else of the group.
func (s *Sticky) Find(job, trajectory, group string) (engine string, scope Scope) {
	for e, scope := range s.FindAll(job, trajectory, group) {
		return e, scope
	}
	return "", ScopeNone
}

// FindAll yields the last engine of the trajectory, else the last ones of the
// group, latest first.
func (s *Sticky) FindAll(job, trajectory, group string) iter.Seq2[string, Scope] {
	return func(yield func(string, Scope) bool) {
		if trajectory != "" {
			if e, ok := s.trajectories.Peek(stickyKey{job, trajectory}); ok {
				yield(e, ScopeTrajectory)
				return
			}
		}
		if group == "" {
			return
		}
		all, _ := s.groups.Peek(stickyKey{job, group})
		for _, e := range all {
			if !yield(e, ScopeGroup) {
				return
			}
		}
	}
}
