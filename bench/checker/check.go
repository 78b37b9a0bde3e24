package checker

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Check names every broken invariant: I1 (one answer each), I2 (received), I3
// (reservations retired once, sums back to zero), I4 (one seed a key, owners by proof), I5 (the first answer
// stands), I6 (attempts bounded), I11 (bounds held). No violation is an empty
// slice. The order is stable: by rollout, then engines, then bounds.
func Check(h History) []Violation {
	c := &check{h: h, limits: h.Limits.withDefaults(), stories: map[string]*story{}}
	c.collect()
	for _, key := range slices.Sorted(maps.Keys(c.stories)) {
		s := c.stories[key]
		c.answered(s)
		c.firstStands(s)
		c.received(s)
		c.attempts(s)
	}
	c.reservations()
	c.seeds()
	c.bounds()
	return c.found
}

type check struct {
	h       History
	limits  Limits
	stories map[string]*story
	found   []Violation
}

// story is everything of one rollout.
type story struct {
	key      string
	accepted *Submit
	unknown  bool
	refused  string // the error of a refused submit
	results  []*Result
	binds    []*Reservation // bound, not updates of the same bind
	dead     *Dead
	seen     []int // indexes in History.Seen
}

func (c *check) story(job, id string) *story {
	key := subjects.RolloutKey(job, id)
	s := c.stories[key]
	if s == nil {
		s = &story{key: key}
		c.stories[key] = s
	}
	return s
}

func (c *check) collect() {
	for i := range c.h.Submits {
		sub := &c.h.Submits[i]
		s := c.story(sub.Job, sub.ID)
		switch sub.Outcome {
		case Accepted:
			if s.accepted == nil {
				s.accepted = sub
			}
		case Unknown:
			s.unknown = true
		case Refused:
			s.refused = sub.Err
		}
	}
	for i := range c.h.Results {
		r := &c.h.Results[i]
		s := c.story(r.Job, r.ID)
		s.results = append(s.results, r)
	}
	for i := range c.h.Reservations {
		r := &c.h.Reservations[i]
		if r.Held == nil || r.Held.State != subjects.StateBound {
			continue
		}
		s := c.story(r.Held.Job, r.Held.ID)
		if n := len(s.binds); n > 0 && s.binds[n-1].Held.Bind == r.Held.Bind && s.binds[n-1].Held.Engine == r.Held.Engine {
			continue // the holder renewed its own key
		}
		s.binds = append(s.binds, r)
	}
	for i := range c.h.Dead {
		d := &c.h.Dead[i]
		if d.ID != "" {
			c.story(d.Job, d.ID).dead = d
		}
	}
	for i := range c.h.Seen {
		s := c.story(c.h.Seen[i].Job, c.h.Seen[i].ID)
		s.seen = append(s.seen, i)
	}
}

func (c *check) violate(invariant, rollout, format string, args ...any) {
	c.found = append(c.found, Violation{Invariant: invariant, Rollout: rollout, Text: fmt.Sprintf(format, args...)})
}

// answered is I1: one terminal answer for what was accepted, none for what was not.
func (c *check) answered(s *story) {
	first := s.first()
	if first == nil {
		if s.accepted == nil || !c.h.Ended || s.receivedOnly() {
			return
		}
		text := fmt.Sprintf("rollout %s was accepted at sequence %d of %s and never answered", s.key, s.accepted.Seq, c.where())
		if s.dead != nil {
			text += fmt.Sprintf(" (it stands in DEAD: %s)", s.dead.Reason)
		}
		if n := len(s.binds); n > 0 {
			last := s.binds[n-1]
			text += fmt.Sprintf("; it was last bound to %s at revision %d, bind %d", last.Held.Engine, last.Revision, last.Held.Bind)
		}
		c.violate("I1", s.key, "%s", text)
		return
	}
	for _, r := range s.results {
		if r.Status != "" && r.Reader != first.Reader {
			c.violate("I1", s.key, "rollout %s was answered twice: for reader %s at revision %d (%s) and for reader %s at revision %d (%s)",
				s.key, first.Reader, first.Revision, first.Status, r.Reader, r.Revision, r.Status)
		}
	}
	if s.accepted == nil && !s.unknown && len(c.h.Submits) > 0 {
		text := fmt.Sprintf("rollout %s was answered at revision %d (%s) although no submitter had it accepted", s.key, first.Revision, first.Status)
		if s.refused != "" {
			text += ": its submit was refused with " + s.refused
		}
		c.violate("I1", s.key, "%s", text)
	}
	if !first.Status.Valid() {
		c.violate("I1", s.key, "rollout %s was answered at revision %d with the unknown status %q", s.key, first.Revision, first.Status)
	}
}

func (c *check) where() string {
	if c.h.Pool == "" {
		return "ROLLOUTS"
	}
	return "ROLLOUTS_" + c.h.Pool
}

// firstStands is I5: the register of a rollout is written once, then at most
// overwritten by the received mark of exactly that answer.
func (c *check) firstStands(s *story) {
	at := map[string]*Result{} // by reader
	mark := map[string]*Result{}
	for _, r := range s.results {
		was, done := at[r.Reader], mark[r.Reader]
		if r.Unguarded {
			c.violate("I5", s.key, "rollout %s was written in the register at revision %d without a guard: a later answer could replace the first", s.key, r.Revision)
		}
		if r.Status == "" {
			switch {
			case done != nil:
				c.violate("I5", s.key, "rollout %s was marked received twice: at revisions %d and %d", s.key, done.Revision, r.Revision)
			case was != nil && r.Replaces != 0 && r.Replaces != was.Revision:
				c.violate("I5", s.key, "rollout %s was marked received at revision %d for the answer at %d, but the answer stood at %d",
					s.key, r.Revision, r.Replaces, was.Revision)
			case was == nil && c.h.UnseenResults == 0:
				c.violate("I5", s.key, "rollout %s was marked received at revision %d without an answer before it", s.key, r.Revision)
			}
			mark[r.Reader] = r
			continue
		}
		switch {
		case done != nil:
			c.violate("I5", s.key, "rollout %s was answered again at revision %d (%s, bind %d) after it was received at revision %d",
				s.key, r.Revision, r.Status, r.Bind, done.Revision)
		case was != nil:
			c.violate("I5", s.key, "the answer of rollout %s at revision %d (%s, bind %d) was replaced at revision %d (%s, bind %d)",
				s.key, was.Revision, was.Status, was.Bind, r.Revision, r.Status, r.Bind)
		}
		if was == nil {
			at[r.Reader] = r
		}
	}
}

// received is I2: handed out at least once before its received mark, never after.
func (c *check) received(s *story) {
	handed, done := 0, false
	for _, i := range s.seen {
		switch {
		case c.h.Seen[i].Received:
			if handed == 0 {
				c.violate("I2", s.key, "rollout %s was marked received before user code had seen its answer", s.key)
			}
			done = true
		case done:
			c.violate("I2", s.key, "rollout %s was handed to user code again after it was received%s", s.key, s.marked())
		default:
			handed++
		}
	}
	if c.h.Ended && len(s.seen) == 0 && len(c.h.Seen) > 0 && s.accepted != nil && s.first() != nil {
		c.violate("I2", s.key, "rollout %s was answered at revision %d and no reader was ever handed it", s.key, s.first().Revision)
	}
}

// attempts is I6: bind numbers rise, burnt attempts and binds are bounded, and
// nothing is bound long after its answer.
func (c *check) attempts(s *story) {
	most := c.limits.MaxAttempts
	var before *Reservation
	for _, b := range s.binds {
		if b.Held.MaxAttempts > 0 {
			most = b.Held.MaxAttempts
		}
		if before != nil && b.Held.Bind <= before.Held.Bind {
			c.violate("I6", s.key, "rollout %s was bound with number %d to %s at revision %d after number %d to %s at revision %d: bind numbers must rise",
				s.key, b.Held.Bind, b.Held.Engine, b.Revision, before.Held.Bind, before.Held.Engine, before.Revision)
		}
		if b.Held.Burnt >= most {
			c.violate("I6", s.key, "rollout %s was bound to %s at revision %d with %d attempts burnt of %d allowed",
				s.key, b.Held.Engine, b.Revision, b.Held.Burnt, most)
		}
		if first := s.first(); first != nil && !b.Inferred && b.Stored > first.Stored+int64(c.limits.LateBind) {
			c.violate("I6", s.key, "rollout %s was bound to %s at revision %d, %v after its answer at revision %d of the register",
				s.key, b.Held.Engine, b.Revision, time.Duration(b.Stored-first.Stored).Round(time.Millisecond), first.Revision)
		}
		before = b
	}
	if n := len(s.binds); n > c.limits.MaxBinds {
		c.violate("I6", s.key, "rollout %s was bound %d times, at most %d are allowed (first at revision %d, last at %d)",
			s.key, n, c.limits.MaxBinds, s.binds[0].Revision, s.binds[n-1].Revision)
	}
}

// bounds is the measured half of I11, and what nobody could read.
func (c *check) bounds() {
	for _, text := range c.h.Unreadable {
		c.violate("I3", "", "%s: its accounting cannot be read", text)
	}
	for _, b := range c.h.Bounds {
		if b.Value > b.Most || b.Value != b.Value {
			c.violate("I11", "", "%s was %g, at most %g is allowed", b.Name, b.Value, b.Most)
		}
	}
}

// first is the first answer stored, nil when none was seen.
func (s *story) first() *Result {
	for _, r := range s.results {
		if r.Status != "" {
			return r
		}
	}
	return nil
}

// receivedOnly tells that the answer was overwritten before it was seen: the mark proves it.
func (s *story) receivedOnly() bool { return len(s.results) > 0 && s.first() == nil }

func (s *story) marked() string {
	for _, r := range s.results {
		if r.Status == "" {
			return fmt.Sprintf(" at revision %d", r.Revision)
		}
	}
	return ""
}
