package policy

import "time"

// FuserState is a Fuser as plain data, for checkpoints.
type FuserState struct {
	Tokens, Requests       float64
	HasTokens, HasRequests bool
	At                     time.Duration
	Held                   int     `json:"held,omitempty"`
	Decode, Prefill        float64 // tokens/s learned
}

// State of the fuser now.
func (f *Fuser) State() FuserState {
	return FuserState{f.tokens, f.requests, f.hasTokens, f.hasRequests, f.at, f.held, f.rates.decode, f.rates.prefill}
}

// Fuser is the one that the state was taken of.
func (s FuserState) Fuser() Fuser {
	return Fuser{tokens: s.Tokens, requests: s.Requests, hasTokens: s.HasTokens, hasRequests: s.HasRequests, at: s.At, held: s.Held, rates: rates{s.Decode, s.Prefill}}
}

// LengthsState is what was learned of lengths as plain data, oldest first.
type LengthsState struct {
	Groups []GroupLength
	Jobs   []JobLength
	Pool   float64
	Seen   bool
}

// GroupLength is the average length of a group's answers, in tokens.
type GroupLength struct {
	Job, Group string
	Tokens     float64
}

// JobLength is the average length of a job's answers, in tokens.
type JobLength struct {
	Job    string
	Tokens float64
}

// State of what was learned now.
func (l *Lengths) State() LengthsState {
	s := LengthsState{Pool: l.pool, Seen: l.seen}
	for _, k := range l.groups.Keys() {
		v, _ := l.groups.Peek(k)
		s.Groups = append(s.Groups, GroupLength{k.job, k.group, v})
	}
	for _, k := range l.jobs.Keys() {
		v, _ := l.jobs.Peek(k)
		s.Jobs = append(s.Jobs, JobLength{k, v})
	}
	return s
}

// Lengths are those that the state was taken of.
func (s LengthsState) Lengths() *Lengths {
	l := NewLengths()
	l.pool, l.seen = s.Pool, s.Seen
	for _, g := range s.Groups {
		l.groups.Add(lengthKey{g.Job, g.Group}, g.Tokens)
	}
	for _, j := range s.Jobs {
		l.jobs.Add(j.Job, j.Tokens)
	}
	return l
}

// StickyState is what a Sticky remembers as plain data, oldest first.
type StickyState struct {
	Trajectories, Groups []StickyEngine
}

// StickyEngine is the last engine of one trajectory or group.
type StickyEngine struct {
	Job, ID, Engine string
	Older           []string // of a group: those before it, latest first
}

// State of what is remembered now.
func (s *Sticky) State() StickyState {
	var out StickyState
	for _, k := range s.trajectories.Keys() {
		e, _ := s.trajectories.Peek(k)
		out.Trajectories = append(out.Trajectories, StickyEngine{Job: k.job, ID: k.id, Engine: e})
	}
	for _, k := range s.groups.Keys() {
		all, _ := s.groups.Peek(k)
		out.Groups = append(out.Groups, StickyEngine{Job: k.job, ID: k.id, Engine: all[0], Older: all[1:]})
	}
	return out
}

// Sticky is the one that the state was taken of.
func (s StickyState) Sticky() *Sticky {
	out := NewSticky()
	for _, e := range s.Trajectories {
		out.trajectories.Add(stickyKey{e.Job, e.ID}, e.Engine)
	}
	for _, e := range s.Groups {
		all := append([]string{e.Engine}, e.Older...)
		out.groups.Add(stickyKey{e.Job, e.ID}, all[:min(len(all), maxGroupEngines)])
	}
	return out
}
