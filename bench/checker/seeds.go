package checker

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// Seed is one message at a seed's key: a seed, its cooldown, or, without Put,
// the marker of one that was given back.
type Seed struct {
	Revision  uint64         `json:"revision"`
	Stored    int64          `json:"stored"` // server time, unix ns
	Key       string         `json:"key"`
	Put       *subjects.Seed `json:"put,omitempty"`
	Guard     uint64         `json:"guard"`               // revision that it replaced, 0 = nothing
	Unguarded bool           `json:"unguarded,omitempty"` // written without the guard it must carry
}

// Owned is one version of an entry of the owner map.
type Owned struct {
	Revision uint64           `json:"revision"`
	Key      string           `json:"key"`
	Owners   []subjects.Owner `json:"owners"`
}

func readSeed(pool subjects.Pool, key string, h nats.Header) (Seed, error) {
	seq, filter, guarded := guardOf(h)
	s := Seed{Key: key, Guard: seq, Unguarded: !guarded || filter != "" && filter != pool.SeedSubject(key)}
	if h.Get(subjects.HdrKVOperation) != "" {
		return s, nil
	}
	sd, err := subjects.SeedFromHeader(key, h)
	s.Put = &sd
	return s, err
}

// seedWait is how long after the last answer a seed may still be live: those whose
// turn it was to end it may be dead.
const seedWait = 45 * time.Second

// seedsEnd waits until no seed is live, for seedWait: one that is then is left behind.
func (r *Recorder) seedsEnd(ctx context.Context) {
	late := time.NewTimer(seedWait)
	defer late.Stop()
	for {
		r.mu.Lock()
		live, changed := r.liveSeeds(), r.changed
		r.mu.Unlock()
		if live == 0 {
			return
		}
		select {
		case <-changed:
		case <-late.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// liveSeeds counts keys whose newest message is a live seed. Callers hold mu.
func (r *Recorder) liveSeeds() int {
	newest := map[string]Seed{}
	for rev, s := range r.seeds {
		if rev > newest[s.Key].Revision {
			newest[s.Key] = s
		}
	}
	n := 0
	for _, s := range newest {
		if s.Put != nil && s.Put.State == subjects.SeedLive {
			n++
		}
	}
	return n
}

// seeds is I4: one live seed a key and one a target engine, each written with
// its reservation, each ended; no owner without a clean answer with usage.
func (c *check) seeds() {
	bound := map[uint64]*Reservation{}
	for i := range c.h.Reservations {
		bound[c.h.Reservations[i].Revision] = &c.h.Reservations[i]
	}
	live := map[string]*Seed{}
	targets := map[string]*Seed{}
	for i := range c.h.Seeds {
		s := &c.h.Seeds[i]
		if s.Unguarded {
			c.violate("I4", "", "what stands at the seed of key %s was written at revision %d without its guard", s.Key, s.Revision)
		}
		was := live[s.Key]
		if was != nil {
			delete(live, s.Key)
			if targets[was.Put.Engine] == was {
				delete(targets, was.Put.Engine)
			}
		}
		if s.Put == nil || s.Put.State != subjects.SeedLive {
			continue
		}
		c.seed(s, was, targets[s.Put.Engine], bound[s.Revision+1])
		live[s.Key], targets[s.Put.Engine] = s, s
	}
	if c.h.Ended && c.h.UnseenReservations == 0 {
		for _, key := range slices.Sorted(maps.Keys(live)) {
			s := live[key]
			c.violate("I4", s.Put.Rollout(), "the seed of key %s by rollout %s on %s, at revision %d, was left behind", key, s.Put.Rollout(), s.Put.Engine, s.Revision)
		}
	}
	c.proofs()
}

// seed judges a new one against what stood at its key, and at its target.
func (c *check) seed(s, was, other *Seed, bind *Reservation) {
	p := s.Put
	// What was not seen may have ended it in between; that it replaces a live one
	// its own guard says.
	if was != nil && (s.Guard == was.Revision || c.h.UnseenReservations == 0) {
		c.violate("I4", p.Rollout(), "key %s was seeded by rollout %s at revision %d while its seed by %s at revision %d was live",
			s.Key, p.Rollout(), s.Revision, was.Put.Rollout(), was.Revision)
	}
	if other != nil && other != was && c.h.UnseenReservations == 0 {
		c.violate("I4", p.Rollout(), "%s became the target of a seed of key %s at revision %d while it was that of key %s at revision %d",
			p.Engine, s.Key, s.Revision, other.Key, other.Revision)
	}
	switch {
	case bind == nil && c.h.UnseenReservations > 0:
	case bind == nil || bind.Held == nil || bind.Held.Engine != p.Engine || bind.Held.Key() != p.Rollout() || bind.Held.Bind != p.Bind:
		c.violate("I4", p.Rollout(), "the seed of key %s at revision %d has no reservation of rollout %s on %s behind it", s.Key, s.Revision, p.Rollout(), p.Engine)
	}
}

// proofs: an owner has completed the rollout that it is said to own by.
func (c *check) proofs() {
	judged := map[string]bool{}
	for i := range c.h.Owned {
		v := &c.h.Owned[i]
		for _, o := range v.Owners {
			at := v.Key + "/" + o.Engine + "/" + o.Epoch + "/" + o.Proof.Rollout
			if judged[at] {
				continue
			}
			judged[at] = true
			s := c.stories[o.Proof.Rollout]
			if s == nil || s.first() == nil {
				if c.h.UnseenResults == 0 {
					c.violate("I4", o.Proof.Rollout, "%s owns key %s at revision %d by rollout %s, which was never answered", o.Engine, v.Key, v.Revision, o.Proof.Rollout)
				}
				continue
			}
			if r := s.first(); !r.Status.Sample() || r.Engine != o.Engine || r.Epoch != o.Epoch || r.Bind != o.Proof.Bind || r.CompletionTokens == nil {
				c.violate("I4", o.Proof.Rollout, "%s (epoch %s) owns key %s at revision %d by bind %d of rollout %s, which was answered as %s by %s (epoch %s), bind %d",
					o.Engine, o.Epoch, v.Key, v.Revision, o.Proof.Bind, o.Proof.Rollout, r.Status, r.Engine, r.Epoch, r.Bind)
			}
		}
	}
}
