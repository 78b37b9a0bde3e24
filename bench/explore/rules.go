package explore

import (
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// cooldown of the settings.
const cooldown = 5 * time.Second

// liveSeed is a key's seed that nobody has ended.
func (x *world) liveSeed(s *state, key int) (core.SeedPut, bool) {
	p, ok := x.one(s.seeds[key].ev).(core.SeedPut)
	return p, ok && p.State == subjects.SeedLive
}

// judgeSeed: one live seed a key, one a target engine, none in a cooldown. A seed
// that is one too many for the ceiling is harmless: its proof adds nobody.
func (x *world) judgeSeed(s *state, key int, h *subjects.Held) {
	if p, live := x.liveSeed(s, key); live {
		x.breaks("a second live seed of key %d: on %s, while %s is seeded with %s", key, h.Engine, p.Engine, p.Rollout())
	}
	for k := range x.scene.Keys {
		if p, live := x.liveSeed(s, k); live && p.Engine == h.Engine {
			x.breaks("engine %s is the target of two live seeds, of keys %d and %d", h.Engine, k, key)
		}
	}
	if s.proved[key] >= 0 && x.cores.at(s.now)-x.cores.at(uint8(s.proved[key])) < cooldown {
		x.breaks("key %d is seeded again, on %s, within the cooldown of its last seed", key, h.Engine)
	}
}

// judgeWindow: an engine is never bound more than it can run at once. It is what
// the wildcard guard is for: no bind is unaware of another.
func (x *world) judgeWindow(s *state, engine int) {
	n := 0
	for _, k := range s.keys {
		if p := x.put(k); engineIndex(p.Engine) == engine && p.State == subjects.StateBound && p.Epoch == epochName(engine, s.epoch[engine]) {
			n++
		}
	}
	if n > 1 {
		x.breaks("engine %s is bound %d rollouts, more than its window of 1", engineName(engine), n)
	}
}

// judgeEnd: nobody ends a seed whose rollout is at work.
func (x *world) judgeEnd(s *state, key int) {
	p, live := x.liveSeed(s, key)
	if !live {
		return
	}
	if i := x.find(s, p.Engine, p.ID); i >= 0 {
		if h := x.put(s.keys[i]); h.Bind == p.Bind && x.runs(s, h) {
			x.breaks("the seed of key %d is ended while its rollout %s runs on %s", key, p.Rollout(), p.Engine)
		}
	}
}

// judgeOwners: not more than the ceiling, none without proof, none beside others
// but by a seed.
func (x *world) judgeOwners(s *state, key int, owners []subjects.Owner) {
	if len(owners) > x.scene.Ceiling {
		x.breaks("key %d has %d owners, more than the ceiling of %d", key, len(owners), x.scene.Ceiling)
	}
	for i := range owners {
		o := &owners[i]
		if !x.isNew(s, key, o) {
			continue
		}
		r := rolloutIndex(o.Proof.Rollout[len(job)+1:])
		a, ok := x.one(s.answers[r]).(core.Answered)
		switch {
		case !ok || !a.Status.Sample():
			x.breaks("%s owns key %d by %s, which was not completed", o.Engine, key, o.Proof.Rollout)
		case a.Engine != o.Engine || a.Epoch != o.Epoch || a.Bind != o.Proof.Bind:
			x.breaks("%s (%s) owns key %d by %s, which %s (%s) completed", o.Engine, o.Epoch, key, o.Proof.Rollout, a.Engine, a.Epoch)
		case a.CompletionTokens == nil:
			x.breaks("%s owns key %d by %s, whose answer has no usage", o.Engine, key, o.Proof.Rollout)
		case len(owners) > 1 && s.sown[r]&(1<<o.Proof.Bind) == 0:
			x.breaks("%s is made a further owner of key %d by %s, which was no seed", o.Engine, key, o.Proof.Rollout)
		}
	}
}

func (x *world) isNew(s *state, key int, o *subjects.Owner) bool {
	p, ok := x.one(s.owners[key].ev).(core.OwnerPut)
	if !ok {
		return true
	}
	for i := range p.Owners {
		if p.Owners[i].Engine == o.Engine && p.Owners[i].Epoch == o.Epoch {
			return false
		}
	}
	return true
}

// judgeRest: what a world that has come to rest must not have left.
func (x *world) judgeRest(s *state) {
	for k := range x.scene.Keys {
		if p, live := x.liveSeed(s, k); live {
			x.breaks("all is quiet, and the seed of key %d is left behind: %s on %s", k, p.Rollout(), p.Engine)
		}
	}
	for _, k := range s.keys {
		p := x.put(k)
		x.breaks("all is quiet, and the reservation of %s on %s is left behind, state %s", p.Key(), p.Engine, p.State)
	}
	for r := range x.scene.all() {
		if s.answers[r] == 0 {
			x.breaks("all is quiet, and rollout %d has no answer", r)
		}
	}
}
